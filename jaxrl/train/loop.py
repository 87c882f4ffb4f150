"""The loop of one phase: take, collate, step, publish, log, save.

Read ``train`` from top to bottom to follow a batch from the pool to the update.
"""

import dataclasses
import hashlib
import json
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl import evaluate, mesh
from jaxrl.algorithms import contract as algorithms
from jaxrl.algorithms.contract import Algorithm, everyone
from jaxrl.batch import Batch
from jaxrl.model.policy import Policy
from jaxrl.model.sampler import Sampler
from jaxrl.model.versions import write_weights
from jaxrl.pool.characters import CharacterTokenizer
from jaxrl.pool.contract import Group, Manifest, PoolEnd, PoolError, RolloutPool
from jaxrl.pool.published_tokenizer import PublishedTokenizer
from jaxrl.pool.rollout import ACTION, ROUTES, Version
from jaxrl.pool.tokenizer import SentencePieceTokenizer
from jaxrl.tasks.contract import Split, TaskSource
from jaxrl.train import optimizer, roles, routing
from jaxrl.train.accounts import Account
from jaxrl.train.checkpoint import CheckpointError, Checkpoints, Restored
from jaxrl.train.collate import Shown, collate
from jaxrl.train.metrics import Logger, Progress, samples_table
from jaxrl.train.packing import Packing
from jaxrl.train.routing import RoutingConfig
from jaxrl.train.settings import Phase
from jaxrl.train.state import TrainState
from jaxrl.train.step import Step, make_step
from jaxrl.train.workdir import Workdir


@dataclasses.dataclass
class Compilation:
    """Seconds that this process spent on compiling so far."""

    seconds: float = 0.0

    def __post_init__(self) -> None:
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        # Tracing is left out: its events nest, so that their sum counts twice.
        if event.endswith(("backend_compile_duration", "jaxpr_to_mlir_module_duration")):
            self.seconds += duration_secs


# Listeners cannot be removed, so there is one for the process.
COMPILATION = Compilation()


Reader = SentencePieceTokenizer | CharacterTokenizer | PublishedTokenizer


@dataclasses.dataclass(frozen=True)
class Models:
    """What works on the devices, the same in all phases of a run; arrays come later."""

    mesh: Mesh
    policy: Policy
    sampler: Sampler


@dataclasses.dataclass(frozen=True)
class Parts(Models):
    """What does the work, the same in all phases of a run."""

    source: TaskSource
    tokenizer: Reader


@dataclasses.dataclass
class Books:
    """What is written down, and the accounts that go into each checkpoint."""

    workdir: Workdir
    checkpoints: Checkpoints
    logger: Logger
    progress: Progress
    identity: Mapping[str, Any]  # what a continuation of this run must share with it
    prompts: Mapping[str, str]  # text of the train split's tasks, by key
    epoch: int = 0  # of the lineage: one more after each restart
    consumed: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"groups": 0, "digest": "", "last": []}
    )  # groups trained so far and the chained digest of their manifests
    accounts: dict[str, Account] = dataclasses.field(default_factory=dict)  # by phase
    compilations: dict[str, int] = dataclasses.field(default_factory=dict)
    published: tuple[Version, str] | None = None  # the newest weights directory
    saved: int = -1  # step of the newest checkpoint

    def open(self, restored: Restored | None) -> None:
        """Take over the accounts of a checkpoint, if any, and drop what was written past it.

        The epoch is above all that ever published here, also above those of attempts that ended
        before their first checkpoint: a version never means two sets of weights.
        """
        epochs = [epoch for epoch, _ in self.workdir.published()]
        self.workdir.forget_after(restored.step if restored else -1)
        if restored:
            epochs.append(restored.host["epoch"])
            self.saved = restored.step
            self.consumed = restored.host["consumed"]
            accounts = restored.host["accounts"]
            self.accounts = {name: Account(**account) for name, account in accounts.items()}
            self.progress.note(f"continuing at step {restored.step}")
            self.logger.scalars(restored.step, {"checkpoint/fallbacks": restored.fallbacks})
        self.epoch = max(epochs, default=-1) + 1

    def consume(self, manifest: Manifest) -> None:
        """Chain the manifest of a step into the account of what was trained."""
        groups = [list(group) for group in manifest.groups]
        chained = self.consumed["digest"] + json.dumps(groups)
        self.consumed = {
            "groups": self.consumed["groups"] + len(groups),
            "digest": hashlib.blake2b(chained.encode(), digest_size=16).hexdigest(),
            "last": groups,
        }
        self.workdir.journal(manifest)

    def close(self) -> None:
        """End the files that are open."""
        self.progress.close()
        self.logger.close()
        self.checkpoints.close()


