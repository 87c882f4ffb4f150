"""Text <-> token ids: a SentencePiece model trained on a task's own text. No jax here.

Pieces are chosen so that text comes back as it went in: no normalisation, no space put in front,
spaces kept, digits one by one. A prompt and its answer are encoded apart and their ids joined; the
joined text is never encoded again, so the border between them is where training put it.
"""

import hashlib
import io
import os
import pathlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import sentencepiece

PAD_ID = 0
UNKNOWN_ID = 1
EOS_ID = 2

# Shown where a sampled id has no text (padding, unknown, beyond the vocabulary): it can never
# complete a right answer.
NO_TEXT = "\N{REPLACEMENT CHARACTER}"

# SentencePiece writes spaces as this sign inside, so the sign itself cannot be told from a space.
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

# Text between digits that recurs in this part of the texts becomes one piece: a task's fixed
# wording costs one token.
PHRASE_FRACTION = 0.05
MAX_PHRASES = 32


def shared_phrases(texts: Sequence[str]) -> list[str]:
    """The wordings that a task repeats: runs without digits, of two characters or more, in at least
    5 % of the texts.

    Sorted by how often they occur, then by text: the same texts give the same phrases in any order.
    """
    counts = Counter(run for text in texts for run in set(re.split(r"\d+", text)) if len(run) > 1)
    often = [(run, count) for run, count in counts.items() if count >= PHRASE_FRACTION * len(texts)]
    often.sort(key=lambda item: (-item[1], item[0]))
    return [run for run, _ in often[:MAX_PHRASES]]


def train_sentencepiece(
    texts: Iterable[str],
    vocab_size: int,
    path: str | os.PathLike[str],
    *,
    exact: bool = False,
) -> "SentencePieceTokenizer":
    """Train on the texts, write the model to ``path`` (at once or not at all) and open it.

    ``vocab_size`` is a ceiling: a small task has fewer pieces, and the tokenizer then has fewer.
    With ``exact`` that is a ValueError that states the maximum. ValueError too if there is no text,
    or if the ceiling is too low for the characters that occur, with the minimum. The same texts in
    the same order give the same bytes.
    """
    texts = list(texts)
    if not any(texts):
        raise ValueError(
            "the texts to train a tokenizer on are empty; allowed: at least one character"
        )
    characters = sorted(set("".join(texts)) - {" ", SPACE})
    # Control characters are no ordinary characters to SentencePiece: they have to be pieces of
    # their own.
    symbols = [sign for sign in characters if not sign.isprintable()]
    phrases = [run for run in shared_phrases(texts) if not set(run) & {*symbols, SPACE}]
    least = 3 + 1 + len(characters)  # pad, unknown and eos; the space; every character by itself
    if vocab_size < least:
        raise ValueError(f"vocab_size={vocab_size} is too small for this text; allowed: >= {least}")
    symbols += phrases[: vocab_size - least]
    model, limit = _train(texts, vocab_size, symbols, characters)
    if limit is not None:
        if exact:
            raise ValueError(
                f"vocab_size={vocab_size} is more than this text gives; allowed: <= {limit}"
            )
        model, limit = _train(texts, limit, symbols, characters)
    if model is None:
        raise ValueError(
            f"SentencePiece found no vocabulary of at most {vocab_size} pieces in this text"
        )
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(path.name + ".tmp")
    with half.open("wb") as file:
        file.write(model)
        file.flush()
        os.fsync(file.fileno())
    half.replace(path)
    return SentencePieceTokenizer(path)


def _train(
    texts: Sequence[str], vocab_size: int, symbols: Sequence[str], characters: Sequence[str]
) -> tuple[bytes | None, int | None]:
    """The model's bytes, or the largest vocabulary that this text allows."""
    model = io.BytesIO()  # and not a path: the path would become part of the bytes
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            user_defined_symbols=[symbol.replace(" ", SPACE) for symbol in symbols],
            required_chars=SPACE + "".join(sign for sign in characters if sign.isprintable()),
            character_coverage=1.0,
            split_digits=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            pad_id=PAD_ID,
            unk_id=UNKNOWN_ID,
            bos_id=-1,
            eos_id=EOS_ID,
            num_threads=1,  # sums in one order
            max_sentence_length=1 << 24,  # a longer text would be skipped in silence
            minloglevel=2,
        )
    except RuntimeError as error:
        limit = re.search(r"too high .*<= (\d+)", str(error))
        if limit is None:
            raise ValueError(
                f"SentencePiece cannot train with vocab_size={vocab_size}: {error}"
            ) from error
        return None, int(limit.group(1))
    return model.getvalue(), None


class SentencePieceTokenizer:
    """A trained model, read from a file.

    ``decode(encode(text)) == text`` for texts made of the characters it was trained on.
    ``vocab_size`` counts all pieces, the three special ids included; ``digest`` names the model's
    bytes.
    """

    pad_id = PAD_ID
    eos_id = EOS_ID

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a model file. FileNotFoundError if there is none, ValueError if it is not a model of
        ours."""
        model = pathlib.Path(path).read_bytes()
        self.digest = hashlib.blake2b(model, digest_size=16).hexdigest()
        self._pieces = sentencepiece.SentencePieceProcessor()
        try:
            self._pieces.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise ValueError(f"{path} is not a SentencePiece model: {error}") from error
        ids = (self._pieces.pad_id(), self._pieces.unk_id(), self._pieces.eos_id())
        if ids != (PAD_ID, UNKNOWN_ID, EOS_ID):
            raise ValueError(
                f"{path}: pad, unknown and eos ids are {ids}; "
                f"allowed: {(PAD_ID, UNKNOWN_ID, EOS_ID)}"
            )
        self.vocab_size: int = self._pieces.vocab_size()
        self.stop_ids = frozenset({EOS_ID})
        known = range(EOS_ID + 1, self.vocab_size)
        self._texts = {one: self._pieces.id_to_piece(one).replace(SPACE, " ") for one in known}
        self._texts[EOS_ID] = ""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without eos. A character that training never saw becomes the unknown
        id."""
        return self._pieces.encode(text)

    def prompt(self, text: str) -> list[int]:
        """Ids of a text: nothing stands around it."""
        return self.encode(text)

    def question(self, ids: Iterable[int]) -> str:
        """Text of ids."""
        return self.decode(ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; stop ids have none, ids that stand for no text show as U+FFFD."""
        return "".join([self._texts.get(token, NO_TEXT) for token in ids])
