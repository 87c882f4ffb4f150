"""ArenaFlow: a tournament ranks the rollouts of a prompt, and the steps that decided count more.

    R_i = 1 - rank_i / (G - 1),   A_i = R_i - mean (/ std)
    A_it = A_i (1 + step_weight g_i(step of t)) where A_i > 0, else A_i

g_i(s) in [0, 1] weighs the won matches in which the judge named step s, exponentially in their
depth (kernels/steps.py). A rollout that is no valid trajectory ranks last. With step_weight = 0 and
scale_by_std it is ArenaRL. The verifier's reward is not used. Amplified groups no longer sum to 0:
winners are pushed a little more than losers, as in the source. Source: ArenaFlow, arXiv 2609.21378,
sections 3 and 4; tokens count alike over the whole update, for the clips are DAPO's and the source
names no other mean.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.algorithms.contract import Diagnostics, Logits, Reading
from jaxrl.batch import Batch, Credit
from jaxrl.kernels.groups import group_center, group_scale
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.steps import amplified, over_tokens, step_gain, step_over_tokens
from jaxrl.kernels.tournaments import rank_reward
from jaxrl.kernels.trust import Trust, trusted_surrogate
from jaxrl.kernels.weights import token_mean


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Raises ValueError naming a field that is out of range."""

    trust: Trust
    step_weight: float  # of the steps that decided, >= 0; 0: all steps of a rollout count alike
    scale_by_std: bool  # divide advantages by the group's standard deviation
    dynamic_sampling: bool  # refuse groups in which all are level

    scorers = (("student", "plain"),)
    observers = (("student", "plain"),)
    refresh = "take"
    coupled = False
    lessons = ()

    def __post_init__(self) -> None:
        if not 0 <= self.step_weight < math.inf:
            raise ValueError(
                f"algorithm.step_weight={self.step_weight!r}; allowed: 0 <= step_weight < inf"
            )

    @property
    def needs(self) -> tuple[str, ...]:
        """Points of the tournament, the more the better; won matches by round and named step."""
        return ("points", "named")[: 1 + (self.step_weight > 0)]

    def observe(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """old_logp and entropy of the take's start."""
        student = logits["student"]
        return {"old_logp": taken_logp(student, taken), "entropy": entropy(student)}

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """Centred rank rewards, amplified at the steps that decided."""
        acted, rollout = batch.acted, batch.rollout
        weight = token_mean(batch.minibatch[rollout], acted)
        reward = rank_reward(batch.facts["points"], batch.group, batch.valid)
        relative = group_scale if self.scale_by_std else group_center
        advantage = over_tokens(relative(reward, batch.group, batch.valid), rollout, acted)
        if self.step_weight > 0:
            gain = step_over_tokens(step_gain(batch.facts["named"]), batch.step, rollout, acted)
            advantage = amplified(advantage, gain, weight=self.step_weight)
        return Credit(advantage, weight)

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
        """With dynamic sampling: whether the tournament told anybody from another, of those that
        may be trained: rollouts without a reward are not.
        """
        points = np.asarray(facts["points"], float)[np.isfinite(rewards)]
        return not self.dynamic_sampling or (points.size > 0 and bool(np.ptp(points) > 0))
