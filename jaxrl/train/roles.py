"""The models beside the student: of which form they are, where their weights come from, what trains
them."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax

from jaxrl.algorithms import contract as algorithms
from jaxrl.algorithms.contract import Algorithm
from jaxrl.model import novelty
from jaxrl.model.form import ModelConfig
from jaxrl.model.policy import NOVELTY, VALUE, Policy
from jaxrl.train import optimizer
from jaxrl.train.routing import ORIGIN, ROUTER
from jaxrl.train.settings import Phase
from jaxrl.train.state import Role, roles_of, scorer

SELF = "self"
TEACHER = "teacher"

Params = Mapping[str, jax.Array]


def readers(phases: Sequence[Phase], who: str) -> list[Phase]:
    """The phases whose algorithm reads a role."""
    return [p for p in phases if who in roles_of(algorithms.load(**p.algorithm))]


def forms(phases: Sequence[Phase]) -> dict[str, ModelConfig]:
    """Forms of the models that are not of the student's. ValueError where phases differ."""
    found: dict[str, ModelConfig] = {}
    for phase in readers(phases, VALUE):
        found[VALUE] = dataclasses.replace(phase.model, tied_head=False, outputs=1)
    for phase in readers(phases, TEACHER):
        form = phase.scorers.teacher.model
        if found.setdefault(TEACHER, form) != form:
            raise ValueError(
                f"phases.{phase.name}.scorers.teacher.model differs from an earlier phase's; "
                "allowed: one form of teacher a run"
            )
    return {who: form for who, form in found.items() if form != phases[0].model}


def learners(phase: Phase, algorithm: Algorithm) -> dict[str, optax.GradientTransformation]:
    """The optimizers of the roles that an algorithm trains beside the student."""
    return {who: optimizer.build(phase.scorers.optimizer(who)) for who, _ in algorithm.lessons}


def beside(phase: Phase) -> set[str]:
    """Roles that no algorithm reads, but metrics do."""
    return {ORIGIN} if phase.model.experts.count else set()


def build(
    phase: Phase, policy: Policy, student: Params, teacher: Params | None, key: jax.Array
) -> dict[str, Role]:
    """The roles that the phase's algorithm reads, besides student and reference.

    ``self`` starts as the student, in float32 at least: its steps are too small for less; ``value``
    as the student's trunk with an output of 0; ``novelty`` is drawn anew; ``router_origin`` are the
    student's routers as they are now. ``teacher`` are its
    weights, if the algorithm reads one.
    """
    algorithm = algorithms.load(**phase.algorithm)
    txs = learners(phase, algorithm)
    asked = roles_of(algorithm)
    freeze = {who: phase.scorers.optimizer(who).freeze for who in (TEACHER, VALUE, NOVELTY)}
    made: dict[str, Role] = {}
    if SELF in asked:
        average = {n: x.astype(jnp.promote_types(x.dtype, jnp.float32)) for n, x in student.items()}
        made[SELF] = scorer(average, ema_rate=phase.scorers.average.ema_rate)
    if TEACHER in asked:
        assert teacher is not None
        made[TEACHER] = scorer(teacher, tx=txs.get(TEACHER), freeze=freeze[TEACHER])
    if VALUE in asked:
        trunk = {
            name: student[name] if name in student else jnp.zeros(shape.shape, shape.dtype)
            for name, shape in policy.form_of(VALUE).shapes.items()
        }
        made[VALUE] = scorer(trunk, tx=txs.get(VALUE), freeze=freeze[VALUE])
    if NOVELTY in asked:
        width, hidden = phase.model.width, phase.scorers.novelty.hidden
        layers = len(novelty.depths(phase.model.layers))
        params = novelty.init(key, layers=layers, width=width, hidden=hidden)
        fixed = (f"^{novelty.FROZEN}", *freeze[NOVELTY])
        made[NOVELTY] = scorer(params, tx=txs.get(NOVELTY), freeze=fixed)
    if phase.model.experts.count:
        made[ORIGIN] = scorer({name: x for name, x in student.items() if ROUTER.search(name)})
    return made
