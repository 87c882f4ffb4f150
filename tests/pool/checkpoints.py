"""Tokenizers in the published formats, trained on the spot: no network, no file of anybody."""

import io
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = [
    *(f"What is {a} + {b} = {a + b}?\n" for a in range(40) for b in range(5)),
    "Tom has five apples, doesn't he?  Yes:\n\n\tfive.",
    "a<|x|>b<|y|>c<|z|>",  # the start of a control token is a piece of its own
    "naïve Ω 数学 🙂 café <think> user system assistant model",
]

# Control tokens of the templates, in the order of their ids.
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
)


def byte_level(**pretokenizer: Any) -> Tokenizer:
    """Byte-level BPE, as GPT-2 and its heirs; <think> and </think> are added, and no control."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        **{"add_prefix_space": False, **pretokenizer}
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=600,
            initial_alphabet=alphabet,
            special_tokens=list(SPECIAL),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    """BPE over pieces with a sign for the space and byte fallback, as Llama 2's tokenizer.json."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.train_from_iterator(
        [line for text in TEXTS for line in text.split(" ")],
        trainers.BpeTrainer(
            vocab_size=700,
            special_tokens=["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
            show_progress=False,
        ),
    )
    document = json.loads(tokenizer.to_str())
    keep = {"<unk>", *SPECIAL}  # bytes are pieces, nothing to be typed
    document["added_tokens"] = [t for t in document["added_tokens"] if t["content"] in keep]
    return Tokenizer.from_str(json.dumps(document))


def sentencepiece_model(**settings: Any) -> bytes:
    """A SentencePiece model as Llama 2's: bos and eos, bytes for what is unknown, a space in
    front. Gemma's control tokens are pieces of it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=model,
        **{
            "model_type": "bpe",
            "vocab_size": 400,
            "byte_fallback": True,
            "unk_id": 0,
            "bos_id": 1,
            "eos_id": 2,
            "pad_id": -1,
            "user_defined_symbols": ["<start_of_turn>", "<end_of_turn>", "\n"],
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "hard_vocab_limit": False,
            "num_threads": 1,
            "minloglevel": 2,
            **settings,
        },
    )
    return model.getvalue()


def write(
    folder: pathlib.Path,
    tokenizer: Tokenizer | bytes,
    *,
    config: Mapping[str, Any] | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    template: str | None = None,
) -> pathlib.Path:
    """A checkpoint's folder, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(tokenizer, bytes):
        (folder / "tokenizer.model").write_bytes(tokenizer)
    else:
        tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if eos_token_id is not None:
        stated = json.dumps({"eos_token_id": eos_token_id})
        (folder / "generation_config.json").write_text(stated)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
