"""A mixture of gated experts, drop-less: every route is computed, however uneven the load.

    out = sum_j down_e(gate_j activation(gate_e(x)) * up_e(x)),  e = routes[j]

A route of -1 loads nobody and adds 0; an expert without tokens has gradients of exactly 0. Routes
are sorted by expert, so that the rows of one expert are a run. Two forms, equal in what they give:

    padded  each run cut or padded to the same number of rows, a little above the mean, for one
            batched matmul over all experts; what is beyond goes through a loop over blocks of one
            expert each. On CPU, which turns ``ragged_dot`` into a dense matmul an expert.
    ragged  ``jax.lax.ragged_dot``: on TPU, which has a grouped matmul.

A gate scales the inner activations, which are narrower than what comes out of an expert, and rows
are fetched in both directions, never scattered, but for the few of the loop.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

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
    """sum_j down_e(gates_j activation(x gate_e) * (x up_e)) with e = routes_j, in x's dtype.

    On one device; ``auto`` goes by the default backend. The sum over j is taken in float32.
    """
    form = matmul_for(matmul, jax.default_backend())
    return _mixture(x, routes, gates, gate, up, down, activation, form, routes.size)


def _mixture(
    x: Array,
    routes: Array,
    gates: Array,
    gate: Array,
    up: Array,
    down: Array,
    activation: Activation,
    form: str,
    expected: int,
) -> Array:
    """``expected`` routes are there, the others -1, as far as is known without looking."""
    runs = _sorted(routes, gate.shape[0])
    gates = gates.astype(jnp.float32)
    if form == "ragged":
        sizes = runs.start[1:] - runs.start[:-1]
        slot = jnp.where(jnp.arange(routes.size) < runs.start[-1], runs.slot, -1)
        row = jnp.where(routes < 0, -1, runs.row)

        def multiply(rows: Array, weight: Array) -> Array:
            return jax.lax.ragged_dot(rows, weight, sizes)

        made = _through(x, gates, gate, up, down, slot, row, activation, multiply)
    else:
        mean = expected / gate.shape[0]
        room = 8 * math.ceil((mean + math.sqrt(mean)) / 8)
        block = min(max(8 * round(mean / 32), 8), 64)
        made = _padded(x, gates, gate, up, down, runs, activation, room, block)
    return made.astype(x.dtype)


class _Runs(NamedTuple):
    """Slots (a slot is one choice of one token) sorted by their expert, those without one last."""

    slot: Array  # of each sorted row
    row: Array  # of each slot [token choice]
    start: Array  # of each expert's run, then where the last one ends [expert + 1]


def _sorted(routes: Array, experts: int) -> _Runs:
    expert = jnp.where(routes < 0, experts, routes).reshape(-1)
    slot = jnp.argsort(expert).astype(jnp.int32)
    counts = (expert[:, None] == jnp.arange(experts)).sum(0)
    start = jnp.concatenate([jnp.zeros_like(counts[:1]), jnp.cumsum(counts)]).astype(jnp.int32)
    return _Runs(slot, jnp.argsort(slot).astype(jnp.int32).reshape(routes.shape), start)


def _fetch(x: Array, index: Array) -> Array:
    """x[index], 0 where index is -1."""
    return jnp.where((index < 0)[..., None], 0, x[jnp.maximum(index, 0)])


@jax.custom_vjp
def _spread(x: Array, source: Array, places: Array) -> Array:
    """Row i is x[source[i]]; places[j] are all rows made of x[j], so that the gradient of x[j] is a
    sum of what is fetched from there, where autodiff would scatter."""
    return _fetch(x, source)


@jax.custom_vjp
def _collect(rows: Array, source: Array, places: Array) -> Array:
    """The transpose of ``_spread``, in float32."""
    return _fetch(rows, places).astype(jnp.float32).sum(1)


_spread.defvjp(
    lambda x, source, places: (_fetch(x, source), (source, places)),
    lambda kept, g: (_collect(g, *kept).astype(g.dtype), None, None),
)
_collect.defvjp(
    lambda rows, source, places: (
        _collect(rows, source, places),
        (source, places, jnp.zeros((), rows.dtype)),
    ),
    lambda kept, g: (_fetch(g.astype(kept[2].dtype), kept[0]), None, None),
)


def _expert(
    rows: Array,
    share: Array,
    gate: Array,
    up: Array,
    down: Array,
    activation: Activation,
    multiply: Callable[[Array, Array], Array],
) -> Array:
    inner = activation(multiply(rows, gate)) * multiply(rows, up)
    return multiply((inner.astype(jnp.float32) * share).astype(rows.dtype), down)


def _through(
    x: Array,
    gates: Array,
    gate: Array,
    up: Array,
    down: Array,
    slot: Array,
    row: Array,
    activation: Activation,
    multiply: Callable[[Array, Array], Array],
) -> Array:
    """All rows through their experts, summed over each token's; float32."""
    token = slot // row.shape[1]
    rows = _spread(x, token, row)
    share = _spread(gates.reshape(-1, 1), slot, row.reshape(-1, 1))
    made = _expert(rows, share, gate, up, down, activation, multiply)
    return _collect(made, token, row)


