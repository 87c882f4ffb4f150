"""The one jitted step: any algorithm, any policy, any mesh of ``data``, ``fsdp``, ``tensor`` and
``expert``.

    observe     scorers that the credit or the loss needs, no gradient, in micro-batches
    credit      once, over the whole take
    update      epochs x minibatches times: gradients of micro-batches are added, then one
                ``tx.update``

Where a take is one update, the credit looks at no observation and the loss has no balance term,
there is no first pass: what is observed is read in the update's own, off the same logits.

Roles with an ``ema_rate`` follow the student after each update. Lessons come last: other roles that
train on the same take, each beside the models as they were when the take began.

An update without a weighted token, or with a gradient that is not finite, is skipped: parameters,
moments and schedule stay as they are and a metric counts it. So is one with a change that is not
finite among those that are looked at beforehand (``optimizer.preview``: a part of large arrays).
``state.step`` counts takes and advances either way.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool

from jaxrl.algorithms.contract import Algorithm, Reading
from jaxrl.batch import Batch, Credit
from jaxrl.mesh import compiler_options, ways
from jaxrl.train import accumulate, routing
from jaxrl.train.accumulate import (
    ADVANTAGE,
    ADVANTAGE_SQUARE,
    LOGP,
    RATIO,
    Models,
    Taken,
    Tally,
    tally,
)
from jaxrl.train.optimizer import preview
from jaxrl.train.rounding import choose
from jaxrl.train.routing import Loads, RoutingConfig
from jaxrl.train.state import STUDENT, Role, Scorer, TrainState, models_of, shardings

Metrics = dict[str, Array]

# Metrics that are arrays begin so, for the log to draw.
SHOWN, SPREAD, LOAD = "shown/", "spread/", "router/load"
SPREADS = {ADVANTAGE: ADVANTAGE, RATIO: "loss/log_ratio"}
MOVED = "optim/moved"  # share of parameters that an update changes: the log tells what is left

# Names under which algorithms observe the student's own log-probs at the start of the take.
OLD_LOGP = {"old_logp", "student"}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a take is cut. Raises ValueError naming the fields that do not fit."""

    rollouts: int  # in a take
    epochs: int
    minibatches: int  # updates an epoch
    micro_rollouts: int  # at most this many are alive at once
    rollouts_per_group: int
    coupled: bool
    ways: int  # parts into which the mesh splits rows
    packed: bool  # a group is a row of the trunk

    def __post_init__(self) -> None:
        groups, left = divmod(self.rollouts, self.rollouts_per_group)
        if left or groups % self.minibatches:
            raise ValueError(
                f"train.minibatches={self.minibatches} does not cut {self.rollouts} rollouts in "
                "groups of "
                f"pool.rollouts_per_group={self.rollouts_per_group}; allowed: divisors of the "
                "number of groups"
            )
        if self.coupled and self.micro % self.rollouts_per_group:
            raise ValueError(
                f"train.micro_rollouts={self.micro_rollouts}: this algorithm couples the rollouts "
                "of a group; "
                f"allowed: multiples of pool.rollouts_per_group={self.rollouts_per_group}"
            )
        row = self.rollouts_per_group * self.ways
        if self.packed and (self.update % self.micro or self.micro % row):
            raise ValueError(
                f"train.micro_rollouts={self.micro_rollouts}: with train.packing a group is a row "
                f"of the trunk; allowed: divisors of the {self.update} rollouts of an update that "
                "are multiples of pool.rollouts_per_group * mesh.data * mesh.fsdp * mesh.expert = "
                f"{row}"
            )
        if self.update % self.micro or self.micro % self.ways:
            raise ValueError(
                f"train.micro_rollouts={self.micro_rollouts}; allowed: divisors of the "
                f"{self.update} rollouts of an "
                "update that are multiples of mesh.data * mesh.fsdp * "
                f"mesh.expert = {self.ways}"
            )

    @property
    def update(self) -> int:
        """Rollouts of an update."""
        return self.rollouts // self.minibatches

    @property
    def updates(self) -> int:
        """Updates of a take."""
        return self.epochs * self.minibatches

    @property
    def micro(self) -> int:
        """Rollouts of a micro-batch."""
        return min(self.micro_rollouts, self.update)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
    """What one update tells: ``numbers`` of the update, ``tallies`` of tokens and rollouts."""

    made: Bool[Array, ""]
    empty: Bool[Array, ""]
    numbers: dict[str, Tally]
    tallies: dict[str, Tally]
    loads: Loads | None  # of a student with experts
    seen: Reading  # what was observed on the way, if it was not before
    advantage: Array | None = None  # of the first rows, where they are to be shown


