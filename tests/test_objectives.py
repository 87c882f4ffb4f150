"""Each config's method, on rollouts of a real pool: a step down its gradient lowers its objective,
and goes through a model no more often than its scorers ask for."""

import dataclasses
import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath

from configs import base
from jaxrl.algorithms import contract
from jaxrl.mesh import make_mesh
from jaxrl.model.policy import Policy
from jaxrl.model.transformer import UNGUIDED
from jaxrl.model.versions import write_weights
from jaxrl.pool.contract import Completion
from jaxrl.pool.rollout import StopReason
from jaxrl.train import accumulate, loop, roles, rounds, settings
from jaxrl.train.checkpoint import Checkpoints
from jaxrl.train.collate import Shown, collate
from jaxrl.train.loop import Parts
from jaxrl.train.metrics import Logger, Progress
from jaxrl.train.settings import Phase
from jaxrl.train.state import STUDENT, models_of, roles_of
from jaxrl.train.workdir import Workdir

ROOT = Path(__file__).parents[1]
NAMES = contract.names()

# A verifier that first weights please now and then, so that rewards differ inside a group.
SOURCE = """
from jaxrl.tasks import reasoning
from jaxrl.tasks.contract import Verdict

class Source(reasoning.Source):
    def verify(self, task, response):
        right = response.strip()[:1].isdigit()
        return Verdict(score=float(right), correct=right, components={"score": float(right)})
"""


# Methods whose takes teach nothing unless some answers are right, or some texts are texts.
SKILLED = ("cover", "gvpo_distill", "mimo", "praxis")
# Their weights on log p are detached and move with the policy, so the value of their loss does not
# tell what its gradient lowers.
DETACHED = ("cispo", "mimo")


class Prompter:
    """Stands in for a language model that knows some answers: of every two samples of a question,
    the first is the task's own answer and the second the sampler's.
    """

    def __init__(self, parts: Parts) -> None:
        self.sampler, self.version, encode = parts.sampler, None, parts.tokenizer.encode
        stop = parts.tokenizer.eos_id
        self.answers = {
            tuple(encode(task.prompt)): np.array([*encode(task.answer), stop], np.int32)
            for task in parts.source.tasks("train")
            if task.answer
        }

    def load(self, version: Any, path: str) -> None:
        self.sampler.load(version, path)

    def generate(self, requests: Any) -> list[Completion]:
        completions = self.sampler.generate(requests)
        for i, request in enumerate(requests):
            known = self.answers.get(tuple(request.prompt))
            if known is not None and request.sample % 2 == 0:
                known = known[-request.max_new_tokens :]
                logp = np.full(len(known), -0.5, np.float32)
                version = completions[i].version
                completions[i] = Completion(known, logp, version, StopReason.STOP)
        return completions


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Any:
    """A folder to work in, with the easy source on the path; parts that configs share."""
    folder = tmp_path_factory.mktemp("objectives")
    (folder / "easy_sums.py").write_text(SOURCE)
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(folder))
    # One device of the tests' eight: nothing here is about sharding, and it is run op by op.
    one = lambda sizes, _=None: make_mesh(sizes, jax.devices()[:1])  # noqa: E731
    patch.setattr(rounds.mesh, "make_mesh", one)
    yield folder, {}
    patch.undo()


def last_phase(name: str) -> tuple[list[Phase], Phase]:
    """A method's own phase, as :tiny, on one device."""
    config: Any = importlib.import_module(f"configs.{name}").get_config("tiny")
    explained: Any = base.get_config("")
    if config.task.source == explained.task.source:
        config.task.source = "easy_sums"
    phases = settings.phases(config)
    mine = [phase for phase in phases if phase.algorithm["name"] == name]
    return phases, mine[-1]


def parts_of(phases: list[Phase], desk: Any) -> Parts:
    """Task, tokenizer, model and sampler; compiled once for configs that share them."""
    folder, shared = desk
    phase = phases[0]
    key = json.dumps(
        [dataclasses.asdict(part) for part in (phase.model, phase.task, phase.sampler)]
        + [phase.pool.tokenizer, phase.pool.tokenizer_vocab_size],
        default=str,
    )
    if key not in shared:
        shared[key] = rounds.assemble(phases, epath.Path(folder))
    parts = shared[key]
    others = tuple(sorted(roles.forms(phases).items()))
    return dataclasses.replace(parts, policy=dataclasses.replace(parts.policy, others=others))


