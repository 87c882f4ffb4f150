"""Residual advantage: what a verifier says of a rollout, plus what a teacher says of each token.

    A_t = A_ver + lambda (a_t - abar)
    a_t = d_t(y_t) - sum_v pS_t(v) d_t(v),  d_t = pT_t - pS_t
    abar = sum_t w_t a_t / sum_t w_t over the response, w_t the token's weight in the loss

pS is the student at the take's start, pT the teacher on the same prefix, both at the sampling
temperature. Labels are made once a take, from one joint reading of the two; then PPO's clip as in
kernels/trust.py. A group whose rewards are all equal has A_ver = 0 and still teaches: none is
refused. lambda = 0 is the base algorithm, and no teacher is scored.

Source: arXiv 2610.11519, equations 1-10. w is our reading of its weighted mean: in both weightings
the tokens of a response count alike, so abar is their plain mean.
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
from jaxrl.kernels.divergences import k1
from jaxrl.kernels.groups import group_center, group_scale
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.residuals import (
    missing_mass,
    residual_advantage,
    response_center,
    top_residual,
)
from jaxrl.kernels.returns import whiten
from jaxrl.kernels.steps import over_tokens
from jaxrl.kernels.trust import Trust, trusted_surrogate
from jaxrl.kernels.weights import rollout_mean, token_mean

VERIFIERS = ("scaled", "centred", "whitened")
WEIGHTINGS = ("token_mean", "rollout_mean")
TEACHER = ("teacher", "plain")


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Raises ValueError naming a field that is out of range."""

    trust: Trust
    residual_weight: float  # lambda, >= 0; 0: the base algorithm
    center_responses: bool  # take off abar; false: A_ver + lambda a_t
    teacher_top: int  # sum pS pT over so many likeliest tokens of the teacher; 0: all
    verifier: str  # A_ver: "scaled" GRPO's, "centred" Dr. GRPO's, "whitened" REINFORCE++'s
    weighting: str  # one of WEIGHTINGS

    scorers = (("student", "plain"),)
    refresh = "take"
    coupled = False
    lessons = ()
    needs = ()

    def __post_init__(self) -> None:
        bad = {
            "residual_weight": (0 <= self.residual_weight < math.inf, "0 <= weight < inf"),
            "teacher_top": (self.teacher_top >= 0, ">= 0, 0 for the whole vocabulary"),
            "verifier": (self.verifier in VERIFIERS, f"one of {VERIFIERS}"),
            "weighting": (self.weighting in WEIGHTINGS, f"one of {WEIGHTINGS}"),
        }
        for name, (good, allowed) in bad.items():
            if not good:
                raise ValueError(f"algorithm.{name}={vars(self)[name]!r}; allowed: {allowed}")

    @property
    def observers(self) -> tuple[tuple[str, str], ...]:
        """The student at the take's start, and the teacher where it has a say."""
        return (("student", "plain"), TEACHER)[: 1 + (self.residual_weight > 0)]

    def observe(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """old_logp and entropy; with a teacher its log-prob, and a_t, one number a token.

        Raises ValueError if the two vocabularies differ in size.
        """
        student = logits["student"]
        observed = {"old_logp": taken_logp(student, taken), "entropy": entropy(student)}
        if self.residual_weight == 0:
            return observed
        teacher = logits["teacher/plain"]
        if teacher.shape != student.shape:
            raise ValueError(
                f"the teacher has {teacher.shape[-1]} logits a token; allowed: the student's "
                f"{student.shape[-1]} (residuals compare them id by id)"
            )
        observed["teacher_logp"] = taken_logp(teacher, taken)
        if self.teacher_top == 0:
            return observed | {"residual": residual_advantage(student, teacher, taken)}
        kept = self.teacher_top
        return observed | {
            "residual": top_residual(student, teacher, taken, kept=kept),
            "teacher_missing": missing_mass(teacher, kept=kept),
        }

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """A_ver and the teacher's residuals, the labels of the whole take."""
        verified = self.verified(batch)
        if self.residual_weight == 0:
            return verified
        residual, acted = observed["residual"], batch.acted
        if self.center_responses:
            residual = response_center(residual, verified.weight, batch.rollout, acted)
        taught = self.residual_weight * jnp.where(acted, residual, 0)
        return dataclasses.replace(verified, advantage=verified.advantage + taught)

    def verified(self, batch: Batch) -> Credit:
        """A_ver, the same at every action token, and the weights of the tokens."""
        acted, rollout = batch.acted, batch.rollout
        minibatch = batch.minibatch[rollout]
        if self.verifier == "whitened":
            reward = over_tokens(batch.reward, rollout, acted)
            advantage = whiten(reward, jnp.zeros_like(rollout), acted)  # over the take
        else:
            relative = group_scale if self.verifier == "scaled" else group_center
            advantage = over_tokens(
                relative(batch.reward, batch.group, batch.valid), rollout, acted
            )
        if self.weighting == "token_mean":
            return Credit(advantage, token_mean(minibatch, acted))
        return Credit(advantage, rollout_mean(rollout, minibatch, acted))

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Log-prob of the taken token."""
        return {"logp": taken_logp(logits["student"], taken)}

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """The policy term within the bounds of trust."""
        token_loss, diagnostics = trusted_surrogate(
            reading["logp"],
            observed["old_logp"],
            batch.sampler_logp,
            credit.advantage,
            batch.rollout,
            batch.acted,
            trust=self.trust,
        )
        curves = {
            name: observed[name]
            for name in ("entropy", "residual", "teacher_missing")
            if name in observed
        }
        if self.residual_weight > 0:
            curves["teacher_kl"] = k1(observed["old_logp"], observed["teacher_logp"])
        return token_loss, diagnostics | curves

    def keep(self, rewards: np.ndarray, facts: Mapping[str, Any]) -> bool:
        """Every group is trained: where rewards are equal the teacher still speaks."""
        return True
