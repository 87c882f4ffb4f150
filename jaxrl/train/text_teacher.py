"""A teacher that reads the responses' text in tokens of its own: facts for a pool's rollouts."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxrl.model.policy import Policy
from jaxrl.model.rating import sequence_logp
from jaxrl.pool.canonical import retell
from jaxrl.pool.contract import Annotate, Tokenizer
from jaxrl.pool.rollout import Rollout


def annotator(
    policy: Policy, params: Mapping[str, jax.Array], *, own: Tokenizer, other: Tokenizer
) -> Annotate:
    """What ``algorithms/gvpo_distill.py`` needs of each rollout, from a teacher ``policy`` with
    weights ``params`` that reads ``other``'s tokens; the rollouts were sampled in ``own``'s.

    ``teacher_logp``: log-prob of the response's text in nats at temperature 1, in the teacher's
    canonical tokens, with the end of the text if the student ended it; ``text_length`` in
    characters; ``text_usable``: 1, or 0 (and the others 0 too) where ``pool.canonical.retell``
    says that there is no one text to speak of.
    """

    def annotate(rollouts: Sequence[Rollout]) -> list[Mapping[str, Any]]:
        told = [retell(rollout, own, other) for rollout in rollouts]
        # Rows that are not usable are scored as a stand-in, so that their number stays the same.
        stand_in = ([other.eos_id], [other.eos_id])
        pairs = [stand_in if one is None else (one.prompt, one.response) for one in told]
        logp = sequence_logp(policy, params, pairs)
        return [
            {
                "teacher_logp": 0.0 if one is None else float(total),
                "text_length": 0 if one is None else one.length,
                "text_usable": int(one is not None),
            }
            for one, total in zip(told, logp, strict=True)
        ]

    return annotate