class Unseen(dict[str, Any]):
    """An empty reading: whoever looks for something in it is told that it is not there yet."""

    class Looked(Exception):
        """Somebody did."""

    def _looked(self, *_: Any) -> Any:
        raise Unseen.Looked

    __missing__ = __contains__ = __iter__ = get = _looked


@dataclasses.dataclass(frozen=True)
class Learner:
    """A role that is trained: by which passes, with which optimizer."""

    who: str
    passes: accumulate.Passes
    tx: optax.GradientTransformation
    shown: int = 0  # rows whose advantages are told


class Step:
    """(state, batch) -> (state, metrics), compiled once a bucket. The given state is consumed."""

    def __init__(
        self,
        policy: Scorer,
        algorithm: Algorithm,
        tx: optax.GradientTransformation,
        mesh: Mesh,
        cuts: Mapping[str, int],
        lesson_txs: Mapping[str, optax.GradientTransformation],
        routed: RoutingConfig | None,
        shown: int,
    ) -> None:
        self.policy, self.algorithm, self.mesh = policy, algorithm, mesh
        self.cuts = cuts
        self.needs = (*algorithm.needs, *(routed.needs if routed else ()))
        passes = accumulate.Passes(policy, algorithm, mesh, STUDENT, routed, shown > 0)
        self.student = Learner(STUDENT, passes, tx, shown)
        self.pupils = [
            Learner(who, accumulate.Passes(policy, lesson, mesh, who), lesson_txs[who])
            for who, lesson in algorithm.lessons
        ]
        self.trace_count = 0
        self._compiled: Any = None

    def jitted(self, state: TrainState) -> Any:
        """The jitted function, shardings stated, state donated; ``state`` may be shapes only."""
        if self._compiled is None:
            where = shardings(state, self.policy, self.mesh)
            everywhere = NamedSharding(self.mesh, PartitionSpec())
            self._compiled = jax.jit(
                self.take,
                in_shardings=(where, self.student.passes.rows),
                out_shardings=(where, everywhere),
                donate_argnums=0,
                compiler_options=compiler_options(self.mesh),
            )
        return self._compiled

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Run one take. One without a rollout changes nothing but the count of takes: it carries no
        facts, and without their shapes there is nothing to compile.
        """
        if set(self.needs) - set(batch.facts):
            updates = self.plan(batch.valid.shape[0], batch.packed is not None).updates
            passed = dataclasses.replace(state, step=_next(state.step))
            return passed, nothing_taken(updates)
        return self.jitted(state)(state, batch)

    def plan(self, rollouts: int, packed: bool) -> Plan:
        """How a take of so many rollouts is cut."""
        split = ways(self.mesh, self.policy.rules["rows"])
        coupled = self.algorithm.coupled
        return Plan(rollouts=rollouts, coupled=coupled, packed=packed, ways=split, **self.cuts)

    def observe(self, models: Models, batch: Batch, plan: Plan) -> tuple[Reading, Loads | None]:
        """What the algorithm observes with these parameters, and the loads of its experts."""
        parts = batch.valid.shape[0] // plan.micro
        return self.student.passes.observe(self.algorithm, models, batch, parts)

    def blind_credit(self, batch: Batch, plan: Plan) -> Credit | None:
        """Credit that looks at nothing observed, where a take is one update: then what is observed
        is seen in that update's own pass, with the same weights. Else None."""
        algorithm = self.algorithm
        routed = self.student.passes.routing
        balanced = routed is not None and routed.balance_weight > 0  # by the loads at the start
        alone = not algorithm.lessons and not balanced
        if plan.updates > 1 or algorithm.refresh != "take" or not algorithm.observers or not alone:
            return None
        try:
            return algorithm.credit(batch, Unseen())
        except Unseen.Looked:
            return None

    def update(
        self,
        learner: Learner,
        role: Role,
        models: Models,
        taken: Taken,
        plan: Plan,
        begun: Loads | None,
    ) -> tuple[Role, Report]:
        """One update of a role from the rollouts of ``taken``; the same role if skipped."""
        batch, observed, credit = taken
        if credit is None:  # refresh = "update"; what came with the batch is the start of the take
            start = {f"start/{name}": x for name, x in observed.items()}
            now = observed if plan.updates == 1 else self.observe(models, batch, plan)[0]
            observed = {**now, **start}
            credit = self.algorithm.credit(batch, observed)
        parts = plan.update // plan.micro
        loss, grads, tallies, loads, seen = learner.passes.gradient(
            role.params, models, (batch, observed, credit), parts, begun
        )
        norm = optax.tree.norm(grads)
        empty = ~(credit.weight != 0).any()
        change, moved = preview(learner.tx, grads, role.opt_state, role.params, norm)
        # All of them, so that the update waits for what still reads the old parameters.
        made = ~empty & jnp.isfinite(norm + loss + change + moved)
        tx = optax.with_extra_args_support(learner.tx)
        changes, opt_state = tx.update(grads, role.opt_state, role.params, made=made, norm=norm)
        after = (optax.apply_updates(role.params, changes), opt_state)
        params, opt_state = choose(made, after, (role.params, role.opt_state))
        numbers = {"loss/total": loss, "optim/grad_norm": norm}
        numbers |= {"optim/update_norm": change, MOVED: moved}
        report = Report(
            made=made,
            empty=empty,
            numbers={name: tally(x, made) for name, x in numbers.items()},
            tallies={name: t.only_if(made) for name, t in tallies.items()},
            loads=loads,
            seen=seen,
            advantage=credit.advantage[: learner.shown] if learner.shown else None,
        )
        return dataclasses.replace(role, params=params, opt_state=opt_state), report

    def updates(
        self,
        learner: Learner,
        roles: Mapping[str, Role],
        taken: Taken,
        plan: Plan,
        begun: Loads | None,
    ) -> tuple[Role, dict[str, Role], Report]:
        """All updates of a take: the learner after them, the roles that followed it, reports."""
        follows = learner.who == STUDENT
        followers = {w: r for w, r in roles.items() if follows and r.ema_rate > 0}

        def update(carry: Any, part: Taken) -> tuple[Any, Report]:
            role, behind = carry
            now = models_of({**roles, learner.who: role, **behind})
            role, report = self.update(learner, role, now, part, plan, begun)
            return (role, {w: follow(r, role, report.made) for w, r in behind.items()}), report

        def epoch(carry: Any, _: None) -> tuple[Any, Report]:
            return jax.lax.scan(update, carry, taken)

        start = roles[learner.who], followers
        (role, behind), reports = jax.lax.scan(epoch, start, None, length=plan.epochs)
        return role, behind, reports

    def take(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """All updates of one take. Pure; jitted by ``__call__``."""
        self.trace_count += 1  # runs when traced, not when called
        plan = self.plan(batch.valid.shape[0], batch.packed is not None)
        batch = accumulate.sanitised(batch)
        roles, learner, observed, begun = dict(state.roles), self.student, {}, None
        credit = self.blind_credit(batch, plan)
        if credit is not None:
            along = dataclasses.replace(learner.passes, observer=self.algorithm)
            learner = dataclasses.replace(learner, passes=along)
        else:
            observed, begun = self.observe(models_of(roles), batch, plan)
            if self.algorithm.refresh == "take":
                credit = self.algorithm.credit(batch, observed)

        def cut(credit: Any) -> Taken:
            rows = self.student.passes.rows
            return accumulate.cut_taken((batch, observed, credit), plan.minibatches, rows)

        student, behind, reports = self.updates(learner, roles, cut(credit), plan, begun)
        seen = jax.tree.map(lambda x: x[0, 0], reports.seen)
        read = seen.pop(LOGP, None)  # by the first update, of its rollouts
        observed = observed or seen
        metrics = (
            report_metrics(reports) | batch_metrics(batch, state.step) | optimizer_metrics(student)
        )
        if old := OLD_LOGP & set(observed):
            metrics |= sampler_gap(batch, observed[old.pop()], state.step)
        elif read is not None:
            first = jax.tree.map(lambda x: x[0], cut(credit)[0])
            metrics |= sampler_gap(first, read, state.step)
        if self.student.shown:
            metrics |= shown_rows(batch, reports)
        if reports.loads is not None:
            loads = jax.tree.map(lambda x: x.sum((0, 1)), reports.loads)
            routed = self.student.passes.routing
            assert routed is not None
            # One update, without a pass before it, is where the take starts.
            metrics |= routing.metrics(routed, loads if begun is None else begun, loads)
            metrics |= {LOAD: loads.count} if self.student.shown else {}
            if origin := roles.get(routing.ORIGIN):
                metrics |= routing.distance(routed, origin.all, student.all)
        changed = {STUDENT: student, **behind}
        for pupil, (_, lesson) in zip(self.pupils, self.algorithm.lessons, strict=True):
            part = cut(lesson.credit(batch, observed))
            changed[pupil.who], _, reports = self.updates(pupil, roles, part, plan, None)
            told = report_metrics(reports)
            metrics |= {f"{pupil.who}/{name}": value for name, value in told.items()}
        return TrainState(state.step + 1, state.key, roles | changed), finite(metrics)


def follow(role: Role, student: Role, made: Array) -> Role:
    """A moving average goes on towards the student, if there was an update."""

    def move(old: Array, new: Array) -> Array:
        mixed = old + (1 - role.ema_rate) * (new - old)  # exact where the two are equal
        return jnp.where(made, mixed, old).astype(old.dtype)

    return dataclasses.replace(
        role, params={name: move(x, student.all[name]) for name, x in role.params.items()}
    )


_next = jax.jit(lambda step: step + 1)


@functools.partial(jax.jit, static_argnums=0)
def nothing_taken(updates: int) -> Metrics:
    """Metrics of a take without a rollout: what everybody reads, and all updates skipped."""
    zero = ("loss/total", "reward/mean", "batch/valid_rollouts", "batch/action_tokens")
    counts = {"optim/updates": 0, "optim/skipped": updates, "batch/empty": updates}
    return {name: jnp.float32(x) for name, x in {**dict.fromkeys(zero, 0), **counts}.items()}


def report_metrics(reports: Report) -> Metrics:
    """Numbers of all updates together, skipped ones left out."""
    reports = dataclasses.replace(reports, loads=None, seen={}, advantage=None)
    total = jax.tree.map(lambda x: x.sum((0, 1)), reports)
    peaks = {name: t.peak.max((0, 1)) for name, t in reports.tallies.items()}
    tallies = {name: dataclasses.replace(t, peak=peaks[name]) for name, t in total.tallies.items()}
    spreads = {name: t.counts for name, t in tallies.items() if t.counts is not None}
    advantage, square = tallies.pop(ADVANTAGE), tallies.pop(ADVANTAGE_SQUARE)
    metrics = {name: t.mean for name, t in total.numbers.items()}
    metrics["optim/frac_params_unchanged"] = 1 - metrics.pop(MOVED)
    metrics |= {SPREAD + SPREADS[name]: counts for name, counts in spreads.items()}
    for name, t in tallies.items():
        metrics |= {f"loss/{name}_mean": t.mean, f"loss/{name}_max": t.top}
    return metrics | {
        "credit/advantage_std": jnp.sqrt(jnp.maximum(square.mean - advantage.mean**2, 0)),
        "optim/updates": total.made,
        "optim/skipped": reports.made.size - total.made,
        "batch/empty": total.empty,
    }


def batch_metrics(batch: Batch, step: Array) -> Metrics:
    """What was taken: rewards, lengths, and how many steps older than the trainer's the weights
    were that sampled."""
    length = jnp.zeros(batch.valid.shape, jnp.int32).at[batch.rollout].add(batch.acted.sum(-1))
    reward = tally(batch.reward, batch.valid)
    deviation = tally((batch.reward - reward.mean) ** 2, batch.valid)
    lengths = tally(length, batch.valid)
    metrics = {
        "reward/mean": reward.mean,
        "reward/std": jnp.sqrt(deviation.mean),
        "response/length_mean": lengths.mean,
        "response/length_max": lengths.top,
        "response/truncated_frac": tally(batch.truncated, batch.valid).mean,
        "batch/valid_rollouts": batch.valid.sum(),
        "batch/action_tokens": batch.acted.sum(),
    }
    age = tally(step - batch.version, batch.acted & (batch.version >= 0))
    return metrics | {"sampler/staleness_mean": age.mean, "sampler/staleness_max": age.top}


def sampler_gap(batch: Batch, logp: Array, step: Array) -> Metrics:
    """Metrics of the gap to ``logp``, the trainer's log-probs before anything moved."""
    gap, known = jnp.abs(logp - batch.sampler_logp), batch.acted & (batch.version >= 0)
    return gap_metrics(gap, step - batch.version, known)


def gap_metrics(gap: Array, lag: Array, mask: Array) -> Metrics:
    """How far the sampler's log-probs are from the trainer's (nats, absolute), and how much of that
    follows from older weights.

    ``gap_p99`` is the value that at most a hundredth of the tokens exceed. ``gap_lag_share`` is the
    squared correlation of gap and lag (steps): the share of the gap's variance that a line through
    the lag explains; 0 where all tokens are of one version.
    """
    told, few = tally(gap, mask), mask.sum() // 100

    def halved(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        middle = (ends[0] + ends[1]) / 2
        low = (mask & (gap > middle)).sum() <= few
        return jnp.where(low, ends[0], middle), jnp.where(low, middle, ends[1])

    # Halving an interval sums counts over the devices; sorting would bring all tokens to each.
    begin = jnp.zeros_like(told.top), told.top
    p99 = jax.lax.fori_loop(0, 24, halved, begin)[1]
    off, late = gap - told.mean, lag - tally(lag, mask).mean
    both, apart, ages = (tally(x, mask).mean for x in (off * late, off * off, late * late))
    varies = (apart > 0) & (ages > 0)
    share = both**2 / jnp.where(varies, apart * ages, 1.0)
    return {
        "sampler/gap_mean": told.mean,
        "sampler/gap_p99": p99,
        "sampler/gap_max": told.top,
        "sampler/gap_lag_share": jnp.where(varies, share, 0.0),
    }


def optimizer_metrics(trained: Role) -> Metrics:
    """The learning rate used last."""
    rate = optax.tree.get(trained.opt_state, "learning_rate")
    return {} if rate is None else {"optim/learning_rate": rate}


def shown_rows(batch: Batch, reports: Report) -> Metrics:
    """The first rows of a take, as they are shown: ids, which of them acted, and advantages."""
    assert reports.advantage is not None
    advantage = reports.advantage[0, 0]
    rows = advantage.shape[0]
    return {
        f"{SHOWN}tokens": batch.tokens[:rows],
        f"{SHOWN}acted": batch.acted[:rows],
        f"{SHOWN}advantage": advantage.astype(jnp.float32),
    }


def finite(metrics: Metrics) -> Metrics:
    """Float32 numbers; those not finite become 0 and are counted in ``metrics/nonfinite``. Arrays
    stay as they are."""
    arrays = {name: x for name, x in metrics.items() if jnp.ndim(x)}
    metrics = {name: x for name, x in metrics.items() if name not in arrays}
    wide = jnp.stack([jnp.asarray(x, jnp.float32) for x in metrics.values()])
    good = jnp.isfinite(wide)
    kept = dict(zip(metrics, jnp.where(good, wide, 0), strict=True)) | arrays
    return kept | {"metrics/nonfinite": (~good).sum().astype(jnp.float32)}


def make_step(
    policy: Scorer,
    algorithm: Algorithm,
    tx: optax.GradientTransformation,
    *,
    mesh: Mesh,
    epochs: int,
    minibatches: int,
    micro_rollouts: int,
    rollouts_per_group: int,
    lesson_txs: Mapping[str, optax.GradientTransformation] | None = None,
    routed: RoutingConfig | None = None,
    shown: int = 0,
) -> Step:
    """The step of a phase.

    ``policy`` has ``score``, ``axes`` and ``rules`` as ``model/policy.py``'s. A take is cut into
    ``minibatches`` equal updates at group borders and walked through ``epochs`` times; an update
    goes through the model ``micro_rollouts`` at a time. ``lesson_txs`` are the optimizers of other
    roles that the algorithm trains; ValueError naming those that lack. Cuts that do not fit raise
    ValueError (see ``Plan``) when the first batch comes. ``routed`` is given for a student with
    experts. With ``shown`` the metrics also hold arrays for people: the first so many rows with
    their advantages, histograms (see ``spread.py``), and experts' loads.
    """
    cuts = {
        "epochs": epochs,
        "minibatches": minibatches,
        "micro_rollouts": micro_rollouts,
        "rollouts_per_group": rollouts_per_group,
    }
    lesson_txs = lesson_txs or {}
    pupils = [who for who, _ in algorithm.lessons]
    if len({STUDENT, *pupils}) != len(pupils) + 1:
        raise ValueError(f"lessons for {pupils}; allowed: one a role, none for the student")
    lacking = sorted(set(pupils) - set(lesson_txs))
    if lacking:
        raise ValueError(f"the algorithm trains {lacking}; allowed: roles with an optimizer")
    return Step(policy, algorithm, tx, mesh, cuts, lesson_txs, routed, shown)
