"""Attention that never forms its scores: the splash kernel, where a TPU compiles it.

    out = softmax(scale q k^T) v     over the earlier tokens of the own segment, and oneself; on a
                                     local layer over the last ``window`` of them

The dense twin is ``layers.attend``, under the mask that ``transformer.visible`` makes of the same
segments. Each device works on its own rows, heads and queries, since kernels are not partitioned;
of its rows it has the keys and values of all tokens.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from jaxrl.mesh import Rules, spec, ways
from jaxrl.model.form import KEPT_ATTENTION, ModelConfig

LANES = 128  # of the vector unit: tokens and sizes of heads come in multiples of it
BLOCK = 512  # at most so many queries, and keys, at once

# (query, key, value [row head token size], segment [row token], *, scale, window) -> like query;
# a window of 0 is none.
Fused = Callable[..., Array]


def fits(config: ModelConfig, tokens: int) -> bool:
    """Whether the kernel computes what this form asks for, on rows of so many tokens a device."""
    alike = len({config.is_local(layer) for layer in range(config.layers)}) == 1
    sizes = (tokens, config.head_size, config.value_width)
    return alike and config.sinks == "none" and not any(size % LANES for size in sizes)


def chosen(config: ModelConfig, tokens: int, mesh: Mesh | None, rules: Rules) -> Fused | None:
    """The kernel on this mesh, or None for the dense form. ValueError where ``model.attention``
    asks for a kernel that does not fit.
    """
    on_tpu = mesh is not None and mesh.devices.flat[0].platform == "tpu"
    wanted = config.attention == "splash" or (config.attention == "auto" and on_tpu)
    if not wanted:
        return None
    parts = ways(mesh, rules["tokens"])
    if mesh is not None and tokens % parts == 0 and fits(config, tokens // parts):
        return functools.partial(splash, mesh=mesh, rules=rules, interpret=not on_tpu)
    if config.attention == "auto":
        return None
    raise ValueError(
        f"model.attention='splash' with rows of {tokens} tokens, model.head_size="
        f"{config.head_size}, model.sinks={config.sinks!r}, "
        f"model.local_layers={config.local_layers}; allowed: 'dense', or a mesh, multiples of "
        f"{LANES} on each device, no sinks, and layers that are all local or all global"
    )


def splash(
    query: Array,
    key: Array,
    value: Array,
    segment: Array,
    *,
    scale: float,
    window: int,
    mesh: Mesh,
    rules: Rules,
    interpret: bool,
) -> Array:
    """See above. ``interpret`` runs the kernel's program without a TPU."""
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    tokens, parts = query.shape[2], ways(mesh, rules["tokens"])
    heads = query.shape[1] // ways(mesh, rules["heads"])
    block = next(size for size in (BLOCK, BLOCK // 2, LANES) if tokens // parts % size == 0)
    whole = (tokens, tokens)
    mask = kernels.LocalMask(whole, (window - 1, 0), 0) if window else kernels.CausalMask(whole)
    kernel = kernels.make_splash_mha(
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

    def local(kernel: Any, q: Array, k: Array, v: Array, own: Array, all_: Array) -> Array:
        def row(q: Array, k: Array, v: Array, own: Array, all_: Array) -> Any:
            return kernel(q, k, v, segment_ids=kernels.SegmentIds(own, all_))

        return jax.vmap(row)(q, k, v, own, all_)

    # Which blocks are masked differs with the queries: each device is given what is its own.
    masks = kernel.manual_sharding_spec(NamedSharding(mesh, spec((None, "tokens"), rules)))
    queries = spec(("rows", "heads", "tokens", "head"), rules)
    sources = spec(("rows", "kv_heads", None, "head"), rules)
    segments = spec(("rows", "tokens"), rules), spec(("rows", None), rules)
    call = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(masks, queries, sources, sources, *segments),
        out_specs=queries,
        check_vma=False,  # kernels do not tell along which axes they vary
    )
    scaled = (query.astype(jnp.float32) * scale).astype(query.dtype)
    return call(kernel, scaled, key, value, segment, segment)
