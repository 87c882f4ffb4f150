"""PPO: clipped ratios under advantages of a value model, or of none.

r_t = R at the last token, less kl_weight k1_t, k1 = old_logp - ref_logp. With ``value``: A by
generalised advantage estimation from the values at the take's start, and the value learns A + V
under a clipped squared error (the Lesson). Without: A = return-to-go, and the whitening takes off
the take's mean, which is then the only baseline; no groups are needed either way. Token loss
kernels/trust.py's, token mean. Sources: arXiv 1707.06347 (PPO), 1506.02438 (GAE), 2203.02155 (KL
in the reward).
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
from jaxrl.kernels.divergences import k1, k3
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.returns import clipped_value, gae, whiten
from jaxrl.kernels.steps import over_last_token
from jaxrl.kernels.trust import Trust, trusted_surrogate
from jaxrl.kernels.weights import token_mean


@dataclasses.dataclass(frozen=True)
class Returns:
    """Advantages that the policy and the value both stand on. Raises ValueError naming a field."""

    value: bool  # a value model is the baseline
    discount: float  # of later tokens' rewards, in [0, 1]
    trace: float  # lambda of the advantage estimation, in [0, 1]; 1 without a value
    kl_weight: float  # of KL(policy, reference), in the reward, >= 0; 0: no reference is scored

    def __post_init__(self) -> None:
        bad = {
            "discount": (0 <= self.discount <= 1, "0 to 1"),
            "trace": (
                0 <= self.trace <= 1 if self.value else self.trace == 1,
                "0 to 1, 1 without a value",
            ),
            "kl_weight": (0 <= self.kl_weight < math.inf, "0 <= kl_weight < inf"),
        }
        for name, (good, allowed) in bad.items():
            if not good:
                raise ValueError(f"returns.{name}={vars(self)[name]!r}; allowed: {allowed}")

    def advantage(self, batch: Batch, observed: Reading) -> Float[Array, "row token"]:
        """Not yet whitened; the return-to-go where there is no value."""
        reward = over_last_token(batch.reward, batch.rollout, batch.acted)
        if self.kl_weight > 0:
            reward -= self.kl_weight * k1(observed["old_logp"], observed["ref_logp"])
        value = observed["value"] if self.value else jnp.zeros_like(reward)
        return gae(reward, value, batch.acted, discount=self.discount, trace=self.trace)


@dataclasses.dataclass(frozen=True)
class ValueLesson:
    """The value model learns what followed each state. Target A + V, token mean."""

    returns: Returns
    value_clip: float

    scorers = (("value", "plain"),)

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """As advantage: the return that the value is to learn."""
        target = self.returns.advantage(batch, observed) + observed["value"]
        return Credit(
            advantage=jnp.where(batch.acted, target, 0),
            weight=token_mean(batch.minibatch[batch.rollout], batch.acted),
        )

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """The one output of the value model."""
        return {"value": logits["value/plain"][:, 0]}

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """Squared error, held near the take's start."""
        return clipped_value(
            reading["value"], observed["value"], credit.advantage, clip=self.value_clip
        )


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Raises ValueError naming a field that is out of range."""

    trust: Trust
    returns: Returns
    value_clip: float  # how far an update may move a value, in units of reward, > 0; inf: any way
    whiten: bool  # advantages to mean 0 and variance 1 over the take's tokens

    scorers = (("student", "plain"),)
    refresh = "take"
    coupled = False
    needs = ()

    def __post_init__(self) -> None:
        bad = {
            "value_clip": (self.value_clip > 0, "> 0, inf for none"),
            "whiten": (
                self.whiten or self.returns.value,
                "true without a value",
            ),
        }
        for name, (good, allowed) in bad.items():
            if not good:
                raise ValueError(f"algorithm.{name}={vars(self)[name]!r}; allowed: {allowed}")

    @property
    def lessons(self) -> tuple[tuple[str, ValueLesson], ...]:
        """The value's, if there is one."""
        return (("value", ValueLesson(self.returns, self.value_clip)),)[: self.returns.value]

    @property
    def observers(self) -> tuple[tuple[str, str], ...]:
        """The student once a take; the value and the reference where they are asked for."""
        returns = self.returns
        asked = {"student": True, "value": returns.value, "reference": returns.kl_weight > 0}
        return tuple((who, "plain") for who, wanted in asked.items() if wanted)

    def observe(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """old_logp and entropy of the take's start; value and ref_logp where asked for."""
        student = logits["student"]
        observed = {"old_logp": taken_logp(student, taken), "entropy": entropy(student)}
        if self.returns.value:
            observed["value"] = logits["value/plain"][:, 0]
        if self.returns.kl_weight > 0:
            observed["ref_logp"] = taken_logp(logits["reference/plain"], taken)
        return observed

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """Advantages of the take's start."""
        advantage = self.returns.advantage(batch, observed)
        if self.whiten:
            advantage = whiten(advantage, jnp.zeros_like(batch.rollout), batch.acted)
        return Credit(advantage, token_mean(batch.minibatch[batch.rollout], batch.acted))

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Log-prob of the taken token."""
        return {"logp": taken_logp(logits["student"], taken)}

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """Policy term within the bounds of trust."""
        logp, old_logp = reading["logp"], observed["old_logp"]
        arrays = (logp, old_logp, batch.sampler_logp, credit.advantage, batch.rollout, batch.acted)
        token_loss, diagnostics = trusted_surrogate(*arrays, trust=self.trust)
        diagnostics |= {"entropy": observed["entropy"]}
        if self.returns.kl_weight > 0:
            diagnostics |= {"reference_kl": k3(logp, observed["ref_logp"])}
        return token_loss, diagnostics

    def keep(self, rewards: np.ndarray, facts: Mapping[str, Any]) -> bool:
        """Every group is trained."""
        return True
