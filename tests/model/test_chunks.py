"""Heads see the tokens from a row's first action on, wherever they lie, and no others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.batch import ACTION, PROMPT
from jaxrl.kernels.readings import entropy
from tests.model.tiny import STUDENT, policy_on, read, rows, seeded

KIND = np.array(
    [
        [PROMPT] * 5 + [ACTION] * 4 + [0] * 2,
        [PROMPT] * 2 + [ACTION] * 2 + [PROMPT] * 3 + [ACTION] * 4,
        [PROMPT] * 7 + [0] * 4,
        [PROMPT] * 9 + [ACTION] * 2,
    ]
)
BATCH = dataclasses.replace(
    rows(np.random.default_rng(0).integers(1, 20, KIND.shape), KIND > 0, temperature=0.7),
    kind=jnp.asarray(KIND),
)


def found(policy, params, bonus=0.0):
    """Log-probs, how often a chunk was looked at, and a gradient."""
    seen = []

    def looked(logits, taken):
        jax.debug.callback(lambda: seen.append(1))
        some = jax.lax.stop_gradient(entropy(logits["student"]))
        return read(logits, taken) | {"entropy": entropy(logits["student"]) if bonus else some}

    def loss(params):
        score = policy.score({"student": params}, BATCH, looked, STUDENT)
        logp, bonuses = score["logp"], bonus * score["entropy"]
        return ((logp + bonuses) * BATCH.acted * jnp.arange(1.0, 12.0)).sum(), logp

    grads, logp = jax.jit(jax.grad(loss, has_aux=True))(params)
    jax.effects_barrier()
    return np.asarray(logp), grads, len(seen)


@pytest.mark.parametrize(("again", "bonus"), [(True, 0), (True, 0.3), (False, 0.3)])
def test_answers_only_gives_the_same_of_them_for_less(again, bonus):
    _, params = seeded()
    whole, all_grads, often = found(policy_on(score_chunk_positions=6), params, bonus)
    policy = policy_on(score_chunk_positions=6, score_remat=again)
    policy = dataclasses.replace(policy, answers_only=True)
    answers, grads, seldom = found(policy, params, bonus)
    begun = np.cumsum(KIND == ACTION, 1) > 0
    begun &= KIND > 0
    np.testing.assert_allclose(answers[begun], whole[begun], rtol=1e-6, atol=1e-6)
    assert not answers[~begun].any()
    for name, slope in grads.items():
        right = all_grads[name]
        few = 1e-6 * np.abs(right).max()
        np.testing.assert_allclose(slope, right, rtol=1e-4, atol=few, err_msg=name)
    assert begun.sum() == 15
    # Three chunks forwards. Backwards too if slopes need more than fits, that of entropies.
    assert seldom == (2 * 3 if again and bonus else 3) < often
