"""GRPO: group-relative advantages under PPO's clipped ratio.

A_i = R_i - mean (/ std) over the prompt's valid rollouts; the token loss is kernels/trust.py's
(clipped ratio to the take's start, dual clip, correction for the sampler), plus kl_weight times a
term with the gradient of KL(policy, reference). Sources: GRPO arXiv 2402.03300; without std and
with fixed length Dr. GRPO, arXiv 2503.20783; off-policy masking DeepSeek-V3.2, arXiv 2512.02556.
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
from jaxrl.kernels.groups import group_center, group_scale, size_factor
from jaxrl.kernels.ratios import rollout_mask
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.steps import over_tokens
from jaxrl.kernels.trust import Trust, trusted_surrogate
from jaxrl.kernels.weights import fixed_length, rollout_mean, rollout_sum_mean, token_mean

WEIGHTINGS = ("token_mean", "rollout_mean", "rollout_sum_mean", "fixed_length")


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Raises ValueError naming a field that is out of range."""

    trust: Trust
    kl_weight: float  # of KL(policy, reference), >= 0; 0: no reference is scored
    scale_by_std: bool  # divide advantages by the group's standard deviation
    full_group: float  # advantages get the scale of a group so large, > 1, inf; 0: as they are
    mask_limit: float  # nats a token: drop bad rollouts that have fallen further; inf: none
    dynamic_sampling: bool  # refuse groups whose valid rewards are all equal
    weighting: str  # one of WEIGHTINGS
    length_tokens: int  # divisor of fixed_length, > 0; 0 for the other weightings

    scorers = (("student", "plain"),)
    refresh = "take"
    coupled = False
    lessons = ()
    needs = ()

    def __post_init__(self) -> None:
        bad = {
            "kl_weight": (0 <= self.kl_weight < math.inf, "0 <= kl_weight < inf"),
            "full_group": (self.full_group == 0 or self.full_group > 1, "0, or > 1"),
            "mask_limit": (self.mask_limit > 0, "> 0, inf for none"),
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
        if self.full_group > 0:
            advantage = advantage * size_factor(batch.group, batch.valid, full=self.full_group)
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
        """Policy term within the bounds of trust, plus the KL term (corrected for nothing)."""
        logp, old_logp = reading["logp"], observed["old_logp"]
        arrays = (credit.advantage, batch.rollout, batch.acted)
        token_loss, diagnostics = trusted_surrogate(
            logp, old_logp, batch.sampler_logp, *arrays, trust=self.trust
        )
        diagnostics |= {"entropy": observed["entropy"]}
        if self.mask_limit < math.inf:
            kept = rollout_mask(logp, old_logp, *arrays, limit=self.mask_limit)
            token_loss *= kept
            diagnostics |= {"rollout_masked": 1 - kept}
        if self.kl_weight > 0:
            ref_logp = observed["ref_logp"]
            token_loss += self.kl_weight * reverse_kl_loss(logp, old_logp, ref_logp)
            diagnostics |= {"reference_kl": k3(logp, ref_logp)}
        return token_loss, diagnostics

    def keep(self, rewards: np.ndarray, facts: Mapping[str, Any]) -> bool:
        """With dynamic sampling: whether the finite rewards differ, some passed and some failed.

        Such a group has advantages; one of equal rewards has none. Source: DAPO, arXiv 2503.14476;
        over the rollouts that screen a task, CodeMidas' mixed-outcome filter, arXiv 2609.22068.
        """
        finite = rewards[np.isfinite(rewards)]
        return not self.dynamic_sampling or (finite.size > 0 and bool(np.ptp(finite) > 0))
