"""GSPO: one ratio and one clip decision for a whole response.

s_i = exp(mean_t (logp_t - old_logp_t)); the token loss is -min(s A, clip(s) A) with A the scaled
group advantage, and its gradient reaches each token's log-prob with the factor s_i. A mean of
log-ratios moves by far less than a single one: the clips are a hundred times narrower than PPO's.
Correction for the sampler as in kernels/trust.py. Source: arXiv 2507.18071.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.algorithms.contract import Diagnostics, Logits, Reading
from jaxrl.batch import Batch, Credit
from jaxrl.kernels.divergences import k3
from jaxrl.kernels.groups import group_scale
from jaxrl.kernels.ratios import rollout_ratio
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.steps import over_tokens
from jaxrl.kernels.trust import Trust, trusted_ratio
from jaxrl.kernels.weights import rollout_mean


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """The clips of ``trust`` bound the response's ratio. Weighting: per-response token means."""

    trust: Trust

    scorers = (("student", "plain"),)
    observers = (("student", "plain"),)
    refresh = "take"
    coupled = False
    lessons = ()
    needs = ()

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
            weight=rollout_mean(rollout, batch.minibatch[rollout], acted),
        )

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Log-prob of the taken token."""
        return {"logp": taken_logp(logits["student"], taken)}

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """Policy term within the bounds of trust, with the response's ratio at each token."""
        logp, old_logp, acted = reading["logp"], observed["old_logp"], batch.acted
        token_loss, diagnostics = trusted_ratio(
            rollout_ratio(logp, old_logp, batch.rollout, acted),
            old_logp,
            batch.sampler_logp,
            credit.advantage,
            batch.rollout,
            acted,
            trust=self.trust,
        )
        return token_loss, diagnostics | {
            "entropy": observed["entropy"],
            "old_kl": k3(old_logp, logp),
        }

    def keep(self, rewards: np.ndarray, facts: Mapping[str, Any]) -> bool:
        """Every group is trained."""
        return True
