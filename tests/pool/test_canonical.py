"""Which rollouts two models can speak of, and in which tokens."""

import dataclasses

import numpy as np
import pytest

from jaxrl.pool.canonical import retell
from jaxrl.pool.characters import CharacterTokenizer
from jaxrl.pool.rollout import FEEDBACK, StopReason
from tests.train.toy import rollout

PAIRS = CharacterTokenizer("abc", 2)  # 3 a, 4 b, 5 c, 6 aa, 7 ab, 8 ac, 9 ba, ...
LETTERS = CharacterTokenizer("abc", 1)


def sampled(response, stop=StopReason.STOP):
    """A rollout of the prompt "ab" in pairs; a stopped response has its eos."""
    ids = response if isinstance(response, list) else PAIRS.encode(response)
    return rollout(
        4, 0, [7], [*ids, PAIRS.eos_id] if stop is StopReason.STOP else ids, 0.0, stop=stop
    )


def test_the_same_text_in_other_tokens():
    told = retell(sampled("cab"), PAIRS, LETTERS)
    assert told is not None
    assert (told.prompt, told.response, told.length) == ([3, 4], [5, 3, 4, LETTERS.eos_id], 3)


def test_both_sides_leave_the_end_out_of_a_text_that_was_cut():
    told = retell(sampled("cab", stop=StopReason.LENGTH), PAIRS, LETTERS)
    assert told is not None
    assert told.response == [5, 3, 4]


def test_what_the_environment_answered_is_no_part_of_the_text():
    plain = sampled("cab")
    kind, tokens = np.append(plain.kind, np.uint8(FEEDBACK)), np.append(plain.tokens, np.uint32(3))
    told = retell(dataclasses.replace(plain, kind=kind, tokens=tokens), PAIRS, LETTERS)
    assert told == retell(plain, PAIRS, LETTERS)
    spoken = np.append(kind, plain.kind[-1:])  # the policy went on after it
    again = dataclasses.replace(plain, kind=spoken, tokens=np.append(tokens, np.uint32(4)))
    assert retell(again, PAIRS, LETTERS) is None


@pytest.mark.parametrize(
    "response", ["", [3, 4], [1], [0]], ids=["empty", "other tokens", "unknown", "padding"]
)
def test_no_one_text(response):
    assert retell(sampled(response), PAIRS, LETTERS) is None


def test_a_text_that_the_other_cannot_write():
    few = CharacterTokenizer("ab", 1)
    assert retell(sampled("ab"), PAIRS, few) is not None
    assert retell(sampled("ac"), PAIRS, few) is None
    assert retell(sampled("ab"), PAIRS, CharacterTokenizer("bc", 1)) is None
