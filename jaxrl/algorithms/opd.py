"""On-policy distillation: the student's own responses, each token judged by a teacher.

For the divergence D of student S and teacher T at one position (reverse KL(S, T), forward KL(T, S),
or the generalised Jensen-Shannon divergence between them), prefixes held fixed:

    sampled  A_t = log T(y_t) - log S(y_t) (reverse; see ``sampled_jsd_advantage`` for the others),
             detached, under PPO's surrogate: its expected gradient is that of full
    full     sum over the vocabulary, differentiated through S
    top_k    the same over the top_k likeliest tokens of ``support`` and one bucket for the rest

The mean goes over the update's action tokens. There is no reward. The expectation needs rollouts
sampled at temperature 1 or scored at theirs, without top-p or top-k. S is the trainer's policy at
the take's start, and ``trust`` corrects for the sampler. A token that the teacher rules out counts
as one of probability 1e-10 (``teacher_floored``).

GKD (arXiv 2306.13649) is full with "jsd": its off-policy share are rows of a recorded pool, on
which the sampled estimator would be wrong. Source of the sampled form: Thinking Machines,
"On-Policy Distillation", 2025.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.algorithms.contract import Diagnostics, Logits, Reading
from jaxrl.batch import Batch, Credit
from jaxrl.kernels.divergences import (
    FLOOR,
    floored_logits,
    floored_logp,
    generalised_jsd,
    k1,
    sampled_jsd_advantage,
    top_k_tail,
)
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.returns import return_to_go
from jaxrl.kernels.trust import Trust, trusted_surrogate
from jaxrl.kernels.weights import token_mean

STUDENT = ("student", "plain")
TEACHER = ("teacher", "plain")
ESTIMATORS = ("sampled", "full", "top_k")
DIVERGENCES = ("reverse", "forward", "jsd")
ALLOWED = "allowed: one vocabulary (else compare whole texts: gvpo_distill)"


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Raises ValueError naming a field that is out of range."""

    estimator: str  # one of ESTIMATORS
    divergence: str  # one of DIVERGENCES
    alpha: float  # the teacher's share in the mixture of "jsd", in (0, 1); 0 for the others
    top_k: int  # tokens kept by "top_k"; 0 for the others
    support: str  # whose likeliest tokens "top_k" keeps: "student", "teacher"; "" for the others
    discount: float  # in [0, 1], of the advantages of later tokens: 0 is OPD, 1 the reverse KL of
    # whole responses; sampled reverse only, else 0
    trust: Trust  # of "sampled"; the others have no ratio

    refresh = "take"
    coupled = False
    lessons = ()
    needs = ()

    def __post_init__(self) -> None:
        kept = self.estimator == "top_k"
        returns = (self.estimator, self.divergence) == ("sampled", "reverse")
        bad = {
            "estimator": (self.estimator in ESTIMATORS, f"one of {ESTIMATORS}"),
            "divergence": (self.divergence in DIVERGENCES, f"one of {DIVERGENCES}"),
            "alpha": (
                0 < self.alpha < 1 if self.divergence == "jsd" else self.alpha == 0,
                "0 < alpha < 1 with divergence='jsd', else 0",
            ),
            "top_k": ((self.top_k > 0) == kept, "> 0 with estimator='top_k', else 0"),
            "support": (
                self.support in (("student", "teacher") if kept else ("",)),
                "'student', 'teacher' with estimator='top_k', else ''",
            ),
            "discount": (
                0 <= self.discount <= 1 and (self.discount == 0 or returns),
                "0 to 1 with estimator='sampled', divergence='reverse', else 0",
            ),
        }
        for name, (good, allowed) in bad.items():
            if not good:
                raise ValueError(f"algorithm.{name}={vars(self)[name]!r}; allowed: {allowed}")

    @property
    def scorers(self) -> tuple[tuple[str, str], ...]:
        """The teacher is read beside the student unless the tokens are a sample of it all."""
        return (STUDENT,) if self.estimator == "sampled" else (STUDENT, TEACHER)

    @property
    def observers(self) -> tuple[tuple[str, str], ...]:
        """The sampled advantages are those of the take's start."""
        return (STUDENT, TEACHER) if self.estimator == "sampled" else ()

    @property
    def mixture(self) -> float:
        """The divergence as alpha of ``generalised_jsd``."""
        return {"reverse": 1.0, "forward": 0.0, "jsd": self.alpha}[self.divergence]

    def observe(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Log-prob of the taken token under both, and the entropy, at the take's start. Raises
        ValueError, as ``read`` does, if the vocabularies differ in size.
        """
        student, teacher = logits["student"], logits["teacher/plain"]
        if teacher.shape != student.shape:
            raise ValueError(f"student {student.shape}, teacher {teacher.shape}; {ALLOWED}")
        old_logp, teacher_logp = taken_logp(student, taken), floored_logp(teacher, taken)
        return {"old_logp": old_logp, "teacher_logp": teacher_logp, "entropy": entropy(student)}

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """Sampled: the divergence's advantage. Else 0: the loss needs none."""
        acted = batch.acted
        weight = token_mean(batch.minibatch[batch.rollout], acted)
        if self.estimator != "sampled":
            return Credit(advantage=jnp.zeros_like(weight), weight=weight)
        old_logp, teacher_logp = observed["old_logp"], observed["teacher_logp"]
        advantage = sampled_jsd_advantage(old_logp, teacher_logp, alpha=self.mixture)
        if self.discount > 0:
            advantage = return_to_go(advantage, acted, discount=self.discount)
        return Credit(advantage=jnp.where(acted, advantage, 0), weight=weight)

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Log-prob of the taken token; and the divergence, if it is taken over the vocabulary."""
        student, reading = logits["student"], {"logp": taken_logp(logits["student"], taken)}
        if self.estimator == "sampled":
            return reading
        teacher = logits["teacher/plain"]
        reading |= {"teacher_logp": floored_logp(teacher, taken), "entropy": entropy(student)}
        teacher = floored_logits(teacher)
        if self.estimator == "top_k":
            chosen = student if self.support == "student" else teacher
            student, teacher = (top_k_tail(x, chosen, k=self.top_k) for x in (student, teacher))
        divergence = generalised_jsd(student, teacher, alpha=self.mixture)
        return jax.lax.stop_gradient(reading) | {"divergence": divergence}

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """The surrogate of the sampled advantages, or the divergence itself."""
        told = observed if self.estimator == "sampled" else reading
        logp, teacher_logp = reading["logp"], told["teacher_logp"]
        curves = {
            "entropy": told["entropy"],
            "teacher_kl": k1(logp, teacher_logp),
            "teacher_floored": teacher_logp <= FLOOR,
        }
        if self.estimator != "sampled":
            return reading["divergence"], curves
        signals = observed["old_logp"], batch.sampler_logp, credit.advantage
        token_loss, diagnostics = trusted_surrogate(
            logp, *signals, batch.rollout, batch.acted, trust=self.trust
        )
        return token_loss, diagnostics | curves

    def keep(self, rewards: np.ndarray, facts: Mapping[str, Any]) -> bool:
        """Every group is trained; rewards are for the curves."""
        return True
