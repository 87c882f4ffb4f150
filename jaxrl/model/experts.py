"""A mixture of gated experts, drop-less: every route is computed, however uneven the load.

    out = sum_j gate_j down_e(activation(gate_e(x)) * up_e(x)),  e = routes[j]

A route of -1 loads nobody and adds 0; an expert without tokens has gradients of exactly 0. Rows are
sorted by expert, so that the rows of one expert are a run, and multiplied run by run:

    padded  a loop over the experts, over blocks of each run: on CPU, where XLA turns ``ragged_dot``
            into one dense matmul an expert
    ragged  ``jax.lax.ragged_dot``: on TPU, which has a grouped matmul

Nothing is scattered: rows move by a permutation and its inverse, one in each direction.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxrl.mesh import MeshAxes, Rules, per_device, require_divisible

MATMULS = ("auto", "padded", "ragged")

Activation = Callable[[Array], Array]


def matmul_for(matmul: str, platform: str) -> str:
    """``auto`` is padded on CPU and ragged elsewhere. Raises ValueError for an unknown form."""
    if matmul not in MATMULS:
        raise ValueError(f"model.experts.matmul={matmul!r} is unknown; allowed: {MATMULS}")
    if matmul != "auto":
        return matmul
    return "padded" if platform == "cpu" else "ragged"


def mixture(
    x: Float[Array, "token embed"],
    routes: Int[Array, "token choice"],
    gates: Float[Array, "token choice"],
    gate: Float[Array, "expert embed mlp"],
    up: Float[Array, "expert embed mlp"],
    down: Float[Array, "expert mlp embed"],
    *,
    activation: Activation,
    matmul: str,
) -> Float[Array, "token embed"]:
    """sum_j gates_j down_e(activation(x gate_e) * (x up_e)) with e = routes_j, in x's dtype.

    Gates count in float32. On one device; ``auto`` goes by the default backend.
    """
    choices, experts = routes.shape[1], gate.shape[0]
    padded = matmul_for(matmul, jax.default_backend()) == "padded"
    flat = jnp.where(routes < 0, experts, routes).reshape(-1)
    order = jnp.argsort(flat)  # row -> slot, a slot being a choice of a token
    row = jnp.argsort(order)  # slot -> row
    start = jnp.searchsorted(flat[order], jnp.arange(experts + 1)).astype(jnp.int32)
    multiply = functools.partial(_padded if padded else _ragged, start=start)
    rows = _moved(x, order, row, choices)
    inner = activation(multiply(rows, gate)) * multiply(rows, up)
    made = _moved(multiply(inner, down), row, order, 1)
    made = made.reshape(*routes.shape, -1).astype(jnp.float32)
    kept = (routes >= 0)[..., None]
    return jnp.where(kept, gates[..., None] * made, 0).sum(1).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _moved(x: Array, source: Array, target: Array, copies: int) -> Array:
    """Row i is x[source[i] // copies]; target is the inverse of the permutation source, so that the
    gradient is fetched too, where autodiff would scatter."""
    return x[source // copies]


def _moved_forward(x: Array, source: Array, target: Array, copies: int) -> tuple[Array, Array]:
    return x[source // copies], target


def _moved_backward(copies: int, target: Array, g: Array) -> tuple[Array, None, None]:
    g = g[target].reshape(-1, copies, g.shape[-1])
    return g.astype(jnp.float32).sum(1).astype(g.dtype), None, None


_moved.defvjp(_moved_forward, _moved_backward)


def _ragged(rows: Array, weight: Array, start: Array) -> Array:
    """Rows beyond the last run are 0."""
    made = jax.lax.ragged_dot(rows, weight, jnp.diff(start))
    return jnp.where(jnp.arange(rows.shape[0])[:, None] < start[-1], made, 0)


def _block(rows: int, experts: int) -> int:
    """Rows of a block: a power of 2 near half of a mean run, so that little of it is padding."""
    mean = max(rows // experts, 1)
    return min(max(1 << (mean.bit_length() - 2), 8), 128) if mean > 1 else 8


@jax.custom_vjp
def _padded(rows: Array, weight: Array, start: Array) -> Array:
    """rows[i] @ weight[e] for the run start[e] <= i < start[e + 1], block by block.

    The surplus rows of a run's last block belong to the next run, which is computed afterwards.
    """
    size, block = rows.shape[0], _block(rows.shape[0], weight.shape[0])
    rows = jnp.pad(rows, ((0, block), (0, 0)))

    def expert(e: Array, made: Array) -> Array:
        def one(i: Array, made: Array) -> Array:
            at = start[e] + i * block
            part = jax.lax.dynamic_slice_in_dim(rows, at, block) @ weight[e]
            return jax.lax.dynamic_update_slice_in_dim(made, part, at, 0)

        return jax.lax.fori_loop(0, -(-(start[e + 1] - start[e]) // block), one, made)

    made = _zeros((size + block, weight.shape[2]), rows)
    made = jax.lax.fori_loop(0, weight.shape[0], expert, made)[:size]
    return jnp.where(jnp.arange(size)[:, None] < start[-1], made, 0)


def _padded_forward(rows: Array, weight: Array, start: Array) -> tuple[Array, Any]:
    return _padded(rows, weight, start), (rows, weight, start)


def _padded_backward(kept: Any, g: Array) -> tuple[Array, Array, None]:
    rows, weight, start = kept
    d_rows = _padded(g, weight.swapaxes(1, 2), start)
    return d_rows, _outer(rows, g, start).astype(weight.dtype), None


def _outer(rows: Array, g: Array, start: Array) -> Array:
    """rows^T g over each run, in float32: [expert, columns of rows, columns of g]."""
    experts = start.size - 1
    block = _block(rows.shape[0], experts)
    rows, g = (jnp.pad(x, ((0, block), (0, 0))) for x in (rows, g))

    def expert(e: Array, made: Array) -> Array:
        def one(i: Array, total: Array) -> Array:
            at = start[e] + i * block
            mine = (at + jnp.arange(block) < start[e + 1])[:, None]
            part = jnp.where(mine, jax.lax.dynamic_slice_in_dim(rows, at, block), 0)
            return total + jnp.matmul(
                part.T,
                jax.lax.dynamic_slice_in_dim(g, at, block),
                preferred_element_type=jnp.float32,
            )

        total = _zeros(made.shape[1:], made[0])
        total = jax.lax.fori_loop(0, -(-(start[e + 1] - start[e]) // block), one, total)
        return jax.lax.dynamic_update_index_in_dim(made, total, e, 0)

    made = _zeros((experts, rows.shape[1], g.shape[1]), rows.astype(jnp.float32))
    return jax.lax.fori_loop(0, experts, expert, made)


def _zeros(shape: tuple[int, ...], like: Array) -> Array:
    """Zeros to fill in a loop, made of ``like`` so that they vary over the same mesh axes."""
    return jnp.broadcast_to(jnp.where(True, 0, like[0, 0]), shape)


_padded.defvjp(_padded_forward, _padded_backward)


def sharded_mixture(mesh: Mesh, rules: Rules, *, matmul: str) -> Callable[..., Array]:
    """``mixture`` for arrays that lie on a mesh: tokens split over the axes of ``rows``, experts
    over those of ``expert``, ``mlp`` and ``embed`` of the weights as the rules say.

    Each device sends its tokens to the devices that hold their experts and takes back, for each of
    these, the sum over the experts there. Buffers have room for all tokens of every device. Raises
    ValueError if an axis of ``expert`` splits no rows, or the tokens do not divide.
    """
    peers, inner, embed = rules["expert"], rules["mlp"], rules["embed"]
    if not set(peers) <= set(rules["rows"]):
        raise ValueError(f"rules.expert={peers} must be among rules.rows={rules['rows']}")
    form = matmul_for(matmul, mesh.devices.flat[0].platform)

    def local(x: Array, routes: Array, gates: Array, *weights: Array, activation: Activation):
        gate, up, down = (
            _whole(w, embed, axis) for w, axis in zip(weights, (1, 1, 2), strict=True)
        )
        mix = functools.partial(
            mixture, gate=gate, up=up, down=down, activation=activation, matmul=form
        )
        made = _exchanged(mix, x, routes, gates, peers, gate.shape[0])
        return jax.lax.psum(made, inner) if inner else made

    def whole(x: Array, routes: Array, gates: Array, *weights: Array, activation: Activation):
        require_divisible("tokens", x.shape[0], mesh, rules["rows"])
        require_divisible("model.experts.count", weights[0].shape[0], mesh, peers)
        inward = ("expert", "embed", "mlp")
        call = per_device(
            functools.partial(local, activation=activation),
            mesh,
            rules,
            (*[("rows", None)] * 3, inward, inward, ("expert", "mlp", "embed")),
            ("rows", None),
        )
        return call(x, routes, gates, *weights)

    return whole


def _whole(weight: Array, axes: MeshAxes, axis: int) -> Array:
    return jax.lax.all_gather(weight, axes, axis=axis, tiled=True) if axes else weight


def _exchanged(
    mix: Callable[..., Array], x: Array, routes: Array, gates: Array, peers: MeshAxes, experts: int
) -> Array:
    """The mixture over all peers' experts, ``experts`` on each: tokens go there and come back."""
    if not peers:
        return mix(x, routes, gates)
    count = jax.lax.psum(1, peers)
    first = experts * jnp.arange(count)[:, None, None]
    theirs = jnp.where((routes >= first) & (routes < first + experts), routes - first, -1)
    sent = jnp.where((theirs >= 0).any(-1, keepdims=True), x, 0)
    swap = functools.partial(jax.lax.all_to_all, axis_name=peers, split_axis=0, concat_axis=0)
    there = [swap(a) for a in (sent, theirs, jnp.where(theirs < 0, 0, gates))]
    made = mix(*(a.reshape(-1, a.shape[-1]) for a in there))
    return swap(made.reshape(count, *x.shape)).sum(0)
