"""GRPO: group-relative advantages under PPO's clipped ratio.

A_i = R_i - mean (/ std) over the prompt's valid rollouts; token loss -min(r A, clip(r) A) with r =
exp(logp - old_logp), times the truncated trainer-to-sampler ratio, plus kl_weight times a term with
the gradient of KL(policy, reference). Sources: GRPO arXiv 2402.03300; without std and with fixed
length Dr. GRPO, arXiv 2503.20783.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.algorithms.contract import Diagnostics, Logits, Reading
from jaxrl.batch import Batch, Credit
from jaxrl.kernels.divergences import k3, reverse_kl_loss
from jaxrl.kernels.groups import group_center, group_scale
from jaxrl.kernels.ratios import token_ratio, truncated_ratio
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.steps import over_tokens
from jaxrl.kernels.surrogates import clipped_surrogate, dual_clip
from jaxrl.kernels.weights import fixed_length, rollout_mean, rollout_sum_mean, token_mean

WEIGHTINGS = ("token_mean", "rollout_mean", "rollout_sum_mean", "fixed_length")


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Raises ValueError naming a field that is out of range."""

    clip_low: float  # ratios below 1 - clip_low are clipped, in [0, 1)
    clip_high: float  # ratios above 1 + clip_high are clipped, >= 0
    dual_clip: float  # bound on the ratio of tokens with negative advantage, > 1; inf: none
    kl_weight: float  # of KL(policy, reference), >= 0; 0: no reference is scored
    mismatch_cap: float  # on trainer over sampler probability (TIS), >= 1; inf: not corrected
    scale_by_std: bool  # divide advantages by the group's standard deviation
    weighting: str  # one of WEIGHTINGS
    length_tokens: int  # divisor of fixed_length, > 0; 0 for the other weightings

    scorers = (("student", "plain"),)
    refresh = "take"
    coupled = False
    lessons = ()
    needs = ()

    def __post_init__(self) -> None:
        bad = {
            "clip_low": (0 <= self.clip_low < 1, "0 <= clip_low < 1"),
            "clip_high": (self.clip_high >= 0, "clip_high >= 0"),
            "dual_clip": (self.dual_clip > 1, "dual_clip > 1, inf for none"),
            "kl_weight": (0 <= self.kl_weight < math.inf, "0 <= kl_weight < inf"),
            "mismatch_cap": (self.mismatch_cap >= 1, "mismatch_cap >= 1, inf for none"),
            "weighting": (self.weighting in WEIGHTINGS, f"one of {WEIGHTINGS}"),
            "length_tokens": (
                (self.length_tokens > 0) == (self.weighting == "fixed_length"),
                "> 0 with weighting='fixed_length', else 0",
            ),
        }
        for name, (good, allowed) in bad.items():
            if not good:
                raise ValueError(f"algorithm.{name}={vars(self)[name]!r}; allowed: {allowed}")

    @property
    def observers(self) -> tuple[tuple[str, str], ...]:
        """The student once a take; the reference beside it if a KL term asks for it."""
        return (("student", "plain"), ("reference", "plain"))[: 1 + (self.kl_weight > 0)]

    def observe(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """old_logp and entropy of the take's start; ref_logp if a KL term asks for it."""
        student = logits["student"]
        observed = {"old_logp": taken_logp(student, taken), "entropy": entropy(student)}
        if self.kl_weight > 0:
            observed["ref_logp"] = taken_logp(logits["reference/plain"], taken)
        return observed

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """Advantages over the valid rollouts of a group, the same at every action token."""
        acted, rollout = batch.acted, batch.rollout
        relative = group_scale if self.scale_by_std else group_center
        advantage = relative(batch.reward, batch.group, batch.valid)
        minibatch = batch.minibatch[rollout]
        if self.weighting == "token_mean":
            weight = token_mean(minibatch, acted)
        elif self.weighting == "rollout_mean":
            weight = rollout_mean(rollout, minibatch, acted)
        elif self.weighting == "rollout_sum_mean":
            weight = rollout_sum_mean(rollout, minibatch, acted)
        else:
            weight = fixed_length(rollout, minibatch, acted, length=self.length_tokens)
        return Credit(advantage=over_tokens(advantage, rollout, acted), weight=weight)

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Log-prob of the taken token."""
        return {"logp": taken_logp(logits["student"], taken)}

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """Clipped policy term, corrected for the sampler, plus the KL term (not corrected)."""
        logp, old_logp = reading["logp"], observed["old_logp"]
        token_loss, diagnostics = clipped_surrogate(
            token_ratio(logp, old_logp),
            credit.advantage,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        token_loss, dual = dual_clip(token_loss, credit.advantage, cap=self.dual_clip)
        diagnostics |= dual | {
            "entropy": observed["entropy"],
            "old_kl": k3(old_logp, logp),  # tokens are drawn from the old policy: KL(old, current)
            "sampler_kl": k3(batch.sampler_logp, old_logp),
        }
        if self.mismatch_cap < math.inf:
            mismatch = truncated_ratio(old_logp, batch.sampler_logp, cap=self.mismatch_cap)
            token_loss = mismatch * token_loss
            diagnostics |= {
                "mismatch": mismatch,
                "mismatch_truncated": mismatch >= self.mismatch_cap,
            }
        if self.kl_weight > 0:
            ref_logp = observed["ref_logp"]
            token_loss += self.kl_weight * reverse_kl_loss(logp, old_logp, ref_logp)
            diagnostics |= {"reference_kl": k3(logp, ref_logp)}
        return token_loss, diagnostics

    def keep(self, rewards: np.ndarray, facts: Mapping[str, Any]) -> bool:
        """Every group is trained."""
        return True
