"""The pool whose workers are other processes, as the trainer sees it.

The trainer opens groups in the ledger and takes them when their samples are sealed; a gateway and
its workers do the rest (``jaxrl.pool.ledger``, ``jaxrl.pool.segments``). ``take`` looks, judges,
replaces what is refused, and waits, in ``_gather``.

What survives a crash: the ledger and the spool hold all that was sampled, the checkpoint says what
was consumed. At a start the ledger follows the checkpoint: groups that were taken for steps which
it does not cover are due at the same steps again.
"""

import dataclasses
import os
import pathlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from jaxrl.pool import staleness
from jaxrl.pool.announced import CURRENT, announce
from jaxrl.pool.contract import (
    Annotate,
    Group,
    Keep,
    Manifest,
    PoolEnd,
    PoolError,
    Questions,
    Tokenizer,
)
from jaxrl.pool.curves import Curves, ages
from jaxrl.pool.deadline import within
from jaxrl.pool.fitting import Fitting
from jaxrl.pool.ledger import GroupState, Ledger, LedgerRefusal, Live, OpenGroup, SlotState
from jaxrl.pool.local import COUNTS as LOCAL_COUNTS
from jaxrl.pool.openings import Openings
from jaxrl.pool.permits import Permits
from jaxrl.pool.ranges import Ranges
from jaxrl.pool.rollout import Version, digest_of
from jaxrl.pool.segments import Spool
from jaxrl.pool.shards import of_shard
from jaxrl.pool.waiting import Waiting

# Besides those of a local pool; every count is in every manifest.
COUNTS = (
    *LOCAL_COUNTS,
    "dropped",  # groups that had grown too old when their step came
    "void_infra",  # groups whose samples infrastructure failed too often
    "void_data",  # groups whose task could not be set up or verified
    "void_judge",  # groups that nobody could judge
    "void_untrainable",  # groups with an answer whose ids and log-probs the server did not tell
    "damaged",  # segments that could not be read back, each sampled anew
    "overage_tokens",  # tokens too old to be trained on
    "partial",  # groups handed over without the samples that infrastructure failed
    "cancelled_pressure",  # attempts given back because engines were overloaded
    "deferred",  # draws that wait because their universe has its share of the pool
)


@dataclasses.dataclass(frozen=True)
class Rules:
    """What a remote pool does about age and failure; see the fields of ``config.pool``."""

    staleness: int
    over_age: Literal["drop", "wait", "continue"]
    max_refills: int
    max_attempts: int
    min_group: int
    watchdog_s: float
    poll_s: float
    keep_checkpoints: int  # segments of steps that none of these covers may go; see ``record``
    record: bool  # keep all segments
    quotas: Sequence[tuple[str, float]]  # of universes; see ``Quotas``
    permits: Permits = Permits()  # that attempts need


class Helpers(Protocol):
    """The gateway and the workers of a pool, where this process started them."""

    def ensure(self) -> None:
        """Start again what has died. PoolError when that happened too often."""
        ...

    def tell(self) -> None:
        """Tell the gateway that groups were opened or weights announced."""
        ...

    def counts(self) -> Mapping[str, float]:
        """What the gateway measures of itself since its start."""
        ...

    def close(self) -> None:
        """End them."""
        ...


