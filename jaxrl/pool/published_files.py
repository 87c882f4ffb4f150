"""What the files of a published checkpoint say about its tokenizer. No jax here.

Nothing of them is run: JSON, text and the bytes of a SentencePiece model or a GGUF file are read.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.pool import gguf_tokenizer
from jaxrl.pool.pieces import JsonPieces, Pieces, SentencePieces

ALLOWED = "a directory with tokenizer.json or tokenizer.model, or a file .json, .model or .gguf"

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclasses.dataclass(frozen=True)
class Published:
    """A tokenizer's vocabulary and what the files beside it say."""

    pieces: Pieces
    names: Mapping[str, str]  # bos_token, eos_token, ...: their texts
    stop_ids: Sequence[int]  # of the files that speak of generation
    adds_bos: bool | None  # whether a plain sequence begins with bos; None: not said
    template: str | None  # of chats


def published(path: str | os.PathLike[str]) -> Published:
    """Read a tokenizer: of a directory ``tokenizer.json``, else ``tokenizer.model``; or such a
    file, or a GGUF file.

    Beside it stand ``tokenizer_config.json``, ``special_tokens_map.json``,
    ``generation_config.json`` (else ``config.json``, of which only eos_token_id is read) and
    ``chat_template.jinja``, each if it is there. ValueError naming file and field for one that is
    missing, that is not JSON, or that says what cannot be.
    """
    path = pathlib.Path(path)
    file = path
    if path.is_dir():
        names = ("tokenizer.json", "tokenizer.model")
        file = next((path / name for name in names if (path / name).is_file()), path)
    if not file.is_file():
        found = "no tokenizer is there" if path.is_dir() else "it does not exist"
        raise ValueError(f"{path}: {found}; allowed: {ALLOWED}")
    if file.suffix not in (".json", ".model", ".gguf"):
        raise ValueError(f"{path} ends with {file.suffix!r}; allowed: {ALLOWED}")
    try:
        return _of_gguf(file) if file.suffix == ".gguf" else _of_directory(file)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _of_gguf(file: pathlib.Path) -> Published:
    found = gguf_tokenizer.read(file)
    added = {text: {"special": True} for text in found.names.values()}
    return Published(
        pieces=JsonPieces(found.document, added),
        names=found.names,
        stop_ids=found.stop_ids,
        adds_bos=found.adds_bos,
        template=found.template,
    )


def _of_directory(file: pathlib.Path) -> Published:
    told = _object(file.parent / "tokenizer_config.json")
    told = {**_object(file.parent / "special_tokens_map.json"), **told}
    names = {name: _text(name, told[name]) for name in _NAMED if told.get(name) is not None}
    added = _added(told)
    for text in names.values():
        added[text] = {**added.get(text, {}), "special": True}
    if file.suffix == ".model":
        legacy = told.get("legacy")
        pieces = SentencePieces(file.read_bytes(), added, prefix_once=not legacy)
        names = {**pieces.names, **names}
    else:
        pieces = JsonPieces(_object(file), added)
    adds_bos = told.get("add_bos_token")
    return Published(
        pieces=pieces,
        names=names,
        stop_ids=_stop_ids(file.parent),
        adds_bos=None if adds_bos is None else bool(adds_bos),
        template=_template(file.parent, told.get("chat_template")),
    )


def _object(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds a {type(value).__name__}; allowed: an object")
    return value


def _text(name: str, value: Any) -> str:
    """A token is written as its text, or with its fields."""
    text = value["content"] if isinstance(value, dict) and "content" in value else value
    if not isinstance(text, str) or not text:
        raise ValueError(f"{name}={value!r}; allowed: a token's text")
    return text


def _added(told: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Tokens that the config adds to those of the vocabulary's own file."""
    added: dict[str, dict[str, Any]] = {}
    decoder = told.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise ValueError(f"added_tokens_decoder={decoder!r}; allowed: a mapping of ids")
    for token, fields in decoder.items():
        if not token.isdecimal() or not isinstance(fields, dict):
            raise ValueError(f"added_tokens_decoder has {token!r}: {fields!r}; allowed: id: fields")
        added[_text("added_tokens_decoder", fields)] = {**fields, "id": int(token)}
    for name in _LISTS:
        listed = told.get(name) or []
        if not isinstance(listed, dict | list):
            raise ValueError(f"{name}={listed!r}; allowed: a list or a mapping of tokens")
        for token in listed.values() if isinstance(listed, dict) else listed:
            text = _text(name, token)
            added[text] = {**added.get(text, {}), "special": True}
    return added


def _stop_ids(folder: pathlib.Path) -> list[int]:
    """eos_token_id of generation_config.json, else of config.json: an id, or a list of them."""
    for name in ("generation_config.json", "config.json"):
        value = _object(folder / name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise ValueError(f"{name}: eos_token_id={value!r}; allowed: an id, or a list of ids")
        return ids
    return []


def _template(folder: pathlib.Path, stated: Any) -> str | None:
    """chat_template.jinja, else what the config states: a template, or one called default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if isinstance(stated, Sequence) and not isinstance(stated, str):
        if not all(isinstance(one, dict) and {"name", "template"} <= set(one) for one in stated):
            raise ValueError("chat_template is a list; allowed: of mappings of name and template")
        named = {str(one["name"]): one["template"] for one in stated}
        if "default" not in named:
            raise ValueError(f"chat_template has {sorted(named)}; allowed: one called 'default'")
        stated = named["default"]
    if stated is not None and not isinstance(stated, str):
        raise ValueError(f"chat_template is a {type(stated).__name__}; allowed: a template's text")
    return stated
