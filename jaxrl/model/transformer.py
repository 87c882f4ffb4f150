"""A decoder in the form of Qwen3, in Flax NNX: pre-norm blocks of grouped-query attention and
SwiGLU.

    x = E[token];  in each block: x += attention(norm(x)), x += swiglu(norm(x))
    logits = norm(x) @ E^T (tied head) or norm(x) @ W

Queries and keys are normalised per head, then rotated by position (halves rotated, as in the
published weights). NNX only declares parameters here: everything is called as a pure function after
``split`` and ``merge``. The blocks are one Block whose parameters have a leading layer axis,
scanned.

Shapes: x ``[row token embed]``, queries ``[row head token size]``, keys and values ``[row kv_head
token size]``. Heads come before tokens because XLA:CPU runs these batched matmuls up to three times
faster than with tokens first.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxrl.model import novelty

FAMILIES = ("qwen3",)
REMAT = ("none", "full", "dots")
# Stacks up to this depth are unrolled inside the scan: its copies of what the backward pass needs
# cost a fifth of the step on XLA:CPU, while unrolling a deep stack costs minutes of compilation.
UNROLLED_LAYERS = 8
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}

Params = Mapping[str, Array]
# Takes a block's new keys and values, returns those to attend to: itself in training, the whole
# cache in decoding.
Remember = Callable[[Array, Array], tuple[Array, Array]]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The ``model`` section of the config.

    Raises ValueError naming the field, its value and what is allowed.
    """

    family: str
    vocab_size: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int  # even: rotary positions turn pairs
    hidden: int
    rope_theta: float
    norm_epsilon: float
    tied_head: bool
    outputs: int  # 0: logits over the vocabulary; else so many numbers a position, untied
    dtype: str
    param_dtype: str
    remat: str
    score_chunk_positions: int

    def __post_init__(self) -> None:
        for field, allowed in (
            ("family", FAMILIES),
            ("dtype", (*DTYPES,)),
            ("param_dtype", (*DTYPES,)),
            ("remat", REMAT),
        ):
            if dataclasses.asdict(self)[field] not in allowed:
                raise ValueError(
                    f"model.{field}={dataclasses.asdict(self)[field]!r} is unknown; "
                    f"allowed: {allowed}"
                )
        positive = ("vocab_size", "layers", "width", "heads", "kv_heads", "head_size", "hidden")
        for field in (*positive, "rope_theta", "norm_epsilon", "score_chunk_positions"):
            if dataclasses.asdict(self)[field] <= 0:
                raise ValueError(
                    f"model.{field}={dataclasses.asdict(self)[field]} is not allowed: above 0"
                )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads={self.heads} must be a multiple of model.kv_heads={self.kv_heads}"
            )
        if self.outputs < 0:
            raise ValueError(f"model.outputs={self.outputs} is not allowed: 0 or more")
        if self.head_size % 2:
            raise ValueError(f"model.head_size={self.head_size} is not allowed: even")


class Linear(nnx.Module):
    """A kernel and nothing else, drawn with deviation ``scale / sqrt(fan in)``.

    ``contract`` is how many of the kernel's first axes are contracted with x's last.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        config: ModelConfig,
        rngs: nnx.Rngs,
        *,
        contract: int = 1,
        scale: float = 1.0,
    ) -> None:
        deviation = scale / math.sqrt(math.prod(shape[:contract]))
        value = deviation * jax.random.normal(rngs.params(), shape, jnp.float32)
        self.kernel = nnx.Param(value.astype(DTYPES[config.param_dtype]), axes=axes)
        self.contract = contract

    def __call__(self, x: Array) -> Array:
        """Contract x's last axes with the kernel, in x's dtype.

        As a matmul of two flat arrays: XLA:CPU takes twice as long for the gradient when x has
        two leading axes.
        """
        kernel = self.kernel[...].astype(x.dtype)
        kept, made = x.shape[: x.ndim - self.contract], kernel.shape[self.contract :]
        size = math.prod(kernel.shape[: self.contract])
        return (x.reshape(-1, size) @ kernel.reshape(size, -1)).reshape(*kept, *made)


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + epsilon) * scale``, computed in float32, returned in x's dtype."""

    def __init__(self, size: int, config: ModelConfig) -> None:
        self.scale = nnx.Param(jnp.ones((size,), DTYPES[config.param_dtype]), axes=(None,))
        self.epsilon = config.norm_epsilon

    def __call__(self, x: Array) -> Array:
        """Normalise the last axis."""
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (wide * inverse).astype(x.dtype) * self.scale[...].astype(x.dtype)


