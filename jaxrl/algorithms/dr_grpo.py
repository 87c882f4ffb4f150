"""Dr. GRPO: GRPO without its two biases.

A_i = R_i - mean over the prompt's valid rollouts, not divided by their deviation (which would count
easy and hard prompts more); token losses are summed and divided by a constant length, not by the
response's own (which would make long wrong answers cheap). The token loss is kernels/trust.py's.
Source: arXiv 2503.20783. It is `grpo` with scale_by_std off and weighting = "fixed_length".
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.algorithms.contract import Diagnostics, Logits, Reading
from jaxrl.batch import Batch, Credit
from jaxrl.kernels.groups import group_center
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.steps import over_tokens
from jaxrl.kernels.trust import Trust, trusted_surrogate
from jaxrl.kernels.weights import fixed_length


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Raises ValueError naming a field that is out of range."""

    trust: Trust
    length_tokens: int  # what sums over tokens are divided by, > 0: sampler.max_new_tokens

    scorers = (("student", "plain"),)
    observers = (("student", "plain"),)
    refresh = "take"
    coupled = False
    lessons = ()
    needs = ()

    def __post_init__(self) -> None:
        if not self.length_tokens > 0:
            raise ValueError(f"algorithm.length_tokens={self.length_tokens!r}; allowed: > 0")

    def observe(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """old_logp and entropy of the take's start."""
        student = logits["student"]
        return {"old_logp": taken_logp(student, taken), "entropy": entropy(student)}

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """Rewards less their mean, the same at every action token."""
        acted, rollout = batch.acted, batch.rollout
        advantage = group_center(batch.reward, batch.group, batch.valid)
        return Credit(
            advantage=over_tokens(advantage, rollout, acted),
            weight=fixed_length(
                rollout, batch.minibatch[rollout], acted, length=self.length_tokens
            ),
        )

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Log-prob of the taken token."""
        return {"logp": taken_logp(logits["student"], taken)}

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """Policy term within the bounds of trust."""
        token_loss, diagnostics = trusted_surrogate(
            reading["logp"],
            observed["old_logp"],
            batch.sampler_logp,
            credit.advantage,
            batch.rollout,
            batch.acted,
            trust=self.trust,
        )
        return token_loss, diagnostics | {"entropy": observed["entropy"]}

    def keep(self, rewards: np.ndarray, facts: Mapping[str, Any]) -> bool:
        """Every group is trained."""
        return True
