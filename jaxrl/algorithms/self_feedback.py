"""SELF: learn from what the environment answered, without any reward.

A transition is one turn: L action tokens a after a context, then M tokens f of the environment's
answer. Three contexts over one set of weights: the student's, a teacher's that shows f before the
action, and an environment's in which f is what comes next:

    l_sd  = 1 / L sum_j KL(student_j, teacher_j)        full vocabulary, no gradient to the teacher
    l_env = -1 / M sum_k log student(f_k | environment's context, a, f_<k)
    loss  = mean over transitions of feedback_weight l_env + distillation_weight l_sd

The teacher is the student's moving average, read anew in each update. The mean draws a trajectory
uniformly, then a turn of it: here as exact weights, so that a long episode weighs no more than a
short one. Source: SELF, §3, Eq. 1-8.

Where the paper is silent: a transition without feedback is in neither term; one whose teacher's
context does not fit is in l_env only; each term's mean is over the transitions that have it.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl.algorithms.contract import Diagnostics, Logits, Reading
from jaxrl.batch import FEEDBACK, Batch, Credit
from jaxrl.kernels.hindsight import feedback_loss, hindsight_gap, turn_mean, turn_sum
from jaxrl.kernels.readings import entropy, taken_logp

STUDENT = ("student", "plain")
TEACHER = ("self", "with_feedback")
ENVIRONMENT = ("student", "as_environment")


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Raises ValueError naming a field that is out of range."""

    feedback_weight: float  # of the environment's answer, >= 0; 0: it is not scored
    distillation_weight: float  # of the pull to the teacher, >= 0; 0: there is no teacher

    observers = ()
    refresh = "take"
    coupled = False
    lessons = ()
    needs = ()

    def __post_init__(self) -> None:
        weights = {name: vars(self)[name] for name in ("feedback_weight", "distillation_weight")}
        for name, value in weights.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"algorithm.{name}={value!r}; allowed: 0 <= {name} < inf")
        if not any(weights.values()):
            raise ValueError(
                "algorithm.feedback_weight=0 and algorithm.distillation_weight=0; allowed: one > 0"
            )

    @property
    def scorers(self) -> tuple[tuple[str, str], ...]:
        """The student; beside it whom the two terms ask for."""
        teacher = (TEACHER,) if self.distillation_weight > 0 else ()
        return (STUDENT, *teacher, *((ENVIRONMENT,) if self.feedback_weight > 0 else ()))

    def observe(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Nothing: the teacher moves after each update, so it is read with the student."""
        return {}

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """No advantage: weights of both expectations over transitions."""
        minibatch = batch.minibatch[batch.rollout]
        terms = (self._distilled(batch), self._answered(batch))
        weight = sum(turn_mean(batch.step, batch.rollout, minibatch, mask) for mask in terms)
        return Credit(advantage=jnp.zeros_like(weight), weight=jnp.asarray(weight))

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """KL(student, teacher) at every position, log-prob of the taken token in the environment's
        context, and the entropy for the curves.
        """
        student = logits["student"]
        reading = {"entropy": jax.lax.stop_gradient(entropy(student))}
        if self.distillation_weight > 0:
            reading["gap"] = hindsight_gap(student, logits["self/with_feedback"])
        if self.feedback_weight > 0:
            reading["feedback_logp"] = taken_logp(logits["student/as_environment"], taken)
        return reading

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """The gap at action tokens, the surprise at feedback tokens, 0 elsewhere.

        Curves are means over the tokens of both terms together: where both are trained, each counts
        half, and ``distillation`` and ``feedback_nll`` add up to twice what they show.
        """
        token_loss = jnp.zeros_like(credit.weight)
        diagnostics = {"entropy": reading["entropy"]}
        if self.distillation_weight > 0:
            gap = jnp.where(self._distilled(batch), reading["gap"], 0)
            token_loss += self.distillation_weight * gap
            diagnostics["distillation"] = gap
        if self.feedback_weight > 0:
            surprise = feedback_loss(reading["feedback_logp"], self._answered(batch))
            token_loss += self.feedback_weight * surprise
            diagnostics["feedback_nll"] = surprise
        return token_loss, diagnostics

    def keep(self, rewards: np.ndarray, facts: Mapping[str, Any]) -> bool:
        """Every group is trained: rewards are not looked at."""
        return True

    def _replied(self, batch: Batch) -> Bool[Array, "row token"]:
        return (batch.kind == FEEDBACK) & batch.valid[batch.rollout][:, None]

    def _answered(self, batch: Batch) -> Bool[Array, "row token"]:
        """Feedback tokens that are trained."""
        if self.feedback_weight == 0:
            return jnp.zeros(batch.kind.shape, bool)
        return self._replied(batch) & batch.held(ENVIRONMENT[1])

    def _distilled(self, batch: Batch) -> Bool[Array, "row token"]:
        """Action tokens of turns that were answered, where the teacher's context holds them."""
        if self.distillation_weight == 0:
            return jnp.zeros(batch.kind.shape, bool)
        replied = self._replied(batch)
        answered = turn_sum(replied, batch.step, replied) > 0
        return batch.acted & answered & batch.held(TEACHER[1])