def rotate(
    x: Float[Array, "row head token size"], position: Int[Array, "row token"], theta: float
) -> Array:
    """Rotary positions, in float32: pair (i, i + size/2) turns by ``position theta^(-2i/size)``."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = position[:, None, :, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)


def attend(
    query: Float[Array, "row head token size"],
    key: Float[Array, "row kv_head source size"],
    value: Float[Array, "row kv_head source size"],
    mask: Bool[Array, "row token source"],
) -> Float[Array, "row head token size"]:
    """``softmax(q k^T / sqrt(size)) v`` where the mask is true; scores in float32.

    Each query needs one true entry. Heads that share a key are folded into the token axis, so that
    one batched matmul serves them all.
    """
    rows, heads, tokens, size = query.shape
    shared, source = key.shape[1], key.shape[2]
    folded = query.reshape(rows, shared, heads // shared * tokens, size)
    scores = jnp.einsum(
        "rkts,rkus->rktu", folded, key, preferred_element_type=jnp.float32
    ) / math.sqrt(size)
    scores = scores.reshape(rows, heads, tokens, source)
    scores = jnp.where(mask[:, None], scores, jnp.finfo(jnp.float32).min)
    weight = jax.nn.softmax(scores, axis=-1).astype(value.dtype).reshape(rows, shared, -1, source)
    return jnp.einsum("rktu,rkus->rkts", weight, value).reshape(query.shape)


class Attention(nnx.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        width, size = config.width, config.head_size
        self.query = Linear((width, config.heads, size), ("embed", "heads", "head"), config, rngs)
        self.key = Linear(
            (width, config.kv_heads, size), ("embed", "kv_heads", "head"), config, rngs
        )
        self.value = Linear(
            (width, config.kv_heads, size), ("embed", "kv_heads", "head"), config, rngs
        )
        self.output = Linear(
            (config.heads, size, width),
            ("heads", "head", "embed"),
            config,
            rngs,
            contract=2,
            scale=1 / math.sqrt(2 * config.layers),
        )
        self.query_norm = RMSNorm(size, config)
        self.key_norm = RMSNorm(size, config)
        self.theta = config.rope_theta

    def __call__(
        self, x: Array, position: Array, mask: Array, remember: Remember
    ) -> tuple[Array, Array, Array]:
        """Returns the output and the keys and values that ``remember`` returned."""
        query, key, value = (
            linear(x).swapaxes(1, 2) for linear in (self.query, self.key, self.value)
        )
        query = rotate(self.query_norm(query), position, self.theta)
        keys, values = remember(rotate(self.key_norm(key), position, self.theta), value)
        return self.output(attend(query, keys, values, mask).swapaxes(1, 2)), keys, values


class SwiGLU(nnx.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        width, hidden = config.width, config.hidden
        self.gate = Linear((width, hidden), ("embed", "mlp"), config, rngs)
        self.up = Linear((width, hidden), ("embed", "mlp"), config, rngs)
        self.down = Linear(
            (hidden, width), ("mlp", "embed"), config, rngs, scale=1 / math.sqrt(2 * config.layers)
        )

    def __call__(self, x: Array) -> Array:
        """Same shape as x."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Attention, then SwiGLU, each behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.width, config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.width, config)
        self.mlp = SwiGLU(config, rngs)

    def __call__(
        self, x: Array, position: Array, mask: Array, remember: Remember
    ) -> tuple[Array, Array, Array]:
        """Returns the new x and the keys and values that ``remember`` returned."""
        attended, keys, values = self.attention(self.attention_norm(x), position, mask, remember)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), keys, values


