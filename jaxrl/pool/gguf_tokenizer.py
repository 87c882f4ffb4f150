"""The tokenizer inside a GGUF file: its metadata as a ``tokenizer.json``. No jax here.

Such a file holds the tokens, their kinds and the merges; how text is cut beforehand it only names.
Source: the keys ``tokenizer.*`` of the GGUF specification (ggml, docs/gguf.md), the names of
llama.cpp.
"""

import dataclasses
import importlib
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

# Kinds of tokens in tokenizer.ggml.token_type.
CONTROL, USER_DEFINED = 3, 4

# More ids that end a turn or a text, besides eos.
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")

_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES = {**_GPT2, "use_regex": False}


def _split(pattern: str) -> dict[str, Any]:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, _BYTES]}


_DIGITS = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, _GPT2],
}
# Words with at most one sign before them, digits by so many, other signs, line breaks, spaces.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# How text is cut, by the name in tokenizer.ggml.pre.
PRETOKENIZERS: Mapping[str, Mapping[str, Any]] = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "llama-bpe": _split(_WORDS.format(digits=r"\p{N}{1,3}")),
    "qwen2": _split(_WORDS.format(digits=r"\p{N}")),
}


@dataclasses.dataclass(frozen=True)
class Found:
    """What a GGUF file says."""

    document: Mapping[str, Any]  # as a tokenizer.json
    names: Mapping[str, str]  # bos_token, eos_token, ...: their texts
    stop_ids: Sequence[int]
    adds_bos: bool
    template: str | None


def read(path: str | os.PathLike[str]) -> Found:
    """The tokenizer of a GGUF file. ValueError naming the key for a file that is none, that has no
    tokenizer, or one of a kind that is not known here; and without the package ``gguf``."""
    return from_metadata(_metadata(path))


def unpack(path: str | os.PathLike[str], folder: pathlib.Path) -> None:
    """The tokenizer of a GGUF file as the files that published checkpoints have beside their
    weights, for who takes over an export. Errors as ``read``.

    ``tokenizer.json``, ``tokenizer_config.json`` with the chat template, and a ``config.json`` that
    holds only the ids of special tokens and how many positions the model is meant for.
    """
    told = _metadata(path)
    found = from_metadata(told)
    positions = told.get(f"{told.get('general.architecture')}.context_length")
    ids = {token: place for place, token in enumerate(told["tokenizer.ggml.tokens"])}
    stated = {f"{name}_id": ids[text] for name, text in found.names.items() if name != "unk_token"}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": found.adds_bos,
        **found.names,
        **({"model_max_length": positions} if positions else {}),
        **({"chat_template": found.template} if found.template else {}),
    }
    generation = {**stated, "eos_token_id": list(found.stop_ids)} if found.stop_ids else stated
    carried = {**stated, **({"max_position_embeddings": positions} if positions else {})}
    for name, held in (
        ("tokenizer.json", found.document),
        ("tokenizer_config.json", config),
        ("generation_config.json", generation),
        ("config.json", carried),
    ):
        (folder / name).write_text(json.dumps(held, indent=2, ensure_ascii=False) + "\n")


def _metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        gguf = importlib.import_module("gguf")  # of an extra: only for who asks
    except ImportError as error:
        raise ValueError("to read it, pip install jaxrl[gguf]") from error
    try:
        fields = gguf.GGUFReader(path).fields
        return {key: field.contents() for key, field in fields.items()}
    except Exception as error:  # whatever a reader meets in bytes that are no GGUF
        raise ValueError(f"no GGUF file that can be read: {error}") from error


def from_metadata(told: Mapping[str, Any]) -> Found:
    """The tokenizer of the metadata ``tokenizer.*``. Errors as ``read``."""
    kind = _required(told, "model")
    if kind != "gpt2":
        raise ValueError(f"tokenizer.ggml.model={kind!r}; allowed: 'gpt2' (byte-level BPE)")
    cut = _required(told, "pre")
    if cut not in PRETOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre={cut!r}; allowed: {', '.join(PRETOKENIZERS)}")
    tokens, kinds = _required(told, "tokens"), _required(told, "token_type")
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.tokens has {len(tokens)}, {len(set(tokens))} of them distinct, "
            f"token_type {len(kinds)}; allowed: as many, all distinct"
        )
    ids = {
        name: _id(told, name, len(tokens))
        for name in ("bos_token_id", "unknown_token_id", "padding_token_id", *_ENDS)
        if f"tokenizer.ggml.{name}" in told
    }
    called = {"unknown_token_id": "unk_token", "padding_token_id": "pad_token"}
    names = {
        called.get(name, name.removesuffix("_id")): tokens[at]
        for name, at in ids.items()
        if name not in ("eot_token_id", "eom_token_id")
    }
    return Found(
        document=_document(tokens, kinds, _required(told, "merges"), cut),
        names=names,
        stop_ids=[ids[name] for name in _ENDS if name in ids],
        adds_bos=bool(told.get("tokenizer.ggml.add_bos_token", False)),
        template=told.get("tokenizer.chat_template"),
    )


def _document(
    tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str], cut: str
) -> dict[str, Any]:
    """As a ``tokenizer.json``."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": place, "content": token, "special": kind == CONTROL, **flags}
        for place, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        # Qwen's published tokenizers compose characters first.
        "normalizer": {"type": "NFC"} if cut == "qwen2" else None,
        "pre_tokenizer": PRETOKENIZERS[cut],
        "post_processor": None,
        "decoder": _GPT2,
        "model": {
            "type": "BPE",
            "vocab": {token: place for place, token in enumerate(tokens)},
            "merges": list(merges),
            "byte_fallback": False,
            "ignore_merges": cut == "llama-bpe",
        },
    }


def _required(told: Mapping[str, Any], key: str) -> Any:
    name = f"tokenizer.ggml.{key}"
    if name not in told:
        raise ValueError(f"{name} is missing; allowed: a GGUF file with its tokenizer")
    return told[name]


def _id(told: Mapping[str, Any], name: str, size: int) -> int:
    value = told[f"tokenizer.ggml.{name}"]
    if not 0 <= value < size:
        raise ValueError(f"tokenizer.ggml.{name}={value!r}; allowed: 0 to {size - 1}")
    return int(value)
