"""ExpDis: an explorer is rewarded for right answers that are new; a student learns from its best.

    R = (+1 right, -1 wrong) + novelty_weight * novelty * 1[right] + overlong penalty
    A = R - mean over the prompt's valid rollouts; no division by the standard deviation

The token loss is kernels/trust.py's, weighted by 1 / (length_tokens * trained rollouts). Novelty is
the error with which a predictor guesses a frozen random network's output on the student's hidden
states, read over the response without its prompt. It is observed at the start of a take, before the
predictor learns from the take's rollouts, and no gradient of it reaches the policy. The predictor
descends the squared error, mean over rollouts, in as many steps as the student (the paper: one).

Truncated rollouts stay in the group statistics, but none of their tokens is trained or counted.
Dynamic sampling tests the total reward: an all-right group is kept where novelty may differ. The
host, which sees neither novelty nor length, refuses what cannot vary; a group whose total turns out
equal has advantage and weight 0. With novelty_weight = 0 this is the student's own reinforcement
and no novelty is scored. The explorer, the filter and the student are phases of a run, see
configs/exp_dis.py and pool/filtering.py. Source: arXiv 2610.10536.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl.algorithms.contract import Diagnostics, Logits, Reading
from jaxrl.batch import Batch, Credit
from jaxrl.kernels.grades import overlong_penalty
from jaxrl.kernels.groups import group_center, group_sum
from jaxrl.kernels.novelty import network_novelty, novelty_reward
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.steps import over_tokens, rollout_sum
from jaxrl.kernels.trust import Trust, trusted_surrogate
from jaxrl.kernels.weights import fixed_length, rollout_mean

STUDENT = ("student", "plain")
NOVELTY = ("novelty", "response_only")


def judged_tokens(batch: Batch) -> Bool[Array, "row token"]:
    """Tokens that stand for their rollout's novelty: those that the view shows, of a response that
    fits in there. The first is among them: it has a hidden state, if nothing before it.
    """
    return batch.acted & (batch.views[NOVELTY[1]].index >= 0)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predictor learns to guess the random networks on all valid rollouts of a take."""

    scorers = (NOVELTY,)

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """Each rollout counts the same, however long; nothing is better than expected."""
        weight = rollout_mean(batch.rollout, batch.minibatch[batch.rollout], judged_tokens(batch))
        return Credit(advantage=jnp.zeros_like(weight), weight=weight)

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Squared error, summed over layers: each layer has a predictor of its own."""
        return {"square_error": logits["/".join(NOVELTY)].sum(-1)}

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """The squared error itself."""
        return reading["square_error"], {}


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Raises ValueError naming a field that is out of range."""

    trust: Trust
    novelty_weight: float  # of novelty against the verdict's +-1, >= 0; 0: no novelty is scored
    length_tokens: int  # divisor of the loss, a constant: sampler.max_new_tokens
    dynamic_sampling: bool  # refuse groups whose total reward cannot vary
    overlong_penalty: float  # taken off the reward at the limit, >= 0; 0: no shaping
    overlong_limit_tokens: int  # response length of the full penalty: sampler.max_new_tokens
    overlong_buffer_tokens: int  # the penalty grows over so many tokens before the limit

    scorers = (STUDENT,)
    refresh = "take"
    coupled = False
    needs = ()

    def __post_init__(self) -> None:
        limit = self.overlong_limit_tokens
        bad = {
            "novelty_weight": (0 <= self.novelty_weight < math.inf, "0 <= weight < inf"),
            "length_tokens": (self.length_tokens > 0, "> 0"),
            "overlong_penalty": (0 <= self.overlong_penalty < math.inf, "0 <= penalty < inf"),
            "overlong_limit_tokens": (limit > 0, "> 0"),
            "overlong_buffer_tokens": (0 < self.overlong_buffer_tokens <= limit, f"1 to {limit}"),
        }
        for name, (good, allowed) in bad.items():
            if not good:
                raise ValueError(f"algorithm.{name}={vars(self)[name]!r}; allowed: {allowed}")

    @property
    def observers(self) -> tuple[tuple[str, str], ...]:
        """The student at the take's start, and the novelty of what it said."""
        return (STUDENT, NOVELTY) if self.novelty_weight else (STUDENT,)

    @property
    def lessons(self) -> tuple[tuple[str, Prediction], ...]:
        """The predictor's, if novelty is scored."""
        return (("novelty", Prediction()),) if self.novelty_weight else ()

    def observe(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """old_logp and entropy of the take's start; novelty before the predictor's step."""
        student = logits["student"]
        observed = {"old_logp": taken_logp(student, taken), "entropy": entropy(student)}
        if self.novelty_weight:
            observed["novelty"] = network_novelty(logits["/".join(NOVELTY)])
        return observed

    def total_reward(self, batch: Batch, observed: Reading) -> Float[Array, " rollout"]:
        """R: correct is the verifier's full mark, a reward of at least 1."""
        acted, rollout, rollouts = batch.acted, batch.rollout, batch.valid.shape[0]
        correct, novelty = batch.reward >= 1, jnp.zeros_like(batch.reward)
        if self.novelty_weight:
            judged = judged_tokens(batch)
            tokens = rollout_sum(judged, rollout, judged, rollouts=rollouts)
            novelty = rollout_sum(observed["novelty"], rollout, judged, rollouts=rollouts)
            novelty /= jnp.maximum(tokens, 1)
        return novelty_reward(novelty, correct, weight=self.novelty_weight) + overlong_penalty(
            rollout_sum(acted, rollout, acted, rollouts=rollouts),
            limit=self.overlong_limit_tokens,
            buffer=self.overlong_buffer_tokens,
            penalty=self.overlong_penalty,
        )

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """Centred total rewards; weight on groups that vary, and on rollouts that ended."""
        acted, rollout = batch.acted, batch.rollout
        advantage = group_center(self.total_reward(batch, observed), batch.group, batch.valid)
        varies = group_sum(advantage != 0, batch.group, batch.valid) > 0
        trained = acted & (varies & ~batch.truncated)[rollout][:, None]
        return Credit(
            advantage=over_tokens(advantage, rollout, acted),
            weight=fixed_length(
                rollout, batch.minibatch[rollout], trained, length=self.length_tokens
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
        seen = {name: observed[name] for name in ("entropy", "novelty") if name in observed}
        return token_loss, diagnostics | seen

    def keep(self, rewards: np.ndarray, facts: Mapping[str, Any]) -> bool:
        """Whether the total reward may vary: verdicts differ, or right answers may in novelty."""
        right = rewards[np.isfinite(rewards)] >= 1
        mixed = bool(right.any() and not right.all())
        return not self.dynamic_sampling or mixed or bool(self.novelty_weight and right.any())
