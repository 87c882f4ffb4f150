"""Attention that never forms its scores: splash kernels, where a TPU compiles them.

    out = softmax(scale q k^T) v     over the earlier tokens of the own segment, and oneself; on a
                                     local layer over the last ``window`` of them

There are two, by ``model.kernels``: "splash" is the one that comes with JAX; "tokamax", which grew
out of it, takes sinks too, and going back makes all three gradients in one kernel. The twin of both
is ``layers.attend``, under the mask that ``transformer.visible`` makes of the same segments. Each
device works on its own rows, heads and queries, since kernels are not partitioned; of its rows it
has the keys and values of all tokens.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from jaxrl.mesh import Rules, spec, ways
from jaxrl.model import tokamax_kernels
from jaxrl.model.form import KEPT_ATTENTION, ModelConfig

LANES = 128  # of the vector unit: tokens and sizes of heads come in multiples of it
BLOCK = 512  # at most so many queries, and keys, at once

# (query, key, value [row head token size], segment [row token], *, scale, window, sink) -> like
# query; a window of 0 is none, and so is a sink [head] of None.
Fused = Callable[..., Array]


def fits(config: ModelConfig, tokens: int, kernels: str) -> bool:
    """Whether these kernels compute what this form asks for, on rows of so many tokens a device."""
    alike = len({config.is_local(layer) for layer in range(config.layers)}) == 1
    sinks = config.sinks == "none" or kernels == "tokamax"
    sizes = (tokens, config.head_size, config.value_width)
    return alike and sinks and not any(size % LANES for size in sizes)


def chosen(config: ModelConfig, tokens: int, mesh: Mesh | None, rules: Rules) -> Fused | None:
    """The kernel on this mesh, or None for the dense form. ValueError where ``model.kernels`` asks
    for one that does not fit.
    """
    on_tpu = mesh is not None and mesh.devices.flat[0].platform == "tpu"
    asked = config.kernels
    if asked == "xla" or (asked == "auto" and not on_tpu):
        return None
    kernels = "splash" if asked == "auto" else asked
    parts = ways(mesh, rules["tokens"])
    if mesh is not None and tokens % parts == 0 and fits(config, tokens // parts, kernels):
        return functools.partial(
            fused, kernels=kernels, mesh=mesh, rules=rules, interpret=not on_tpu
        )
    if asked == "auto":
        return None
    raise ValueError(
        f"model.kernels={asked!r} with rows of {tokens} tokens, model.head_size="
        f"{config.head_size}, model.value_size={config.value_size}, model.sinks={config.sinks!r}, "
        f"model.local_layers={config.local_layers}; allowed: 'auto', 'xla', or a mesh, multiples "
        f"of {LANES} on each device, layers that are all local or all global"
        + ("" if kernels == "tokamax" else ", and no sinks")
    )


def fused(
    query: Array,
    key: Array,
    value: Array,
    segment: Array,
    *,
    scale: float,
    window: int,
    sink: Array | None,
    kernels: str,
    mesh: Mesh,
    rules: Rules,
    interpret: bool,
) -> Array:
    """See above. ``interpret`` runs the kernel's program without a TPU."""
    tokens, parts = query.shape[2], ways(mesh, rules["tokens"])
    block = next(size for size in (BLOCK, BLOCK // 2, LANES) if tokens // parts % size == 0)
    if kernels == "tokamax":
        kernel = tokamax_kernels.splash_kernel(tokens, window, block, parts, interpret)
        lying = spec(("tokens",), rules)
    else:
        heads = query.shape[1] // ways(mesh, rules["heads"])
        kernel = _splash_kernel(tokens, heads, window, block, parts, interpret)
        lying = spec((None, "tokens"), rules)

    def local(kernel: Any, q: Array, k: Array, v: Array, own: Array, all_: Array, *sink: Array):
        def row(q: Array, k: Array, v: Array, own: Array, all_: Array) -> Any:
            return kernel(q, k, v, SegmentIds(own, all_), *sink)

        return jax.vmap(row)(q, k, v, own, all_)

    # Which blocks are masked differs with the queries: each device is given what is its own.
    masks = kernel.manual_sharding_spec(NamedSharding(mesh, lying))
    queries = spec(("rows", "heads", "tokens", "head"), rules)
    sources = spec(("rows", "kv_heads", None, "head"), rules)
    segments = spec(("rows", "tokens"), rules), spec(("rows", None), rules)
    sinks = () if sink is None else (sink,)
    call = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(
            masks,
            queries,
            sources,
            sources,
            *segments,
            *(spec(("heads",), rules),) * len(sinks),
        ),
        out_specs=queries,
        check_vma=False,  # kernels do not tell along which axes they vary
    )
    scaled = (query.astype(jnp.float32) * scale).astype(query.dtype)
    return call(kernel, scaled, key, value, segment, segment, *sinks)


class SegmentIds(NamedTuple):
    """Of a row's queries and of its keys, under the names by which both kernels read them."""

    q: Array
    kv: Array


def _splash_kernel(
    tokens: int, heads: int, window: int, block: int, parts: int, interpret: bool
) -> Any:
    """JAX's own, for the heads of a device."""
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    whole = (tokens, tokens)
    mask = kernels.LocalMask(whole, (window - 1, 0), 0) if window else kernels.CausalMask(whole)
    return kernels.make_splash_mha(
        kernels.MultiHeadMask([mask] * heads),
        block_sizes=kernels.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=block,
            # Apart from keys and values: one kernel for all three writes a part of the queries'
            # gradient for each block of keys, and adding those up costs more than it saves.
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=parts,
        residual_checkpoint_name=KEPT_ATTENTION,
        interpret=interpret,
    )
