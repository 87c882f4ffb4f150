"""GVPO: the implicit reward beta log(policy / anchor) is to vary in a group as the true one does.

For the k valid rollouts of a prompt, with l_i the summed log-prob of response i, r_i = beta (l_i -
anchor_i), c(.) centring over the group and e_i = c(r)_i - c(R)_i:

    loss = mean over prompts with k >= 2 of  sum_i e_i^2 / (2 (k - 1))
    grad = mean over prompts of  -beta / (k - 1) sum_i w_i grad l_i,  w_i = -e_i

Source: arXiv 2504.19599. Two equal forms. "written" differentiates the loss, so a micro-batch holds
whole groups. "weights" reads l_i without gradient before each update and descends -beta / (k - 1)
w_i l_i, so a micro-batch may cut a group; it costs one more forward pass an update, and the loss it
reports is not the objective's value.

anchor = "start": the student at the start of the take (mirror descent). With a single update a take
r is 0 and this is beta times REINFORCE: use at least two minibatches or epochs. anchor = "frozen":
the reference; the optimum is reference exp(R / beta). Groups with equal rewards are trained: their
residual still pulls the policy back to the anchor. Empty responses are legal (l_i = 0).

Any policy may have sampled the rollouts: its log-probs do not enter. If each rollout of a group is
drawn by chance from several policies, nothing changes. If a group holds a fixed number from each
(so many of its own, so many recorded), the spread between them is over-weighted: ``strata`` takes
the exact form then, and the fact ``behaviour`` of a rollout, any integer, says who sampled it.
Groups with a single usable rollout of some policy are left out. The optimum is the same.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl.algorithms.contract import Diagnostics, Logits, Reading
from jaxrl.batch import PAD, Batch, Credit
from jaxrl.kernels.divergences import k1
from jaxrl.kernels.groups import group_center
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.steps import over_tokens, rollout_sum
from jaxrl.kernels.surrogates import policy_gradient
from jaxrl.kernels.variance import (
    accompanied,
    centred_gap,
    gap_weights,
    stratified_gap,
    stratified_weights,
)
from jaxrl.kernels.weights import prompt_sum_mean

STUDENT = ("student", "plain")
REFERENCE = ("reference", "plain")


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Raises ValueError naming a field that is out of range."""

    beta: float  # weight of KL(policy, anchor) against the reward, > 0
    anchor: str  # "start": the student at the take's start; "frozen": the reference
    coupling: str  # "written" or "weights", see above
    unit_grad: bool  # divide the loss by beta, so that its scale is that of REINFORCE
    keep_truncated: bool  # false: truncated rollouts count as invalid
    strata: bool  # groups hold fixed numbers of rollouts from several policies

    scorers = (STUDENT,)
    lessons = ()

    def __post_init__(self) -> None:
        bad = {
            "beta": (0 < self.beta < math.inf, "0 < beta < inf"),
            "anchor": (self.anchor in ("start", "frozen"), "'start', 'frozen'"),
            "coupling": (self.coupling in ("written", "weights"), "'written', 'weights'"),
        }
        for name, (good, allowed) in bad.items():
            if not good:
                raise ValueError(f"algorithm.{name}={vars(self)[name]!r}; allowed: {allowed}")

    @property
    def coupled(self) -> bool:
        """As written, a micro-batch must hold whole groups."""
        return self.coupling == "written"

    @property
    def needs(self) -> tuple[str, ...]:
        """Who sampled a rollout, where groups are made up of several policies' rollouts."""
        return ("behaviour",) if self.strata else ()

    @property
    def refresh(self) -> str:
        """The detached weights follow the policy from update to update; the anchor does not move
        inside a take.
        """
        return "take" if self.coupled else "update"

    @property
    def observers(self) -> tuple[tuple[str, str], ...]:
        """The anchor, and the student where its log-probs are needed before the loss."""
        if self.anchor == "start":
            return (STUDENT,)
        return (REFERENCE,) if self.coupled else (STUDENT, REFERENCE)

    def observe(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Log-prob of the taken token under each observer, by its name in ``logits``."""
        return {who: taken_logp(of, taken) for who, of in logits.items()}

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Log-prob of the taken token, and the entropy for the curves."""
        student = logits["student"]
        return {
            "logp": taken_logp(student, taken),
            "entropy": jax.lax.stop_gradient(entropy(student)),
        }

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """Weights of a mean over prompts; advantage c(R)_i as written, w_i / (k - 1) as weights
        (or that of the exact form for strata).
        """
        acted, rollout, counted = batch.acted, batch.rollout, self._counted(batch)
        share = prompt_sum_mean(batch.group, batch.minibatch, counted, least=2)
        if self.unit_grad:
            share = share / self.beta
        if not self.coupled:
            weights = stratified_weights if self.strata else gap_weights
            advantage = weights(*self._terms(observed["student"], batch, observed), beta=self.beta)
            return Credit(
                over_tokens(advantage, rollout, acted), over_tokens(share, rollout, acted)
            )
        # A rollout's loss is spread over its own action tokens. An empty response has none, yet its
        # residual is part of the loss: the tokens of its prompt carry it.
        rollouts = batch.valid.shape[0]
        empty = rollout_sum(acted, rollout, acted, rollouts=rollouts) == 0
        carrier = acted | ((batch.kind != PAD) & empty[rollout][:, None])
        tokens = rollout_sum(carrier, rollout, carrier, rollouts=rollouts)
        advantage = group_center(batch.reward, batch.group, counted)  # for the curves only
        return Credit(
            advantage=over_tokens(advantage, rollout, acted),
            weight=over_tokens(share / jnp.maximum(tokens, 1), rollout, carrier),
        )

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """The rollout's e_i^2 / (2 (k - 1)) at its tokens, or -beta w_i / (k - 1) logp_t."""
        logp = reading["logp"]
        curves = {"entropy": reading["entropy"], "anchor_kl": k1(logp, self._anchor_logp(observed))}
        if self.coupled:
            distance = stratified_gap if self.strata else centred_gap
            gap, diagnostics = distance(*self._terms(logp, batch, observed), beta=self.beta)
            return over_tokens(gap, batch.rollout, batch.kind != PAD), diagnostics | curves
        token_loss, diagnostics = policy_gradient(logp, self.beta * credit.advantage)
        return token_loss, diagnostics | curves

    def keep(self, rewards: np.ndarray, facts: Mapping[str, Any]) -> bool:
        """Every group is trained: with equal rewards too, the residual pulls towards the anchor."""
        return True

    def _anchor_logp(self, observed: Reading) -> Float[Array, "row token"]:
        if self.anchor == "frozen":
            return observed["reference/plain"]
        return observed["student" if self.coupled else "start/student"]

    def _counted(self, batch: Batch) -> Bool[Array, " rollout"]:
        usable = batch.valid & (self.keep_truncated | ~batch.truncated)
        if not self.strata:
            return usable
        return accompanied(batch.facts["behaviour"], batch.group, usable) > 0

    def _terms(self, logp: Array, batch: Batch, observed: Reading) -> tuple[Array, ...]:
        """What the kernels of variance.py take, with log-probs summed over each response.

        Those over the anchor's, token by token: two sums over a long response are large, alike, and
        rounded apart by more than what they differ by.
        """
        anchor_logp = jax.lax.stop_gradient(self._anchor_logp(observed))
        gap, rollouts = logp - anchor_logp, batch.valid.shape[0]
        total = rollout_sum(gap, batch.rollout, batch.acted, rollouts=rollouts)
        return (
            total,
            jnp.zeros_like(total),
            batch.reward,
            *((batch.facts["behaviour"],) if self.strata else ()),
            batch.group,
            self._counted(batch),
        )
