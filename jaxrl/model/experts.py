"""A mixture of gated experts, drop-less: every route is computed, however uneven the load.

    out = sum_j down_e(gates_j activation(gate_e(x)) * up_e(x)),  e = routes_j

A route of -1 loads nobody and adds 0; an expert without tokens has gradients of exactly 0. Routes
are sorted so that the rows of one expert are a run. Forms, equal in what they give:

    padded   a loop that visits each expert with a token once, two at a time, their runs padded to
             the next of a few sizes (``visit_sizes``). On CPU, which turns ``ragged_dot`` into a
             dense matmul an expert. What an uneven load costs is the padding, not the longest run
             times all experts. ``Visiting`` does so in the weights of all layers.
    ragged   ``jax.lax.ragged_dot``: elsewhere.
    tokamax  tokamax's grouped product, a kernel for TPUs that skips rows of no expert;
             ``tokamax_twin`` is its own implementation in XLA, for where there is no TPU.

A gate scales the inner activations, where this is one more factor of a product.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxrl.mesh import MeshAxes, Rules, per_device, require_divisible, ways
from jaxrl.model.tokamax_kernels import LANES, grouped_product, grouped_product_twin

MATMULS = ("padded", "ragged", "tokamax", "tokamax_twin")
EXCHANGES = ("auto", "dense", "ragged")
# Sizes of padded runs, in mean runs: dense where an even load lies, few as each is compiled apart.
SIZES = (0.25, 0.5, 0.75, 0.875, 1, 1.125, 1.25, 1.375, 1.5, 1.75, 2)
GROWTH = 1.5  # from the last of them to the longest run that there is
QUANTUM = 16  # sizes are multiples of so many rows

# (rows, weights of the experts, how many rows each has) -> rows; anything behind the last run.
PRODUCTS: dict[str, Callable[..., Array]] = {
    "ragged": lambda rows, weights, sizes: jax.lax.ragged_dot(rows, weights, sizes),
    "tokamax": lambda rows, weights, sizes: grouped_product(rows, weights, sizes, False),
    "tokamax_twin": grouped_product_twin,
}

Activation = Callable[[Array], Array]
Multiply = Callable[[Array, Array], Array]  # (rows, weights of the experts) -> rows
Weights = tuple[Array, ...]  # gate, up, down


def matmul_for(kernels: str, platform: str) -> str:
    """The form that ``model.kernels`` asks for, on this platform."""
    if kernels == "tokamax":
        return "tokamax" if platform == "tpu" else "tokamax_twin"
    return "padded" if platform == "cpu" else "ragged"


def _known(matmul: str) -> str:
    if matmul not in MATMULS:
        raise ValueError(f"matmul={matmul!r} is unknown; allowed: {MATMULS}")
    return matmul


def mixture(
    x: Float[Array, "*token embed"],
    routes: Int[Array, "*token choice"],
    gates: Float[Array, "*token choice"],
    gate: Float[Array, "expert embed mlp"],
    up: Float[Array, "expert embed mlp"],
    down: Float[Array, "expert mlp embed"],
    *,
    activation: Activation,
    matmul: str,
) -> Float[Array, "*token embed"]:
    """sum_j down_e(gates_j activation(x gate_e) * (x up_e)) with e = routes_j, in x's dtype.

    On one device. The sum over j is taken in float32.
    """
    weights, form = (gate, up, down), _known(matmul)
    flat = _flat(x, routes, gates)
    return _mixture(*flat, weights, activation, form, routes.size).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class Visiting:
    """The padded form of ``mixture``, on one device; of a layer by itself, or ``within`` a stack of
    layers, which is then neither cut into layers nor, in gradients, put together of them. Copies of
    weights cost about as much as products of few tokens."""

    def __call__(
        self,
        x: Float[Array, "*token embed"],
        routes: Int[Array, "*token choice"],
        gates: Float[Array, "*token choice"],
        *weights: Array,
        activation: Activation,
    ) -> Float[Array, "*token embed"]:
        """``mixture`` with these weights."""
        return mixture(x, routes, gates, *weights, activation=activation, matmul="padded")

    def within(
        self,
        x: Float[Array, "*token embed"],
        routes: Int[Array, "*token choice"],
        gates: Float[Array, "*token choice"],
        stacks: tuple[Float[Array, "layer expert _ _"], ...],
        layer: int,
        *,
        activation: Activation,
    ) -> tuple[Float[Array, "*token embed"], tuple[Float[Array, "layer expert _ _"], ...]]:
        """``mixture`` with the weights of one layer of the stacks, and the stacks, as they were.

        The next layer is to be given what this one returns. So the gradient goes back through the
        layers as one array for all of them, into which each writes its own; by stacks that another
        layer was given too, it would be an array of zeros for each, and their sum.
        """
        flat, where, shares = _flat(x, routes, gates)
        experts, shares = stacks[0].shape[1], shares.astype(jnp.float32)
        sizes = visit_sizes(where.shape[0], where.shape[1], where.size / experts)
        visits, place = _visits(where, experts, sizes), jnp.int32(layer)
        visited: Any = _padded(flat, shares, stacks, place, visits, activation, sizes)
        made, stacks = visited
        return made.reshape(x.shape).astype(x.dtype), stacks


def _flat(x: Array, routes: Array, gates: Array) -> tuple[Array, Array, Array]:
    """Tokens along one axis."""
    width, choices = x.shape[-1], routes.shape[-1]
    return x.reshape(-1, width), routes.reshape(-1, choices), gates.reshape(-1, choices)


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
    gates = gates.astype(jnp.float32)
    if form == "padded":
        sizes = visit_sizes(routes.shape[0], routes.shape[1], expected / experts)
        stacks = tuple(weight[None] for weight in weights)
        visits = _visits(routes, experts, sizes)
        visited: Any = _padded(x, gates, stacks, jnp.int32(0), visits, activation, sizes)
        made = visited[0]
    else:
        runs = _sorted(routes, experts)
        slot = jnp.where(jnp.arange(routes.size) < runs.start[-1], runs.slot, -1)
        if form == "tokamax":
            slot = jnp.pad(slot, (0, -slot.size % LANES), constant_values=-1)
        row = jnp.where(routes < 0, -1, runs.row)
        multiply = functools.partial(PRODUCTS[form], sizes=runs.sizes)
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


def _order(keys: Array, count: int) -> Array:
    """``jnp.argsort(keys)`` of integers 0 .. count - 1, that is of key and place as one number: on
    CPU a fifth of the time."""
    if count * keys.size > jnp.iinfo(jnp.int32).max:
        return jnp.argsort(keys).astype(jnp.int32)
    place = jnp.arange(keys.size, dtype=jnp.int32)
    return jax.lax.sort(keys.astype(jnp.int32) * keys.size + place, is_stable=False) % keys.size


def _sorted(routes: Array, experts: int) -> _Runs:
    expert = jnp.where(routes < 0, experts, routes).reshape(-1)
    slot = _order(expert, experts + 1)
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


def visit_sizes(tokens: int, choices: int, mean: float) -> tuple[int, ...]:
    """To how many rows a run may be padded, ascending, if ``mean`` is what an even load makes.

    An expert gets at most ``tokens``; the last size is for routes that name it more than once.
    """
    top, sizes = 0, {tokens * choices}
    steps = iter(SIZES)
    while top < tokens:
        rows = mean * step if (step := next(steps, None)) else top * GROWTH
        top = min(QUANTUM * max(math.ceil(rows / QUANTUM), 1), tokens)
        sizes.add(top)
    return tuple(sorted(sizes))


class _Visits(NamedTuple):
    """Experts by how many rows they have, two to a visit: XLA gives each a core, where it splits a
    product of few rows badly. Runs lie in this order, so that what the padding of one writes over
    is written by a later one."""

    slot: Array  # of each sorted row, and behind them what the padding of the last run reaches
    expert: Array  # of each visit [visit 2]
    start: Array  # of its run [visit 2]
    end: Array  # [visit 2]
    first: Array  # visit of each size, then the number of visits [size + 1]

    def rows(self, i: Array, size: int, choices: int) -> tuple[Array, Array]:
        """Slots and tokens of visit i [2 size], -1 in padding."""
        slot = self.runs(self.slot, i, size)
        inside = self.start[i][:, None] + jnp.arange(size) < self.end[i][:, None]
        slot = jnp.where(inside, slot, -1)
        return slot, jnp.where(slot < 0, -1, slot // choices)

    def runs(self, rows: Array, i: Array, size: int) -> Array:
        """What lies in sorted rows where visit i has its runs [2 size ...]."""
        return jnp.stack([jax.lax.dynamic_slice_in_dim(rows, at, size) for at in self.start[i]])

    def put(self, rows: Array, i: Array, made: Array) -> Array:
        """Sorted rows with what visit i made of its own [2 size ...]."""
        for at, one in zip(self.start[i], made, strict=True):
            rows = jax.lax.dynamic_update_slice_in_dim(rows, one, at, axis=0)
        return rows

    def all(self, sizes: tuple[int, ...], visit: Callable[..., Any], carry: Any) -> Any:
        """``carry = visit(i, carry, size)`` for every visit: one loop a size, as a conditional
        within a loop would copy what it carries."""
        for k, size in enumerate(sizes):
            sized = functools.partial(visit, size=size)
            carry = jax.lax.fori_loop(self.first[k], self.first[k + 1], sized, carry)
        return carry

    def blank(self, shape: tuple[int, ...], dtype: Any, number: int) -> Array:
        """Zeros, each ``number`` with its own expression: equal constants would be one buffer, and
        a copy of it for each loop that writes."""
        none = jnp.minimum(self.first[0], 0) * number
        return jnp.broadcast_to(none.astype(dtype), shape)


def _visits(routes: Array, experts: int, sizes: tuple[int, ...]) -> _Visits:
    expert = jnp.where(routes < 0, experts, routes).reshape(-1)
    counts = (expert[:, None] == jnp.arange(experts)).sum(0).astype(jnp.int32)
    order = jnp.argsort(counts).astype(jnp.int32)
    place = jnp.argsort(order).astype(jnp.int32)
    last = jnp.full_like(place[:1], experts)
    slot = _order(jnp.concatenate([place, last])[expert], experts + 1)
    beyond = max(b - a for a, b in zip((0, *sizes), sizes, strict=False))
    slot = jnp.concatenate([slot, jnp.zeros_like(slot, shape=(beyond,))])
    counts = counts[order]
    if experts % 2:  # one of them twice, first without a row: what that writes is written over
        order = jnp.concatenate([order[:1], order])
        counts = jnp.concatenate([jnp.zeros_like(counts[:1]), counts])
    end = jnp.cumsum(counts).astype(jnp.int32)
    start, end, order = (a.reshape(-1, 2) for a in (end - counts, end, order))
    smaller = jnp.asarray((0, *sizes[:-1]), jnp.int32)
    size = (counts[1::2, None] > smaller).sum(1)  # 0: no row
    first = (size[:, None] <= jnp.arange(len(sizes) + 1)).sum(0).astype(jnp.int32)
    return _Visits(slot, order, start, end, first)


def _of(stacks: Weights, layer: Array, experts: Array) -> Weights:
    """The weights of two experts of a layer."""

    def one(stack: Array, expert: Array) -> Array:
        at = (layer, expert, 0, 0)
        return jax.lax.dynamic_slice(stack, at, (1, 1, *stack.shape[2:]))[0, 0]

    return tuple(jnp.stack([one(stack, e) for e in experts]) for stack in stacks)


def _put(stack: Array, layer: Array, experts: Array, own: Array) -> Array:
    """The stack with those of two experts of a layer replaced, the second last."""
    for e, one in zip(experts, own, strict=True):
        stack = jax.lax.dynamic_update_slice(stack, one[None, None], (layer, e, 0, 0))
    return stack


def _scaled(gate: Array, up: Array, share: Array, activation: Activation) -> Array:
    return ((activation(gate) * up).astype(jnp.float32) * share).astype(gate.dtype)


def _add(x: Array, index: Array, rows: Array) -> Array:
    """x[index] += rows, but for an index of -1."""
    index = jnp.where(index < 0, x.shape[0], index)
    rows = rows.reshape(-1, rows.shape[-1]).astype(x.dtype)
    return x.at[index.reshape(-1)].add(rows, mode="drop")


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _padded(
    x: Array,
    gates: Array,
    stacks: Weights,
    layer: Array,
    visits: _Visits,
    activation: Activation,
    sizes: tuple[int, ...],
) -> tuple[Array, Weights]:
    """The mixture by visits, float32, and the stacks."""
    return _padded_forward(x, gates, stacks, layer, visits, activation, sizes, keep=False)[0]


def _padded_forward(
    x: Array,
    gates: Array,
    stacks: Weights,
    layer: Array,
    visits: _Visits,
    activation: Activation,
    sizes: tuple[int, ...],
    keep: bool = True,
) -> tuple[tuple[Array, Weights], Any]:
    """Keeps what the gate and up matmuls of each sorted row gave."""
    inner = (visits.slot.size, stacks[0].shape[-1])
    kept = tuple(visits.blank(inner, x.dtype, n) for n in (1, 2) if keep)

    def visit(i: Array, carry: Any, size: int) -> Any:
        made, kept = carry
        slot, token = visits.rows(i, size, gates.shape[1])
        rows, share = _fetch(x, token), _fetch(gates.reshape(-1, 1), slot)
        own = _of(stacks, layer, visits.expert[i])
        gate, up = rows @ own[0], rows @ own[1]
        out = _scaled(gate, up, share, activation) @ own[2]
        kept = tuple(visits.put(a, i, b) for a, b in zip(kept, (gate, up), strict=keep))
        return _add(made, token, out), kept

    made, kept = visits.all(sizes, visit, (visits.blank(x.shape, jnp.float32, 3), kept))
    return (made, stacks), (x, gates, stacks, layer, visits, kept)


def _padded_backward(
    activation: Activation, sizes: tuple[int, ...], saved: Any, cotangents: tuple[Array, Weights]
) -> tuple[Any, ...]:
    """By the stacks: what came from later layers, this layer's part replaced."""
    x, gates, stacks, layer, visits, kept = saved
    g, d_stacks = cotangents
    g = g.astype(x.dtype)
    scaled = functools.partial(_scaled, activation=activation)

    def visit(i: Array, grads: Any, size: int) -> Any:
        d_x, d_gates, d_stacks = grads
        slot, token = visits.rows(i, size, gates.shape[1])
        rows, share = _fetch(x, token), _fetch(gates.reshape(-1, 1), slot)
        own = _of(stacks, layer, visits.expert[i])
        gate, up = (visits.runs(a, i, size) for a in kept)
        d_out = _fetch(g, token)  # 0 in padding, and so are all gradients by its rows
        inner, pull = jax.vjp(scaled, gate, up, share)
        d_gate, d_up, d_share = pull(d_out @ own[2].mT)
        d_rows = d_gate @ own[0].mT + d_up @ own[1].mT
        made = (rows.mT @ d_gate, rows.mT @ d_up, inner.mT @ d_out)
        put = functools.partial(_put, layer=layer, experts=visits.expert[i])
        d_stacks = tuple(put(a, own=b) for a, b in zip(d_stacks, made, strict=True))
        return _add(d_x, token, d_rows), _add(d_gates, slot, d_share), d_stacks

    blank = visits.blank
    begin = (blank(x.shape, jnp.float32, 4), blank((gates.size, 1), jnp.float32, 5), d_stacks)
    d_x, d_gates, d_stacks = visits.all(sizes, visit, begin)
    return d_x.astype(x.dtype), d_gates.reshape(gates.shape), d_stacks, None, None