def publish(books: Books, phase: Phase, state: TrainState) -> tuple[Version, str]:
    """The student's weights as a versioned directory: which version, and where it is."""
    step = int(state.step)
    if books.published is None or books.published[0].step != step:
        path = books.workdir.weights(books.epoch, step)
        student = state.roles["student"].all
        digest = write_weights(path, student, epoch=books.epoch, step=step)
        books.published = Version(books.epoch, step, digest), str(path)
        books.workdir.drop_weights(phase.checkpoint.keep_weights)
    return books.published


def _asked(result: Mapping[str, Any]) -> int:
    """How many prompts a result was asked for, whatever became of them."""
    return sum(result.get(name, 0) for name in ("prompts", "rejected_long", "unverified"))


def differs(result: Mapping[str, Any], phase: Phase) -> list[str]:
    """Settings of ``eval`` that a held-out result was not measured with: they may be changed."""
    asked = min(phase.eval.prompts, phase.task.held_out_prompts)
    seen = result.get("seen", {})
    pairs = {
        "eval.seen_prompts": (_asked(seen), min(phase.eval.seen_prompts, phase.task.train_prompts)),
        "eval.samples": (result["samples"], phase.eval.samples),
        "eval.temperature": (result["temperature"], phase.eval.temperature),
        "eval.prompts": (_asked(result), asked),
    }
    return [f"{name} was {was!r}, is {now!r}" for name, (was, now) in pairs.items() if was != now]


def measure(parts: Parts, books: Books, phase: Phase, state: TrainState) -> dict[str, Any]:
    """Held-out accuracy of these weights, and that on questions of the train split if asked for;
    read back if it was measured before a restart."""
    step = int(state.step)
    result = books.workdir.read_eval(step)
    if result is None or differs(result, phase):
        parts.sampler.load(*publish(books, phase, state))

        def accuracy(split: Split, prompts: int, first_group: int) -> dict[str, Any]:
            return evaluate.evaluate(
                parts.sampler,
                parts.tokenizer,
                parts.source,
                parts.source.tasks(split)[:prompts],
                samples=phase.eval.samples,
                temperature=phase.eval.temperature,
                max_new_tokens=phase.sampler.max_new_tokens,
                max_prompt_tokens=max(phase.sampler.prompt_buckets),
                first_group=first_group,
            ).to_json()

        result = accuracy("held_out", phase.eval.prompts, evaluate.FIRST_GROUP)
        if phase.eval.seen_prompts:
            first = evaluate.FIRST_GROUP + phase.eval.prompts
            result["seen"] = accuracy("train", phase.eval.seen_prompts, first)
        books.workdir.write_eval(step, result)
    note(books, step, "eval", "held out", result)
    if "seen" in result:
        note(books, step, "eval_seen", "of the train split", result["seen"])
    return result


