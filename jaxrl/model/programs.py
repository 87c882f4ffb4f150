"""The programs of a sampler: what lies on the devices between two calls, and what is done to it.

Prompts are read and copied, first tokens are drawn, and slots decode in one loop until enough of
them have ended. Who sits where is the host's business (``seats.py``).
"""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxrl.mesh import spec, ways
from jaxrl.model import decoding
from jaxrl.model.decoding import Cache, Pieces
from jaxrl.model.drawing import draw, sample_keys
from jaxrl.model.filled import Shared
from jaxrl.model.form import DTYPES
from jaxrl.model.policy import Policy
from jaxrl.model.seats import Layout

MAX_STOP_IDS = 8  # stop ids a request may have; a compiled width


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Held:
    """Prompts on the device, a row each; donated from one reading to the next."""

    cache: Cache
    state: Float[Array, "slot embed"]  # of rows, after the last token; the first draw's
    routes: Int[Array, "row place layer k"] | None  # -1 where none; None if not recorded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """What samples have said, on the device; donated from one call to the next."""

    cache: Cache
    token: Int[Array, " slot"]  # the newest token, not yet in the cache
    length: Int[Array, " slot"]  # of the prompt
    made: Int[Array, " slot"]  # new tokens so far
    active: Bool[Array, " slot"]
    stopped: Bool[Array, " slot"]  # ended by a stop id, not by its limit
    key: UInt32[
        Array, "slot 2"
    ]  # of the sample; the index of the new token is folded in at each draw
    first: Int[Array, " slot"]  # index of the first new token in its answer
    temperature: Float[Array, " slot"]
    limit: Int[Array, " slot"]
    stop: Int[Array, "slot stop"]  # -1 where unused
    tokens: Int[Array, "slot new"]
    logp: Float[Array, "slot new"]
    routes: Int[Array, "slot new layer k"] | None  # as of prompts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Admission:
    """Which slots take up a request, and what it asks for."""

    fresh: Any
    row: Any  # of its prompt, among those of all devices
    length: Any
    group: Any
    sample: Any
    call: Any
    first: Any
    temperature: Any
    limit: Any
    stop: Any


