"""The parts of a decoder block, in Flax NNX: linear maps, norms, rotary positions, attention, the
inner block (dense or a mixture of experts).

Shapes: x ``[row token embed]``, queries ``[row head token size]``, keys and values ``[row kv_head
token size]``. Heads come before tokens because XLA:CPU runs these batched matmuls up to three times
faster than with tokens first.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxrl.kernels import routers
from jaxrl.model.attention import Fused
from jaxrl.model.form import DTYPES, KEPT_ATTENTION, KEPT_INNER, KEPT_PROJECTIONS, Kind, ModelConfig

# Takes a block's new keys and values, returns those to attend to: itself in training, the whole
# cache in decoding.
Remember = Callable[[Array, Array], tuple[Array, Array]]

# (x [token embed], routes, gates, gate, up, down, *, activation) -> [token embed]
Mixture = Callable[..., Array]
EXPERTS = ("gate", "up", "down")  # parameters of Experts that a mixture is given

# Queries of a causal block: at least so many, and no more blocks than that, as each is compiled.
CAUSAL_BLOCK, CAUSAL_BLOCKS = 64, 8


def keep(key: Array, value: Array) -> tuple[Array, Array]:
    """New keys and values are all that there is to attend to."""
    return key, value


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sight:
    """What the queries of a layer may look at, and by which angles heads are turned.

    ``mask`` is [row token source], or an object that attends by itself (``sharing.SharedMask``).
    """

    mask: Any
    cos: Float[Array, "row token half"]
    sin: Float[Array, "row token half"]
    # For attention without a mask; None: the mask is used.
    segment: Int[Array, "row token"] | None = None
    fused: Fused | None = dataclasses.field(default=None, metadata={"static": True})
    window: int = dataclasses.field(default=0, metadata={"static": True})  # 0: none

    def by(self, fused: Fused | None, segment: Array) -> "Sight":
        """The same, for a kernel if there is one."""
        return self if fused is None else dataclasses.replace(self, segment=segment, fused=fused)

    def or_local(self, other: "Sight", local: Any) -> "Sight":
        """``other`` where ``local`` is true; by their masks, as what is not known is no kernel."""
        masked = (dataclasses.replace(one, fused=None, window=0) for one in (self, other))
        return jax.tree.map(lambda here, there: jnp.where(local, there, here), *masked)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guide:
    """What a sparse layer is told: which tokens count, the recorded routes (-1: none; None: the
    router chooses), and the experts' shares for the balance term (None: it is not asked for)."""

    counted: Bool[Array, "row token"]
    recorded: Int[Array, "row token k"] | None
    share: Float[Array, " expert"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """What a sparse layer did: the experts that its router would choose, best first (-1 where a
    token does not count), and the balance term of each token (see ``routers.balance``)."""

    chosen: Int[Array, "row token k"]
    balance: Float[Array, "row token"]


class Linear(nnx.Module):
    """A kernel and nothing else, drawn with deviation ``scale / sqrt(fan in)``; an adapter beside
    it where the config says so, whose second factor is 0 at first.

    ``contract`` is how many of the kernel's first axes are contracted with x's last.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        config: ModelConfig,
        rngs: nnx.Rngs,
        *,
        contract: int = 1,
        scale: float = 1.0,
    ) -> None:
        deviation, key = 1 / math.sqrt(math.prod(shape[:contract])), rngs.params()
        value = scale * deviation * jax.random.normal(key, shape, jnp.float32)
        self.kernel = nnx.Param(value.astype(DTYPES[config.param_dtype]), axes=axes)
        self.contract = contract
        self.adapted = config.adapter.fits(name)
        if self.adapted:
            rank, dtype = config.adapter.rank, DTYPES[config.adapter.dtype]
            self.strength = config.adapter.alpha / rank
            # A key of its own: the kernels are the same bits whether there are adapters or not.
            key = jax.random.fold_in(key, 1)
            low = deviation * jax.random.normal(key, (*shape[:contract], rank), jnp.float32)
            self.adapter_in = nnx.Param(low.astype(dtype), axes=(*axes[:contract], None))
            zeros = jnp.zeros((rank, *shape[contract:]), dtype)
            self.adapter_out = nnx.Param(zeros, axes=(None, *axes[contract:]))

    def __call__(self, x: Array) -> Array:
        """Contract x's last axes with the kernel, in x's dtype."""
        made = contracted(x, self.kernel[...], self.contract)
        return made if not self.adapted else made + self.added(x)

    def added(self, x: Array) -> Array:
        """What the adapter adds, in x's dtype."""
        low = contracted(x, self.adapter_in[...], self.contract)
        return self.strength * contracted(low, self.adapter_out[...], 1)


def contracted(x: Array, kernel: Array, axes: int) -> Array:
    """x's last ``axes`` axes with the kernel's first, in x's dtype.

    As a matmul of two flat arrays: XLA:CPU takes twice as long for the gradient when x has two
    leading axes.
    """
    kernel = kernel.astype(x.dtype)
    kept, made = x.shape[: x.ndim - axes], kernel.shape[axes:]
    size = math.prod(kernel.shape[:axes])
    return (x.reshape(-1, size) @ kernel.reshape(size, -1)).reshape(*kept, *made)


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + epsilon) * (offset + scale)``, computed in float32, returned in x's
    dtype."""

    def __init__(self, size: int, config: ModelConfig) -> None:
        ones = jnp.full((size,), 1 - config.norm_offset, DTYPES[config.param_dtype])
        self.scale = nnx.Param(ones, axes=(None,))
        self.epsilon = config.norm_epsilon
        self.offset = config.norm_offset

    def __call__(self, x: Array) -> Array:
        """Normalise the last axis."""
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        if self.offset:  # a small number beside the offset: no half precision before the product
            factor = self.offset + self.scale[...].astype(jnp.float32)
            return (wide * inverse * factor).astype(x.dtype)
        return (wide * inverse).astype(x.dtype) * self.scale[...].astype(x.dtype)


def frequencies(config: ModelConfig, *, local: bool) -> np.ndarray:
    """Angle per position of each pair: ``theta^(-2i/size)``, scaled as the config says on global
    layers ("linear": over the factor; "llama3": long waves over the factor, short ones as they are,
    between the two bounds a mixture)."""
    size = config.rope_size or config.head_size
    theta = config.local_rope_theta if local else config.rope_theta
    plain = theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    kind, *numbers = config.rope_scaling
    if local or kind == "none":
        return plain
    factor = numbers[0]
    if kind == "linear":
        return plain / factor
    _, low, high, original = numbers
    turns = original * plain / (2 * math.pi)  # in the original context
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return plain * (kept + (1 - kept) / factor)


def sight(
    config: ModelConfig,
    mask: Any,
    position: Int[Array, "row token"],
    *,
    local: bool,
) -> Sight:
    """What a layer's queries see: the mask as given, angles by the kind of layer."""
    angle = position[..., None].astype(jnp.float32) * jnp.asarray(
        frequencies(config, local=local), jnp.float32
    )
    window = config.window if local else 0
    return Sight(mask, jnp.cos(angle), jnp.sin(angle), window=window)