class Decoder(nnx.Module):
    """Embedding, stacked blocks, last norm, head."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        table = jax.random.normal(rngs.params(), (config.vocab_size, config.width)) / math.sqrt(
            config.width
        )
        self.embedding = nnx.Param(
            table.astype(DTYPES[config.param_dtype]), axes=("vocab", "embed")
        )
        definition, _ = nnx.split(nnx.eval_shape(lambda: Block(config, nnx.Rngs(params=0))))
        keys = jax.random.split(rngs.params(), config.layers)
        stacked = jax.vmap(lambda key: nnx.state(Block(config, nnx.Rngs(params=key))))(keys)
        self.blocks = nnx.merge(definition, stacked)
        self.norm = RMSNorm(config.width, config)
        self.head = (
            None
            if config.tied_head or config.outputs
            else Linear((config.width, config.vocab_size), ("embed", "vocab"), config, rngs)
        )
        # Its columns are too few to be split, hence another name and other axes than the head's.
        self.output = (
            Linear((config.width, config.outputs), ("embed", None), config, rngs)
            if config.outputs
            else None
        )
        self.dtype = DTYPES[config.dtype]
        self.remat = config.remat

    def embed(self, tokens: Int[Array, "row token"]) -> Array:
        """Token ids -> x, in the compute dtype."""
        return jnp.take(self.embedding[...], tokens, axis=0).astype(self.dtype)

    def hidden(
        self,
        tokens: Int[Array, "row token"],
        position: Int[Array, "row token"],
        segment: Int[Array, "row token"],
        constrain: Callable[[Array], Array],
    ) -> Float[Array, "row token embed"]:
        """Last hidden states; a token sees the earlier tokens of its own segment and itself."""
        return self.norm(self._through(tokens, position, segment, constrain, lambda x: None)[0])

    def features(
        self,
        tokens: Int[Array, "row token"],
        position: Int[Array, "row token"],
        segment: Int[Array, "row token"],
        constrain: Callable[[Array], Array],
        mask: Bool[Array, "row token"],
    ) -> Float[Array, "row layer embed"]:
        """Mean over a row's counted tokens of the states at ``novelty.depths``, in float32; 0 where
        none counts.
        """

        def pool(x: Array) -> Array:
            return novelty.pooled(x, mask)

        _, after = self._through(tokens, position, segment, constrain, pool)
        each = jnp.concatenate([pool(self.embed(tokens))[None], after])
        return jnp.moveaxis(each[jnp.array(novelty.depths(after.shape[0]))], 0, 1)

    def _through(
        self,
        tokens: Array,
        position: Array,
        segment: Array,
        constrain: Callable[[Array], Array],
        note: Callable[[Array], Any],
    ) -> tuple[Array, Any]:
        """The states after the last block, and what ``note`` says of those after each."""
        mask = visible(segment)
        definition, stacked = nnx.split(self.blocks)

        def body(x: Array, layer: Any) -> tuple[Array, Any]:
            x, _, _ = nnx.merge(definition, layer)(
                x, position, mask, lambda key, value: (key, value)
            )
            return constrain(x), note(x)

        if self.remat != "none":
            saved = (
                jax.checkpoint_policies.dots_with_no_batch_dims_saveable
                if self.remat == "dots"
                else None
            )
            body = jax.checkpoint(body, policy=saved)
        layers = jax.tree.leaves(stacked)[0].shape[0]
        unroll = layers if layers <= UNROLLED_LAYERS else 1
        return jax.lax.scan(body, constrain(self.embed(tokens)), stacked, unroll=unroll)

    def layers(self) -> list[Block]:
        """The blocks one by one, for decoding: a scan would copy the cache at every step."""
        definition, stacked = nnx.split(self.blocks)
        count = jax.tree.leaves(stacked)[0].shape[0]
        return [
            nnx.merge(definition, jax.tree.map(lambda leaf, i=i: leaf[i], stacked))
            for i in range(count)
        ]

    def logits(self, hidden: Float[Array, "position embed"]) -> Float[Array, "position vocab"]:
        """Float32, accumulated in float32 whatever the compute dtype."""
        head = self.output or self.head
        kernel, axis = (self.embedding, 1) if head is None else (head.kernel, 0)
        dimensions = (((hidden.ndim - 1,), (axis,)), ((), ()))
        return jax.lax.dot_general(
            hidden, kernel[...].astype(hidden.dtype), dimensions, preferred_element_type=jnp.float32
        )


def visible(segment: Int[Array, "row token"]) -> Bool[Array, "row token source"]:
    """Causal and block-diagonal: same segment, not later in the row.

    Padding (segment 0) sees padding only, and nothing sees it.
    """
    tokens = segment.shape[1]
    causal = jnp.arange(tokens)[:, None] >= jnp.arange(tokens)[None, :]
    return causal[None] & (segment[:, :, None] == segment[:, None, :])


def name_of(path: tuple[Any, ...]) -> str:
    """A parameter's name: its path in the module joined with ``/``."""
    return "/".join(str(part) for part in path)


@lru_cache(maxsize=32)
def blueprint(config: ModelConfig) -> tuple[Any, Any]:
    """The module without arrays: (graph definition, state of shapes)."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(params=0))))


def initialise(config: ModelConfig, key: Array) -> dict[str, Array]:
    """Flat parameters by name; jit this with output shardings to have them born in place."""
    state = nnx.state(Decoder(config, nnx.Rngs(params=key)))
    return {name_of(path): leaf[...] for path, leaf in nnx.to_flat_state(state)}


def shapes(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each parameter, by name."""
    return {
        name_of(path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in nnx.to_flat_state(blueprint(config)[1])
    }


def logical_axes(config: ModelConfig) -> dict[str, tuple[str | None, ...]]:
    """Logical axes of each parameter, by name; block parameters have ``layers`` in front."""
    named = {}
    for path, leaf in nnx.to_flat_state(blueprint(config)[1]):
        axes = leaf.get_metadata()["axes"]
        named[name_of(path)] = ("layers", *axes) if path[0] == "blocks" else axes
    return named


def bind(config: ModelConfig, params: Params) -> Decoder:
    """Module from flat parameters.

    Raises ValueError naming all missing, surplus and mis-shaped ones at once.
    """
    definition, state = blueprint(config)
    expected = shapes(config)
    faults = [f"missing {name}" for name in sorted(set(expected) - set(params))]
    faults += [f"surplus {name}" for name in sorted(set(params) - set(expected))]
    faults += [
        f"{name} has shape {params[name].shape}, expected {expected[name].shape}"
        for name in sorted(set(params) & set(expected))
        if params[name].shape != expected[name].shape
    ]
    if faults:
        raise ValueError("parameters do not fit the model: " + "; ".join(faults))
    return nnx.merge(
        definition, nnx.map_state(lambda path, leaf: leaf.replace(params[name_of(path)]), state)
    )
