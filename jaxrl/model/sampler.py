"""Continuously batched generation with a KV cache: token ids in, token ids and log-probs out.

A fixed number of slots decode side by side, in one device loop until enough of them have ended;
then the host reads what is finished and refills the free slots from the queue. Requests that share
a prompt (a group) share its prefill. One prefill and one decode program is compiled for each prompt
bucket, and the cache of a bucket is no longer than its requests can get.

    logp = log_softmax(logits / T)[token]     in float32, over the whole vocabulary, never above 0
    key  = fold_in(fold_in(fold_in(run key, group), sample), index of the new token)

so that a sample depends on nothing but its request and the weights: not on its slot, its neighbours
or the attempt. The draw inverts the cumulative distribution with one uniform number a token, where
Gumbel noise takes one a vocabulary entry.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxrl.mesh import require_divisible, spec, ways
from jaxrl.model.policy import Cache, Policy, build
from jaxrl.model.versions import read_weights
from jaxrl.pool.contract import Completion, Request
from jaxrl.pool.rollout import StopReason, Version

MAX_STOP_IDS = 8  # stop ids a request may have; a compiled width
PREFILL_POSITIONS = 2048  # prompt positions of one prefill call, on a device
REFILL_FRACTION = 4  # refill once 1/4 of the slots is free: a prefill has a fixed width
VOCAB_BLOCK = 128  # entries of the inner of the two cumulative sums of a draw


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """Everything that lives on the device between two calls; donated from one to the next."""

    cache: Cache
    token: Int[Array, " slot"]  # the newest token, not yet in the cache
    place: Int[Array, " slot"]  # where it will go
    made: Int[Array, " slot"]  # new tokens so far
    active: Bool[Array, " slot"]
    stopped: Bool[Array, " slot"]  # ended by a stop id, not by its limit
    key: UInt32[
        Array, "slot 2"
    ]  # of the sample; the index of the new token is folded in at each draw
    temperature: Float[Array, " slot"]
    limit: Int[Array, " slot"]
    stop: Int[Array, "slot stop"]  # -1 where unused
    tokens: Int[Array, "slot new"]
    logp: Float[Array, "slot new"]
    routes: Int[Array, "slot place layer k"] | None  # -1 where none; None if not recorded


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Admission:
    """Which requests go to which slots: one entry a slot, unused entries having ``slot`` beyond the
    last.
    """

    slot: Any
    row: Any  # of the prompt in this prefill call
    length: Any
    group: Any
    sample: Any
    temperature: Any
    limit: Any
    stop: Any


def first(mask: Bool[Array, "row entry"], otherwise: Int[Array, " row"]) -> Int[Array, " row"]:
    """Index of the first true entry of each row, ``otherwise`` where there is none."""
    return jnp.where(mask.any(-1), jnp.argmax(mask, -1), otherwise)


def invert(mass: Float[Array, "row vocab"], uniform: Float[Array, " row"]) -> Int[Array, " row"]:
    """The entry whose stretch of the cumulative mass holds ``uniform * total``; never one of zero
    mass.

    In two steps, over blocks and inside the block found, so that the long cumulative sum is short.
    Parallel sums are not monotone in the last bit: entries of zero mass are refused by name, and a
    target that rounding leaves past the end goes to the largest entry.
    """
    rows, vocab = mass.shape
    block = min(vocab, VOCAB_BLOCK)
    mass = jnp.pad(mass, ((0, 0), (0, -vocab % block))).reshape(rows, -1, block)
    total = mass.sum(-1)
    upto = jnp.cumsum(total, -1)
    target = uniform * upto[:, -1]
    chosen = first((upto > target[:, None]) & (total > 0), jnp.argmax(total, -1))
    take = functools.partial(jnp.take_along_axis, indices=chosen[:, None], axis=1)
    rest = target - (take(upto) - take(total))[:, 0]
    inner = jnp.take_along_axis(mass, chosen[:, None, None], axis=1)[:, 0]
    within = first((jnp.cumsum(inner, -1) > rest[:, None]) & (inner > 0), jnp.argmax(inner, -1))
    return (chosen * block + within).astype(jnp.int32)


def draw(
    logits: Float[Array, "slot vocab"],
    key: UInt32[Array, "slot 2"],
    index: Int[Array, " slot"],
    temperature: Float[Array, " slot"],
) -> tuple[Int[Array, " slot"], Float[Array, " slot"]]:
    """One token for each slot and its log-prob. Temperature 0 is greedy, its log-prob that of
    temperature 1.
    """
    greedy = temperature == 0
    logits = logits / jnp.where(greedy, 1, temperature)[:, None]
    top = logits.max(-1, keepdims=True)
    mass = jnp.exp(logits - top)
    uniform = jax.vmap(
        lambda data, i: jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(data), i))
    )(key, index)
    token = jnp.where(greedy, jnp.argmax(logits, -1).astype(jnp.int32), invert(mass, uniform))
    taken = jnp.take_along_axis(logits, token[:, None], axis=-1) - top
    return token, jnp.minimum(taken[:, 0] - jnp.log(mass.sum(-1)), 0)


def sample_keys(seed: int, group: Array, sample: Array) -> UInt32[Array, "slot 2"]:
    """fold_in(fold_in(run key, group), sample) of each entry, as key data."""
    run = jax.random.key(seed)
    keys = jax.vmap(lambda g, s: jax.random.fold_in(jax.random.fold_in(run, g), s))(group, sample)
    return jax.random.key_data(keys)


class Sampler:
    """The trainer's own generation engine (a pool's Generator). Serves nothing before the first
    ``load``.

    ``slots`` sequences decode side by side; ``prompt_buckets`` are the prompt lengths that are
    compiled, in tokens, the longest being the limit; ``max_new_tokens`` is the most that a request
    may ask for. With ``record_routes`` completions carry the experts that each token went through.
    Raises ValueError naming the field, its value and what is allowed. ``mesh`` may be
    another than the policy's: weights are loaded onto it.
    """

    def __init__(
        self,
        policy: Policy,
        mesh: Mesh | None,
        *,
        seed: int,
        slots: int,
        prompt_buckets: Sequence[int],
        max_new_tokens: int,
        record_routes: bool,
    ) -> None:
        self.policy = build(policy.config, mesh, policy.rules)
        if slots < 1 or max_new_tokens < 1:
            raise ValueError(
                f"sampler.slots={slots}, sampler.max_new_tokens={max_new_tokens}: "
                "each must be at least 1"
            )
        if not prompt_buckets or min(prompt_buckets) < 1:
            raise ValueError(
                f"sampler.prompt_buckets={tuple(prompt_buckets)!r}: at least one, all positive"
            )
        require_divisible("sampler.slots", slots, mesh, policy.rules.rows)
        if record_routes and not policy.config.sparse_layers:
            raise ValueError(
                "sampler.record_routes=True; allowed: False (model.experts.count=0: no routes)"
            )
        self.seed = seed
        self.record_routes = record_routes
        self.slots = slots
        self.prompt_buckets = tuple(sorted(set(prompt_buckets)))
        self.max_new_tokens = max_new_tokens
        self.version: Version | None = None
        self._params: dict[str, Array] = {}
        self._idle: dict[int, Slots] = {}  # the device state of each bucket, between two calls
        self._traces: collections.Counter[str] = collections.Counter()
        shardings = self._shardings()
        self._prefill = jax.jit(self._admit, donate_argnums=1, out_shardings=shardings)
        self._decode = jax.jit(self._advance, donate_argnums=1, out_shardings=shardings)

    @property
    def compilations(self) -> dict[str, int]:
        """How often each program was traced: ``prefill/<bucket>`` and ``decode/<bucket>``."""
        return dict(self._traces)

    def load(self, version: Version, path: str) -> None:
        """Take published weights and forget all that was computed with the old ones.

        Raises ValueError if the directory is not this version or does not fit the model; the old
        weights then stay.
        """
        params, manifest = read_weights(path, self.policy.shardings, shapes=self.policy.shapes)
        held = Version(manifest["epoch"], manifest["step"], manifest["digest"])
        if held != version:
            raise ValueError(f"{path} holds {held}, asked for was {version}")
        self._params, self.version = params, version
        self._idle.clear()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in the order of the requests.

        Raises RuntimeError before the first ``load``; ValueError naming the first request that
        cannot be served and why.
        """
        if self.version is None:
            raise RuntimeError("the sampler holds no weights: load a published version first")
        queues: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            queues.setdefault(self._bucket(index, request), []).append(index)
        found: dict[int, Completion] = {}
        for bucket, indices in sorted(queues.items()):
            self._run(bucket, requests, indices, found)
        return [found[index] for index in range(len(requests))]

    def _bucket(self, index: int, request: Request) -> int:
        """The bucket that a request's prompt goes to, after all checks on the request."""
        limit, vocab = self.prompt_buckets[-1], self.policy.config.vocab_size
        length, stated = (
            len(request.prompt),
            f"request {index} (group {request.group}, sample {request.sample})",
        )
        checks = (
            (
                0 < length <= limit,
                f"prompt of {length} tokens; allowed: 1 to {limit} (sampler.prompt_buckets)",
            ),
            (
                0 < request.max_new_tokens <= self.max_new_tokens,
                f"max_new_tokens={request.max_new_tokens}; allowed: 1 to {self.max_new_tokens}",
            ),
            (
                request.temperature >= 0,
                f"temperature={request.temperature}; allowed: 0 (greedy) or more",
            ),
            (
                len(request.stop_ids) <= MAX_STOP_IDS,
                f"{len(request.stop_ids)} stop ids; allowed: {MAX_STOP_IDS}",
            ),
            (0 <= request.group < 2**32, f"group={request.group}; allowed: 0 to 2**32 - 1"),
            (0 <= request.sample < 2**32, f"sample={request.sample}; allowed: 0 to 2**32 - 1"),
        )
        for passed, fault in checks:
            if not passed:
                raise ValueError(f"{stated}: {fault}")
        if min(request.prompt) < 0 or max(request.prompt) >= vocab:
            raise ValueError(
                f"{stated}: prompt ids {min(request.prompt)} to {max(request.prompt)}; "
                f"allowed: 0 to {vocab - 1} (model.vocab_size={vocab})"
            )
        return next(bucket for bucket in self.prompt_buckets if length <= bucket)

    def _run(
        self,
        bucket: int,
        requests: Sequence[Request],
        indices: Sequence[int],
        found: dict[int, Completion],
    ) -> None:
        """Serve one bucket's requests. The only wait for the device is the read after each decode
        loop.
        """
        assert self.version is not None
        queue = collections.deque((index, requests[index]) for index in indices)
        state = self._idle.pop(bucket, None) or self._empty(bucket)
        holder: dict[int, int] = {}  # slot -> index of its request
        free = list(range(self.slots))
        while queue or holder:
            while queue and free:
                prompts, lengths, admission = self._plan(bucket, queue, free, holder)
                state = self._prefill(self._params, state, prompts, lengths, admission)
            enough = self.slots - -(-self.slots // REFILL_FRACTION) if queue else 0
            state = self._decode(self._params, state, enough)
            active, stopped, made, tokens, logp = jax.device_get(
                (state.active, state.stopped, state.made, state.tokens, state.logp)
            )
            ended = [slot for slot in holder if not active[slot]]
            routes = np.asarray(state.routes) if ended and state.routes is not None else None
            for slot in ended:
                count, index = made[slot], holder.pop(slot)
                length = len(requests[index].prompt) + count
                found[index] = Completion(
                    tokens=tokens[slot, :count].copy(),
                    logp=logp[slot, :count].copy(),
                    version=self.version,
                    stop_reason=StopReason.STOP if stopped[slot] else StopReason.LENGTH,
                    routes=None if routes is None else routes[slot, :length].copy(),
                )
                free.append(slot)
        self._idle[bucket] = state

    def _plan(
        self,
        bucket: int,
        queue: collections.deque[tuple[int, Request]],
        free: list[int],
        holder: dict[int, int],
    ) -> tuple[np.ndarray, np.ndarray, Admission]:
        """Move requests from the queue to free slots, as many as one prefill call takes; equal
        prompts share a row.
        """
        width = self._prefill_rows(bucket)
        rows: dict[tuple[int, ...], int] = {}
        prompts = np.zeros((width, bucket), np.int32)
        lengths = np.ones(width, np.int32)
        plan = self._vacant()
        entry = 0
        while queue and free:
            index, request = queue[0]
            prompt = tuple(request.prompt)
            if prompt not in rows:
                if len(rows) == width:
                    break
                rows[prompt] = len(rows)
                prompts[rows[prompt], : len(prompt)] = prompt
                lengths[rows[prompt]] = len(prompt)
            queue.popleft()
            slot = free.pop()
            holder[slot] = index
            plan.slot[entry], plan.row[entry], plan.length[entry] = slot, rows[prompt], len(prompt)
            plan.group[entry], plan.sample[entry] = request.group, request.sample
            plan.temperature[entry], plan.limit[entry] = request.temperature, request.max_new_tokens
            plan.stop[entry, : len(request.stop_ids)] = sorted(request.stop_ids)
            entry += 1
        return prompts, lengths, plan

    def _vacant(self) -> Admission:
        """A plan that admits nobody."""
        whole = functools.partial(np.zeros, self.slots)
        return Admission(
            slot=np.full(self.slots, self.slots, np.int32),
            row=whole(np.int32),
            length=np.ones(self.slots, np.int32),
            group=whole(np.uint32),
            sample=whole(np.uint32),
            temperature=np.ones(self.slots, np.float32),
            limit=np.ones(self.slots, np.int32),
            stop=np.full((self.slots, MAX_STOP_IDS), -1, np.int32),
        )

    def _admit(
        self, params: Any, state: Slots, prompts: Array, lengths: Array, plan: Admission
    ) -> Slots:
        """Prefill prompts, copy their keys and values to the slots of their requests, draw the
        first tokens.
        """
        bucket = prompts.shape[1]
        self._traces[f"prefill/{bucket}"] += 1
        logits, cache, chosen = self.policy.prefill(params, prompts, lengths)
        key = sample_keys(self.seed, plan.group, plan.sample)
        token, logp = draw(logits[plan.row], key, jnp.zeros_like(plan.row), plan.temperature)
        stopped = (token[:, None] == plan.stop).any(-1)

        def put(old: Array, new: Array) -> Array:
            return old.at[plan.slot].set(new, mode="drop")

        def copy(old: Array, new: Array) -> Array:
            return old.at[plan.slot, :, :bucket].set(new[plan.row], mode="drop")

        routes = state.routes
        if routes is not None and chosen is not None:
            after = routes.shape[1] - bucket  # what an earlier request left there
            shown = jnp.pad(chosen, ((0, 0), (0, after), (0, 0), (0, 0)), constant_values=-1)
            routes = put(routes, shown[plan.row].astype(routes.dtype))

        return Slots(
            cache=jax.tree.map(copy, state.cache, cache),
            token=put(state.token, token),
            place=put(state.place, plan.length),
            made=put(state.made, jnp.ones_like(plan.limit)),
            active=put(state.active, ~stopped & (plan.limit > 1)),
            stopped=put(state.stopped, stopped),
            key=put(state.key, key),
            temperature=put(state.temperature, plan.temperature),
            limit=put(state.limit, plan.limit),
            stop=put(state.stop, plan.stop),
            tokens=state.tokens.at[plan.slot, 0].set(token, mode="drop"),
            logp=state.logp.at[plan.slot, 0].set(logp, mode="drop"),
            routes=routes,
        )

    def _advance(self, params: Any, state: Slots, enough: Array) -> Slots:
        """Decode until at most ``enough`` slots are active."""
        self._traces[f"decode/{state.cache[0][0].shape[2] - self.max_new_tokens}"] += 1
        step = self.policy.decoder(params)
        slot = jnp.arange(self.slots)

        def body(s: Slots) -> Slots:
            logits, cache, chosen = step(s.token, s.place, s.cache)
            token, logp = draw(logits, s.key, s.made, s.temperature)
            where = jnp.where(s.active, s.made, self.max_new_tokens)  # out of range is dropped
            stopped = s.active & (token[:, None] == s.stop).any(-1)
            made = s.made + s.active
            routes = s.routes
            if routes is not None and chosen is not None:
                went = jnp.where(s.active, s.place, routes.shape[1])
                routes = routes.at[slot, went].set(chosen.astype(routes.dtype), mode="drop")
            return dataclasses.replace(
                s,
                cache=cache,
                token=jnp.where(s.active, token, s.token),
                place=s.place + s.active,
                made=made,
                active=s.active & ~stopped & (made < s.limit),
                stopped=s.stopped | stopped,
                tokens=s.tokens.at[slot, where].set(token, mode="drop"),
                logp=s.logp.at[slot, where].set(logp, mode="drop"),
                routes=routes,
            )

        return jax.lax.while_loop(lambda s: s.active.sum() > enough, body, state)

    def _prefill_rows(self, bucket: int) -> int:
        """Prompts of one prefill call: about PREFILL_POSITIONS on each device, no more than there
        are slots.
        """
        devices = ways(self.policy.mesh, self.policy.rules.rows)
        return min(self.slots, max(1, PREFILL_POSITIONS // bucket) * devices)

    def lowered(self, bucket: int) -> dict[str, Any]:
        """The two programs of a prompt bucket, lowered from shapes on the mesh: ``prefill`` and
        ``decode``. No weights are needed.
        """

        def lying(x: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

        params = jax.tree.map(lying, self.policy.shapes, self.policy.shardings)
        empty = jax.eval_shape(lambda: self._blank(bucket))
        state = jax.tree.map(lying, empty, self._shardings())
        prompts = np.zeros((self._prefill_rows(bucket), bucket), np.int32)
        plan = self._vacant()
        prefill = self._prefill.lower(params, state, prompts, prompts[:, 0], plan)
        decode = self._decode.lower(params, state, np.int32(0))
        return {"prefill": prefill, "decode": decode}

    def _empty(self, bucket: int) -> Slots:
        """Slots without requests, on the devices."""
        return jax.device_put(self._blank(bucket), self._shardings())

    def _blank(self, bucket: int) -> Slots:
        """Slots without requests."""
        slots, new = self.slots, self.max_new_tokens
        zeros = functools.partial(np.zeros, slots)
        named: dict[str, Any] = dict(
            cache=self.policy.empty_cache(slots, bucket + new),
            token=zeros(np.int32),
            place=zeros(np.int32),
            made=zeros(np.int32),
            active=zeros(bool),
            stopped=zeros(bool),
            key=np.zeros((slots, 2), np.uint32),
            temperature=np.ones(slots, np.float32),
            limit=np.ones(slots, np.int32),
            stop=np.full((slots, MAX_STOP_IDS), -1, np.int32),
            tokens=np.zeros((slots, new), np.int32),
            logp=np.zeros((slots, new), np.float32),
            routes=None,
        )
        if self.record_routes:
            config = self.policy.config
            each = (len(config.sparse_layers), config.experts.per_token)
            named["routes"] = np.full((slots, bucket + new, *each), -1, np.int16)
        return Slots(**named)

    def _shardings(self) -> Any:
        """Slots over the axes of rows, heads of the cache over theirs; None without a mesh."""
        policy = self.policy
        if policy.mesh is None:
            return None
        rows = NamedSharding(policy.mesh, spec(("rows",), policy.rules))
        heads = NamedSharding(policy.mesh, spec(("rows", "kv_heads", None, "head"), policy.rules))
        names = (field.name for field in dataclasses.fields(Slots))
        cache = tuple((heads, heads) for _ in range(policy.config.layers))
        named: dict[str, Any] = {name: cache if name == "cache" else rows for name in names}
        named["routes"] = rows if self.record_routes else None
        return Slots(**named)