def rotate(x: Float[Array, "row head token size"], sight: Sight) -> Array:
    """Rotary positions, in float32: pair (i, i + half) turns by its angle; what a head has beyond
    the pairs stays."""
    half = sight.cos.shape[-1]
    cos, sin = sight.cos[:, None], sight.sin[:, None]
    wide = x.astype(jnp.float32)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*turned, rest], axis=-1).astype(x.dtype)


def attend(
    query: Float[Array, "row head token size"],
    key: Float[Array, "row kv_head source size"],
    value: Float[Array, "row kv_head source value_size"],
    mask: Bool[Array, "row token source"],
    *,
    scale: float,
    sink: Float[Array, " head"] | None = None,
    causal: bool = False,
) -> Float[Array, "row head token value_size"]:
    """``softmax(scale q k^T) v`` where the mask is true; scores in float32.

    Each query needs one true entry. A sink is one more score a head, which takes its share of the
    softmax and gives nothing. With ``causal`` token i sees no source after the i-th, whatever the
    mask: queries go in blocks, each against the sources up to its end, so that of the half that
    nobody sees most is not computed.
    """
    tokens = query.shape[2]
    size = max(CAUSAL_BLOCK, -(-tokens // CAUSAL_BLOCKS)) if causal else tokens
    found = []
    for start in range(0, tokens, size):
        end = min(start + size, tokens)
        seen = end if causal else key.shape[2]
        shown = mask[:, start:end, :seen]
        sources = key[:, :, :seen], value[:, :, :seen]
        found.append(_attended(query[:, :, start:end], *sources, shown, scale, sink))
    return found[0] if len(found) == 1 else jnp.concatenate(found, axis=2)


def _attended(
    query: Array, key: Array, value: Array, mask: Array, scale: float, sink: Array | None
) -> Array:
    """A block of ``attend``. Heads that share a key are folded into the token axis, so that one
    batched matmul serves them all; what is divided by the weights' sum are the values, which are
    fewer than the scores."""
    rows, heads, tokens, size = query.shape
    shared, source = key.shape[1], key.shape[2]
    folded = query.reshape(rows, shared, heads // shared * tokens, size)
    scores = scale * jnp.einsum("rkts,rkus->rktu", folded, key, preferred_element_type=jnp.float32)
    scores = scores.reshape(rows, heads, tokens, source)
    scores = jnp.where(mask[:, None], scores, jnp.finfo(jnp.float32).min)
    peak = scores.max(-1, keepdims=True)
    lone = None if sink is None else sink.astype(jnp.float32)[:, None, None]
    peak = jax.lax.stop_gradient(peak if lone is None else jnp.maximum(peak, lone))
    weight = jnp.exp(scores - peak)
    total = weight.sum(-1, keepdims=True)
    total = total if lone is None else total + jnp.exp(lone - peak)
    weight = weight.astype(value.dtype).reshape(rows, shared, -1, source)
    found = jnp.einsum("rktu,rkus->rkts", weight, value, preferred_element_type=jnp.float32)
    return (found.reshape(rows, heads, tokens, -1) / total).astype(value.dtype)


class Attention(nnx.Module):
    """Grouped-query attention."""

    def __init__(self, config: ModelConfig, kind: Kind, rngs: nnx.Rngs) -> None:
        width, size, value = config.width, config.head_size, config.value_width

        def projection(name: str, heads: int, axis: str, size: int) -> Linear:
            axes = ("embed", axis, "head")
            return Linear(f"attention/{name}", (width, heads, size), axes, config, rngs)

        self.query = projection("query", config.heads, "heads", size)
        self.key = projection("key", kind.kv_heads, "kv_heads", size)
        self.value = projection("value", kind.kv_heads, "kv_heads", value)
        self.output = Linear(
            "attention/output",
            (config.heads, value, width),
            ("heads", "head", "embed"),
            config,
            rngs,
            contract=2,
            scale=1 / math.sqrt(2 * config.layers),
        )
        self.query_norm = RMSNorm(size, config) if config.qk_norm else None
        self.key_norm = RMSNorm(size, config) if config.qk_norm else None
        zeros = jnp.zeros((config.heads,), DTYPES[config.param_dtype])
        self.sink = nnx.Param(zeros, axes=("heads",)) if kind.sink else None
        self.scale = config.attention_scale or 1 / math.sqrt(size)
        self.value_scale = config.value_scale

    def __call__(self, x: Array, sight: Sight, remember: Remember) -> tuple[Array, Array, Array]:
        """Returns the output and the keys and values that ``remember`` returned."""
        query, key, value = (
            linear(x).swapaxes(1, 2) for linear in (self.query, self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.value_scale != 1:
            value = value * self.value_scale
        query, key, value = (
            checkpoint_name(x, KEPT_PROJECTIONS)
            for x in (rotate(query, sight), rotate(key, sight), value)
        )
        keys, values = remember(key, value)
        sink = None if self.sink is None else self.sink[...]
        if sight.fused is not None:
            found = sight.fused(
                query, keys, values, sight.segment, scale=self.scale, window=sight.window, sink=sink
            )
        else:
            if isinstance(sight.mask, jax.Array):
                # A square mask is that of rows by themselves, where nothing later is seen.
                alone = query.shape[2] == keys.shape[2]
                found = attend(
                    query, keys, values, sight.mask, scale=self.scale, sink=sink, causal=alone
                )
            else:
                found = sight.mask.attend(query, keys, values, scale=self.scale, sink=sink)
            found = checkpoint_name(found, KEPT_ATTENTION)
        return self.output(found.swapaxes(1, 2)), keys, values


class GatedMLP(nnx.Module):
    """``down(activation(gate(x)) * up(x))``: SwiGLU with silu."""

    def __init__(self, name: str, hidden: int, config: ModelConfig, rngs: nnx.Rngs) -> None:
        width, out = config.width, 1 / math.sqrt(2 * config.layers)
        inward, outward = ("embed", "mlp"), ("mlp", "embed")
        self.gate = Linear(f"{name}/gate", (width, hidden), inward, config, rngs)
        self.up = Linear(f"{name}/up", (width, hidden), inward, config, rngs)
        self.down = Linear(f"{name}/down", (hidden, width), outward, config, rngs, scale=out)
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x: Array) -> Array:
        """Same shape as x."""
        gate, up = (checkpoint_name(linear(x), KEPT_INNER) for linear in (self.gate, self.up))
        return self.down(self.activation(gate) * up)


class Router(nnx.Module):
    """Scores of the experts, in float32 whatever the rest is: top-k decisions flip in half
    precision."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        experts = config.experts
        shape = (config.width, experts.count)
        value = jax.random.normal(rngs.params(), shape) / math.sqrt(config.width)
        self.kernel = nnx.Param(value, axes=("embed", None))
        zeros = jnp.zeros((experts.count,), jnp.float32)
        self.bias = nnx.Param(zeros, axes=(None,)) if experts.router == "sigmoid" else None
        self.per_token = experts.per_token
        self.normalise, self.scale = experts.normalise, experts.scale

    def __call__(self, x: Float[Array, "*token embed"]) -> Float[Array, "*token expert"]:
        """The logits; the bias of a sigmoid router takes part in the choice only."""
        kernel = self.kernel[...].astype(jnp.float32)
        # Said explicitly: accelerators multiply float32 in fewer bits by default.
        return jnp.matmul(x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST)

    def choose(self, logits: Float[Array, "*token expert"]) -> tuple[Array, Array]:
        """The experts of each token, best first, and their gates."""
        if self.bias is None:
            return routers.softmax_router(
                logits, per_token=self.per_token, normalise=self.normalise, scale=self.scale
            )
        return routers.sigmoid_router(
            logits,
            self.bias[...],
            per_token=self.per_token,
            normalise=self.normalise,
            scale=self.scale,
        )

    def gates(self, logits: Float[Array, "*token expert"], routes: Array) -> Array:
        """The gates of given routes under these logits."""
        gates = routers.softmax_gates if self.bias is None else routers.sigmoid_gates
        return gates(logits, routes, normalise=self.normalise, scale=self.scale)

    def probability(self, logits: Float[Array, "*token expert"]) -> Float[Array, "*token expert"]:
        """What the balance term takes for probabilities of the experts; they sum to 1."""
        if self.bias is None:
            return jax.nn.softmax(logits, axis=-1)
        return jax.nn.softmax(jax.nn.log_sigmoid(logits), axis=-1)  # sigmoids over their sum


class Experts(nnx.Module):
    """A mixture of gated experts, drop-less, beside an expert that all tokens share if there is
    one."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        experts, width = config.experts, config.width
        inward = ("expert", "embed", "mlp")

        def drawn(shape: tuple[int, ...], axes: tuple[str, ...], scale: float) -> nnx.Param:
            value = scale / math.sqrt(shape[1]) * jax.random.normal(rngs.params(), shape)
            return nnx.Param(value.astype(DTYPES[config.param_dtype]), axes=axes)

        self.router = Router(config, rngs)
        self.gate = drawn((experts.count, width, experts.hidden), inward, 1.0)
        self.up = drawn((experts.count, width, experts.hidden), inward, 1.0)
        out = 1 / math.sqrt(2 * config.layers)
        self.down = drawn((experts.count, experts.hidden, width), ("expert", "mlp", "embed"), out)
        self.shared = (
            GatedMLP("mlp/shared", experts.shared_hidden, config, rngs)
            if experts.shared_hidden
            else None
        )
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x: Array, guide: Guide, mix: Mixture) -> tuple[Array, Routing]:
        """The same shape as x, and what the router did."""
        counted = guide.counted[..., None]
        logits = self.router(x)
        chosen, gates = self.router.choose(logits)
        chosen = used = jnp.where(counted, chosen, -1)
        if guide.recorded is not None:
            used = jnp.where(counted & (guide.recorded >= 0), guide.recorded, chosen)
            gates = self.router.gates(logits, used)
        weights = (getattr(self, name)[...].astype(x.dtype) for name in EXPERTS)
        made = mix(x, used, gates, *weights, activation=self.activation)
        if self.shared is not None:
            made = made + self.shared(x)
        balance = jnp.zeros(x.shape[:-1])
        if guide.share is not None:
            balance = routers.balance(self.router.probability(logits), guide.share)
        return made, Routing(chosen, balance)


class Block(nnx.Module):
    """Attention, then the inner block, each behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig, kind: Kind, rngs: nnx.Rngs) -> None:
        norm = functools.partial(RMSNorm, config.width, config)
        self.attention_norm = norm()
        self.attention = Attention(config, kind, rngs)
        self.mlp_norm = norm()
        self.mlp = (
            Experts(config, rngs) if kind.sparse else GatedMLP("mlp", config.hidden, config, rngs)
        )
        self.attention_post_norm = norm() if config.post_norms else None
        self.mlp_post_norm = norm() if config.post_norms else None

    def __call__(
        self, x: Array, sight: Sight, remember: Remember, guide: Guide, mix: Mixture
    ) -> tuple[Array, Array, Array, Routing | None]:
        """Returns the new x, the keys and values that ``remember`` returned, and the routing of a
        sparse block."""
        made, keys, values = self.attention(self.attention_norm(x), sight, remember)
        x = x + (made if self.attention_post_norm is None else self.attention_post_norm(made))
        inner, routing = self.mlp_norm(x), None
        if isinstance(self.mlp, Experts):
            made, routing = self.mlp(inner, guide, mix)
        else:
            made = self.mlp(inner)
        made = made if self.mlp_post_norm is None else self.mlp_post_norm(made)
        return x + made, keys, values, routing
