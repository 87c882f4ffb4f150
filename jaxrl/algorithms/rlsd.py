"""RLSD: GRPO whose verifier decides the direction and whose teacher decides where it counts.

    A_it = A_i (1 - share + share clip(exp(sign(A_i) (log T(y_t) - log S(y_t))), 1 -+ band))

A_i is GRPO's advantage. Of a good response the tokens that the teacher likes better than the
student weigh more, of a bad one those that it likes less; no sign changes, so a group without
spread teaches nothing. The teacher is another model, or the student's own weights behind a
solution; tokens without a place there keep A_i. Then PPO's surrogate and the mean of per-rollout
token means. Source: the reweighting of ms-swift's RLSD; the rest is GRPO, arXiv 2402.03300.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.algorithms.contract import Diagnostics, Logits, Reading
from jaxrl.batch import Batch, Credit
from jaxrl.kernels.calibration import reweighted_advantage
from jaxrl.kernels.divergences import FLOOR, floored_logp, k1
from jaxrl.kernels.groups import group_center, group_scale
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.steps import over_tokens
from jaxrl.kernels.trust import Trust, trusted_surrogate
from jaxrl.kernels.weights import rollout_mean

TEACHERS = {
    "teacher": ("teacher", "plain"),
    "reference": ("reference", "with_solution"),
    "self": ("self", "with_solution"),
}


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Raises ValueError naming a field that is out of range."""

    teacher: str  # "teacher": another model | "reference", "self": own weights behind a solution
    share: float  # of the reweighting, in [0, 1]; 0: GRPO
    band: float  # a token weighs 1 - band to 1 + band, in [0, 1)
    scale_by_std: bool  # divide advantages by the group's standard deviation
    trust: Trust

    scorers = (("student", "plain"),)
    refresh = "take"
    coupled = False
    lessons = ()
    needs = ()

    def __post_init__(self) -> None:
        bad = {
            "teacher": (self.teacher in TEACHERS, f"one of {tuple(TEACHERS)}"),
            "share": (0 <= self.share <= 1, "0 <= share <= 1"),
            "band": (0 <= self.band < 1, "0 <= band < 1"),
        }
        for name, (good, allowed) in bad.items():
            if not good:
                raise ValueError(f"algorithm.{name}={vars(self)[name]!r}; allowed: {allowed}")

    @property
    def observers(self) -> tuple[tuple[str, str], ...]:
        """The student and the teacher, once a take."""
        return (("student", "plain"), TEACHERS[self.teacher])

    def observe(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Log-prob of the taken token under both. Raises ValueError if the vocabularies differ in
        size.
        """
        student, teacher = logits["student"], logits["/".join(TEACHERS[self.teacher])]
        if teacher.shape != student.shape:
            raise ValueError(
                f"student {student.shape}, teacher {teacher.shape}; allowed: one vocabulary"
            )
        return {
            "old_logp": taken_logp(student, taken),
            "entropy": entropy(student),
            "teacher_logp": floored_logp(teacher, taken),
        }

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """GRPO's advantages, reweighted token by token."""
        acted, rollout = batch.acted, batch.rollout
        relative = group_scale if self.scale_by_std else group_center
        verdict = relative(batch.reward, batch.group, batch.valid)
        verdict = over_tokens(verdict, rollout, acted)
        advantage = reweighted_advantage(
            observed["old_logp"],
            observed["teacher_logp"],
            verdict,
            share=self.share,
            band=self.band,
        )
        held = acted & batch.held(TEACHERS[self.teacher][1])
        return Credit(
            advantage=jnp.where(held, advantage, verdict),
            weight=rollout_mean(rollout, batch.minibatch[rollout], acted),
        )

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Log-prob of the taken token."""
        return {"logp": taken_logp(logits["student"], taken)}

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """PPO's surrogate of the reweighted advantages."""
        logp, teacher_logp = reading["logp"], observed["teacher_logp"]
        signals = observed["old_logp"], batch.sampler_logp, credit.advantage
        token_loss, diagnostics = trusted_surrogate(
            logp, *signals, batch.rollout, batch.acted, trust=self.trust
        )
        held = batch.held(TEACHERS[self.teacher][1])
        return token_loss, diagnostics | {
            "entropy": observed["entropy"],
            "teacher_kl": jnp.where(held, k1(logp, teacher_logp), 0),
            "teacher_floored": held & (teacher_logp <= FLOOR),
        }

    def keep(self, rewards: np.ndarray, facts: Mapping[str, Any]) -> bool:
        """Every group is trained."""
        return True
