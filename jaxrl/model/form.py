"""The form of a model: every number that says what is computed, and which layers are alike."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

FAMILIES = ("qwen3", "llama", "qwen3_moe", "gemma3", "mimo_v2")
# What the forward pass of a layer keeps for the backward pass; the rest is computed again.
KEPT_ATTENTION = "attention"  # what attention gives, before its output projection
KEPT_PROJECTIONS = "projections"  # queries, keys and values, turned by their positions
KEPT_INNER = "inner"  # gate and up of a dense inner block
REMAT: dict[str, tuple[str, ...] | None] = {
    "none": None,  # all is kept
    "full": (),  # nothing but the layer's input
    "attention": (KEPT_ATTENTION,),
    "projections": (KEPT_ATTENTION, KEPT_PROJECTIONS),
    "inner": (KEPT_ATTENTION, KEPT_PROJECTIONS, KEPT_INNER),
    "dots": None,  # every matrix product without batch axes
}
KERNELS = ("auto", "xla", "splash", "tokamax")
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
ACTIVATIONS = ("silu", "gelu_tanh")
SINKS = ("none", "local", "all")
ROUTERS = ("softmax", "sigmoid")
ROPE_SCALINGS = {"none": 0, "linear": 1, "llama3": 4}  # kind -> how many numbers follow
# What the fields say of a form that has none of what they can add: Llama's.
PLAIN: dict[str, Any] = {
    "qk_norm": False,
    "norm_offset": 0.0,
    "post_norms": False,
    "activation": "silu",
    "embed_scale": 1.0,
    "attention_scale": 0.0,
    "value_size": 0,
    "value_scale": 1.0,
    "rope_size": 0,
    "local_layers": (0,),
    "window": 0,
    "local_rope_theta": 10_000.0,
    "local_kv_heads": 0,
    "sinks": "none",
}


def _require(section: str, record: Any, **checks: tuple[bool, str]) -> None:
    """Raise ValueError naming the first field that is not as it should be."""
    for field, (right, allowed) in checks.items():
        if not right:
            value = vars(record)[field]
            raise ValueError(f"{section}.{field}={value!r} is not allowed: {allowed}")


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The mixture of experts that takes the place of the inner block; ``count`` 0 is none.

    Raises ValueError naming the field, its value and what is allowed.
    """

    count: int
    per_token: int
    hidden: int  # inner width of an expert
    shared_hidden: int  # of the expert that every token goes through; 0: there is none
    dense_layers: tuple[int, ...]  # layers that keep a dense block
    router: str
    normalise: bool  # the gates of a token's experts sum to 1
    scale: float  # of the gates

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        _require(
            "model.experts",
            self,
            count=(self.count >= 0, "0 (dense) or more"),
            router=(self.router in ROUTERS, f"one of {ROUTERS}"),
            shared_hidden=(self.shared_hidden >= 0, "0 (none) or more"),
            scale=(self.scale > 0, "> 0"),
        )
        if self.count:
            _require(
                "model.experts",
                self,
                per_token=(0 < self.per_token <= self.count, f"1 to {self.count}"),
                hidden=(self.hidden > 0, "> 0"),
            )


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """Low-rank additions to linear kernels (LoRA, arXiv 2106.09685):

        y = x W + alpha / rank * (x A) B

    for each linear whose name (``attention/query``, ``mlp/down``, ...) the regular expression is
    found in. ``rank`` 0 is none. Raises ValueError naming the field.
    """

    rank: int
    alpha: float
    pattern: str
    dtype: str  # of the factors

    def __post_init__(self) -> None:
        _require(
            "model.adapter",
            self,
            rank=(self.rank >= 0, "0 (none) or more"),
            alpha=(self.alpha > 0, "> 0"),
            dtype=(self.dtype in DTYPES, f"one of {(*DTYPES,)}"),
        )
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"model.adapter.pattern={self.pattern!r}: {error}") from error

    def fits(self, name: str) -> bool:
        """Whether the linear of this name gets an adapter."""
        return bool(self.rank and re.search(self.pattern, name))


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The ``model`` section of the config.

    Raises ValueError naming the field, its value and what is allowed.
    """

    family: str  # of the published format; what is computed is said by the other fields
    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    rope_theta: float
    norm_epsilon: float
    tied_head: bool
    outputs: int  # 0: logits over the vocabulary; else so many numbers a position, untied
    dtype: str
    param_dtype: str
    remat: str
    kernels: str  # of attention and experts: see model/attention.py and model/experts.py
    score_chunk_positions: int
    score_remat: bool
    qk_norm: bool  # queries and keys are normalised per head
    norm_offset: float  # RMSNorm multiplies with offset + scale
    post_norms: bool  # what a block gives is normalised before it is added
    activation: str
    embed_scale: float
    attention_scale: float  # of q k^T; 0: 1 / sqrt(head_size)
    value_size: int  # 0: head_size
    value_scale: float
    rope_size: int  # how many of a head's numbers turn; 0: all
    rope_scaling: tuple[Any, ...]  # of global layers; a kind and its numbers
    local_layers: tuple[int, ...]  # a pattern repeated over the layers; 1: sliding window
    window: int  # tokens that a local layer sees, itself included
    local_rope_theta: float
    local_kv_heads: int  # 0: kv_heads
    sinks: str  # which layers have a learned logit, a head, in the softmax's denominator
    experts: ExpertsConfig
    adapter: AdapterConfig

    def __post_init__(self) -> None:
        for field in ("rope_scaling", "local_layers"):
            object.__setattr__(self, field, tuple(vars(self)[field]))
        for field, allowed in (
            ("family", FAMILIES),
            ("dtype", (*DTYPES,)),
            ("param_dtype", (*DTYPES,)),
            ("remat", (*REMAT,)),
            ("kernels", KERNELS),
            ("activation", ACTIVATIONS),
            ("sinks", SINKS),
        ):
            if vars(self)[field] not in allowed:
                raise ValueError(
                    f"model.{field}={vars(self)[field]!r} is unknown; allowed: {allowed}"
                )
        positive = ("vocab_size", "layers", "width", "heads", "kv_heads", "head_size", "hidden")
        factors = ("rope_theta", "local_rope_theta", "norm_epsilon", "embed_scale", "value_scale")
        for field in (*positive, *factors, "score_chunk_positions"):
            if vars(self)[field] <= 0:
                raise ValueError(f"model.{field}={vars(self)[field]} is not allowed: above 0")
        for field in ("outputs", "attention_scale", "value_size", "rope_size", "local_kv_heads"):
            if vars(self)[field] < 0:
                raise ValueError(f"model.{field}={vars(self)[field]} is not allowed: 0 or more")
        for field in ("kv_heads", "local_kv_heads"):
            if vars(self)[field] and self.heads % vars(self)[field]:
                raise ValueError(
                    f"model.heads={self.heads} must be a multiple of "
                    f"model.{field}={vars(self)[field]}"
                )
        kind, *numbers = self.rope_scaling or ("",)
        _require(
            "model",
            self,
            head_size=(self.head_size % 2 == 0, "even"),
            rope_size=(self.rope_size % 2 == 0 and self.rope_size <= self.head_size, "even, fits"),
            rope_scaling=(
                ROPE_SCALINGS.get(kind) == len(numbers) and all(x > 0 for x in numbers),
                "('none',), ('linear', factor) or ('llama3', factor, low_freq_factor, "
                "high_freq_factor, original_positions)",
            ),
            local_layers=(
                bool(self.local_layers) and set(self.local_layers) <= {0, 1},
                "a pattern of 0 and 1",
            ),
            window=(self.window > 0 or not any(self.local_layers), "> 0 beside local layers"),
        )
        outside = [i for i in self.experts.dense_layers if not 0 <= i < self.layers]
        if outside:
            raise ValueError(f"model.experts.dense_layers: {outside} are not layers")

    def is_local(self, layer: int) -> bool:
        """Whether a layer sees a window only."""
        return bool(self.local_layers[layer % len(self.local_layers)])

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.experts.count > 0 and layer not in self.experts.dense_layers

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The layers that have experts, whose routes are recorded in this order."""
        return tuple(layer for layer in range(self.layers) if self.is_sparse(layer))

    def kind(self, layer: int) -> "Kind":
        """What a layer's parameters look like."""
        local = self.is_local(layer)
        heads = self.local_kv_heads if local and self.local_kv_heads else self.kv_heads
        sink = self.sinks == "all" or (self.sinks == "local" and local)
        return Kind(sparse=self.is_sparse(layer), kv_heads=heads, sink=sink)

    @property
    def value_width(self) -> int:
        """Numbers of a value."""
        return self.value_size or self.head_size


