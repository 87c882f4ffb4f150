"""The loop of one phase: take, collate, step, publish, log, save.

Read ``train`` from top to bottom to follow a batch from the pool to the update.
"""

import dataclasses
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl import evaluate, mesh
from jaxrl.algorithms import contract as algorithms
from jaxrl.algorithms.contract import Algorithm, everyone
from jaxrl.batch import Batch
from jaxrl.model.policy import Policy
from jaxrl.model.sampler import Sampler
from jaxrl.model.versions import write_weights
from jaxrl.pool.characters import CharacterTokenizer
from jaxrl.pool.contract import Generator, Group, Manifest, PoolEnd, RolloutPool
from jaxrl.pool.rollout import ROUTES, Version
from jaxrl.pool.tokenizer import SentencePieceTokenizer
from jaxrl.tasks.contract import Split, TaskSource
from jaxrl.train import heap, hosts, optimizer, roles, routing
from jaxrl.train.accounts import Account
from jaxrl.train.books import Books, log, note, rescuing, save, save_rest
from jaxrl.train.collate import Shown, collate
from jaxrl.train.packing import Packing
from jaxrl.train.routing import RoutingConfig
from jaxrl.train.settings import Phase
from jaxrl.train.state import TrainState
from jaxrl.train.step import Step, make_step

if TYPE_CHECKING:  # slow to load, and the main job's is made from its task's text
    from jaxrl.pool.published_tokenizer import PublishedTokenizer


MESSY_S = 1.0  # a compilation that takes longer leaves a heap worth handing back


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
        if event.endswith("backend_compile_duration") and duration_secs > MESSY_S:
            heap.hand_back()


# Listeners cannot be removed, so there is one for the process.
COMPILATION = Compilation()


Reader: TypeAlias = "SentencePieceTokenizer | CharacterTokenizer | PublishedTokenizer"


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
    generator: Generator  # the sampler, of all processes where there are several


def publish(books: Books, phase: Phase, state: TrainState) -> tuple[Version, str]:
    """The student's weights as a versioned directory: which version, and where it is."""
    step = int(state.step)
    if books.published is None or books.published[0].step != step:
        path, epoch = books.workdir.weights(books.epoch, step), books.epoch
        student = hosts.gathered(state.roles["student"].all)
        digest = hosts.crew().lead(lambda: write_weights(path, student, epoch=epoch, step=step))
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


def accuracy(parts: Parts, phase: Phase) -> dict[str, Any]:
    """Held-out accuracy of the weights that the generator holds, and as ``seen`` that on questions
    of the train split if it is asked for."""

    def of(split: Split, prompts: int, first_group: int) -> dict[str, Any]:
        return evaluate.evaluate(
            parts.generator,
            parts.tokenizer,
            parts.source,
            parts.source.tasks(split)[:prompts],
            samples=phase.eval.samples,
            temperature=phase.eval.temperature,
            max_new_tokens=phase.sampler.max_new_tokens,
            max_prompt_tokens=max(phase.sampler.prompt_buckets),
            first_group=first_group,
        ).to_json()

    asked, first = phase.eval, evaluate.FIRST_GROUP
    result = of("held_out", asked.prompts, first)
    if asked.seen_prompts:
        result["seen"] = of("train", asked.seen_prompts, first + asked.prompts)
    return result


def measure(parts: Parts, books: Books, phase: Phase, state: TrainState) -> dict[str, Any]:
    """``accuracy`` of these weights; read back if it was measured before a restart."""
    step, lead = int(state.step), hosts.crew().lead
    result = lead(lambda: books.workdir.read_eval(step))
    if result is None or differs(result, phase):
        published = publish(books, phase, state)
        lead(lambda: parts.generator.load(*published))
        result = lead(lambda: accuracy(parts, phase))
        books.workdir.write_eval(step, result)
        if phase.checkpoint.keep_best:
            books.workdir.note_best((published[0].epoch, step), result["avg_at_k"])
    note(books, step, "eval", "held out", result)
    if "seen" in result:
        note(books, step, "eval_seen", "of the train split", result["seen"])
    return result


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
    if deaf and phase.pool.kind != "recorded" and not phase.pool.max_feedback_tokens:
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
    if phase.pool.kind != "recorded" and longest > max(phase.train.token_buckets):
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
    rollouts = phase.train.groups * phase.pool.rollouts_per_group
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
        shown=min(phase.log.samples, rollouts // phase.train.minibatches),
    )
    packing_of(phase)
    step.plan(rollouts, phase.train.packing.on)
    views_of(phase, algorithm)
    half_ulp = 2.0**-9 / math.sqrt(phase.model.width)  # of a weight of typical size, in bfloat16
    narrow = any(x.dtype == jax.numpy.bfloat16 for x in trained.values())
    lost = phase.optimizer.rounding == "nearest" and phase.optimizer.learning_rate < half_ulp
    if narrow and lost:
        warnings.warn(
            f"optimizer.learning_rate={phase.optimizer.learning_rate} is below half a unit in the "
            f"last place ({half_ulp:.1e}) of most weights that are trained in bfloat16: they "
            "will not move; set optimizer.rounding='stochastic' or 'masters'",
            stacklevel=2,
        )
    return algorithm, step


