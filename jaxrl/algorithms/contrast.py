"""Contrastive self-distillation: wrong responses, drawn to one context and pushed off another.

The student's own weights, frozen at the phase's start (or their moving average), score each wrong
response y twice: behind a right solution of the same problem (p+), and behind another wrong
response (p-). Both contexts have one template. For its tokens

    A_t = 1/2 (A(p+(y_t) / S(y_t)) - A(p-(y_t) / S(y_t))),  see ``contrastive_advantage``

under PPO's surrogate, the mean going over the tokens of the rollouts that have both contexts. Right
responses, and wrong ones without a context, are not trained. Reward only chooses the rows.

With alpha = 1 the student cancels, and what both contexts change alike (style) does not enter; with
alpha < 1 it leaks in. Nothing brings the contrast to rest: A does not vanish where the student is
p+, and meanwhile the student's own bias among equally right tokens grows, as under any policy
gradient. Stop early, or set kl_weight: with alpha = 1 the rest is then start (p+ / p-)^(1 / (2
kl_weight)). ``sides`` leaves one half alone, for comparison: "right" stops at p+ (SDPO, with
teacher="self"), "wrong" runs away.

Sources: arXiv 2609.21561; SDPO, github.com/lasgroup/SDPO; OPSD, arXiv 2601.18734.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl.algorithms.contract import Diagnostics, Logits, Reading
from jaxrl.batch import Batch, Credit
from jaxrl.kernels.contrast import contrastive_advantage
from jaxrl.kernels.divergences import (
    FLOOR,
    floored_logp,
    k3,
    reverse_kl_loss,
    sampled_jsd_advantage,
)
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.trust import Trust, trusted_surrogate
from jaxrl.kernels.weights import token_mean

CONTEXTS = {"right": "with_solution", "wrong": "with_wrong_solution"}
SIDES = {"both": ("right", "wrong"), "right": ("right",), "wrong": ("wrong",)}


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Raises ValueError naming a field that is out of range."""

    alpha: float  # the teacher's share in the generalised Jensen-Shannon mixture, in (0, 1]
    sides: str  # "both", or one alone: "right" attracts, "wrong" repels
    teacher: str  # "reference": the phase's first weights | "self": the moving average
    success: float  # a response is right from this reward on, and then not trained
    kl_weight: float  # of KL(policy, the phase's first weights), >= 0
    trust: Trust

    scorers = (("student", "plain"),)
    refresh = "take"
    coupled = False
    lessons = ()
    needs = ()

    def __post_init__(self) -> None:
        bad = {
            "alpha": (0 < self.alpha <= 1, "0 < alpha <= 1"),
            "sides": (self.sides in SIDES, f"one of {tuple(SIDES)}"),
            "teacher": (self.teacher in ("reference", "self"), "'reference', 'self'"),
            "success": (math.isfinite(self.success), "a reward"),
            "kl_weight": (0 <= self.kl_weight < math.inf, "0 <= kl_weight < inf"),
        }
        for name, (good, allowed) in bad.items():
            if not good:
                raise ValueError(f"algorithm.{name}={vars(self)[name]!r}; allowed: {allowed}")

    @property
    def observers(self) -> tuple[tuple[str, str], ...]:
        """The student, the teacher behind each context, the start if a KL term asks for it."""
        shown = [(self.teacher, CONTEXTS[side]) for side in SIDES[self.sides]]
        start = [("reference", "plain")] if self.kl_weight > 0 else []
        return (("student", "plain"), *shown, *start)

    def observe(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Log-prob of the taken token under each of them."""
        student = logits["student"]
        observed = {"old_logp": taken_logp(student, taken), "entropy": entropy(student)}
        for side in SIDES[self.sides]:
            seen = logits[f"{self.teacher}/{CONTEXTS[side]}"]
            observed[f"{side}_logp"] = floored_logp(seen, taken)
        if self.kl_weight > 0:
            observed["ref_logp"] = taken_logp(logits["reference/plain"], taken)
        return observed

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """The contrast, on wrong responses that have every context."""
        taught = self._taught(batch)
        old_logp, alpha = observed["old_logp"], self.alpha
        told = [observed[f"{side}_logp"] for side in SIDES[self.sides]]
        if self.sides == "both":
            advantage = contrastive_advantage(old_logp, *told, alpha=alpha)
        else:
            sign = 1 if self.sides == "right" else -1
            advantage = sign * sampled_jsd_advantage(old_logp, *told, alpha=alpha)
        return Credit(
            advantage=jnp.where(taught, advantage, 0),
            weight=token_mean(batch.minibatch[batch.rollout], taught),
        )

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Log-prob of the taken token."""
        return {"logp": taken_logp(logits["student"], taken)}

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """PPO's surrogate of the contrast, plus the KL term."""
        logp, old_logp = reading["logp"], observed["old_logp"]
        signals = old_logp, batch.sampler_logp, credit.advantage
        token_loss, diagnostics = trusted_surrogate(
            logp, *signals, batch.rollout, batch.acted, trust=self.trust
        )
        diagnostics |= {"entropy": observed["entropy"]}
        for side in SIDES[self.sides]:
            told = observed[f"{side}_logp"]
            diagnostics |= {f"{side}_shift": told - old_logp, f"{side}_floored": told <= FLOOR}
        if self.kl_weight > 0:
            token_loss += self.kl_weight * reverse_kl_loss(logp, old_logp, observed["ref_logp"])
            diagnostics |= {"reference_kl": k3(logp, observed["ref_logp"])}
        return token_loss, diagnostics

    def keep(self, rewards: np.ndarray, facts: Mapping[str, Any]) -> bool:
        """Every group is taken: whether a response is trained depends on its contexts."""
        return True

    def _taught(self, batch: Batch) -> Bool[Array, "row token"]:
        """Action tokens of the wrong responses that every context holds whole."""
        acted = batch.acted
        for side in SIDES[self.sides]:
            acted &= (batch.held(CONTEXTS[side]) | ~acted).all(-1, keepdims=True)
        return acted & (batch.reward < self.success)[batch.rollout][:, None]
