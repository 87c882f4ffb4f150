"""The last number of a response, by hand; the source that scores it, beside the whole text's."""

import pytest

from jaxrl.tasks import last_number, reasoning

SPLITS = {"seed": 0, "train_prompts": 5, "held_out_prompts": 5, "held_out_fraction": 0.1}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", "42"),
        (" 3.", "3"),
        ("The answer is -7.", "-7"),
        ("23 - 60 = -37", "-37"),
        ("5-3", "3"),
        ("5 - 3", "3"),
        ("(5)-3", "3"),
        ("x = -3.25 m", "-3.25"),
        ("1,234,567 in all", "1234567"),
        ("1,2", "2"),
        ("12,3456", "3456"),
        ("**8**", "8"),
        ("first 4, then five", "4"),
        ("-", ""),
        ("none", ""),
        ("", ""),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number.last_number(text) == number


def test_sentences_count_where_the_whole_text_does_not():
    made = last_number.Source("chain_sum", {"min_terms": 2, "max_terms": 2}, **SPLITS)
    whole = reasoning.Source("chain_sum", {"min_terms": 2, "max_terms": 2}, **SPLITS)
    for split in ("train", "held_out"):
        assert [t.prompt for t in made.tasks(split)] == [t.prompt for t in whole.tasks(split)]
    task = made.tasks("train")[0]
    for text in (task.answer, f"The answer is {task.answer}.", f"1 + 1 = {task.answer}\n"):
        verdict = made.verify(task, text)
        assert verdict.correct and verdict.components == {"score": 1.0, "stated": 1.0}
    assert not whole.verify(task, f"The answer is {task.answer}.").correct
    assert not made.verify(task, f"{task.answer}, not {int(task.answer) + 1}").correct
    silent = made.verify(task, "I do not know.")
    assert (silent.correct, silent.score, silent.components["stated"]) == (False, 0.0, 0.0)
