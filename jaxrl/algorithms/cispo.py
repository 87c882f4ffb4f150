"""CISPO: the ratio is held, the gradient is not: no token is ever cut off.

Token loss -sg(clip(r, ratio_floor, ratio_cap)) A logp with r = exp(logp - old_logp) and A the
scaled group advantage; token mean. The bounds are absolute, not 1 +- epsilon: on-policy the weight
is 1. Source: MiniMax-M1, arXiv 2506.13585, which uses no lower bound.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.algorithms.contract import Diagnostics, Logits, Reading
from jaxrl.batch import Batch, Credit
from jaxrl.kernels.divergences import k3
from jaxrl.kernels.groups import group_scale
from jaxrl.kernels.ratios import token_ratio, truncated_ratio
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.steps import over_tokens
from jaxrl.kernels.surrogates import detached_ratio
from jaxrl.kernels.weights import token_mean


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Raises ValueError naming a field that is out of range."""

    ratio_cap: float  # largest weight, absolute, >= 1
    ratio_floor: float  # smallest weight, absolute, in [0, 1]; 0: a cap alone
    mismatch_cap: float  # on trainer over sampler probability (TIS), >= 1; inf: not corrected

    scorers = (("student", "plain"),)
    observers = (("student", "plain"),)
    refresh = "take"
    coupled = False
    lessons = ()
    needs = ()

    def __post_init__(self) -> None:
        bad = {
            "ratio_cap": (self.ratio_cap >= 1, ">= 1: an absolute bound, not an epsilon"),
            "ratio_floor": (0 <= self.ratio_floor <= 1, "0 to 1, absolute"),
            "mismatch_cap": (self.mismatch_cap >= 1, ">= 1, inf for none"),
        }
        for name, (good, allowed) in bad.items():
            if not good:
                raise ValueError(f"algorithm.{name}={vars(self)[name]!r}; allowed: {allowed}")

    def observe(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """old_logp and entropy of the take's start."""
        student = logits["student"]
        return {"old_logp": taken_logp(student, taken), "entropy": entropy(student)}

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """Scaled rewards of the group, the same at every action token."""
        acted, rollout = batch.acted, batch.rollout
        advantage = group_scale(batch.reward, batch.group, batch.valid)
        return Credit(
            advantage=over_tokens(advantage, rollout, acted),
            weight=token_mean(batch.minibatch[rollout], acted),
        )

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Log-prob of the taken token."""
        return {"logp": taken_logp(logits["student"], taken)}

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """Policy gradient under a held ratio, corrected for the sampler."""
        logp, old_logp = reading["logp"], observed["old_logp"]
        token_loss, diagnostics = detached_ratio(
            logp,
            token_ratio(logp, old_logp),
            credit.advantage,
            low=self.ratio_floor,
            high=self.ratio_cap,
        )
        diagnostics |= {
            "entropy": observed["entropy"],
            "old_kl": k3(old_logp, logp),
            "sampler_kl": k3(batch.sampler_logp, old_logp),
        }
        if self.mismatch_cap < math.inf:
            mismatch = truncated_ratio(old_logp, batch.sampler_logp, cap=self.mismatch_cap)
            token_loss = mismatch * token_loss
            diagnostics |= {
                "mismatch": mismatch,
                "mismatch_truncated": mismatch >= self.mismatch_cap,
            }
        return token_loss, diagnostics

    def keep(self, rewards: np.ndarray, facts: Mapping[str, Any]) -> bool:
        """Every group is trained."""
        return True