def note(books: Books, step: int, area: str, title: str, result: Mapping[str, Any]) -> None:
    """Curves and a line of one accuracy."""
    k = result["k"]
    accuracies = {
        f"avg_at_{k}": result["avg_at_k"],
        f"pass_at_{k}": result["pass_at_k"],
        "greedy": result["greedy"],
    }
    books.logger.scalars(step, {f"{area}/{name}": value for name, value in accuracies.items()})
    stated = "  ".join(f"{name} {100 * value:.1f} %" for name, value in accuracies.items())
    books.progress.note(f"{title} after {step} steps: {stated}")


def save(books: Books, phase: Phase, state: TrainState, pool: RolloutPool) -> None:
    """Checkpoint all that the next step depends on, then let the pool commit what it covers."""
    host = {
        "phase": phase.name,
        "epoch": books.epoch,
        "identity": books.identity,
        "consumed": books.consumed,
        "accounts": {name: dataclasses.asdict(x) for name, x in books.accounts.items()},
        "pool": pool.state(),
    }
    books.logger.flush()  # curves of steps that will not run again
    books.checkpoints.save(int(state.step), state, host)
    books.saved = int(state.step)
    pool.commit(int(state.step) - 1)


def save_rest(books: Books, phase: Phase, state: TrainState, pool: RolloutPool) -> None:
    """Checkpoint the steps of this phase that no checkpoint covers, where a pool gives no more."""
    if int(state.step) > phase.first_step and int(state.step) != books.saved:
        save(books, phase, state, pool)


def rescue(books: Books, phase: Phase, state: TrainState, pool: RolloutPool) -> None:
    """``save_rest`` beside an error of the pool, which stays the one that ends the run."""
    try:
        save_rest(books, phase, state, pool)
    except (CheckpointError, OSError) as error:
        books.progress.note(f"the pool failed, and so did a last checkpoint: {error}")


def log(
    books: Books,
    phase: Phase,
    step: int,
    groups: Sequence[Group],
    numbers: Mapping[str, float],
    seconds: Mapping[str, float],
) -> None:
    """Curves, samples and the progress line of one step."""
    account = books.accounts.setdefault(phase.name, Account())
    tokens = int(numbers["batch/action_tokens"])
    working = account.add(phase, groups, numbers, seconds)
    if (step + 1) % phase.log.every_steps == 0:
        rate = {"train/tokens_per_s": tokens / working}
        books.logger.scalars(step, {**numbers, **seconds, **rate})
    if phase.log.samples and step % phase.log.samples_every_steps == 0:
        rows = books.workdir.write_samples(step, groups, books.prompts, phase.log.samples)
        books.logger.text(step, "samples/rollouts", samples_table(rows))
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        lengths = [int((rollout.kind == ACTION).sum()) for rollout in rollouts]
        books.logger.histograms(step, {"reward/spread": rewards, "response/length": lengths})
    books.progress.update(
        step + 1,
        {"loss": numbers["loss/total"], "reward": numbers["reward/mean"]}
        | ({"skipped": numbers["optim/skipped"]} if numbers["optim/skipped"] else {}),
        tokens=tokens,
        seconds=working + seconds["time/compile_s"],
        compile_seconds=seconds["time/compile_s"],
        label=phase.name,
    )


def views_of(phase: Phase, algorithm: Algorithm) -> dict[str, str]:
    """Templates of the contexts besides the plain one that an algorithm reads. ValueError naming
    those that the config does not define, or that nothing can fill."""
    asked = sorted({view for _, view in everyone(algorithm)} - {"plain"})
    lacking = [view for view in asked if view not in phase.scorers.views]
    if lacking or (asked and not phase.train.view_token_buckets):
        raise ValueError(
            f"phases.{phase.name}: algorithm {phase.algorithm['name']!r} reads the views {asked}; "
            f"allowed: templates for each in scorers.views (there are: "
            f"{sorted(phase.scorers.views)}), and train.view_token_buckets that hold them (there "
            f"are: {phase.train.view_token_buckets!r})"
        )
    templates = {view: phase.scorers.views[view] for view in asked}
    deaf = [view for view in asked if "{feedback}" in templates[view]]
    if deaf and phase.pool.kind == "local" and not phase.pool.max_feedback_tokens:
        raise ValueError(
            f"phases.{phase.name}: the views {deaf} show feedback, but "
            "pool.max_feedback_tokens=0; allowed: > 0"
        )
    return templates


