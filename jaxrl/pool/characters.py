"""Text <-> token ids by characters, or by runs of a fixed number of them. No jax here.

The plainest tokenizers there are: nothing is learned, and the same text always falls into the same
pieces. A model that reads characters can teach one that reads something else, by the text alone.
"""

import hashlib
import itertools
from collections.abc import Iterable

from jaxrl.pool.tokenizer import EOS_ID, NO_TEXT, PAD_ID, UNKNOWN_ID

WIDTHS = {"characters": 1, "character_pairs": 2}  # names of the config


def train_characters(texts: Iterable[str], width: int) -> "CharacterTokenizer":
    """The tokenizer of the characters that occur. ValueError if there is none."""
    return CharacterTokenizer(sorted(set().union(*texts)), width)


class CharacterTokenizer:
    """Pieces are all strings of 1 to ``width`` characters of an alphabet.

    A text is cut into pieces of ``width`` from its start; what is left over at its end is a shorter
    piece. ``decode(encode(text)) == text`` for texts of the alphabet; a piece with another
    character becomes the unknown id. ``vocab_size`` counts the three special ids too, ``digest``
    names alphabet and width. ValueError for an empty alphabet, or a width below 1.
    """

    pad_id = PAD_ID
    eos_id = EOS_ID

    def __init__(self, alphabet: Iterable[str], width: int) -> None:
        letters = sorted(alphabet)
        if not letters or any(len(letter) != 1 for letter in letters) or width < 1:
            raise ValueError(
                f"alphabet={letters!r}, width={width!r}; allowed: single characters, at least one, "
                "and a width of at least 1"
            )
        self.width = width
        runs = (itertools.product(letters, repeat=size) for size in range(1, width + 1))
        self._pieces = ["".join(run) for run in itertools.chain(*runs)]
        self._ids = {piece: EOS_ID + 1 + place for place, piece in enumerate(self._pieces)}
        self.vocab_size = EOS_ID + 1 + len(self._pieces)
        self.stop_ids = frozenset({EOS_ID})
        named = f"{width}:{''.join(letters)}".encode()
        self.digest = hashlib.blake2b(named, digest_size=16).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without eos."""
        runs = (text[start : start + self.width] for start in range(0, len(text), self.width))
        return [self._ids.get(run, UNKNOWN_ID) for run in runs]

    def prompt(self, text: str) -> list[int]:
        """Ids of a text: nothing stands around it."""
        return self.encode(text)

    def question(self, ids: Iterable[int]) -> str:
        """Text of ids."""
        return self.decode(ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; stop ids have none, ids that stand for no text show as U+FFFD."""
        return "".join(self._text(int(token)) for token in ids if token not in self.stop_ids)

    def _text(self, token: int) -> str:
        return self._pieces[token - EOS_ID - 1] if EOS_ID < token < self.vocab_size else NO_TEXT
