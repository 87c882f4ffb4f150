"""Supervised fine-tuning: raise the log-prob of every action token, whatever its reward.

Formula: loss = -sum_t logp_t / number of action tokens in the update.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.algorithms.contract import Diagnostics, Logits, Reading
from jaxrl.batch import Batch, Credit
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.surrogates import policy_gradient
from jaxrl.kernels.weights import token_mean


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """No parameters. Advantage 1 at every action token, token mean."""

    scorers = (("student", "plain"),)
    observers = ()
    refresh = "take"
    coupled = False
    lessons = ()
    needs = ()

    def observe(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Nothing."""
        return {}

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """Advantage 1 on action tokens of valid rollouts."""
        acted = batch.acted
        return Credit(
            advantage=acted.astype("float32"),
            weight=token_mean(batch.minibatch[batch.rollout], acted),
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
        """Negative log-likelihood of each token, nats."""
        token_loss, diagnostics = policy_gradient(reading["logp"], credit.advantage)
        return token_loss, {**diagnostics, "entropy": reading["entropy"]}

    def keep(self, rewards: np.ndarray, facts: Mapping[str, Any]) -> bool:
        """Every group is trained."""
        return True
