"""GGUF files of the Llama family, as llama.cpp writes them: read with the ``gguf`` package.

Quantised tensors are dequantised row by row to float32. llama.cpp turns neighbouring pairs of a
head's numbers where the published weights turn halves, and permutes the rows of queries and keys
for it; here they are put back:

    published row  h size + half j + i   =   stored row  h size + 2 i + j,   j in {0, 1}
"""

import importlib
import math
from typing import Any

import numpy as np
from etils import epath

from jaxrl.model.formats import DENSE, MOST_LAYERS, Fields
from jaxrl.model.layouts import EMBEDDING, HEAD, TOP
from jaxrl.model.tensor_files import Tensors

ARCHITECTURE = "llama"
MAGIC = b"GGUF"
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {"token_embd": EMBEDDING, "output_norm": TOP["norm/scale"], "output": HEAD}
# Llama 3's rotary scaling is stored as one divisor a frequency; these are the published ones.
FREQUENCIES = "rope_freqs.weight"
LLAMA3 = (("llama3", 8.0, 1.0, 4.0, 8192), ("llama3", 32.0, 1.0, 4.0, 8192))


def is_gguf(path: epath.Path) -> bool:
    """Is this a GGUF file, by its name?"""
    return path.name.endswith(".gguf")


def _reader(path: epath.Path) -> tuple[Any, Any]:
    """The package, and its reader on a file. ValueError if it is no sound GGUF."""
    try:
        gguf = importlib.import_module("gguf")  # of an extra: only for who asks
    except ImportError as error:
        raise ValueError(f"{path}: to read it, pip install jaxrl[gguf]") from error
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != MAGIC:
        raise ValueError(f"{path} begins with {magic!r}; allowed: {MAGIC!r}")
    try:
        return gguf, gguf.GGUFReader(path)
    except Exception as error:  # whatever the package meets in bytes that are no GGUF
        raise ValueError(f"{path} is truncated or no sound GGUF: {error}") from error


def _config(path: epath.Path, reader: Any) -> dict[str, Any]:
    """The fields of ``model`` that the metadata says."""
    held = {}
    for name, field in reader.fields.items():
        if name.startswith((f"{ARCHITECTURE}.", "general.architecture")):
            held[name.removeprefix(f"{ARCHITECTURE}.")] = field.contents()
    fields = Fields(held, f"{path}: {ARCHITECTURE}")
    if held.get("general.architecture") != ARCHITECTURE:
        raise fields.refuse(
            "general.architecture", held.get("general.architecture"), repr(ARCHITECTURE)
        )
    for name, allowed in (("expert_count", 0), ("attention.sliding_window", 0)):
        fields.only(name, allowed)
    names = {tensor.name: tensor for tensor in reader.tensors}
    width, heads = fields.whole("embedding_length"), fields.whole("attention.head_count")
    size = fields.whole("attention.key_length", default=max(1, width // heads))
    for name in ("rope.dimension_count", "attention.value_length"):
        fields.only(name, size)
    layers = fields.whole("block_count")
    if layers > MOST_LAYERS or "token_embd.weight" not in names:
        raise fields.refuse("block_count", layers, f"at most {MOST_LAYERS}, with token_embd.weight")
    theta = fields.real("rope.freq_base", default=10_000.0)
    return {
        **DENSE,
        "family": "llama",
        "vocab_size": int(names["token_embd.weight"].shape[1]),
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": fields.whole("attention.head_count_kv", default=heads),
        "head_size": size,
        "hidden": fields.whole("feed_forward_length"),
        "rope_theta": theta,
        "rope_scaling": _scaling(fields, names.get(FREQUENCIES), theta, size),
        # Stored in float32: the shortest number that is the same there is what was meant.
        "norm_epsilon": float(str(np.float32(fields.real("attention.layer_norm_rms_epsilon")))),
        "tied_head": "output.weight" not in names,
    }


def _scaling(fields: Fields, stored: Any, theta: float, size: int) -> tuple[Any, ...]:
    """The rotary scaling of the metadata, or the published one whose divisors are stored."""
    kind = fields.value("rope.scaling.type") or "none"
    if stored is not None:
        divisors = np.asarray(stored.data, np.float64).reshape(-1)
        for known in LLAMA3:
            expected = _divisors(known, theta, size)
            if divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-3):
                return known
        raise fields.refuse(FREQUENCIES, divisors.tolist(), f"the divisors of one of {LLAMA3}")
    if kind == "linear":
        return ("linear", fields.real("rope.scaling.factor"))
    if kind != "none":
        raise fields.refuse("rope.scaling.type", kind, "'none', 'linear'")
    return ("none",)


def _divisors(scaling: tuple[Any, ...], theta: float, size: int) -> np.ndarray:
    """By what Llama 3 divides each frequency: 1 where the wavelength is short, the factor where it
    is long, and smoothly between."""
    _, factor, low, high, positions = scaling
    wavelength = 2 * math.pi * theta ** (np.arange(size // 2) * 2 / size)
    smooth = np.clip((positions / wavelength - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def open_file(path: epath.Path) -> tuple[dict[str, Any], Tensors]:
    """The fields of ``model`` that a file's metadata says, and its tensors under their published
    names, dequantised as they are read.

    Raises ValueError naming the key that is not supported, its value and what is allowed; or for a
    file that is truncated or none of the format.
    """
    package, reader = _reader(path)
    dequantize = package.quants.dequantize
    form = _config(path, reader)
    heads = {"attn_q": form["heads"], "attn_k": form["kv_heads"]}
    held = {
        _published(tensor.name): tensor for tensor in reader.tensors if tensor.name != FREQUENCIES
    }

    def rows(name: str, first: int, last: int) -> np.ndarray:
        tensor = held[name]
        kind = tensor.name.split(".")[-2]
        if kind not in heads:
            return dequantize(tensor.data[first:last], tensor.tensor_type)
        return _unpermuted(dequantize(tensor.data, tensor.tensor_type), heads[kind])[first:last]

    shapes = {name: tuple(int(x) for x in reversed(tensor.shape)) for name, tensor in held.items()}
    kinds = {tensor.tensor_type for tensor in held.values()}
    foreign = {kind for kind in kinds if not _dequantises(package, kind)}
    unreadable = {
        name: f"type {tensor.tensor_type.name}, allowed: those that the package gguf dequantises"
        for name, tensor in held.items()
        if tensor.tensor_type in foreign
    }
    return form, Tensors(shapes=shapes, unreadable=unreadable, rows=rows)


def _dequantises(package: Any, kind: Any) -> bool:
    """Can the package make numbers of a type of tensor? One block of zeros tells."""
    try:
        _, size = package.GGML_QUANT_SIZES[kind]
        package.quants.dequantize(np.zeros((1, size), np.uint8), kind)
    except (KeyError, NotImplementedError):
        return False
    return True


def _published(name: str) -> str:
    """The name of a tensor in published checkpoints; its own if it has none there."""
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in OUTSIDE and parts[1] == "weight":
        return OUTSIDE[parts[0]]
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in BLOCK and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{BLOCK[parts[2]]}.weight"
    return name


def _unpermuted(stored: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in the order of the published weights."""
    half = stored.shape[0] // heads // 2
    return stored.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(stored.shape)
