"""RLOO: REINFORCE with the mean of the other rollouts of the prompt as baseline.

A_i = R_i - mean_{j != i} R_j; loss is the mean over rollouts of -A_i sum_t logp_t. Source: arXiv
2402.14740. Departs from it: a KL penalty is not folded into the reward. There is no trust region:
with several updates a take or stale rollouts nothing corrects for the policy's move but
``mismatch_cap``, which sees the take's start only.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.algorithms.contract import Diagnostics, Logits, Reading
from jaxrl.batch import Batch, Credit
from jaxrl.kernels.divergences import k3
from jaxrl.kernels.groups import leave_one_out
from jaxrl.kernels.ratios import truncated_ratio
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.steps import over_tokens
from jaxrl.kernels.surrogates import policy_gradient
from jaxrl.kernels.weights import rollout_sum_mean


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Raises ValueError naming a field that is out of range."""

    mismatch_cap: float  # on trainer over sampler probability (TIS), >= 1; inf: not corrected

    scorers = (("student", "plain"),)
    refresh = "take"
    coupled = False
    lessons = ()
    needs = ()

    def __post_init__(self) -> None:
        if not self.mismatch_cap >= 1:
            raise ValueError(
                f"algorithm.mismatch_cap={self.mismatch_cap!r}; allowed: >= 1, inf for none"
            )

    @property
    def observers(self) -> tuple[tuple[str, str], ...]:
        """The student once a take, only where its distance from the sampler is corrected."""
        return (("student", "plain"),) if self.mismatch_cap < math.inf else ()

    def observe(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """old_logp of the take's start."""
        return {"old_logp": taken_logp(logits["student"], taken)}

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """Leave-one-out advantages over the valid rollouts of a group."""
        acted, rollout = batch.acted, batch.rollout
        advantage = leave_one_out(batch.reward, batch.group, batch.valid)
        return Credit(
            advantage=over_tokens(advantage, rollout, acted),
            weight=rollout_sum_mean(rollout, batch.minibatch[rollout], acted),
        )

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Log-prob of the taken token, and the entropy for the curves."""
        student = logits["student"]
        return {
            "logp": taken_logp(student, taken),
            "entropy": jax.lax.stop_gradient(entropy(student)),
        }

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """Policy gradient, corrected for the sampler."""
        logp = reading["logp"]
        token_loss, diagnostics = policy_gradient(logp, credit.advantage)
        diagnostics |= {
            "entropy": reading["entropy"],
            "sampler_kl": k3(batch.sampler_logp, logp),
        }
        if self.mismatch_cap < math.inf:
            old_logp = observed["old_logp"]
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
