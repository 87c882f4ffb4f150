"""The one jitted step: any algorithm, any policy, any mesh of ``data``, ``fsdp``, ``tensor`` and
``expert``.

    observe     scorers that the credit or the loss needs, no gradient, in micro-batches
    credit      once, over the whole take
    update      epochs x minibatches times: gradients of micro-batches are added, then one
                ``tx.update``

Roles with an ``ema_rate`` follow the student after each update. Lessons come last: other roles that
train on the same take, each beside the models as they were when the take began.

An update without a weighted token, or with a gradient that is not finite, is skipped: parameters,
moments and schedule stay as they are and a metric counts it. ``state.step`` counts takes and
advances either way.
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
from jaxrl.batch import Batch
from jaxrl.mesh import ways
from jaxrl.train import accumulate, routing
from jaxrl.train.accumulate import ADVANTAGE, ADVANTAGE_SQUARE, Models, Taken, Tally, tally
from jaxrl.train.routing import Loads, RoutingConfig
from jaxrl.train.state import STUDENT, Params, Role, Scorer, TrainState, models_of, shardings

Metrics = dict[str, Array]

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


@dataclasses.dataclass(frozen=True)
class Learner:
    """A role that is trained: by which passes, with which optimizer."""

    who: str
    passes: accumulate.Passes
    tx: optax.GradientTransformation


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
    ) -> None:
        self.policy, self.algorithm, self.mesh = policy, algorithm, mesh
        self.cuts = cuts
        self.needs = (*algorithm.needs, *(routed.needs if routed else ()))
        passes = accumulate.Passes(policy, algorithm, mesh, STUDENT, routed)
        self.student = Learner(STUDENT, passes, tx)
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
        loss, grads, tallies, loads = learner.passes.gradient(
            role.params, models, (batch, observed, credit), parts, begun
        )
        norm = optax.tree.norm(grads)
        empty = ~(credit.weight != 0).any()
        made = ~empty & jnp.isfinite(norm) & jnp.isfinite(loss)
        changes, opt_state = learner.tx.update(grads, role.opt_state, role.params)
        after = (optax.apply_updates(role.params, changes), opt_state)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(made, new, old), after, (role.params, role.opt_state)
        )
        changed = optax.tree.norm(changes)
        numbers = {"loss/total": loss, "optim/grad_norm": norm, "optim/update_norm": changed}
        report = Report(
            made=made,
            empty=empty,
            numbers={name: tally(x, made) for name, x in numbers.items()},
            tallies={name: t.only_if(made) for name, t in tallies.items()},
            loads=loads,
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
        roles = dict(state.roles)
        observed, begun = self.observe(models_of(roles), batch, plan)

        def cut(credit: Any) -> Taken:
            rows = self.student.passes.rows
            return accumulate.cut_taken((batch, observed, credit), plan.minibatches, rows)

        once = self.algorithm.refresh == "take"
        credit = self.algorithm.credit(batch, observed) if once else None
        student, behind, reports = self.updates(self.student, roles, cut(credit), plan, begun)
        metrics = (
            report_metrics(reports)
            | batch_metrics(batch, observed)
            | optimizer_metrics(roles[STUDENT].params, student)
        )
        if begun is not None and reports.loads is not None:
            loads = jax.tree.map(lambda x: x.sum((0, 1)), reports.loads)
            routed = self.student.passes.routing
            assert routed is not None
            metrics |= routing.metrics(routed, begun, loads)
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
    reports = dataclasses.replace(reports, loads=None)
    total = jax.tree.map(lambda x: x.sum((0, 1)), reports)
    peaks = {name: t.peak.max((0, 1)) for name, t in reports.tallies.items()}
    tallies = {name: dataclasses.replace(t, peak=peaks[name]) for name, t in total.tallies.items()}
    advantage, square = tallies.pop(ADVANTAGE), tallies.pop(ADVANTAGE_SQUARE)
    metrics = {name: t.mean for name, t in total.numbers.items()}
    for name, t in tallies.items():
        metrics |= {f"loss/{name}_mean": t.mean, f"loss/{name}_max": t.top}
    return metrics | {
        "credit/advantage_std": jnp.sqrt(jnp.maximum(square.mean - advantage.mean**2, 0)),
        "optim/updates": total.made,
        "optim/skipped": reports.made.size - total.made,
        "batch/empty": total.empty,
    }


def batch_metrics(batch: Batch, observed: Reading) -> Metrics:
    """What was taken: rewards, lengths, and the gap between sampler's and trainer's log-probs."""
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
    for name in OLD_LOGP & set(observed):
        gap = tally(
            jnp.abs(observed[name] - batch.sampler_logp), batch.acted & (batch.version >= 0)
        )
        metrics |= {"sampler/gap_mean": gap.mean, "sampler/gap_max": gap.top}
    return metrics


def optimizer_metrics(before: Params, trained: Role) -> Metrics:
    """Share of trainable numbers that the take left bit for bit, and the learning rate used last.

    A share near 1 says that steps are below half a unit in the last place: masters too narrow.
    """
    # In float32: there are more parameters than an int32 counts.
    same = jnp.stack(
        [(before[name] == x).sum(dtype=jnp.float32) for name, x in trained.params.items()]
    ).sum()
    metrics = {"optim/frac_params_unchanged": same / float(sum(x.size for x in before.values()))}
    rate = optax.tree.get(trained.opt_state, "learning_rate")
    return metrics if rate is None else metrics | {"optim/learning_rate": rate}


def finite(metrics: Metrics) -> Metrics:
    """Float32 numbers; those not finite become 0 and are counted in ``metrics/nonfinite``."""
    wide = jnp.stack([jnp.asarray(x, jnp.float32) for x in metrics.values()])
    good = jnp.isfinite(wide)
    kept = dict(zip(metrics, jnp.where(good, wide, 0), strict=True))
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
) -> Step:
    """The step of a phase.

    ``policy`` has ``score``, ``axes`` and ``rules`` as ``model/policy.py``'s. A take is cut into
    ``minibatches`` equal updates at group borders and walked through ``epochs`` times; an update
    goes through the model ``micro_rollouts`` at a time. ``lesson_txs`` are the optimizers of other
    roles that the algorithm trains; ValueError naming those that lack. Cuts that do not fit raise
    ValueError (see ``Plan``) when the first batch comes. ``routed`` is given for a student with
    experts.
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
    return Step(policy, algorithm, tx, mesh, cuts, lesson_txs, routed)
