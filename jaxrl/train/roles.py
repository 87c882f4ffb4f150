"""The models beside the student: of which form they are, where their weights come from, what trains
them."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax

from jaxrl.algorithms import contract as algorithms
from jaxrl.algorithms.contract import Algorithm
from jaxrl.model import novelty
from jaxrl.model.adapters import is_adapter
from jaxrl.model.form import ModelConfig
from jaxrl.model.policy import NOVELTY, VALUE, Policy
from jaxrl.train import optimizer
from jaxrl.train.routing import ORIGIN, ROUTER
from jaxrl.train.settings import Phase
from jaxrl.train.state import STUDENT, Role, roles_of, scorer

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


def base_of_teacher(phase: Phase, policy: Policy, fixed: Collection[str]) -> list[str]:
    """What the teacher shares with the student, which leaves ``fixed`` as it is: nothing, or all
    but the adapters with ``scorers.teacher.base="student"``. ValueError if the student moves it."""
    if phase.scorers.teacher.base != STUDENT:
        return []
    base = [name for name in policy.form_of(TEACHER).shapes if not is_adapter(name)]
    if moving := [name for name in base if name not in fixed]:
        raise ValueError(
            f"phases.{phase.name}: scorers.teacher.base='student', but the student trains "
            f"{', '.join(moving[:4])}; allowed: 'own', or optimizer.train='adapters'"
        )
    return base


def build(
    phase: Phase, policy: Policy, student: Params, teacher: Params | None, key: jax.Array
) -> dict[str, Role]:
    """The roles that the phase's algorithm reads, besides student and reference.

    ``self`` starts as the student, in float32 at least: its steps are too small for less; ``value``
    as the student's trunk with an output of 0; ``novelty`` is drawn anew; ``router_origin`` are the
    student's routers as they are now. ``teacher`` are its weights, if the algorithm reads one.

    What neither the student nor ``self`` or ``value`` trains is the student's and not copied; nor
    is the base of a teacher with ``scorers.teacher.base="student"``, whose adapters alone are read
    from ``teacher``.
    """
    algorithm = algorithms.load(**phase.algorithm)
    txs = learners(phase, algorithm)
    asked = roles_of(algorithm)
    _, fixed = optimizer.split(student, optimizer.freezing(phase.optimizer, student))
    made: dict[str, Role] = {}

    def learning(who: str, params: Params, shared: Collection[str], *freeze: str) -> Role:
        patterns = optimizer.freezing(phase.scorers.optimizer(who), {*params, *shared})
        return scorer(params, tx=txs.get(who), freeze=(*freeze, *patterns), shared=shared)

    if SELF in asked:
        average = {
            name: x.astype(jnp.promote_types(x.dtype, jnp.float32))
            for name, x in student.items()
            if name not in fixed
        }
        made[SELF] = scorer(average, ema_rate=phase.scorers.average.ema_rate, shared=fixed)
    if TEACHER in asked:
        assert teacher is not None
        shared = base_of_teacher(phase, policy, fixed)
        own = {name: x for name, x in teacher.items() if name not in shared}
        made[TEACHER] = learning(TEACHER, own, shared)
    if VALUE in asked:
        trunk = {
            name: student[name] if name in student else jnp.zeros(shape.shape, shape.dtype)
            for name, shape in policy.form_of(VALUE).shapes.items()
        }
        _, still = optimizer.split(trunk, optimizer.freezing(phase.scorers.optimizer(VALUE), trunk))
        made[VALUE] = learning(VALUE, trunk, set(still) & set(fixed))
    if NOVELTY in asked:
        width, hidden = phase.model.width, phase.scorers.novelty.hidden
        layers = len(novelty.depths(phase.model.layers))
        params = novelty.init(key, layers=layers, width=width, hidden=hidden)
        made[NOVELTY] = learning(NOVELTY, params, (), f"^{novelty.FROZEN}")
    if phase.model.experts.count:
        made[ORIGIN] = scorer({name: x for name, x in student.items() if ROUTER.search(name)})
    return made