def batch_and_models(phases: list[Phase], phase: Phase, desk: Any) -> tuple[Parts, Any, Any]:
    """One take of the phase's pool, sampled by first weights, and every model that it reads."""
    parts = parts_of(phases, desk)
    root = epath.Path(desk[0]) / phase.algorithm["name"]
    # Any other model does as a teacher: the test is of the method.
    teacher = parts.policy.form_of(roles.TEACHER).init(jax.random.key(1))
    if phase.scorers.teacher.weights:
        path = rounds.stored(phase.scorers.teacher.weights, root)
        write_weights(path, teacher, epoch=0, step=0)
    student = parts.policy.init(jax.random.key(0))
    state = rounds.fresh(phase, parts.policy, student, teacher)
    root.mkdir(parents=True, exist_ok=True)
    books = loop.Books(
        workdir=Workdir(root),
        checkpoints=Checkpoints(root / "checkpoints", keep=1),
        logger=Logger(root, start_step=0),
        progress=Progress(1),
        identity={},
        prompts={},
    )
    skilled: Any = parts
    if phase.algorithm["name"] in SKILLED:
        skilled = dataclasses.replace(parts, generator=cast(Any, Prompter(parts)))
    pool = rounds.open_pool(phase, skilled, books)
    if phase.pool.kind == "local":
        pool.publish(*loop.publish(books, phase, state))
    groups, _ = pool.take(phase.train.groups, phase.first_step)
    pool.close()
    books.close()
    algorithm = contract.load(**phase.algorithm)
    batch, _ = collate(
        groups,
        token_buckets=phase.train.token_buckets,
        groups_per_step=phase.train.groups,
        rollouts_per_group=phase.pool.rollouts_per_group,
        minibatches=phase.train.minibatches,
        needs=algorithm.needs,
        algorithm=phase.algorithm["name"],
        shown=Shown(
            loop.views_of(phase, algorithm), phase.train.view_token_buckets, parts.tokenizer
        ),
    )
    # First weights seldom stop by themselves, and methods that train no truncated rollout would
    # have nothing to learn from.
    batch = dataclasses.replace(batch, truncated=np.zeros_like(batch.truncated))
    return parts, state, jax.tree.map(jnp.asarray, batch)


@dataclasses.dataclass(frozen=True)
class Counted(Policy):
    """A policy that counts how often it goes through a trunk."""

    passes: Any = dataclasses.field(default_factory=Counter, compare=False, hash=False)

    def score(self, params, batch, read, scorers, guidance=UNGUIDED):
        self.passes.update(scorers)
        return super().score(params, batch, read, scorers, guidance)


def taught(passes, before, after, models, taken) -> float:
    """How the loss moves with the readings of another policy, its slope by them held: the sum of
    d loss / d reading times the readings' change. Counts as one evaluation of the loss.
    """
    batch, observed, credit = taken

    def read(params):
        scored = {**models, passes.who: {**models[passes.who], **params}}
        return passes.policy.score(scored, batch, passes.verbs.read, passes.verbs.scorers)

    def loss(reading):
        return (passes.verbs.loss(reading, batch, observed, credit)[0] * credit.weight).sum()

    start = read(before)
    slope = jax.grad(loss)(start)
    passes.policy.passes.subtract(passes.verbs.scorers)
    end = read(after)
    return float(sum((slope[key] * (end[key] - start[key])).sum() for key in start))


@pytest.mark.parametrize("name", NAMES)
def test_a_step_down_its_gradient_lowers_its_objective(name, desk):
    phases, phase = last_phase(name)
    parts, state, batch = batch_and_models(phases, phase, desk)
    algorithm = contract.load(**phase.algorithm)
    counted = Counted(**{f.name: getattr(parts.policy, f.name) for f in dataclasses.fields(Policy)})
    student = accumulate.Passes(counted, algorithm, parts.mesh, STUDENT)
    batch = accumulate.sanitised(batch)
    models = models_of(state.roles)
    with jax.disable_jit():
        observed, _ = student.observe(algorithm, models, batch, 1)
        credit = algorithm.credit(batch, observed)
        if algorithm.refresh == "update":
            observed = {**observed, **{f"start/{key}": x for key, x in observed.items()}}
            credit = algorithm.credit(batch, observed)
        learners = [(STUDENT, student, credit)]
        for who, lesson in algorithm.lessons:
            passes = accumulate.Passes(counted, lesson, parts.mesh, who)
            learners.append((who, passes, lesson.credit(batch, observed)))
        for who, passes, its_credit in learners:
            trainable = state.roles[who].params
            (before, _), grads = jax.value_and_grad(passes.loss, has_aux=True)(
                trainable, models, (batch, observed, its_credit), None
            )
            norm = float(optax.tree.norm(grads))
            weighed = int((its_credit.weight != 0).sum())
            assert norm > 0, f"{who} learns nothing: {weighed} tokens of this take have a weight"
            # So short a step that curvature does not matter: 1e-3 of the objective's slope.
            step = 1e-2 / norm
            moved = jax.tree.map(lambda p, g, step=step: p - step * g, trainable, grads)
            if name in DETACHED:
                change = taught(passes, trainable, moved, models, (batch, observed, its_credit))
                assert change < 0, who
                continue
            after, _ = passes.loss(moved, models, (batch, observed, its_credit), None)
            assert float(after) < float(before), who
    # One pass for each observer, one for each scorer of each evaluation of a loss (two here).
    asked = Counter(algorithm.observers)
    for _, passes, _ in learners:
        asked.update({scorer: 2 for scorer in passes.verbs.scorers})
    assert counted.passes == asked
    assert {who for who, _ in asked} <= roles_of(algorithm)