@dataclasses.dataclass(frozen=True)
class Kind:
    """What tells the parameters of two layers apart."""

    sparse: bool
    kv_heads: int
    sink: bool


def stacks(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names of the stacks of blocks, and the layers that each holds.

    Layers whose parameters have the same shapes are one stack: ``blocks`` if all have; else one
    name for each kind, made of what differs: ``dense_blocks`` and ``sparse_blocks``,
    ``local_blocks`` and ``global_blocks``, ``local_sparse_blocks``, ...
    """
    groups: dict[Kind, list[int]] = {}
    for layer in range(config.layers):
        groups.setdefault(config.kind(layer), []).append(layer)
    if len(groups) == 1:
        return {"blocks": tuple(range(config.layers))}
    some_sparse = len({kind.sparse for kind in groups}) > 1
    some_local = len({(kind.kv_heads, kind.sink) for kind in groups}) > 1
    named = {}
    for kind, layers in groups.items():
        words = ["local" if config.is_local(layers[0]) else "global"] if some_local else []
        words += ["sparse" if kind.sparse else "dense"] if some_sparse else []
        named["_".join([*words, "blocks"])] = tuple(layers)
    return named


def qwen3(**fields: Any) -> ModelConfig:
    """A dense model in the form of Qwen3, for whoever builds one without a config: the sizes are
    asked for, the rest is as that family has it, and any of it may be given."""
    plain = {
        **PLAIN,
        "family": "qwen3",
        "outputs": 0,
        "kernels": "auto",
        "score_remat": True,
        "qk_norm": True,
        "rope_scaling": ("none",),
        "experts": ExpertsConfig(0, 0, 0, 0, (), "softmax", True, 1.0),
        "adapter": AdapterConfig(0, 1.0, "", "float32"),
    }
    return ModelConfig(**{**plain, **fields})


def read(section: Mapping[str, Any]) -> ModelConfig:
    """The ``model`` section as a mapping -> its record. Raises TypeError for an unknown or missing
    field, ValueError for a bad value."""
    kinds = {"experts": ExpertsConfig, "adapter": AdapterConfig}
    made = {
        name: kinds[name](**value) if name in kinds and isinstance(value, Mapping) else value
        for name, value in section.items()
    }
    return ModelConfig(**made)
