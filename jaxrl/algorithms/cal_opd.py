"""Cal-OPD: on-policy distillation that believes a teacher only as far as it keeps to its word.

The same teacher scores each response three times: as it is, told that it was judged right, and told
that it was judged wrong. Where its log-prob of a token moves with the verdict, it is not knowledge
of the task that speaks; the span of these moves, ``width`` times over, is an interval around the
plain log-prob, and only a student outside of it is pulled, to its border:

    A_t = max(0, low_t - log S(y_t)) - max(0, log S(y_t) - high_t),  see ``calibrated_advantage``

then as OPD, and OPD is width = 0. The mean goes over all action tokens, quiet ones too, so that a
smaller active set also means a smaller step. An update without an active token is skipped (momentum
would move it); a rollout that a probe does not fit is left out. No gradient exactly zero elsewhere
survives weight decay, an entropy or a KL term.

Views ``judged_right`` and ``judged_wrong`` put the verdict before the response and differ in
nothing else; the default probe states an evaluation. Showing the reference solution instead widens
the intervals until little is left to learn. Source: arXiv 2609.21619, section 3.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.algorithms.contract import Diagnostics, Logits, Reading
from jaxrl.batch import Batch, Credit
from jaxrl.kernels.calibration import calibrated_advantage
from jaxrl.kernels.divergences import FLOOR, floored_logp, k1
from jaxrl.kernels.groups import group_sum
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.trust import Trust, trusted_surrogate
from jaxrl.kernels.weights import token_mean

PROBES = ("judged_right", "judged_wrong")


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Raises ValueError naming a field that is out of range."""

    width: float  # of the interval, in moves of the teacher under the verdicts, >= 0; 0: OPD
    trust: Trust

    scorers = (("student", "plain"),)
    observers = (("student", "plain"), ("teacher", "plain"), *(("teacher", x) for x in PROBES))
    refresh = "take"
    coupled = False
    lessons = ()
    needs = ()

    def __post_init__(self) -> None:
        if not 0 <= self.width < math.inf:
            raise ValueError(f"algorithm.width={self.width!r}; allowed: 0 <= width < inf")

    def observe(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Log-prob of the taken token under the student and the teacher's three passes. Raises
        ValueError if the vocabularies differ in size.
        """
        student, teacher = logits["student"], logits["teacher/plain"]
        if teacher.shape != student.shape:
            raise ValueError(
                f"student {student.shape}, teacher {teacher.shape}; allowed: one vocabulary"
            )
        return {
            "old_logp": taken_logp(student, taken),
            "entropy": entropy(student),
            "teacher_logp": floored_logp(teacher, taken),
            "right_logp": floored_logp(logits["teacher/judged_right"], taken),
            "wrong_logp": floored_logp(logits["teacher/judged_wrong"], taken),
        }

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """Calibrated advantages; weight 0 in an update in which all of them are 0."""
        acted, minibatch = batch.acted, batch.minibatch[batch.rollout]
        probed = batch.held("judged_right") & batch.held("judged_wrong")
        trained = acted & (probed | ~acted).all(-1, keepdims=True)
        names = ("old_logp", "teacher_logp", "right_logp", "wrong_logp")
        advantage = calibrated_advantage(*(observed[name] for name in names), width=self.width)
        advantage = jnp.where(trained, advantage, 0)
        active = group_sum((advantage != 0).sum(-1), minibatch, trained.any(-1)) > 0
        weight = token_mean(minibatch, trained)
        return Credit(advantage=advantage, weight=jnp.where(active[:, None], weight, 0))

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Log-prob of the taken token."""
        return {"logp": taken_logp(logits["student"], taken)}

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """PPO's surrogate of the calibrated advantages. kept_mean over discrepancy_mean of the
        curves is the share of the discrepancy that is left.
        """
        old_logp, teacher_logp = observed["old_logp"], observed["teacher_logp"]
        signals = old_logp, batch.sampler_logp, credit.advantage
        token_loss, diagnostics = trusted_surrogate(
            reading["logp"], *signals, batch.rollout, batch.acted, trust=self.trust
        )
        return token_loss, diagnostics | {
            "entropy": observed["entropy"],
            "teacher_kl": k1(reading["logp"], teacher_logp),
            "teacher_floored": teacher_logp <= FLOOR,
            "discrepancy": jnp.abs(teacher_logp - old_logp),
            "kept": jnp.abs(credit.advantage),
            "active": credit.advantage != 0,
        }

    def keep(self, rewards: np.ndarray, facts: Mapping[str, Any]) -> bool:
        """Every group is trained; rewards are for the curves."""
        return True
