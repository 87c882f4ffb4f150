"""REINFORCE++: no value model; the whole take is the baseline.

Plain: r_t = R at the last token, less kl_weight k1_t, k1 = old_logp - ref_logp (as a reward k1 has
the gradient of KL(policy, reference)); A = return-to-go, whitened over all tokens of the take. A
group may have one rollout. With ``group_baseline``: A = R - mean of the prompt's rollouts, the same
at each token, then whitened; the KL term enters the loss, with the gradient of KL(policy,
reference). Token loss kernels/trust.py's, token mean. Source: arXiv 2501.03262.

Departs from public code: with ``group_baseline`` a prompt with one valid rollout has advantage 0
and no part in the whitening.
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
from jaxrl.kernels.divergences import k1, k3, reverse_kl_loss
from jaxrl.kernels.groups import group_center, group_sum
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.returns import return_to_go, whiten
from jaxrl.kernels.steps import over_last_token, over_tokens
from jaxrl.kernels.trust import Trust, trusted_surrogate
from jaxrl.kernels.weights import token_mean


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Raises ValueError naming a field that is out of range."""

    trust: Trust
    group_baseline: bool  # the variant with the prompt's mean
    kl_weight: float  # of KL(policy, reference), >= 0; 0: no reference is scored
    discount: float  # of later tokens' rewards, in [0, 1]; 1 with group_baseline

    scorers = (("student", "plain"),)
    refresh = "take"
    coupled = False
    lessons = ()
    needs = ()

    def __post_init__(self) -> None:
        bad = {
            "kl_weight": (0 <= self.kl_weight < math.inf, "0 <= kl_weight < inf"),
            "discount": (
                self.discount == 1 if self.group_baseline else 0 <= self.discount <= 1,
                "0 to 1, 1 with group_baseline",
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
        """Returns, or centred rewards, whitened over the take."""
        acted, rollout = batch.acted, batch.rollout
        counted = acted
        if self.group_baseline:
            centred = group_center(batch.reward, batch.group, batch.valid)
            signal = over_tokens(centred, rollout, acted)
            beside = group_sum(batch.valid, batch.group, batch.valid) > 1
            counted = acted & beside[rollout][:, None]
        else:
            reward = over_last_token(batch.reward, rollout, acted)
            if self.kl_weight > 0:
                reward -= self.kl_weight * k1(observed["old_logp"], observed["ref_logp"])
            signal = return_to_go(reward, acted, discount=self.discount)
        return Credit(
            advantage=whiten(signal, jnp.zeros_like(rollout), counted),
            weight=token_mean(batch.minibatch[rollout], acted),
        )

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Log-prob of the taken token."""
        return {"logp": taken_logp(logits["student"], taken)}

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """Policy term within the bounds of trust; with ``group_baseline`` the KL term too."""
        logp, old_logp = reading["logp"], observed["old_logp"]
        token_loss, diagnostics = trusted_surrogate(
            logp,
            old_logp,
            batch.sampler_logp,
            credit.advantage,
            batch.rollout,
            batch.acted,
            trust=self.trust,
        )
        diagnostics |= {"entropy": observed["entropy"]}
        if self.kl_weight > 0:
            ref_logp = observed["ref_logp"]
            diagnostics |= {"reference_kl": k3(logp, ref_logp)}
            if self.group_baseline:
                token_loss += self.kl_weight * reverse_kl_loss(logp, old_logp, ref_logp)
        return token_loss, diagnostics

    def keep(self, rewards: np.ndarray, facts: Mapping[str, Any]) -> bool:
        """Every group is trained."""
        return True
