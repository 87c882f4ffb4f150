"""Log-probs of whole texts, against row by row scoring. V5: group-variance distillation's own."""

import jax
import numpy as np
import pytest

from jaxrl.model.rating import sequence_logp
from jaxrl.pool.characters import CharacterTokenizer
from jaxrl.pool.rollout import StopReason
from jaxrl.train.text_teacher import annotator
from tests.model import tiny
from tests.train.toy import rollout

PAIRS = [([3, 4], [5, 6, 7]), ([8], [9]), ([3] * 9, [4] * 11), ([5, 6, 7], [])]


POLICY, PARAMS = tiny.seeded()


@jax.jit
def score(batch):
    return POLICY.score({"student": PARAMS}, batch, tiny.read, tiny.STUDENT)["logp"]


def token_by_token(pairs):
    """Sums over responses of what score says, from rows of another length."""
    rows = np.zeros((4, 20), int)
    for row, (prompt, response) in enumerate(pairs):
        rows[row, : len(prompt) + len(response)] = [*prompt, *response]
    logp = np.asarray(score(tiny.rows(rows, segment=rows > 0)))
    return [
        float(logp[row, len(prompt) : len(prompt) + len(response)].sum())
        for row, (prompt, response) in enumerate(pairs)
    ]


def test_it_sums_what_score_says_of_each_token():
    got = sequence_logp(POLICY, PARAMS, PAIRS)
    np.testing.assert_allclose(got, token_by_token(PAIRS), rtol=1e-5, atol=1e-6)
    assert got[3] == 0
    assert sequence_logp(POLICY, PARAMS, []).shape == (0,)


def test_a_mesh_pads_the_rows():
    got = sequence_logp(tiny.policy_on({"data": 4}), PARAMS, PAIRS[:3])
    np.testing.assert_allclose(got, token_by_token(PAIRS[:3]), rtol=1e-5, atol=1e-6)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="a prompt is empty"):
        sequence_logp(POLICY, PARAMS, [([], [3])])


LETTERS, DOUBLE = CharacterTokenizer("abc", 1), CharacterTokenizer("abc", 2)
TEXTS = ["cab", "a", "bcbcb", ""]


def facts(own):
    """What a teacher of letters says of the same texts, sampled in a student's tokens."""
    annotate = annotator(POLICY, PARAMS, own=own, other=LETTERS)
    rollouts = [
        rollout(4, sample, own.encode("ab"), [*own.encode(text), own.eos_id], 0.0)
        for sample, text in enumerate(TEXTS)
    ]
    return annotate(rollouts), rollouts


def test_v5_the_facts_are_of_the_text_alone():
    by_letter, rollouts = facts(LETTERS)
    by_pair, _ = facts(DOUBLE)
    assert by_letter == by_pair
    assert [one["text_length"] for one in by_letter] == [3, 1, 5, 0]
    assert [one["text_usable"] for one in by_letter] == [1, 1, 1, 0]
    whole = [(r.tokens[:2].tolist(), r.tokens[2:].tolist()) for r in rollouts[:3]]
    np.testing.assert_allclose(
        [one["teacher_logp"] for one in by_letter[:3]], token_by_token(whole), rtol=1e-5
    )


def test_a_text_that_was_cut_is_scored_without_its_end():
    annotate = annotator(POLICY, PARAMS, own=DOUBLE, other=LETTERS)
    cut = rollout(4, 0, DOUBLE.encode("ab"), DOUBLE.encode("cab"), 0.0, stop=StopReason.LENGTH)
    expected = token_by_token([(LETTERS.encode("ab"), LETTERS.encode("cab"))])
    told = annotate([cut] * 4)
    np.testing.assert_allclose([one["teacher_logp"] for one in told], expected * 4, rtol=1e-5)
