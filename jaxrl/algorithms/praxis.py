"""PRAXIS for answers in text: a learner beside a task sampler and an archive of rules that move.

The paper's learner minimises E_{x ~ q}[loss(x) + lam sum_j w_j g_j D_j(x)] over tasks drawn by a
sampler q, where rule j (a program) turns the model's distribution over answers into a label and
D_j = min(-log p(label), C) / C. Of a language model:

    distribution    the group's k responses to a prompt
    label of rule j the response that it picks among them, a constant
    loss            1 - expected reward, descended by its policy gradient, A = R - group mean
    D_j             min(-log p(picked response | prompt), C) / C, the log-prob summed over tokens

    loss = mean over rollouts of  policy term + lam e_i D_i,  e_i = k sum_j w_j g_j 1[j picks i]

e_i arrives as the fact ``endorsement``; which tasks are drawn, what the rules weigh and how far
both may move from take to take is jaxrl/train/curriculum.py's. Source: PRAXIS, §3, Eq. 1 and 2.
Departs: labels of classes become responses, cross-entropy a reward. With lam = 0 this is GRPO
without a standard deviation.
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
from jaxrl.kernels.drift import clipped_consistency
from jaxrl.kernels.groups import group_center
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.steps import over_tokens, rollout_sum
from jaxrl.kernels.trust import Trust, trusted_surrogate
from jaxrl.kernels.weights import rollout_mean


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Raises ValueError naming a field that is out of range."""

    trust: Trust
    consistency_weight: float  # lam of the rules' labels, >= 0; 0: none are asked for
    consistency_cap: float  # nats, > 0: responses less likely than exp(-cap) are not pulled
    # on base over sampler probability of a task, > 0: the objective is that of the base
    # distribution; 0: it is the sampler's own, as in the paper
    correction_cap: float

    scorers = (("student", "plain"),)
    observers = (("student", "plain"),)
    refresh = "take"
    coupled = False
    lessons = ()

    def __post_init__(self) -> None:
        bad = {
            "consistency_weight": (0 <= self.consistency_weight < math.inf, "0 <= weight < inf"),
            "consistency_cap": (0 < self.consistency_cap < math.inf, "0 < cap < inf"),
            "correction_cap": (self.correction_cap >= 0, ">= 0, 0 for none"),
        }
        for name, (good, allowed) in bad.items():
            if not good:
                raise ValueError(f"algorithm.{name}={vars(self)[name]!r}; allowed: {allowed}")

    @property
    def needs(self) -> tuple[str, ...]:
        """What the curriculum says of each rollout."""
        rules = ("endorsement",) if self.consistency_weight > 0 else ()
        odds = ("task_probability", "base_probability") if self.correction_cap > 0 else ()
        return rules + odds

    def observe(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """old_logp and entropy of the take's start."""
        student = logits["student"]
        return {"old_logp": taken_logp(student, taken), "entropy": entropy(student)}

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """R - mean over the group's valid rollouts; the mean over rollouts, times base over sampler
        probability if that is corrected for.
        """
        acted, rollout = batch.acted, batch.rollout
        advantage = group_center(batch.reward, batch.group, batch.valid)
        weight = rollout_mean(rollout, batch.minibatch[rollout], acted)
        if self.correction_cap > 0:
            drawn = jnp.where(batch.valid, batch.facts["task_probability"], 1)
            odds = jnp.minimum(batch.facts["base_probability"] / drawn, self.correction_cap)
            weight = weight * over_tokens(odds, rollout, acted)
        return Credit(advantage=over_tokens(advantage, rollout, acted), weight=weight)

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Log-prob of the taken token."""
        return {"logp": taken_logp(logits["student"], taken)}

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """The policy term of each token, and the rollout's consistency at each of its tokens."""
        logp, acted, rollout = reading["logp"], batch.acted, batch.rollout
        token_loss, diagnostics = trusted_surrogate(
            logp,
            observed["old_logp"],
            batch.sampler_logp,
            credit.advantage,
            rollout,
            acted,
            trust=self.trust,
        )
        diagnostics |= {"entropy": observed["entropy"]}
        if self.consistency_weight > 0:
            response = rollout_sum(logp, rollout, acted, rollouts=batch.valid.shape[0])
            gap = clipped_consistency(response, cap=self.consistency_cap)
            endorsed = over_tokens(batch.facts["endorsement"] * gap, rollout, acted)
            token_loss += self.consistency_weight * endorsed
            diagnostics |= {"consistency": endorsed}
        return token_loss, diagnostics

    def keep(self, rewards: np.ndarray, facts: Mapping[str, Any]) -> bool:
        """Every group is trained: where all are right or all wrong, the rules still speak."""
        return True
