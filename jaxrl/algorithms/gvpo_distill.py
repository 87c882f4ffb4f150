"""Group-variance distillation: a student follows a teacher that may read other tokens.

For the k usable rollouts of a prompt, with l_i the student's and t_i the teacher's log-prob of the
whole text, |y_i| its length in characters and c(.) centring over the group:

    d_i = |y_i|^-alpha (l_i - t_i)
    loss = mean over prompts with k >= 2 of  sum_i c(d)_i^2 / (2 (k - 1))

It is GVPO with reward log(teacher / anchor), where the anchor cancels and beta only scales. With
alpha = 0 and the student's own rollouts its expected gradient is that of KL(student, teacher) over
whole texts. alpha does not move the optimum, the teacher, but says which errors go first.

The teacher scores the text, in its own canonical tokens: facts ``teacher_logp`` (nats, the end of
the text included where the student ended it), ``text_length`` (characters) and ``text_usable``: 0
where the text is empty, does not come back from the teacher's tokens as it was, or where the
student's tokens are not the canonical ones of its text. Such rollouts do not count, nor do
truncated ones. Other tokens of the same text are ignored, so t_i is an underestimate. Sample at
temperature 1: the teacher scores at 1.

Source: GVPO++, arXiv 2609.21432. ``coupling`` as in ``algorithms/gvpo.py``.
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
from jaxrl.batch import Batch, Credit
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.steps import over_tokens, rollout_sum
from jaxrl.kernels.surrogates import policy_gradient
from jaxrl.kernels.variance import centred_gap, gap_weights, length_weight
from jaxrl.kernels.weights import prompt_sum_mean

STUDENT = ("student", "plain")


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Raises ValueError naming a field that is out of range."""

    alpha: float  # length exponent, >= 0; 0: every text counts alike
    coupling: str  # "written" or "weights"
    keep_truncated: bool  # false: truncated rollouts count as unusable

    scorers = (STUDENT,)
    lessons = ()
    needs = ("teacher_logp", "text_length", "text_usable")

    def __post_init__(self) -> None:
        bad = {
            "alpha": (0 <= self.alpha < math.inf, "0 <= alpha < inf"),
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
    def refresh(self) -> str:
        """The detached weights follow the policy from update to update."""
        return "take" if self.coupled else "update"

    @property
    def observers(self) -> tuple[tuple[str, str], ...]:
        """The student where its log-probs are needed before the loss."""
        return () if self.coupled else (STUDENT,)

    def observe(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """The student's log-prob of the taken token."""
        return {"student": taken_logp(logits["student"], taken)}

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Log-prob of the taken token, and the entropy for the curves."""
        student = logits["student"]
        return {
            "logp": taken_logp(student, taken),
            "entropy": jax.lax.stop_gradient(entropy(student)),
        }

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """Weights of a mean over prompts; as weights the advantage is |y|^-alpha w / (k - 1)."""
        acted, rollout, usable = batch.acted, batch.rollout, self._usable(batch)
        share = prompt_sum_mean(batch.group, batch.minibatch, usable, least=2)
        if self.coupled:
            tokens = rollout_sum(acted, rollout, acted, rollouts=batch.valid.shape[0])
            share = share / jnp.maximum(tokens, 1)
            return Credit(jnp.zeros(acted.shape), over_tokens(share, rollout, acted))
        gap, scale = self._gap(observed["student"], batch)
        advantage = scale * gap_weights(*self._terms(scale * gap, batch), beta=1.0)
        return Credit(over_tokens(advantage, rollout, acted), over_tokens(share, rollout, acted))

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """The rollout's c(d)_i^2 / (2 (k - 1)) at its tokens, or its weight times -logp_t."""
        gap, scale = self._gap(reading["logp"], batch)
        curves = {"entropy": reading["entropy"], "sequence_kl": jax.lax.stop_gradient(gap)}
        if not self.coupled:
            token_loss, _ = policy_gradient(reading["logp"], credit.advantage)
            return token_loss, curves
        each, told = centred_gap(*self._terms(scale * gap, batch), beta=1.0)
        return over_tokens(each, batch.rollout, batch.acted), curves | {"gap": told["residual"]}

    def keep(self, rewards: np.ndarray, facts: Mapping[str, Any]) -> bool:
        """Every group is trained; no reward enters."""
        return True

    def _usable(self, batch: Batch) -> Bool[Array, " rollout"]:
        scored = (batch.facts["text_usable"] > 0) & (batch.facts["text_length"] > 0)
        return batch.valid & scored & (self.keep_truncated | ~batch.truncated)

    def _gap(self, logp: Array, batch: Batch) -> tuple[Array, Array]:
        """l - t of each rollout, and |y|^-alpha."""
        rollouts = batch.valid.shape[0]
        total = rollout_sum(logp, batch.rollout, batch.acted, rollouts=rollouts)
        length = length_weight(batch.facts["text_length"] * 1.0, alpha=self.alpha)
        return total - batch.facts["teacher_logp"], length

    def _terms(self, gap: Array, batch: Batch) -> tuple[Array, ...]:
        """What the kernels of variance.py take: no anchor and no reward are left."""
        none = jnp.zeros_like(gap)
        return gap, none, none, batch.group, self._usable(batch)