def _batched(
    x: Array,
    gates: Array,
    gate: Array,
    up: Array,
    down: Array,
    runs: _Runs,
    activation: Activation,
    room: int,
) -> Array:
    """The first ``room`` rows of each run, as one batch of equal matrices."""
    experts = gate.shape[0]
    sizes = runs.start[1:] - runs.start[:-1]
    place = jnp.arange(room)
    source = jnp.minimum(runs.start[:-1, None] + place, runs.slot.size - 1)
    slot = jnp.where(place < sizes[:, None], runs.slot[source], -1).reshape(-1)
    first = runs.start[:, None, None]
    inside = (runs.row >= first[:-1]) & (runs.row < jnp.minimum(first[:-1] + room, first[1:]))
    shift = room * jnp.arange(experts)[:, None, None] - first[:-1]
    row = jnp.where(inside, runs.row + shift, 0).sum(0) - 1 + inside.any(0)

    def multiply(rows: Array, weight: Array) -> Array:
        rows = rows.reshape(experts, room, -1)
        return jnp.matmul(rows, weight).reshape(experts * room, -1)

    return _through(x, gates, gate, up, down, slot, row, activation, multiply)


def _rest(runs: _Runs, room: int, block: int) -> tuple[Array, Callable[[Array], tuple]]:
    """How many blocks hold what is beyond ``room``, and of a block its expert and its slots."""
    sizes = runs.start[1:] - runs.start[:-1]
    blocks = jnp.maximum(sizes - room + block - 1, 0) // block
    last = jnp.cumsum(blocks)

    def of(i: Array) -> tuple[Array, Array]:
        e = (last <= i).sum()
        row = runs.start[e] + room + (i - last[e] + blocks[e]) * block + jnp.arange(block)
        slot = runs.slot[jnp.minimum(row, runs.slot.size - 1)]
        return e, jnp.where(row < runs.start[e + 1], slot, -1)

    return last[-1], of


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _padded(
    x: Array,
    gates: Array,
    gate: Array,
    up: Array,
    down: Array,
    runs: _Runs,
    activation: Activation,
    room: int,
    block: int,
) -> Array:
    return _padded_forward(x, gates, gate, up, down, runs, activation, room, block)[0]


def _padded_forward(
    x: Array,
    gates: Array,
    gate: Array,
    up: Array,
    down: Array,
    runs: _Runs,
    activation: Activation,
    room: int,
    block: int,
) -> tuple[Array, Any]:
    batched = functools.partial(_batched, runs=runs, activation=activation, room=room)
    made, pull = jax.vjp(batched, x, gates, gate, up, down)
    blocks, of = _rest(runs, room, block)

    def one(i: Array, made: Array) -> Array:
        e, slot = of(i)
        token = slot // gates.shape[1]
        share = _fetch(gates.reshape(-1, 1), slot)
        part = _expert(_fetch(x, token), share, gate[e], up[e], down[e], activation, jnp.matmul)
        return made.at[_or_drop(token, x)].add(part.astype(made.dtype), mode="drop")

    made = jax.lax.fori_loop(0, blocks, one, made)
    return made, (pull, x, gates, gate, up, down, runs)


def _or_drop(index: Array, x: Array) -> Array:
    return jnp.where(index < 0, x.shape[0], index)


def _padded_backward(activation: Activation, room: int, block: int, kept: Any, g: Array) -> tuple:
    pull, x, gates, gate, up, down, runs = kept
    grads = tuple(grad.astype(jnp.float32) for grad in pull(g))
    blocks, of = _rest(runs, room, block)

    def one(i: Array, grads: tuple) -> tuple:
        d_x, d_gates, *d_weights = grads
        e, slot = of(i)
        token = slot // gates.shape[1]
        share = _fetch(gates.reshape(-1, 1), slot)
        part = functools.partial(_expert, activation=activation, multiply=jnp.matmul)
        made, pull = jax.vjp(part, _fetch(x, token), share, gate[e], up[e], down[e])
        d_rows, d_share, *d_own = pull(_fetch(g, token).astype(made.dtype))
        d_x = d_x.at[_or_drop(token, x)].add(d_rows.astype(d_x.dtype), mode="drop")
        flat = d_gates.reshape(-1)
        flat = flat.at[_or_drop(slot, flat)].add(d_share[:, 0], mode="drop")
        d_weights = [
            jax.lax.dynamic_update_index_in_dim(whole, whole[e] + own, e, 0)
            for whole, own in zip(d_weights, d_own, strict=True)
        ]
        return d_x, flat.reshape(gates.shape), *d_weights

    d_x, d_gates, *d_weights = jax.lax.fori_loop(0, blocks, one, grads)
    own = (d.astype(w.dtype) for d, w in zip(d_weights, (gate, up, down), strict=True))
    return d_x.astype(x.dtype), d_gates, *own, None


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