def routing_of(phase: Phase) -> RoutingConfig | None:
    """How a phase's experts are trained; None of a dense model. ValueError naming the fields that
    ask for routes which nobody records."""
    experts = phase.model.experts.count
    replay = phase.train.routes == "replayed"
    recorded = phase.sampler.record_routes and phase.pool.kind == "local"
    if replay and not (experts and recorded):
        raise ValueError(
            f"phases.{phase.name}: train.routes='replayed'; allowed: 'free', or "
            "sampler.record_routes=True, pool.kind='local' and a model with experts"
        )
    if phase.train.balance_weight and not experts:
        raise ValueError(
            f"phases.{phase.name}: train.balance_weight={phase.train.balance_weight!r}; allowed: 0 "
            "(model.experts.count=0)"
        )
    if not experts:
        return None
    weight = phase.train.balance_weight
    return RoutingConfig.of(phase.model, recorded=recorded, replay=replay, balance_weight=weight)


def packing_of(phase: Phase) -> Packing | None:
    """How a phase's rows are packed; None if they are not. ValueError naming the fields that do not
    suit its prompts and responses."""
    packing, sampler = phase.train.packing, phase.sampler
    if not packing.on:
        return None
    response = sampler.max_new_tokens + phase.pool.max_feedback_tokens
    shapes = packing.shapes(sampler.prompt_buckets, response, phase.pool.rollouts_per_group)
    return Packing(shapes, (ROUTES,) if phase.train.routes == "replayed" else ())


def prepare(parts: Models, phase: Phase) -> tuple[Algorithm, Step]:
    """A phase's algorithm and step.

    Raises ValueError or TypeError, naming the fields, for what would otherwise fail at the first
    batch: cuts that do not divide, and rollouts that may not fit into a row.
    """
    algorithm = algorithms.load(**phase.algorithm)
    longest = max(phase.sampler.prompt_buckets) + phase.sampler.max_new_tokens
    longest += phase.pool.max_feedback_tokens
    if phase.pool.kind == "local" and longest > max(phase.train.token_buckets):
        raise ValueError(
            f"train.token_buckets={phase.train.token_buckets!r}; allowed: the longest holds a "
            f"prompt and its response, {longest} tokens (sampler.prompt_buckets + max_new_tokens + "
            "pool.max_feedback_tokens)"
        )
    routed = routing_of(phase)
    shapes = parts.policy.shapes
    trained, frozen = optimizer.split(shapes, optimizer.freezing(phase.optimizer, shapes))
    if routed is not None:
        routing.refuse_pointless_balance(routed, sorted(frozen))
    step = make_step(
        parts.policy,
        algorithm,
        optimizer.build(phase.optimizer),
        mesh=parts.mesh,
        epochs=phase.train.epochs,
        minibatches=phase.train.minibatches,
        micro_rollouts=phase.train.micro_rollouts,
        rollouts_per_group=phase.pool.rollouts_per_group,
        lesson_txs=roles.learners(phase, algorithm),
        routed=routed,
    )
    packing_of(phase)
    rollouts = phase.train.groups * phase.pool.rollouts_per_group
    step.plan(rollouts, phase.train.packing.on)
    views_of(phase, algorithm)
    half_ulp = 2.0**-9 / math.sqrt(phase.model.width)  # of a weight of typical size, in bfloat16
    narrow = any(x.dtype == jax.numpy.bfloat16 for x in trained.values())
    if narrow and phase.optimizer.learning_rate < half_ulp:
        warnings.warn(
            f"optimizer.learning_rate={phase.optimizer.learning_rate} is below half a unit in the "
            f"last place ({half_ulp:.1e}) of most weights that are trained in bfloat16: they "
            "will not move; keep float32 masters",
            stacklevel=2,
        )
    return algorithm, step


