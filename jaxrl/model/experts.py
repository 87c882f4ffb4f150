"""A mixture of gated experts, drop-less: every route is computed, however uneven the load.

    out = sum_j down_e(gates_j activation(gate_e(x)) * up_e(x)),  e = routes_j

A route of -1 loads nobody and adds 0; an expert without tokens has gradients of exactly 0. Routes
are sorted by expert, so that the rows of one expert are a run. Two forms, equal in what they give:

    padded  each run cut or padded to the same number of rows, a little above the mean, for one
            batched matmul over all experts; what is beyond goes through a loop over blocks of one
            expert each. On CPU, which turns ``ragged_dot`` into a dense matmul an expert.
    ragged  ``jax.lax.ragged_dot``: on TPU, which has a grouped matmul.

A gate scales the inner activations, where this is one more factor of a product. Rows are fetched in
both directions, never scattered, but for the few of the loop.
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
EXCHANGES = ("auto", "dense", "ragged")
SPREAD = 1.0  # room above the mean run, in deviations of a random load; more pads, less loops

Activation = Callable[[Array], Array]
Multiply = Callable[[Array, Array], Array]  # (rows, weights of the experts) -> rows
Weights = tuple[Array, ...]  # gate, up, down


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
    return _mixture(x, routes, gates, (gate, up, down), activation, form, routes.size)


def _mixture(
    x: Array,
    routes: Array,
    gates: Array,
    weights: Weights,
    activation: Activation,
    form: str,
    expected: int,
) -> Array:
    """``expected``: how many routes are not -1, as far as is known without looking."""
    experts = weights[0].shape[0]
    runs = _sorted(routes, experts)
    gates = gates.astype(jnp.float32)
    if form == "padded":
        mean = expected / experts
        room = 8 * math.ceil((mean + SPREAD * math.sqrt(mean)) / 8)
        block = min(max(8 * round(mean / 32), 8), 64)
        made: Any = _padded(x, gates, weights, runs, activation, room, block)
    else:
        slot = jnp.where(jnp.arange(routes.size) < runs.start[-1], runs.slot, -1)
        row = jnp.where(routes < 0, -1, runs.row)
        multiply = functools.partial(jax.lax.ragged_dot, group_sizes=runs.sizes)
        made = _through(x, gates, weights, slot, row, activation, multiply)
    return made.astype(x.dtype)


class _Runs(NamedTuple):
    """Slots (a slot is one choice of one token) sorted by their expert, those without one last."""

    slot: Array  # of each sorted row
    row: Array  # of each slot [token choice]
    start: Array  # of each expert's run, then where the last one ends [expert + 1]

    @property
    def sizes(self) -> Array:
        """Rows of each expert."""
        return self.start[1:] - self.start[:-1]


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
    lambda rows, *where: (_collect(rows, *where), (where[0], jnp.zeros((), rows.dtype))),
    lambda kept, g: (_fetch(g.astype(kept[1].dtype), kept[0]), None, None),
)


def _gated(
    rows: Array, share: Array, weights: Weights, activation: Activation, multiply: Multiply
) -> Array:
    """Rows through their experts, each scaled by its share [row 1]."""
    gate, up, down = weights
    inner = activation(multiply(rows, gate)) * multiply(rows, up)
    return multiply((inner.astype(jnp.float32) * share).astype(rows.dtype), down)


def _through(
    x: Array,
    gates: Array,
    weights: Weights,
    slot: Array,
    row: Array,
    activation: Activation,
    multiply: Multiply,
) -> Array:
    """Rows made of ``slot`` through their experts, summed over the ``row``s of each token."""
    token = slot // row.shape[1]
    rows = _spread(x, token, row)
    share = _spread(gates.reshape(-1, 1), slot, row.reshape(-1, 1))
    return _collect(_gated(rows, share, weights, activation, multiply), token, row)


def _batched(
    x: Array, gates: Array, weights: Weights, runs: _Runs, activation: Activation, room: int
) -> Array:
    """The first ``room`` rows of each run, as one batch of equal matrices."""
    experts, place = weights[0].shape[0], jnp.arange(room)
    source = jnp.minimum(runs.start[:-1, None] + place, runs.slot.size - 1)
    slot = jnp.where(place < runs.sizes[:, None], runs.slot[source], -1).reshape(-1)
    first, end = runs.start[:-1, None, None], runs.start[1:, None, None]
    inside = (runs.row >= first) & (runs.row < jnp.minimum(first + room, end))
    moved = runs.row + room * jnp.arange(experts)[:, None, None] - first
    row = jnp.where(inside.any(0), jnp.where(inside, moved, 0).sum(0), -1)

    def multiply(rows: Array, weight: Array) -> Array:
        return (rows.reshape(experts, room, -1) @ weight).reshape(experts * room, -1)

    return _through(x, gates, weights, slot, row, activation, multiply)


def _rest(runs: _Runs, room: int, block: int) -> tuple[Array, Callable[[Array], Any]]:
    """How many blocks hold the rows beyond ``room``, and of each its expert and its slots."""
    blocks = (jnp.maximum(runs.sizes - room, 0) + block - 1) // block
    last = jnp.cumsum(blocks)

    def of(i: Array) -> tuple[Array, Array]:
        e = (last <= i).sum()
        row = runs.start[e] + room + (i - last[e] + blocks[e]) * block + jnp.arange(block)
        slot = runs.slot[jnp.minimum(row, runs.slot.size - 1)]
        return e, jnp.where(row < runs.start[e + 1], slot, -1)

    return last[-1], of


def _add(x: Array, index: Array, rows: Array) -> Array:
    """x[index] += rows, but for an index of -1."""
    index = jnp.where(index < 0, x.shape[0], index)
    return x.at[index].add(rows.astype(x.dtype), mode="drop")


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _padded(
    x: Array,
    gates: Array,
    weights: Weights,
    runs: _Runs,
    activation: Activation,
    room: int,
    block: int,
) -> Array:
    """``_batched``, and a loop over what it left; float32."""
    return _padded_forward(x, gates, weights, runs, activation, room, block)[0]


def _padded_forward(
    x: Array,
    gates: Array,
    weights: Weights,
    runs: _Runs,
    activation: Activation,
    room: int,
    block: int,
) -> tuple[Array, Any]:
    batched = functools.partial(_batched, runs=runs, activation=activation, room=room)
    made, pull = jax.vjp(batched, x, gates, weights)
    blocks, of = _rest(runs, room, block)

    def one(i: Array, made: Array) -> Array:
        e, slot = of(i)
        token, own = slot // gates.shape[1], tuple(weight[e] for weight in weights)
        share = _fetch(gates.reshape(-1, 1), slot)
        return _add(made, token, _gated(_fetch(x, token), share, own, activation, jnp.matmul))

    return jax.lax.fori_loop(0, blocks, one, made), (pull, x, gates, weights, runs)


def _padded_backward(activation: Activation, room: int, block: int, kept: Any, g: Array) -> Any:
    pull, x, gates, weights, runs = kept
    wide = jax.tree.map(lambda grad: grad.astype(jnp.float32), pull(g))
    blocks, of = _rest(runs, room, block)
    part = functools.partial(_gated, activation=activation, multiply=jnp.matmul)

    def one(i: Array, grads: Any) -> Any:
        d_x, d_gates, d_weights = grads
        e, slot = of(i)
        token, own = slot // gates.shape[1], tuple(weight[e] for weight in weights)
        made, pull = jax.vjp(part, _fetch(x, token), _fetch(gates.reshape(-1, 1), slot), own)
        d_rows, d_share, d_own = pull(_fetch(g, token).astype(made.dtype))
        d_weights = tuple(
            jax.lax.dynamic_update_index_in_dim(whole, whole[e] + more, e, 0)
            for whole, more in zip(d_weights, d_own, strict=True)
        )
        d_gates = _add(d_gates.reshape(-1, 1), slot, d_share).reshape(gates.shape)
        return _add(d_x, token, d_rows), d_gates, d_weights

    grads = jax.lax.fori_loop(0, blocks, one, wide)
    narrow = jax.tree.map(lambda grad, of: grad.astype(of.dtype), grads, (x, gates, weights))
    return *narrow, None


_padded.defvjp(_padded_forward, _padded_backward)


def sharded_mixture(
    mesh: Mesh, rules: Rules, *, matmul: str, exchange: str = "auto"
) -> Callable[..., Array]:
    """``mixture`` for arrays that lie on a mesh: tokens split over the axes of ``rows``, experts
    over those of ``expert``, ``mlp`` and ``embed`` of the weights as the rules say.

    Each device sends a token once to every device that holds experts of it, and takes back the sum
    over the experts there. Exchanges: ``dense`` moves buffers with room for all tokens of every
    device; ``ragged`` moves what is sent, on TPU, where it is what ``auto`` takes. Raises
    ValueError for an unknown form, an axis of ``expert`` that splits no rows, or tokens or experts
    that do not divide.
    """
    peers, inner, embed = rules["expert"], rules["mlp"], rules["embed"]
    if not set(peers) <= set(rules["rows"]):
        raise ValueError(f"rules.expert={peers} must be among rules.rows={rules['rows']}")
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange={exchange!r} is unknown; allowed: {EXCHANGES}")
    platform = mesh.devices.flat[0].platform
    form, ragged = matmul_for(matmul, platform), exchange == "ragged"
    exchanged = _sent if ragged or exchange == "auto" and platform == "tpu" else _swapped

    def local(x: Array, routes: Array, gates: Array, *weights: Array, activation: Activation):
        gathered = tuple(
            jax.lax.all_gather(weight, embed, axis=axis, tiled=True) if embed else weight
            for weight, axis in zip(weights, (1, 1, 2), strict=True)
        )
        mix = functools.partial(
            _mixture, weights=gathered, activation=activation, form=form, expected=routes.size
        )
        if peers:
            made = exchanged(mix, x, routes, gates, peers, weights[0].shape[0])
        else:
            made = mix(x, routes, gates)
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


def _of_peers(routes: Array, peers: MeshAxes, experts: int) -> Array:
    """The routes as each peer numbers its own experts [peer token choice], -1 if not there."""
    first = experts * jnp.arange(jax.lax.axis_size(peers))[:, None, None]
    return jnp.where((routes >= first) & (routes < first + experts), routes - first, -1)


def _swapped(
    mix: Callable[..., Array], x: Array, routes: Array, gates: Array, peers: MeshAxes, experts: int
) -> Array:
    """The mixture over all peers' experts: tokens there and back in buffers of equal size."""
    theirs = _of_peers(routes, peers, experts)
    sent = jnp.where((theirs >= 0).any(-1, keepdims=True), x, 0)
    swap = functools.partial(jax.lax.all_to_all, axis_name=peers, split_axis=0, concat_axis=0)
    there = [swap(a) for a in (sent, theirs, jnp.broadcast_to(gates, theirs.shape))]
    made = mix(*(a.reshape(-1, a.shape[-1]) for a in there))
    return swap(made.reshape(sent.shape)).astype(jnp.float32).sum(0).astype(x.dtype)


