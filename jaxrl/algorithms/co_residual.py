"""Co-RA: the residual advantage from a teacher that learns from the same verdicts.

A take goes (1) sample and verify, label with the old student and the old teacher; (2) the student
learns from A_ver + lambda (a_t - abar), see ``algorithms/residual.py``; (3) the teacher learns from
the student's rollouts with A_ver alone, its clipped ratio that of its own log-probs; (4) the new
teacher labels the next take. In the paper the teacher trains an adapter, here what its optimizer
says (``config.scorers.teacher.optimizer``), over a base of its own or the student's
(``config.scorers.teacher.base``).

The rollouts are the student's and the teacher's update has no weights for that, so it is a
heuristic: keep its clip tight and its steps small. Source: arXiv 2610.11519, appendix B.8.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.algorithms import residual
from jaxrl.algorithms.contract import Diagnostics, Logits, Reading
from jaxrl.batch import Batch, Credit
from jaxrl.kernels.readings import taken_logp
from jaxrl.kernels.trust import Trust, trusted_surrogate


@dataclasses.dataclass(frozen=True)
class Verdicts:
    """How the teacher learns: A_ver under a clipped ratio of its own log-probs."""

    trust: Trust
    student: residual.Algorithm  # whose A_ver and weights it shares

    scorers = (residual.TEACHER,)

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """A_ver without residuals: the teacher does not teach itself."""
        return self.student.verified(batch)

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """The teacher's log-prob of the taken token."""
        return {"teacher_logp": taken_logp(logits["teacher/plain"], taken)}

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """Clipped surrogate with ratio pT_new / pT_old; the sampler was never the teacher's."""
        old_logp = observed["teacher_logp"]
        return trusted_surrogate(
            reading["teacher_logp"],
            old_logp,
            old_logp,
            credit.advantage,
            batch.rollout,
            batch.acted,
            trust=self.trust,
        )


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Raises ValueError naming a field that is out of range."""

    student: residual.Algorithm  # how the student learns, lambda > 0
    teacher_trust: Trust  # of the teacher's own steps; mismatch "none"

    scorers = (("student", "plain"),)
    refresh = "take"
    coupled = False
    needs = ()

    def __post_init__(self) -> None:
        if self.student.residual_weight == 0:
            raise ValueError("algorithm.student.residual_weight=0; allowed: > 0")
        if self.teacher_trust.mismatch != "none":
            raise ValueError(
                f"algorithm.teacher_trust.mismatch={self.teacher_trust.mismatch!r}; allowed: 'none'"
            )

    @property
    def lessons(self) -> tuple[tuple[str, Verdicts], ...]:
        """The teacher's, after the student's updates."""
        return (("teacher", Verdicts(self.teacher_trust, self.student)),)

    @property
    def observers(self) -> tuple[tuple[str, str], ...]:
        """Student and teacher at the take's start."""
        return self.student.observers

    def observe(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Labels, and the old log-probs of both."""
        return self.student.observe(logits, taken)

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """The student's labels."""
        return self.student.credit(batch, observed)

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """The student's log-prob of the taken token."""
        return self.student.read(logits, taken)

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """The student's policy term."""
        return self.student.loss(reading, batch, observed, credit)

    def keep(self, rewards: np.ndarray, facts: Mapping[str, Any]) -> bool:
        """Every group is trained."""
        return self.student.keep(rewards, facts)