_padded.defvjp(_padded_forward, _padded_backward)


def sharded_mixture(
    mesh: Mesh, rules: Rules, *, matmul: str, exchange: str = "auto"
) -> Callable[..., Array]:
    """``mixture`` for arrays that lie on a mesh: tokens split over the axes of ``rows``, in rows of
    tokens over those of ``tokens`` too, if there are enough; experts over those of ``expert``,
    ``mlp`` and ``embed`` of the weights as the rules say.

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
    form, ragged = _known(matmul), exchange == "ragged"
    exchanged = _sent if ragged or exchange == "auto" and platform == "tpu" else _swapped

    def local(x: Array, routes: Array, gates: Array, *weights: Array, activation: Activation):
        gathered = tuple(
            jax.lax.all_gather(weight, embed, axis=axis, tiled=True) if embed else weight
            for weight, axis in zip(weights, (1, 1, 2), strict=True)
        )
        mix = functools.partial(
            _mixture, weights=gathered, activation=activation, form=form, expected=routes.size
        )
        flat = _flat(x, routes, gates)
        if peers:
            made = exchanged(mix, *flat, peers, weights[0].shape[0])
        else:
            made = mix(*flat)
        made = made.reshape(x.shape)
        return jax.lax.psum(made, inner) if inner else made

    def whole(x: Array, routes: Array, gates: Array, *weights: Array, activation: Activation):
        parts = ways(mesh, rules.rows), ways(mesh, rules.tokens)
        apart = (
            x.ndim == 3 and parts[1] > 1 and not (x.shape[0] % parts[0] or x.shape[1] % parts[1])
        )
        lead = ("rows", "tokens") if apart else ("rows",)
        arrays = x, routes, gates
        if not apart:
            arrays = tuple(a.reshape(-1, a.shape[-1]) for a in arrays)
        require_divisible("tokens", arrays[0].shape[0], mesh, rules["rows"])
        require_divisible("model.experts.count", weights[0].shape[0], mesh, peers)
        inward = ("expert", "embed", "mlp")
        call = per_device(
            functools.partial(local, activation=activation),
            mesh,
            rules,
            (*[(*lead, None)] * 3, inward, inward, ("expert", "mlp", "embed")),
            (*lead, None),
            checked=not form.startswith("tokamax"),
        )
        return call(*arrays, *weights).reshape(x.shape)

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
