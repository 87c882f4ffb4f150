"""What cuts text into pieces: a ``tokenizer.json``, or a SentencePiece model. No jax here.

Here text is only text. Control tokens are told apart by their ids, and ``encode`` gives none of
them, whatever is typed.
"""

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import sentencepiece
from tokenizers import AddedToken, Tokenizer

from jaxrl.pool.chat import Control


class Pieces(Protocol):
    """A vocabulary: text <-> ids."""

    @property
    def vocab_size(self) -> int:
        """The largest id and one."""
        ...

    @property
    def controls(self) -> Mapping[int, Control]:
        """Tokens that steer a model and are no text, by their ids."""
        ...

    @property
    def unknown_id(self) -> int | None:
        """What a character without pieces becomes."""
        ...

    @property
    def added_first(self) -> int | None:
        """The control token that a sequence begins with by the model's own settings."""
        ...

    @property
    def prefix_once(self) -> bool:
        """Whether a space is put in front at the start of a sequence only, not behind a control
        token."""
        ...

    def encode(self, text: str, *, inside: bool) -> list[int]:
        """Ids of a text; ``inside``: of one that goes on, with nothing put in front."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, that of control tokens included."""
        ...

    def has(self, token: int) -> bool:
        """Whether the id stands for something."""
        ...

    @property
    def digest(self) -> str:
        """Of all that the vocabulary was read from."""
        ...


def spelled(pieces: Pieces, text: str, *, inside: bool) -> list[int]:
    """Ids of a text, with no control token among them.

    Where the vocabulary itself would read one, the text is cut behind its first character.
    ValueError for a text that cannot be spelled otherwise.
    """
    forbidden = pieces.controls.keys() - {pieces.unknown_id}
    ids = pieces.encode(text, inside=inside)
    if forbidden.isdisjoint(ids):
        return ids
    typed = "|".join(re.escape(pieces.controls[token].text) for token in forbidden)
    cuts = [0, *(match.start() + 1 for match in re.finditer(f"(?={typed})", text)), len(text)]
    parts = [text[start:end] for start, end in zip(cuts, cuts[1:], strict=False)]
    ids = [
        token
        for number, part in enumerate(parts)
        for token in pieces.encode(part, inside=inside or number > 0)
    ]
    if not forbidden.isdisjoint(ids):
        raise ValueError(f"{text!r} cannot be spelled without a control token")
    return ids


class JsonPieces:
    """A ``tokenizer.json``, as the package ``tokenizers`` reads it.

    ``added`` are more tokens by their texts, with the fields of the published format (id, special,
    lstrip, rstrip, single_word, normalized). ValueError for a document that is none, or an id that
    is not as said.
    """

    def __init__(self, document: Mapping[str, Any], added: Mapping[str, Mapping[str, Any]]) -> None:
        self._document, self._added = steady(document), added
        self.digest = _digest(json.dumps(self._document).encode(), added)
        self._tokenizer = self._opened(self._document)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        for text, told in added.items():
            if "id" in told and told["id"] != vocabulary[text]:
                raise ValueError(
                    f"{text!r} has id {vocabulary[text]}; the files say {told['id']!r} too"
                )
        self.controls = {
            token: Control(one.content, token, one.lstrip, one.rstrip)
            for token, one in self._tokenizer.get_added_tokens_decoder().items()
            if one.special or _special(added, one.content)
        }
        model = self._document["model"]
        unknown = vocabulary.get(model.get("unk_token"))
        self.unknown_id: int | None = model.get("unk_id") if unknown is None else unknown
        first = self._tokenizer.encode("").ids[:1]
        self.added_first = first[0] if first and first[0] in self.controls else None
        pretokenizer = json.dumps(self._document["pre_tokenizer"])
        # Whether only the start of a sequence has a space put in front.
        self.prefix_once = '"prepend_scheme": "first"' in pretokenizer

    def _opened(self, document: Mapping[str, Any]) -> Tokenizer:
        try:
            tokenizer = Tokenizer.from_str(json.dumps(document))
            for text, told in sorted(self._added.items(), key=_place):
                token = AddedToken(text, **{f: bool(told[f]) for f in _FLAGS if f in told})
                add = tokenizer.add_special_tokens if _special(self._added, text) else None
                (add or tokenizer.add_tokens)([token])
        except Exception as error:  # the package raises nothing more precise
            raise ValueError(f"no tokenizer.json that can be read: {error}") from error
        tokenizer.encode_special_tokens = True  # as text
        return tokenizer

    @functools.cached_property
    def _inside(self) -> Tokenizer:
        """The same, with nothing put in front of a text."""
        return self._opened(without_prefix(self._document))

    def encode(self, text: str, *, inside: bool) -> list[int]:
        """Ids, by the document's own rules for text."""
        tokenizer = self._inside if inside else self._tokenizer
        return tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; bytes that are no UTF-8 are U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def has(self, token: int) -> bool:
        """Whether a token has this id: a vocabulary may have holes."""
        return 0 <= token < self.vocab_size and self._tokenizer.id_to_token(token) is not None


