"""CoVer: one policy writes programs and tests, and each side tells what the other is worth.

Of a task's rollouts some are coders i, some testers j; e_ij is whether program i passes test j.

    coder's reward   y_i, the part of the ground-truth tests that its program passes
    tester's reward  sum_{e,v} P(e, v) log(P(e, v) / P(e) P(v)),  P(1, 1) = mean_i e_ij y_i and so
                     on, if cov_i(e_ij, y_i) > 0 (gate), else 0
    A = clip((x - mean) / std, +-advantage_clip) over a role's own rollouts of the task, std over n

A role without spread is dropped from that task, and so are tests that were not selected: no
gradient, no place in a denominator. The token loss is GRPO's with a KL term; the roles weigh
tester_share and 1 - tester_share, each a mean over its own rollouts of the update, however many
there are (a role that was dropped everywhere weighs 0). Source: arXiv 2609.21208, sections 3 and 4.

Departs: the information is that of soft labels (kernels/information.py); the released code's two
trainings in sequence are one update; the clip; the KL term has the gradient of KL(policy,
reference), not k3's; copies of a test and invalid ones that fill up the selection earn 0.

Facts, [rollout ...]: role, truth, cells [2, test] (passed, counted), test_index, selected, rewarded
(jaxrl/tasks/code.py makes them).
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
from jaxrl.kernels.divergences import k3, reverse_kl_loss
from jaxrl.kernels.groups import group_normalize, group_sum
from jaxrl.kernels.information import (
    binned_information,
    covariance,
    gated,
    pass_rate,
    soft_information,
)
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.steps import over_tokens
from jaxrl.kernels.trust import Trust, trusted_surrogate
from jaxrl.kernels.weights import rollout_mean

CODER, TESTER = 0, 1
REWARDS = ("information", "binned", "miller_madow", "covariance", "pass_rate")


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Raises ValueError naming a field that is out of range."""

    trust: Trust
    kl_weight: float  # of KL(policy, reference), >= 0; 0: no reference is scored
    reward: str  # of a test, one of REWARDS; all but the first are there to be compared with
    gate: bool  # 0 for tests that the better programs fail; false for pass_rate
    levels: int  # of the truth, for "binned" and "miller_madow", >= 1; 0 for the others
    reward_duplicates: bool  # copies that fill up the selection earn as much as the first
    tester_share: float  # of the loss, in [0, 1]; 0: coders alone
    advantage_clip: float  # > 0; inf: none

    scorers = (("student", "plain"),)
    refresh = "take"
    coupled = False
    lessons = ()
    needs = ("role", "truth", "cells", "test_index", "selected", "rewarded")

    def __post_init__(self) -> None:
        binned = self.reward in ("binned", "miller_madow")
        bad = {
            "kl_weight": (0 <= self.kl_weight < math.inf, "0 <= kl_weight < inf"),
            "reward": (self.reward in REWARDS, f"one of {REWARDS}"),
            "gate": (not (self.gate and self.reward == "pass_rate"), "false for 'pass_rate'"),
            "levels": (
                (self.levels >= 1) if binned else self.levels == 0,
                ">= 1 for 'binned' and 'miller_madow', else 0",
            ),
            "tester_share": (0 <= self.tester_share <= 1, "0 to 1"),
            "advantage_clip": (self.advantage_clip > 0, "> 0, inf for none"),
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

    def told(self, batch: Batch) -> Float[Array, " rollout"]:
        """A tester's reward at its rollout; of no meaning at coders'."""
        facts, group = batch.facts, batch.group
        passed, counted = facts["cells"][:, 0], facts["cells"][:, 1] > 0
        mask = counted & (batch.valid & (facts["role"] == CODER))[:, None]
        known = (passed, facts["truth"], group, mask)
        apart = covariance(*known)
        if self.reward == "information":
            found = soft_information(*known)
        elif self.reward == "covariance":
            found = apart
        elif self.reward == "pass_rate":
            found = pass_rate(passed, group, mask)
        else:
            corrected = self.reward == "miller_madow"
            found = binned_information(*known, levels=self.levels, miller_madow=corrected)
        found = gated(found, apart) if self.gate else found
        own = jnp.take_along_axis(found, jnp.maximum(facts["test_index"], 0)[:, None], 1)[:, 0]
        return jnp.where((facts["rewarded"] > 0) | self.reward_duplicates, own, 0)

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """Both roles' advantages, and weights that sum to each role's share."""
        facts, rollout, minibatch = batch.facts, batch.rollout, batch.minibatch[batch.rollout]
        coder = batch.valid & (facts["role"] == CODER)
        tester = batch.valid & (facts["role"] == TESTER) & (facts["selected"] > 0)
        roles = (
            (1 - self.tester_share, coder, facts["truth"]),
            (self.tester_share, tester, self.told(batch)),
        )
        advantage, weight = jnp.zeros(()), jnp.zeros(())
        for share, mask, reward in roles:
            found = group_normalize(reward, batch.group, mask, bound=self.advantage_clip)
            spread = mask & (group_sum(jnp.abs(found), batch.group, mask) > 0)
            acted = batch.acted & spread[rollout][:, None]
            advantage += over_tokens(found, rollout, acted)
            weight += share * rollout_mean(rollout, minibatch, acted)
        return Credit(advantage=advantage, weight=weight)

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Log-prob of the taken token."""
        return {"logp": taken_logp(logits["student"], taken)}

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """Policy term within the bounds of trust, plus the KL term."""
        logp, old_logp = reading["logp"], observed["old_logp"]
        arrays = (credit.advantage, batch.rollout, batch.acted)
        token_loss, diagnostics = trusted_surrogate(
            logp, old_logp, batch.sampler_logp, *arrays, trust=self.trust
        )
        diagnostics |= {"entropy": observed["entropy"]}
        if self.kl_weight > 0:
            ref_logp = observed["ref_logp"]
            token_loss += self.kl_weight * reverse_kl_loss(logp, old_logp, ref_logp)
            diagnostics |= {"reference_kl": k3(logp, ref_logp)}
        return token_loss, diagnostics

    def keep(self, rewards: np.ndarray, facts: Mapping[str, Any]) -> bool:
        """Every group is trained: a role without spread is dropped by itself."""
        return True
