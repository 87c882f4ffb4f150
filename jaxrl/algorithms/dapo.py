"""DAPO: decoupled clip, token mean, dynamic sampling, overlong shaping. No KL term.

Source: arXiv 2503.14476. Dynamic sampling tests the verifier's reward, before the overlong penalty:
a penalty alone does not rescue a group whose answers are all right or all wrong.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.algorithms.contract import Diagnostics, Logits, Reading
from jaxrl.batch import Batch, Credit
from jaxrl.kernels.grades import overlong_penalty
from jaxrl.kernels.groups import group_scale
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.steps import over_tokens, rollout_sum
from jaxrl.kernels.trust import Trust, trusted_surrogate
from jaxrl.kernels.weights import token_mean


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Raises ValueError naming a field that is out of range."""

    trust: Trust
    dynamic_sampling: bool  # refuse groups whose valid rewards are all equal
    overlong_penalty: float  # taken off the reward at the limit, >= 0; 0: no shaping
    overlong_limit_tokens: int  # response length of the full penalty: sampler.max_new_tokens
    overlong_buffer_tokens: int  # the penalty grows over so many tokens before the limit
    drop_truncated: bool  # overlong filtering: truncated rollouts keep their place in the group
    # statistics, but none of their tokens is trained or counted

    scorers = (("student", "plain"),)
    observers = (("student", "plain"),)
    refresh = "take"
    coupled = False
    lessons = ()
    needs = ()

    def __post_init__(self) -> None:
        limit = self.overlong_limit_tokens
        bad = {
            "overlong_penalty": (0 <= self.overlong_penalty < math.inf, "0 <= penalty < inf"),
            "overlong_limit_tokens": (limit > 0, "> 0"),
            "overlong_buffer_tokens": (0 < self.overlong_buffer_tokens <= limit, f"1 to {limit}"),
        }
        for name, (good, allowed) in bad.items():
            if not good:
                raise ValueError(f"algorithm.{name}={vars(self)[name]!r}; allowed: {allowed}")

    def observe(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """old_logp and entropy of the take's start."""
        student = logits["student"]
        return {"old_logp": taken_logp(student, taken), "entropy": entropy(student)}

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """Shaped rewards, scaled in the group, the same at every action token."""
        acted, rollout = batch.acted, batch.rollout
        length = rollout_sum(acted, rollout, acted, rollouts=batch.valid.shape[0])
        shaped = batch.reward + overlong_penalty(
            length,
            limit=self.overlong_limit_tokens,
            buffer=self.overlong_buffer_tokens,
            penalty=self.overlong_penalty,
        )
        advantage = group_scale(shaped, batch.group, batch.valid)
        trained = acted & ~batch.truncated[rollout][:, None] if self.drop_truncated else acted
        return Credit(
            advantage=over_tokens(advantage, rollout, acted),
            weight=token_mean(batch.minibatch[rollout], trained),
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
        """With dynamic sampling: whether the finite rewards, as the verifier gave them, differ."""
        finite = rewards[np.isfinite(rewards)]
        return not self.dynamic_sampling or (finite.size > 0 and bool(np.ptp(finite) > 0))