def lay_out(
    parts: Parts, phase: Phase, algorithm: Algorithm, groups: Sequence[Group]
) -> tuple[Batch, dict[str, float]]:
    """Groups as a Batch on the mesh, and what collate counted."""
    routed = routing_of(phase)
    views, buckets = views_of(phase, algorithm), phase.train.view_token_buckets
    batch, counts = collate(
        groups,
        token_buckets=phase.train.token_buckets,
        groups_per_step=phase.train.groups,
        rollouts_per_group=phase.pool.rollouts_per_group,
        minibatches=phase.train.minibatches,
        needs=(*algorithm.needs, *(routed.needs if routed else ())),
        algorithm=phase.algorithm["name"],
        shown=Shown(views, buckets, parts.tokenizer),
        packing=packing_of(phase),
    )
    return mesh.place(batch, parts.mesh, mesh.batch_sharding(parts.mesh).spec), counts


def is_due(phase: Phase, step: int) -> bool:
    """Whether held-out accuracy is measured after so many steps, besides before and after."""
    return phase.eval.every_steps > 0 and step % phase.eval.every_steps == 0


def train(
    parts: Parts, books: Books, phase: Phase, state: TrainState, pool: RolloutPool
) -> TrainState:
    """Run the steps that are left of a phase.

    One step: take whole groups, pad them to a Batch, update the weights, publish them, log, save.
    Ends early, with a line that says so, when the pool has nothing left.
    """
    algorithm, train_step = prepare(parts, phase)
    if int(state.step) > phase.first_step and is_due(phase, int(state.step)):
        measure(parts, books, phase, state)  # its curve was cut where the run resumes
    save_s = 0.0
    for step in range(int(state.step), phase.last_step):
        began, compiled = time.monotonic(), COMPILATION.seconds
        try:
            groups, manifest = pool.take(phase.train.groups, step)
        except PoolEnd as end:
            books.progress.note(f"{phase.name} ends at step {step} of {phase.last_step}: {end}")
            save_rest(books, phase, state, pool)
            break
        except PoolError:
            rescue(books, phase, state, pool)  # nothing that was trained is lost with the pool
            raise
        taken, compiled_then = time.monotonic(), COMPILATION.seconds
        placed, counts = lay_out(parts, phase, algorithm, groups)
        with jax.transfer_guard("disallow"):
            state, metrics = train_step(state, placed)
        numbers = {name: float(value) for name, value in jax.device_get(metrics).items()}
        stepped = time.monotonic()
        books.consume(manifest)
        every = phase.pool.publish_every_steps
        if every and (step + 1) % every == 0:
            try:
                pool.publish(*publish(books, phase, state))
            except PoolError:
                rescue(books, phase, state, pool)
                raise
        numbers |= {f"pool/{name}": count for name, count in manifest.counts.items()}
        numbers |= {f"batch/{name}": count for name, count in counts.items()}
        seconds = {
            "time/take_s": taken - began,
            "time/step_s": stepped - taken,
            "time/publish_s": time.monotonic() - stepped,
            "time/save_s": save_s,  # after the step before
            "time/compile_s": COMPILATION.seconds - compiled,
            "time/take_compile_s": compiled_then - compiled,  # of that, in the take
        }
        log(books, phase, step, groups, numbers, seconds)
        logged = time.monotonic()
        if (step + 1) % phase.checkpoint.every_steps == 0 or step + 1 == phase.last_step:
            save(books, phase, state, pool)
        save_s = time.monotonic() - logged
        if is_due(phase, step + 1):
            measure(parts, books, phase, state)
    books.compilations[f"step:{phase.name}"] = train_step.trace_count
    return state