def lay_out(
    parts: Parts, phase: Phase, algorithm: Algorithm, groups: Sequence[Group]
) -> tuple[Batch, dict[str, float]]:
    """Groups as a Batch in this process's memory, and what collate counted."""
    routed = routing_of(phase)
    views, buckets = views_of(phase, algorithm), phase.train.view_token_buckets
    return collate(
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


Fetched = tuple[Sequence[Group], Manifest, Any, dict[str, float], float]


def fetch(
    parts: Parts, phase: Phase, algorithm: Algorithm, pool: RolloutPool, step: int
) -> Fetched:
    """A take of process 0 and its Batch, seconds of the take last; what another process gets holds
    no groups, and of the Batch the rows that lie on its devices."""
    where = mesh.batch_sharding(parts.mesh)
    crew = hosts.crew()

    def work() -> Fetched:
        began = time.monotonic()
        crew.seconds.clear()
        groups, manifest = pool.take(phase.train.groups, step)
        took = time.monotonic() - began
        batch, counts = lay_out(parts, phase, algorithm, groups)
        counts["tokens"] = int((batch.segment[batch.valid[batch.rollout]] > 0).sum())
        return groups, manifest, batch, counts, took

    def share(fetched: Fetched, process: int) -> Fetched:
        return (), fetched[1], hosts.portion(fetched[2], process, where), *fetched[3:]

    groups, manifest, batch, counts, took = crew.lead(work, share)
    if crew.count > 1 and not crew.index:
        batch = hosts.portion(batch, 0, where)
    return groups, manifest, hosts.place(batch, where), counts, took


def is_due(phase: Phase, step: int) -> bool:
    """Whether held-out accuracy is measured after so many steps, besides before and after."""
    return phase.eval.every_steps > 0 and step % phase.eval.every_steps == 0


def train(
    parts: Parts, books: Books, phase: Phase, state: TrainState, pool: RolloutPool
) -> TrainState:
    """Run the steps that are left of a phase; none, if it was stopped.

    One step: take whole groups, pad them to a Batch, update the weights, publish them, log, save.
    Ends early, with a line that says so, when the pool has nothing left.
    """
    algorithm, train_step = prepare(parts, phase)
    account = books.accounts.get(phase.name, Account())
    if account.stopped:  # what stopped it stands in the checkpoint
        return state
    if int(state.step) > phase.first_step and is_due(phase, int(state.step)):
        measure(parts, books, phase, state)  # its curve was cut where the run resumes
    save_s, first = 0.0, int(state.step)
    for step in range(int(state.step), phase.last_step):
        began, compiled = time.monotonic(), COMPILATION.seconds
        if hosts.told_to_stop(step):
            save_rest(books, phase, state, pool)
            raise hosts.Preempted(f"told to stop: step {step} of {phase.last_step} comes next")
        try:
            with rescuing(books, phase, state, pool):
                groups, manifest, placed, counts, took = fetch(parts, phase, algorithm, pool, step)
        except PoolEnd as end:
            books.progress.note(f"{phase.name} ends at step {step} of {phase.last_step}: {end}")
            save_rest(books, phase, state, pool)
            break
        books.trace(step > first)
        taken, compiled_then = began + took, COMPILATION.seconds
        with jax.transfer_guard("disallow"):
            state, metrics = train_step(state, placed)
        told = jax.device_get(metrics)
        numbers = {name: float(x) for name, x in told.items() if not np.ndim(x)}
        arrays = {name: x for name, x in told.items() if np.ndim(x)}
        stepped = time.monotonic()
        books.consume(manifest)
        every = phase.pool.publish_every_steps
        if every and (step + 1) % every == 0:
            with rescuing(books, phase, state, pool):
                pool.publish(*publish(books, phase, state))
        told = {**manifest.counts, **manifest.readings}
        numbers |= {f"pool/{name}": number for name, number in told.items()}
        numbers |= {f"batch/{name}": count for name, count in counts.items()}
        seconds = {
            "time/take_s": taken - began,
            "time/step_s": stepped - taken,
            "time/publish_s": time.monotonic() - stepped,
            "time/save_s": save_s,  # after the step before
            "time/compile_s": COMPILATION.seconds - compiled,
            "time/take_compile_s": compiled_then - compiled,  # of that, in the take
        }
        log(books, phase, step, groups, numbers, arrays, seconds)
        logged = time.monotonic()
        stop = books.out_of_bounds(phase, numbers)
        if (step + 1) % phase.checkpoint.every_steps == 0 or step + 1 == phase.last_step or stop:
            save(books, phase, state, pool)
        save_s = time.monotonic() - logged
        if is_due(phase, step + 1):
            measure(parts, books, phase, state)
        if stop:
            books.progress.note(f"{phase.name} is stopped after {step + 1} steps: {stop}")
            break
    books.trace(False)
    books.compilations[f"step:{phase.name}"] = train_step.trace_count
    return state
