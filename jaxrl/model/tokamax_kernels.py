"""What is taken from tokamax (the extra ``tokamax``): its grouped matrix product and its splash
attention, both for TPUs, and the XLA twin of the first.

Nothing of it is imported before it is asked for. The kernels lie in modules that tokamax does not
export, since what it exports refuses to compile for devices that are not there, takes no segments
of packed rows, and tiles most shapes by 128: hence the exact versions in constraints.txt.
"""

import functools
import importlib
import importlib.util
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jaxrl.model.form import KEPT_ATTENTION

LANES = 128  # of the vector unit: no side of a product is shorter
ROWS = 512  # of a tile; a tile that two experts share is visited by both
# Most bytes of a tile along what is summed over, and along what is written: with two buffers each
# and the sums in float32 they fill most of the 16 MiB that a kernel gets of v5e's and v5p's VMEM.
SUMMED_BYTES, WRITTEN_BYTES = 4096, 2048
# The gradient of the queries is written once for each block of keys, and in float32 if these are
# more than four: so blocks of keys are as long as it takes, up to this.
MOST_KEYS, FEW_BLOCKS = 2048, 4


def require() -> None:
    """ValueError where tokamax is not installed."""
    if importlib.util.find_spec("tokamax") is None:
        raise ValueError(
            "model.kernels='tokamax': the package tokamax is not installed: pip install -c "
            "constraints.txt -e '.[tokamax]'; allowed without it: 'auto', 'xla', 'splash'"
        )


def _module(name: str) -> Any:
    return importlib.import_module(f"tokamax._src.ops.{name}")


def _tile(size: int, most: int) -> int:
    """Equal parts of a side, in whole lanes."""
    parts = -(-size // most)
    return -(-size // (parts * LANES)) * LANES


def tiles(rows: int, summed: int, written: int, bytes_each: int) -> tuple[int, int, int]:
    """Of a product [rows summed] x [summed written]. ``rows`` is a multiple of 128."""
    down = next(size for size in (ROWS, ROWS // 2, LANES) if rows % size == 0)
    return (
        down,
        _tile(summed, SUMMED_BYTES // bytes_each),
        _tile(written, WRITTEN_BYTES // bytes_each),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_product(
    rows: Float[Array, "row summed"],
    weights: Float[Array, "expert summed written"],
    sizes: Int[Array, " expert"],
    interpret: bool,
) -> Float[Array, "row written"]:
    """Each run of ``sizes[e]`` rows times ``weights[e]``, summed in float32, as
    ``jax.lax.ragged_dot``; but what lies behind the last run holds anything, and is not read going
    back either. Rows are a multiple of 128. Raises ValueError where a side is shorter than 128.
    """
    return _product(rows, weights, sizes, interpret, transposed=False)


def _product(
    rows: Array, weights: Array, sizes: Array, interpret: bool, *, transposed: bool
) -> Array:
    summed, written = weights.shape[1:]
    if min(summed, written) < LANES:
        raise ValueError(
            f"model.kernels='tokamax' with experts' products of {summed} x {written} on a device "
            "(model.width, and model.experts.hidden over mesh.tensor); allowed: "
            f"{LANES} or more each, or model.kernels='auto', 'xla'"
        )
    if transposed:
        summed, written = written, summed
    return _module("ragged_dot.pallas_mosaic_tpu_kernel").gmm(
        rows,
        weights,
        sizes,
        None,  # the backend's precision, as everywhere else
        rows.dtype,
        tiling=tiles(rows.shape[0], summed, written, rows.dtype.itemsize),
        transpose_rhs=transposed,
        interpret=interpret,
    )


def _forward(
    rows: Array, weights: Array, sizes: Array, interpret: bool
) -> tuple[Array, tuple[Array, ...]]:
    return grouped_product(rows, weights, sizes, interpret), (rows, weights, sizes)


def _backward(interpret: bool, kept: tuple[Array, ...], given: Array) -> tuple[Array, Array, None]:
    rows, weights, sizes = kept
    most = WRITTEN_BYTES // rows.dtype.itemsize  # both sides of what is made are written
    down, _, written = tiles(rows.shape[0], LANES, given.shape[1], rows.dtype.itemsize)
    by_weights = _module("ragged_dot.pallas_mosaic_tpu_kernel").tgmm(
        rows.T,  # turned back inside, before it is read
        given,
        sizes,
        None,
        weights.dtype,
        tiling=(down, _tile(rows.shape[1], most), written),
        interpret=interpret,
    )
    return _product(given, weights, sizes, interpret, transposed=True), by_weights, None


grouped_product.defvjp(_forward, _backward)


def grouped_product_twin(rows: Array, weights: Array, sizes: Array) -> Array:
    """The same by tokamax's own implementation in XLA, on any backend and of any shape."""
    product = importlib.import_module("tokamax").ragged_dot
    return product(rows, weights, sizes, implementation="xla")


def keys_at_once(tokens: int, block: int) -> int:
    """Of rows of so many tokens, going back; a multiple of ``block``."""
    sizes = [size for size in range(block, MOST_KEYS + 1, block) if tokens % size == 0]
    return next((size for size in sizes if tokens <= FEW_BLOCKS * size), sizes[-1])


def splash_kernel(tokens: int, window: int, block: int, parts: int, interpret: bool) -> Any:
    """tokamax's splash attention of rows of so many tokens, whose queries lie on ``parts`` devices:
    ``kernel(query, key, value, segment_ids, sinks)`` of one row, queries scaled before."""
    masks = _module("experimental.tpu.splash_attention.splash_attention_mask")
    kernels = _module("experimental.tpu.splash_attention.splash_attention_kernel")
    whole = (tokens, tokens)
    mask = masks.LocalMask(whole, (window - 1, 0), 0) if window else masks.CausalMask(whole)
    return kernels.make_splash_mha(
        mask,
        config=kernels.SplashConfig(
            block_q=block,
            block_kv=block,
            block_kv_compute=block,
            block_q_dkv=block,
            block_kv_dkv=keys_at_once(tokens, block),
            block_kv_dkv_compute=block,
            residual_checkpoint_name=KEPT_ATTENTION,
            interpret=interpret,
        ),
        q_seq_shards=parts,
    )