def _sent(
    mix: Callable[..., Array], x: Array, routes: Array, gates: Array, peers: MeshAxes, experts: int
) -> Array:
    """The mixture over all peers' experts: tokens there and back, no more than are asked for.

    What comes from peer p lies from row p * tokens on; the rest of these rows has routes of -1.
    """
    theirs = _of_peers(routes, peers, experts)
    count, tokens, choices = theirs.shape
    asked = (theirs >= 0).any(-1)
    size = tokens * min(count, choices)
    (pair,) = jnp.nonzero(asked.reshape(-1), size=size, fill_value=-1)
    token = jnp.where(pair < 0, -1, pair % tokens)
    places = jnp.where(asked, jnp.cumsum(asked).reshape(asked.shape) - 1, -1).T
    sizes = asked.sum(1).astype(jnp.int32)
    start = (jnp.cumsum(sizes) - sizes).astype(jnp.int32)
    mine = jnp.arange(count, dtype=jnp.int32) * tokens  # what each peer sent to me
    swap = functools.partial(
        jax.lax.all_to_all, axis_name=peers, split_axis=0, concat_axis=0, tiled=True
    )
    arrived, begin = swap(sizes), swap(start)
    at = jnp.full_like(sizes, jax.lax.axis_index(peers) * tokens)

    def there(rows: Array, blank: int) -> Array:
        room = jnp.full_like(rows, blank, shape=(count * tokens, rows.shape[1]))
        return jax.lax.ragged_all_to_all(rows, room, start, sizes, at, arrived, axis_name=peers)

    made = mix(
        there(_spread(x, token, places), 0),
        there(theirs.reshape(-1, choices)[pair], -1),
        there(_spread(gates, token, places), 0),
    )
    room = jnp.zeros_like(made, shape=(size, made.shape[1]))
    back = jax.lax.ragged_all_to_all(made, room, mine, arrived, begin, sizes, axis_name=peers)
    return _collect(back, token, places).astype(x.dtype)