class RemotePool:
    """A RolloutPool over a ledger, a spool and a folder where versions are announced.

    Draws, refills, ``keep``, ``annotate``, the shard and the counts are those of ``LocalPool``; a
    group's id is the number of its draw. A batch is the oldest groups that are READY. Nothing older
    than ``rules.staleness`` steps is trained on: with 0 the pool is synchronous.

    A take ends with groups, PoolEnd, or PoolError with a dump of the ledger where no sample was
    sealed for ``rules.watchdog_s`` seconds. ``helpers`` are kept running meanwhile, and ended with
    the pool.
    """

    def __init__(
        self,
        ledger: Ledger,
        spool: Spool,
        folder: str | os.PathLike[str],
        tokenizer: Tokenizer,
        source: Questions,
        rules: Rules,
        *,
        seed: int,
        rollouts_per_group: int,
        max_prompt_tokens: int,
        max_feedback_tokens: int = 0,
        keep: Keep | None = None,
        annotate: Annotate | None = None,
        reward: Literal["exact", "score"] = "exact",
        epochs: int = 0,
        split: Literal["train", "held_out"] = "train",
        shard: tuple[int, int] = (0, 1),
        helpers: Helpers | None = None,
    ) -> None:
        self._tasks = tasks = of_shard(whole := source.tasks(split), shard)
        if not tasks:
            raise ValueError(f"no {split!r} task in shard {shard}; allowed: at least one")
        self._ledger, self._spool, self._folder = ledger, spool, pathlib.Path(folder)
        self._rules, self._annotate, self._helpers = rules, annotate, helpers
        self._samples, self._seed = rollouts_per_group, seed
        self._waiting = Waiting(ledger, rules.permits)
        self._openings = Openings(
            self._tasks,
            source,
            tokenizer,
            seed=seed,
            samples=rollouts_per_group,
            max_prompt_tokens=max_prompt_tokens,
            max_attempts=rules.max_attempts,
            min_group=rules.min_group,
            epochs=epochs,
            quotas=rules.quotas,
            universes={task.source for task in whole},
        )
        # what was consumed, and is covered by a checkpoint
        self._committed, self._meter, self._curves = Ranges(), staleness.DropMeter(), Curves()
        self._fitting = Fitting(
            ledger,
            self._waiting,
            spool,
            source,
            tokenizer,
            {task.key: task for task in tasks},
            keep=keep,
            reward=reward,
            max_feedback_tokens=max_feedback_tokens,
            judge_attempts=rules.max_attempts,
            watchdog_s=rules.watchdog_s,
        )
        self._taken: dict[int, list[int]] = {}  # consumed by steps that no checkpoint covers yet
        # void groups of the ledger that were seen, those of this take that are not refilled, and
        # the next step
        self._voids = self._lapsed = self._step = 0
        self._refills: list[int] = []  # generations of groups to be drawn for void ones
        # the newest version, and the first one of this process
        self._version = self._resumed = None
        self._covered: list[int] = []  # steps of checkpoints, as they were committed

    # -- the contract

    def take(self, n: int, step: int) -> tuple[list[Group], Manifest]:
        """The oldest n groups that are ready and young enough; waits for them."""
        if self._version is None:
            raise PoolError(
                "no weights were published: a pool that acked no version serves nothing"
            )
        if n < 1:
            raise ValueError(f"n={n}; allowed: >= 1")
        counts: Counter[str] = Counter({name: 0 for name in COUNTS})
        try:
            self._begin(step)
            chosen = self._gather(n, step, counts)
            groups = [self._handed(live.id, step, counts) for live in chosen]
            self._curves.note(self._ledger.counts(), counts)
        except (LedgerRefusal, OSError) as error:
            raise PoolError(f"the pool's ledger or spool, at step {step}: {error}") from error
        for live, group in zip(chosen, groups, strict=True):
            rewards = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
            self._meter.add(live.seconds, rewards, dropped=False)
        self._taken[step] = [group.id for group in groups]
        self._step = step + 1
        counts["short"] = n - len(groups)
        taken = tuple((group.id, group.content_hash) for group in groups)
        return groups, Manifest(step, taken, dict(counts), self._readings(groups, step))

    def _readings(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        assert self._resumed is not None
        told = self._helpers.counts() if self._helpers is not None else {}
        aged = ages(groups, step, self._resumed, self._rules.staleness)
        return {**aged, **self._meter.readings(), **self._curves.gateway(told)}

    def commit(self, step: int) -> None:
        """A checkpoint covers the steps up to this one."""
        for taken in [at for at in self._taken if at <= step]:
            for number in self._taken.pop(taken):
                self._committed.add(number)
        self._covered.append(step + 1)
        if self._resumed is None:
            return  # the ledger follows the checkpoint when the first version is published
        self._ledger.commit(step)
        if not self._rules.record and len(self._covered) > self._rules.keep_checkpoints:
            del self._covered[: -self._rules.keep_checkpoints]
            self._spool.gc(self._ledger.prune(self._covered[0]))

    def state(self) -> dict[str, Any]:
        """The consumed manifest, the position of the draws, and what was found out about tasks."""
        return {
            "pool": "remote",
            "tasks": len(self._tasks),
            "seed": self._seed,
            "step": self._step,
            "consumed": [list(pair) for pair in self._consumed()],
            "meter": self._meter.state(),
            **self._openings.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, before the first ``publish``. ValueError naming the field if it
        belongs to another pool, task set or seed."""
        mine = {"pool": "remote", "tasks": len(self._tasks), "seed": self._seed}
        for field, value in mine.items():
            if state[field] != value:
                raise ValueError(f"pool state has {field}={state[field]!r}; allowed: {value!r}")
        self._step, self._committed = int(state["step"]), Ranges(state["consumed"])
        self._meter = staleness.DropMeter.of(state["meter"])
        self._openings.restore(state)

    def publish(self, version: Version, path: str) -> None:
        """Announce new weights. The first time, the ledger begins an epoch, which fences what an
        earlier trainer's workers still do, and follows the checkpoint."""
        newest = self._version
        if newest is not None and (version.epoch, version.step) < (newest.epoch, newest.step):
            raise PoolError(f"{version} is older than {newest}, which was published before")
        try:
            if self._resumed is None:
                self._follow(version)
            where = path if "://" in path else os.path.abspath(path)
            announce(self._folder / CURRENT, {**dataclasses.asdict(version), "path": where})
        except (LedgerRefusal, OSError) as error:
            raise PoolError(f"{version} cannot be published: {error}") from error
        self._version = version
        if self._helpers is not None:
            self._helpers.tell()

    def weigh(self, probabilities: Mapping[str, float]) -> None:
        """Draw universes with these probabilities from the next take on; see ``Draws``."""
        self._openings.draws.weigh(probabilities)

    def close(self) -> None:
        """End the helpers and close the ledger."""
        if self._helpers is not None:
            self._helpers.close()
        self._ledger.close()

    # -- beginnings

    def _consumed(self) -> Ranges:
        consumed = Ranges(self._committed)
        for number in (number for groups in self._taken.values() for number in groups):
            consumed.add(number)
        return consumed

    def _follow(self, version: Version) -> None:
        """Make the ledger say what the checkpoint says, and find what is left to be done."""
        epoch = self._ledger.begin_epoch(version.epoch)
        self._spool.forget(epoch)  # what was fenced will not be sealed
        if not self._committed:
            self._step = version.step
        self._ledger.reconcile(self._step, list(self._committed))
        if self._rules.permits.spool_bytes:
            self._ledger.weigh()
        for void in self._ledger.voided(0):
            self._voids += 1
            self._openings.lose(void.id, void.content_hash, void.reason)
        held = {group.id for group in self._ledger.live()}
        self._openings.follow(self._committed, held, self._ledger.next_id())
        self._curves.begin(self._ledger.counts())
        self._resumed = version

    def _begin(self, step: int) -> None:
        """Start a step; one that is begun again gets the same groups."""
        if self._covered and step < self._covered[-1]:
            raise PoolError(
                f"step {step} was committed (all before {self._covered[-1]} were): "
                "its groups are not handed out again"
            )
        if any(taken >= step for taken in self._taken):
            self._taken = {at: groups for at, groups in self._taken.items() if at < step}
            self._ledger.reconcile(step, list(self._consumed()))
        assert self._version is not None
        if self._version.step < self._oldest(step):
            raise PoolError(
                f"step {step} wants versions from {self._oldest(step)} on (pool.staleness="
                f"{self._rules.staleness}); the newest that was published is {self._version}"
            )
        self._lapsed = 0
        if self._openings.ended:
            if all(group.state is GroupState.RESERVED for group in self._ledger.live()):
                raise PoolEnd(f"all prompts were drawn ({len(self._tasks)} tasks)")

    # -- a take

    def _gather(self, n: int, step: int, counts: Counter[str]) -> list[Live]:
        """Wait until a batch is ready and reserve it. PoolError by the watchdog."""
        news, since = None, time.monotonic()
        while True:
            trouble = ""
            try:
                live = self._look(n, step, counts)
                chosen = self._chosen(live, n, step, counts)
                if chosen is not None:
                    self._reserve(step, chosen)
                    self._waiting.over()
                    return chosen
                self._waiting.lacks(live, n, step)
                seen = [(g.id, g.state, g.reissued, g.slots[SlotState.SEALED]) for g in live]
                if seen != news:
                    news, since = seen, time.monotonic()
            except LedgerRefusal as refusal:
                if refusal.reason == "fenced":
                    raise
                trouble = str(refusal)  # it moved between the look and the change: look again
            except OSError as error:  # a database may come back
                trouble = str(error)
            if time.monotonic() - since > self._rules.watchdog_s:
                raise PoolError(self._silence(step, trouble))
            if self._helpers is not None:
                self._helpers.ensure()
            time.sleep(self._rules.poll_s)

    def _look(self, n: int, step: int, counts: Counter[str]) -> list[Live]:
        """What is live, after all that is due was done: leases that ran out, void groups and old
        ones replaced, new ones admitted."""
        self._ledger.expire()
        for void in self._ledger.voided(self._voids):
            self._voids += 1
            self._openings.lose(void.id, void.content_hash, void.reason)
            self._fitting.forget(void.id)
            counts["filtered" if void.reason == "filtered" else "voided"] += 1
            if f"void_{void.reason}" in COUNTS:
                counts[f"void_{void.reason}"] += 1
            self._refills.append(void.generation + (void.reason != "stale"))
        live = self._ledger.live()
        self._openings.learn(live)
        if any(self._drop_if_old(group, step, counts) for group in live):
            return self._look(n, step, counts)
        if self._admit(live, n, step, counts):
            live = self._ledger.live()
        return live

    def _drop_if_old(self, group: Live, step: int, counts: Counter[str]) -> bool:
        """Sample a group anew that has grown too old; void it when that happens again, unless the
        trainer waits so that no group is lost."""
        by_token = self._rules.over_age == "continue"
        age = group.youngest if by_token else group.oldest
        if group.state is GroupState.RESERVED or age is None or age >= self._oldest(step):
            return False
        rewards = [m.sealed.reward for m in self._ledger.members(group.id)]
        known = [reward for reward in rewards if reward is not None]
        self._meter.add(group.seconds, known, dropped=True)
        counts["dropped"] += 1
        self._fitting.forget(group.id)
        # Who waits loses no group: only a rollback makes one too old there, and it may come again.
        if self._version is None or (group.reissued and self._rules.over_age != "wait"):
            self._ledger.void(group.id, "stale")
        else:
            self._ledger.reissue(group.id, self._version)
        return True

    def _version_of(self, group: Live, step: int) -> int:
        """The version that a group's age is counted from. After a rollback it may be sampled, or be
        sampled already, by an older one than it was opened for."""
        known = (group.dispatched, step, *([] if group.oldest is None else [group.oldest]))
        return min(known)

    def _admit(self, live: Sequence[Live], n: int, step: int, counts: Counter[str]) -> bool:
        """Open as many groups as pace allows; whether any was opened."""
        assert self._version is not None
        waiting = [g for g in live if g.state is not GroupState.RESERVED]
        versions = [self._version_of(group, step) for group in waiting]
        limit = self._rules.staleness
        if self._rules.over_age == "wait":
            room = staleness.waiting_room(versions, self._version.step, step, n, limit)
        else:
            room = staleness.room(versions, step, n, limit)
        opened: list[OpenGroup] = []
        sampled = Counter(group.source for group in live if group.state is GroupState.OPEN)
        while len(opened) < room - self._lapsed:
            generation = self._refills.pop(0) if self._refills else 0
            if generation > self._rules.max_refills:
                self._lapsed += 1
                continue
            full = self._openings.quotas.full(sampled, (limit + 1) * n)
            drawn = self._openings.draw(self._version, generation, counts, full)
            if drawn is None:
                self._refills[:0] = [generation] if generation else []
                break
            sampled[drawn.source] += 1
            counts["refilled"] += generation > 0
            opened.append(drawn)
        if opened:
            self._ledger.open_groups(opened)
            if self._helpers is not None:
                self._helpers.tell()
        return bool(opened)

    # -- choosing

    def _chosen(
        self, live: Sequence[Live], n: int, step: int, counts: Counter[str]
    ) -> list[Live] | None:
        """The step's batch if it is ready; None to wait."""
        reserved = [g for g in live if g.state is GroupState.RESERVED and g.step == step]
        if reserved:  # by a transaction whose answer was lost
            return reserved if all(self._fitting.fits(g, counts) for g in reserved) else None
        due = [g for g in live if g.step == step]
        among = due or [g for g in live if g.step is None]
        among = sorted(among, key=lambda group: (self._version_of(group, step), group.id))
        most = len(among) if due or self._openings.ended else n
        target = min(n - (0 if due else self._lapsed), most)
        ready = [group for group in among if group.state is GroupState.READY]
        if len(ready) < target:
            return None
        fit: list[Live] = []
        for group in ready:
            if len(fit) < target and self._fitting.fits(group, counts):
                fit.append(group)
        if len(fit) < target:
            return None
        if self._rules.over_age == "wait" and not due and len(ready) < len(among):
            left = [g for g in among if g not in fit]
            versions = [self._version_of(group, step) for group in left]
            if not staleness.feasible(versions, step + 1, n, self._rules.staleness):
                return None
        return fit

    def _reserve(self, step: int, chosen: Sequence[Live]) -> None:
        ids = [group.id for group in chosen if group.state is GroupState.READY]
        by = "max" if self._rules.over_age == "continue" else "min"
        self._ledger.reserve(step, ids, self._oldest(step), by)

    def _oldest(self, step: int) -> int:
        return step - self._rules.staleness

    # -- handing over

    def _handed(self, number: int, step: int, counts: Counter[str]) -> Group:
        rollouts = self._fitting.take(number)
        if self._rules.over_age == "continue":
            pairs = [staleness.untrain_old(r, self._oldest(step)) for r in rollouts]
            rollouts = [rollout for rollout, _ in pairs]
            counts["overage_tokens"] += sum(old for _, old in pairs)
        counts["partial"] += len(rollouts) < self._samples
        if (annotate := self._annotate) is not None:
            facts = within(
                self._rules.watchdog_s,
                lambda: annotate(rollouts),
                f"annotation of group {number}",
            )
            rollouts = [
                dataclasses.replace(rollout, facts={**rollout.facts, **more})
                for rollout, more in zip(rollouts, facts, strict=True)
            ]
        members = tuple(rollouts)
        return Group(number, digest_of(members), members)

    def _silence(self, step: int, trouble: str) -> str:
        try:
            dump = self._ledger.dump()
        except OSError as error:
            dump = f"no dump: {error}"
        return (
            f"no sample was sealed for {self._rules.watchdog_s} s at step {step} "
            f"(pool.watchdog_s){f'; {trouble}' if trouble else ''}\n{dump}"
        )