_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def _special(added: Mapping[str, Mapping[str, Any]], text: str) -> bool:
    return text in added and bool(added[text].get("special"))


def _place(item: tuple[str, Mapping[str, Any]]) -> tuple[bool, int]:
    """By id; those that say none come last."""
    return "id" not in item[1], item[1].get("id", 0)


def steady(document: Mapping[str, Any]) -> dict[str, Any]:
    """Without what would cut, pad or randomise: files keep such settings from their training."""
    if not isinstance(document.get("model"), dict):
        raise ValueError("no tokenizer.json: it has no 'model'")
    model = {**document["model"]}
    if "dropout" in model:
        model["dropout"] = None
    bare = {"pre_tokenizer": None, **document}
    return {**bare, "model": model, "truncation": None, "padding": None}


def without_prefix(node: Any) -> Any:
    """A tokenizer's document that puts no space in front of a text."""
    if isinstance(node, list):
        return [without_prefix(item) for item in node]
    if not isinstance(node, dict):
        return node
    kind = node.get("type")
    if kind == "Prepend":  # a normalizer of its own: one that does nothing takes its place
        return {"type": "Sequence", "normalizers": []}
    changed = {"Metaspace": {"prepend_scheme": "never"}, "ByteLevel": {"add_prefix_space": False}}
    parts = {key: without_prefix(value) if key in _WALKED else value for key, value in node.items()}
    return {**parts, **(changed[kind] if kind in changed else {})}


# Where a document says what is done to a text before it is cut.
_WALKED = ("normalizer", "normalizers", "pre_tokenizer", "pretokenizers")

# Laid over a model's bytes: add_dummy_prefix of its normalizer_spec is false (protobuf merges a
# message that comes twice).
_NO_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieces:
    """A SentencePiece model, whatever its settings.

    ``added`` are control tokens by their texts: pieces of the model that are not to be typed, or,
    with an ``id``, tokens beyond it. ``prefix_once``: what comes behind a control token has nothing
    put in front. ValueError for bytes that are no model, and for a token that it does not have.
    """

    def __init__(
        self, model: bytes, added: Mapping[str, Mapping[str, Any]], *, prefix_once: bool
    ) -> None:
        self.prefix_once = prefix_once
        self.digest = _digest(model, added)
        self._bytes = model
        self._pieces = _processor(model)
        size = self._pieces.vocab_size()
        self.controls = {
            token: Control(self._pieces.id_to_piece(token), token)
            for token in range(size)
            if self._pieces.is_control(token) or self._pieces.is_unknown(token)
        }
        for text, told in added.items():
            token = self._pieces.piece_to_id(text)
            known = self._pieces.id_to_piece(token) == text
            if known and not told.get("special"):
                continue
            token = token if known else told.get("id", -1)
            if not known and (token < size or not told.get("special")):
                raise ValueError(f"{text!r} is no piece of the SentencePiece model")
            fields = {name: bool(told.get(name)) for name in ("lstrip", "rstrip")}
            self.controls[token] = Control(text, token, **fields)
        self.vocab_size = max([size - 1, *self.controls]) + 1
        self.unknown_id: int | None = self._pieces.unk_id()
        ids = {
            "bos_token": self._pieces.bos_id(),
            "eos_token": self._pieces.eos_id(),
            "unk_token": self._pieces.unk_id(),
            "pad_token": self._pieces.pad_id(),
        }
        self.names = {name: self._pieces.id_to_piece(at) for name, at in ids.items() if at >= 0}
        self.added_first = ids["bos_token"] if ids["bos_token"] >= 0 else None

    @functools.cached_property
    def _inside(self) -> sentencepiece.SentencePieceProcessor:
        return _processor(self._bytes + _NO_PREFIX)

    def encode(self, text: str, *, inside: bool) -> list[int]:
        """Ids, by the model's own rules for text."""
        return (self._inside if inside else self._pieces).encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, of each run between control tokens by itself."""
        text: list[str] = []
        known: list[int] = []
        for token in ids:
            if token not in self.controls:
                known.append(token)
                continue
            text += [self._pieces.decode(known), self.controls[token].text]
            known = []
        return "".join([*text, self._pieces.decode(known)])

    def has(self, token: int) -> bool:
        """Whether a piece or a token beyond the model has this id."""
        if token in self.controls:
            return True
        return 0 <= token < self._pieces.vocab_size() and not self._pieces.is_unused(token)


def _digest(model: bytes, added: Mapping[str, Mapping[str, Any]]) -> str:
    told = json.dumps(added, sort_keys=True).encode()
    return hashlib.blake2b(model + told, digest_size=16).hexdigest()


def _processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    pieces = sentencepiece.SentencePieceProcessor()
    try:
        pieces.LoadFromSerializedProto(model)
    except RuntimeError as error:
        raise ValueError(f"no SentencePiece model: {error}") from error
    return pieces
