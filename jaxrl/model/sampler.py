"""Continuously batched generation with a KV cache: token ids in, token ids and log-probs out.

A fixed number of slots decode side by side, in one device loop until enough of them have ended;
then the host reads what is finished and refills the free slots from the queue. Prompts lie in rows
of their own, apart from what is said after them: the samples of a group share their prompt's row,
which is held once and read once a step for all of them, and a later prompt goes on from what is
there (``seats.py``). Prompts are read in pieces of one size (``decoding.py``), so that neither the
memory of reading nor any compiled shape depends on their lengths. Programs are compiled for each
prompt bucket, which says how long its rows are, once for groups and once for prompts that go alone.

A sample depends on nothing but its request and the weights: not on its slot, its neighbours or the
attempt (``drawing.py`` says what its key is).
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from jaxrl.mesh import require_divisible
from jaxrl.model.decoding import Pieces
from jaxrl.model.drawing import FIRST_CALL
from jaxrl.model.policy import Policy, build
from jaxrl.model.programs import MAX_STOP_IDS, Admission, Held, Programs, Slots
from jaxrl.model.seats import Layout, Prompt, Seats, layouts
from jaxrl.model.versions import read_weights
from jaxrl.pool.contract import Completion, Request
from jaxrl.pool.rollout import StopReason, Version

PIECE = 128  # tokens of a prompt that are read at once, and the grain of what is gone on from
READ_POSITIONS = 2048  # prompt positions of one reading, on a device
REFILL_FRACTION = 4  # refill once 1/4 of the slots is free: a reading has a fixed width


class Sampler:
    """The trainer's own generation engine (a pool's Generator). Serves nothing before the first
    ``load``.

    ``slots`` sequences decode side by side; ``prompt_buckets`` are the prompt lengths that are
    compiled, in tokens, the longest being the limit; ``max_new_tokens`` is the most that a request
    may ask for; groups of ``samples_per_prompt`` are expected, and others served all the same. With
    ``record_routes`` completions carry the experts that each token went through. Raises ValueError
    naming the field, its value and what is allowed. ``mesh`` may be another than the policy's:
    weights are loaded onto it.
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
        samples_per_prompt: int,
        record_routes: bool,
    ) -> None:
        # Decoding has one token a row: what splits tokens of rows splits slots instead.
        rows = (*policy.rules.rows, *policy.rules.tokens)
        rules = dataclasses.replace(policy.rules, rows=rows, tokens=())
        self.policy = build(policy.config, mesh, rules)
        if min(slots, max_new_tokens, samples_per_prompt) < 1:
            raise ValueError(
                f"sampler.slots={slots}, sampler.max_new_tokens={max_new_tokens}, "
                f"samples_per_prompt={samples_per_prompt}: each must be at least 1"
            )
        if not prompt_buckets or min(prompt_buckets) < 1:
            raise ValueError(
                f"sampler.prompt_buckets={tuple(prompt_buckets)!r}: at least one, all positive"
            )
        require_divisible("sampler.slots", slots, mesh, rows)
        if record_routes and not policy.config.sparse_layers:
            raise ValueError(
                "sampler.record_routes=True; allowed: False (model.experts.count=0: no routes)"
            )
        self.seed = seed
        self.record_routes = record_routes
        self.slots = slots
        self.prompt_buckets = tuple(sorted(set(prompt_buckets)))
        self.max_new_tokens = max_new_tokens
        self.samples_per_prompt = samples_per_prompt
        self.version: Version | None = None
        self._params: dict[str, Array] = {}
        self._prompts: dict[int, tuple[list[Seats], Held]] = {}  # of each bucket, between calls
        self._state: Slots | None = None  # between calls
        self._programs = Programs(
            self.policy,
            seed=seed,
            slots=slots,
            max_new_tokens=max_new_tokens,
            record_routes=record_routes,
        )

    @property
    def compilations(self) -> dict[str, int]:
        """How often each program was traced: ``admit``, and ``read``, ``copy`` and ``decode``, each
        ``/<rows> x <places>`` of the prompts."""
        return dict(self._programs.traces)

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
        self._prompts.clear()

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
            (0 <= request.call < FIRST_CALL, f"call={request.call}; allowed: 0 to 2**31 - 1"),
            (0 <= request.first < FIRST_CALL, f"first={request.first}; allowed: 0 to 2**31 - 1"),
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
        queue: dict[Prompt, collections.deque[int]] = {}
        for index in indices:
            queue.setdefault(tuple(requests[index].prompt), collections.deque()).append(index)
        programs = self._programs
        layout = self._layout(bucket, [len(waiting) for waiting in queue.values()])
        places, held = self._prompts.pop(bucket, ([], None))
        if held is None or places[0].layout != layout:
            del held  # before another is made
            places = [Seats(layout) for _ in range(programs.devices)]
            held = jax.device_put(programs.no_prompts(layout), programs.shardings[0])
        state, self._state = self._state, None
        if state is None:
            state = jax.device_put(programs.no_requests(), programs.shardings[1])
        holder: dict[int, int] = {}  # slot -> index of its request
        while queue or holder:
            while taken := dict(self._seated(places, queue)):
                for copies in self._copying(places):
                    held = programs.copy(held, *copies)
                for pieces in self._reading(places):
                    held = programs.read(self._params, held, *pieces)
                for device in places:
                    device.done()
                plan = self._plan(requests, taken)
                state = programs.admit(self._params, held.state, state, plan)
                holder |= {slot: index for slot, (index, _) in taken.items()}
            enough = max(len(holder) - -(-self.slots // REFILL_FRACTION), 0) if queue else 0
            seat, slot = self._who(places)
            state = programs.decode(self._params, held.cache, state, seat, slot, enough)
            self._collect(requests, held, state, places, holder, found)
        self._prompts[bucket], self._state = (places, held), state

    def _collect(
        self,
        requests: Sequence[Request],
        held: Held,
        state: Slots,
        places: Sequence[Seats],
        holder: dict[int, int],
        found: dict[int, Completion],
    ) -> None:
        """Completions of the slots that have ended; these leave their seats."""
        assert self.version is not None
        active, stopped, made, tokens, logp = jax.device_get(
            (state.active, state.stopped, state.made, state.tokens, state.logp)
        )
        ended = [slot for slot in holder if not active[slot]]
        routes = jax.device_get((held.routes, state.routes)) if ended else (None, None)
        for slot in ended:
            count, index = made[slot], holder.pop(slot)
            device, own = divmod(slot, places[0].layout.slots)
            went = None
            if routes[0] is not None and routes[1] is not None:
                row = places[device].seat[own] // places[0].layout.seats
                asked = routes[0][device * places[0].layout.rows + row]
                asked = asked[: len(requests[index].prompt)]
                went = np.concatenate([asked, routes[1][slot, :count]])
            found[index] = Completion(
                tokens=tokens[slot, :count].copy(),
                logp=logp[slot, :count].copy(),
                version=self.version,
                stop_reason=StopReason.STOP if stopped[slot] else StopReason.LENGTH,
                routes=went,
            )
            places[device].leave(own)

    def cached_places(self, bucket: int) -> int:
        """Places of keys and values that a bucket's groups take, on all devices."""
        layout = self._layout(bucket, [self.samples_per_prompt])
        rows = layout.rows * self._programs.devices
        return rows * layout.places + self.slots * self.max_new_tokens

    def lowered(self, bucket: int) -> dict[str, Any]:
        """The two large programs of a prompt bucket's groups, lowered from shapes on the mesh:
        ``prefill`` and ``decode``. No weights are needed.
        """

        def lying(x: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

        programs, layout = self._programs, self._layout(bucket, [self.samples_per_prompt])
        params = jax.tree.map(lying, self.policy.shapes, self.policy.shardings)
        empty = jax.eval_shape(lambda: (programs.no_prompts(layout), programs.no_requests()))
        held, state = jax.tree.map(lying, empty, programs.shardings)
        seat, who = self._who([Seats(layout)] * programs.devices)
        prefill = programs.read.lower(params, held, *self._no_pieces(layout))
        decode = programs.decode.lower(params, held.cache, state, seat, who, np.int32(0))
        return {"prefill": prefill, "decode": decode}

    # -- what the host plans

    def _layout(self, bucket: int, samples: Sequence[int]) -> Layout:
        """Of each device, for so many samples of each prompt: that of groups, unless prompts go
        alone and are more than its rows.
        """
        devices = self._programs.devices
        groups, alone = layouts(self.slots // devices, self.samples_per_prompt, bucket, PIECE)
        rows = sum(-(-count // groups.seats) for count in samples)
        shared = sum(samples) >= len(samples) * self.samples_per_prompt
        return groups if shared or rows <= groups.rows * devices else alone

    def _seated(
        self, places: Sequence[Seats], queue: dict[Prompt, collections.deque[int]]
    ) -> Iterator[tuple[int, tuple[int, int]]]:
        """Move requests from the queue to slots, as many as there is room for: (slot, (index of the
        request, row's state)), numbered over all devices. Where the prompt lies comes first.
        """
        layout = places[0].layout
        for prompt in list(queue):
            waiting = queue[prompt]
            while waiting and any(device.free for device in places):
                near = sorted(
                    range(len(places)),
                    key=lambda d: (not places[d].holds(prompt), -len(places[d].free)),
                )
                sat = ((d, places[d].sit(prompt)) for d in near)
                device, place = next(((d, p) for d, p in sat if p is not None), (0, None))
                if place is None:
                    break
                row = device * layout.slots + place[1]
                yield device * layout.slots + place[0], (waiting.popleft(), row)
            if not waiting:
                del queue[prompt]

    def _copying(self, places: Sequence[Seats]) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Rows that are copied: sources and targets of each device, and how many at most."""
        slots = places[0].layout.slots
        most = max(len(device.copies) for device in places)
        if not most:
            return
        ends = np.full((len(places), slots, 2), (0, slots), np.int32)
        for device, own in zip(places, ends, strict=True):
            own[: len(device.copies)] = np.reshape(device.copies, (-1, 2))
        yield ends[..., 0].reshape(-1), ends[..., 1].reshape(-1), most

    def _reading(self, places: Sequence[Seats]) -> Iterator[tuple[Pieces, np.ndarray]]:
        """Pieces of one call after another, and the row of each that ends its prompt."""
        layout = places[0].layout
        width = self._width(layout)
        for begin in range(0, max(len(device.pieces) for device in places), width):
            pieces, last = self._no_pieces(layout)
            for d, device in enumerate(places):
                for at, (row, start) in enumerate(device.pieces[begin : begin + width], d * width):
                    tokens = device.tokens(row, start)
                    pieces.tokens[at, : len(tokens)] = tokens
                    pieces.row[at], pieces.start[at], pieces.count[at] = row, start, len(tokens)
                    last[at] = row if device.ends(row, start) else layout.slots
            yield pieces, last

    def _width(self, layout: Layout) -> int:
        """Pieces of one reading, on each device: about READ_POSITIONS, no more than rows hold."""
        most = layout.rows * (layout.places // layout.piece)
        return min(most, max(1, READ_POSITIONS // layout.piece))

    def _no_pieces(self, layout: Layout) -> tuple[Pieces, np.ndarray]:
        """A reading of nothing."""
        count = self._width(layout) * self._programs.devices
        nowhere: Any = np.full(count, layout.slots, np.int32)
        zeros: Any = functools.partial(np.zeros, dtype=np.int32)
        pieces = Pieces(zeros((count, layout.piece)), nowhere, zeros(count), zeros(count))
        return pieces, nowhere.copy()

    def _who(self, places: Sequence[Seats]) -> tuple[np.ndarray, np.ndarray]:
        """The seat of each slot, and who has each seat."""
        seat = np.zeros((len(places), places[0].layout.slots), np.int32)
        for device, own in zip(places, seat, strict=True):
            own[list(device.seat)] = list(device.seat.values())
        return seat.reshape(-1), np.concatenate([device.slots for device in places])

    def _plan(self, requests: Sequence[Request], taken: dict[int, tuple[int, int]]) -> Admission:
        """What those who have just sat down ask for."""
        whole = functools.partial(np.zeros, self.slots)
        plan = Admission(
            fresh=whole(bool),
            row=whole(np.int32),
            length=np.ones(self.slots, np.int32),
            group=whole(np.uint32),
            sample=whole(np.uint32),
            call=whole(np.uint32),
            first=whole(np.int32),
            temperature=np.ones(self.slots, np.float32),
            limit=np.ones(self.slots, np.int32),
            stop=np.full((self.slots, MAX_STOP_IDS), -1, np.int32),
        )
        for slot, (index, row) in taken.items():
            request = requests[index]
            plan.fresh[slot], plan.row[slot] = True, row
            plan.length[slot] = len(request.prompt)
            plan.group[slot], plan.sample[slot] = request.group, request.sample
            plan.call[slot], plan.first[slot] = request.call, request.first
            plan.temperature[slot], plan.limit[slot] = request.temperature, request.max_new_tokens
            plan.stop[slot, : len(request.stop_ids)] = sorted(request.stop_ids)
        return plan