class Programs:
    """Jitted, each array donated from one call to the next: ``read`` and ``copy`` make prompts of
    prompts, ``admit`` and ``decode`` slots of slots. ``traces`` counts how often each was traced.
    """

    def __init__(
        self, policy: Policy, *, seed: int, slots: int, max_new_tokens: int, record_routes: bool
    ) -> None:
        self.policy = policy
        self.seed = seed
        self.slots = slots
        self.max_new_tokens = max_new_tokens
        self.record_routes = record_routes
        self.devices = ways(policy.mesh, policy.rules.rows)  # that have slots of their own
        self.traces: collections.Counter[str] = collections.Counter()
        self.shardings = held, state = self._shardings()
        self.read = jax.jit(self._read, donate_argnums=1, out_shardings=held)
        self.copy = jax.jit(self._copy, donate_argnums=0, out_shardings=held)
        self.admit = jax.jit(self._admit, donate_argnums=2, out_shardings=state)
        self.decode = jax.jit(self._decode, donate_argnums=2, out_shardings=state)

    def _traced(self, program: str, cache: Cache) -> None:
        rows, _, places, _ = cache[0][0].shape
        self.traces[f"{program}/{rows} x {places}"] += 1

    def _read(self, params: Any, held: Held, pieces: Pieces, last: Array) -> Held:
        """Read pieces of prompts; ``last`` is the row of those that end one."""
        self._traced("read", held.cache)
        states, cache, chosen = decoding.read(self.policy, params, pieces, held.cache)
        ends = jnp.maximum(pieces.count - 1, 0)[:, None, None]
        state = jnp.take_along_axis(states, ends, axis=1)[:, 0]
        routes = held.routes
        if routes is not None and chosen is not None:
            routes = decoding.put_pieces(self.policy, routes, pieces, chosen, 1)
        return Held(cache, decoding.put(self.policy, held.state, last, state), routes)

    def _copy(self, held: Held, source: Array, target: Array, count: Array) -> Held:
        """Copy whole rows, one after another."""
        self._traced("copy", held.cache)

        def own(by_rows: Any, count: Array) -> Held:
            held, source, target = by_rows

            def one(i: Array, held: Held) -> Held:
                return jax.tree.map(
                    lambda x: x.at[target[i, 0]].set(x[source[i, 0]], mode="drop"), held
                )

            return jax.lax.fori_loop(0, count, one, held)

        by_rows = held, source[:, None], target[:, None]
        return decoding.by_devices(self.policy)(own)(by_rows, count)

    def _admit(self, params: Any, after: Array, state: Slots, plan: Admission) -> Slots:
        """Draw the first tokens of those who have just sat down."""
        self.traces["admit"] += 1
        logits = decoding.after(self.policy, params, after[plan.row])
        key = sample_keys(self.seed, plan.group, plan.sample, plan.call)
        token, logp = draw(logits, key, plan.first, plan.temperature)
        stopped = (token[:, None] == plan.stop).any(-1)

        def put(old: Array, new: Array) -> Array:
            return jnp.where(plan.fresh.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

        nothing = jnp.full((), -1, jnp.int16)  # an earlier request has left something there
        return Slots(
            cache=state.cache,
            token=put(state.token, token),
            length=put(state.length, plan.length),
            made=put(state.made, jnp.ones_like(plan.limit)),
            active=put(state.active, ~stopped & (plan.limit > 1)),
            stopped=put(state.stopped, stopped),
            key=put(state.key, key),
            first=put(state.first, plan.first),
            temperature=put(state.temperature, plan.temperature),
            limit=put(state.limit, plan.limit),
            stop=put(state.stop, plan.stop),
            tokens=state.tokens.at[:, 0].set(put(state.tokens[:, 0], token)),
            logp=state.logp.at[:, 0].set(put(state.logp[:, 0], logp)),
            routes=None if state.routes is None else put(state.routes, nothing),
        )

    def _decode(
        self, params: Any, prompts: Cache, state: Slots, seat: Array, who: Array, enough: Array
    ) -> Slots:
        """Decode until at most ``enough`` slots are active."""
        self._traced("decode", prompts)
        step = decoding.decoder(self.policy, params)
        slot = jnp.arange(self.slots)
        shared = Shared(prompts, state.length, seat, who)

        def body(s: Slots) -> Slots:
            place = s.made - 1
            logits, cache, chosen = step(s.token, place, s.active, s.cache, shared)
            token, logp = draw(logits, s.key, s.first + s.made, s.temperature)
            where = jnp.where(s.active, s.made, self.max_new_tokens)  # out of range is dropped
            stopped = s.active & (token[:, None] == s.stop).any(-1)
            made = s.made + s.active
            routes = s.routes
            if routes is not None and chosen is not None:
                went = jnp.where(s.active, place, self.max_new_tokens)
                routes = routes.at[slot, went].set(chosen.astype(routes.dtype), mode="drop")
            return dataclasses.replace(
                s,
                cache=cache,
                token=jnp.where(s.active, token, s.token),
                made=made,
                active=s.active & ~stopped & (made < s.limit),
                stopped=s.stopped | stopped,
                tokens=s.tokens.at[slot, where].set(token, mode="drop"),
                logp=s.logp.at[slot, where].set(logp, mode="drop"),
                routes=routes,
            )

        return jax.lax.while_loop(lambda s: s.active.sum() > enough, body, state)

    def no_prompts(self, layout: Layout) -> Held:
        """Rows without prompts."""
        config, rows = self.policy.config, layout.rows * self.devices
        return Held(
            cache=decoding.empty_cache(self.policy, rows, layout.places),
            state=jnp.zeros((self.slots, config.width), DTYPES[config.dtype]),
            routes=self._no_routes(rows, layout.places),
        )

    def no_requests(self) -> Slots:
        """Slots without requests."""
        slots, new = self.slots, self.max_new_tokens
        zeros = functools.partial(np.zeros, slots)
        named: dict[str, Any] = dict(
            cache=decoding.empty_cache(self.policy, slots, new),
            token=zeros(np.int32),
            length=np.ones(slots, np.int32),
            made=zeros(np.int32),
            active=zeros(bool),
            stopped=zeros(bool),
            key=np.zeros((slots, 2), np.uint32),
            first=zeros(np.int32),
            temperature=np.ones(slots, np.float32),
            limit=np.ones(slots, np.int32),
            stop=np.full((slots, MAX_STOP_IDS), -1, np.int32),
            tokens=np.zeros((slots, new), np.int32),
            logp=np.zeros((slots, new), np.float32),
            routes=self._no_routes(slots, new),
        )
        return Slots(**named)

    def _no_routes(self, rows: int, places: int) -> Any:
        if not self.record_routes:
            return None
        config = self.policy.config
        each = (len(config.sparse_layers), config.experts.per_token)
        return np.full((rows, places, *each), -1, np.int16)

    def _shardings(self) -> Any:
        """Rows and slots over the axes of rows, heads of the caches over theirs; None without a
        mesh."""
        policy = self.policy
        if policy.mesh is None:
            return None, None
        rows = NamedSharding(policy.mesh, spec(("rows",), policy.rules))
        heads = NamedSharding(policy.mesh, spec(("rows", "kv_heads", None, "head"), policy.rules))
        cache: Any = tuple((heads, heads) for _ in range(policy.config.layers))
        own: dict[str, Any] = {field.name: rows for field in dataclasses.fields(Slots)}
        own |= {"cache": cache, "routes": rows if self.record_routes else None}
        return Held(cache, own["token"], own["routes"]), Slots(**own)
