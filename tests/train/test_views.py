"""Rollouts behind other contexts: what a template becomes, which tokens have a place in it, and who
is shown to whom."""

import dataclasses

import numpy as np
import pytest

from jaxrl.pool.rollout import ACTION, FEEDBACK, INJECTED, PROMPT, Rollout
from jaxrl.train import views
from jaxrl.train.collate import Shown, collate
from tests.pool.scripted import EOS, Letters
from tests.train.toy import group, rollout

KINDS = {"P": PROMPT, "A": ACTION, "F": FEEDBACK, "I": INJECTED}


def spoken(*parts: tuple[str, list[int], int], sample: int = 0, **changes) -> Rollout:
    """A rollout from (kind, ids, step), in order."""
    kinds, ids, steps = (
        np.concatenate([np.full(len(part[1]), KINDS[part[0]]) for part in parts]),
        np.concatenate([part[1] for part in parts]),
        np.concatenate([np.full(len(part[1]), part[2]) for part in parts]),
    )
    columns = {
        "tokens": ids.astype(np.uint32),
        "kind": kinds.astype(np.uint8),
        "step": steps.astype(np.int32),
        "logp": np.where(kinds == ACTION, -0.5, 0).astype(np.float32),
        "version_index": np.where(kinds == ACTION, 0, 65535).astype(np.uint16),
        "temperature": np.ones(len(ids), np.float32),
    }
    plain = rollout(7, sample, [1], [2], 1.0)
    return dataclasses.replace(plain, **{**columns, **changes})


def laid(template, *rollouts, buckets=(8, 16), tokens=16, name="v"):
    """The view of one group, and counts."""
    return views.lay_out(
        name,
        template,
        dict(enumerate(rollouts)),
        {7: rollouts},
        rows=len(rollouts) + 1,  # the last slot is empty
        tokens=tokens,
        token_buckets=buckets,
        tokenizer=Letters(),
    )


def row(view, number):
    """The ids of a row without its padding."""
    return view.tokens[number][view.segment[number] > 0].tolist()


def places(view, number):
    """{column of the plain row: place in the view}"""
    found = view.index[number]
    return {int(column): int(found[column]) for column in np.flatnonzero(found >= 0)}


RIGHT = rollout(7, 0, [10, 11], [20, EOS], 1.0)
WRONG = rollout(7, 1, [10, 11], [30, 31, EOS], 0.0)
OTHER = rollout(7, 2, [10, 11], [40, EOS], 0.0)


def test_own_tokens_are_found_behind_what_is_shown():
    view, counts = laid("{prompt}{solution}{response}", RIGHT, WRONG)
    assert row(view, 1) == [10, 11, 20, EOS, 30, 31, EOS]
    assert places(view, 1) == {2: 4, 3: 5, 4: 6}  # the response alone is scored
    np.testing.assert_array_equal(view.position[1], [0, 1, 2, 3, 4, 5, 6, 0])
    np.testing.assert_array_equal(view.segment[1], [1] * 7 + [0])
    # the right one has nobody right beside it, the last slot nobody at all
    for empty in (0, 2):
        assert row(view, empty) == [] and places(view, empty) == {}
    assert counts == {"v_missing": 1, "v_long": 0}


def test_text_between_placeholders_is_encoded_and_sampled_ids_are_not():
    view, counts = laid("say: {prompt}{response}!", WRONG)
    words = Letters().encode("say: ")
    assert row(view, 0) == [*words, 10, 11, 30, 31, EOS, *Letters().encode("!")]
    assert places(view, 0) == {2: 7, 3: 8, 4: 9} and not any(counts.values())


def test_wrong_is_another_wrong_one():
    view, counts = laid("{prompt}{wrong}{response}", RIGHT, WRONG, OTHER)
    assert [row(view, r)[2:-2] for r in (0, 2)] == [[30, 31, EOS], [30, 31, EOS]]
    assert row(view, 1) == [10, 11, 40, EOS, 30, 31, EOS] and not any(counts.values())


TURNS = spoken(
    ("P", [1, 2], -1),
    ("A", [3, 4], 0),
    ("F", [5], 0),
    ("A", [6], 1),
    ("F", [7, 8], 1),
)


def test_feedback_at_the_end_may_stand_before_or_after():
    view, _ = laid("{prompt}{feedback}{response}", TURNS)
    assert row(view, 0) == [1, 2, 7, 8, 3, 4, 5, 6]  # that between actions is part of the response
    assert places(view, 0) == {5 + 1: 2, 7: 3, 2: 4, 3: 5, 4: 6, 5: 7}
    view, _ = laid("{prompt}{response}{feedback}", TURNS)
    assert row(view, 0) == TURNS.tokens.tolist()
    assert places(view, 0) == {column: column for column in range(2, 8)}


def test_each_step_has_its_history():
    view, counts = laid("{history}{feedback}{response}", TURNS)
    assert row(view, 0) == [1, 2, 5, 3, 4, 1, 2, 3, 4, 5, 7, 8, 6]
    np.testing.assert_array_equal(view.segment[0], [1] * 5 + [2] * 8 + [0] * 3)
    np.testing.assert_array_equal(view.position[0], [*range(5), *range(8), 0, 0, 0])
    assert places(view, 0) == {4: 2, 2: 3, 3: 4, 6: 10, 7: 11, 5: 12}
    assert not any(counts.values())


def test_a_step_without_feedback_has_no_segment():
    silent = spoken(("P", [1], -1), ("A", [3], 0), ("F", [5], 0), ("A", [6], 1))
    view, counts = laid("{history}{feedback}{response}", silent)
    assert row(view, 0) == [1, 5, 3] and places(view, 0) == {2: 1, 1: 2}
    assert counts["v_missing"] == 0  # one of its steps has a place
    _, counts = laid("{prompt}{feedback}{response}", silent)  # none after the last action
    assert counts["v_missing"] == 1


def test_what_a_harness_put_in_is_history_and_has_no_place():
    forced = spoken(("P", [1], -1), ("I", [9], -1), ("A", [3], 0), ("I", [8], 0), ("A", [4], 1))
    view, _ = laid("{history}{response}", forced)
    assert row(view, 0) == [1, 9, 3, 1, 9, 3, 8, 4] and places(view, 0) == {2: 2, 4: 7}


def fact(text):
    return {"solution": text}


@pytest.mark.parametrize(
    ("mine", "siblings", "shown"),
    [
        (WRONG, [OTHER, RIGHT], [20, EOS]),  # the first that is right
        (RIGHT, [rollout(7, 3, [10], [20, EOS], 1.0)], None),  # a twin shows nothing
        (RIGHT, [rollout(7, 3, [10], [20, EOS], 1.0), rollout(7, 4, [10], [21], 1.0)], [21]),
        (WRONG, [rollout(7, 3, [10], [50], None)], None),  # nobody judged it
    ],
)
def test_the_solution_is_the_first_right_siblings(mine, siblings, shown):
    view, counts = laid("{solution}{response}", mine, *siblings)
    said = mine.tokens[mine.kind == ACTION].tolist()
    assert row(view, 0) == ([] if shown is None else [*shown, *said])
    assert bool(counts["v_missing"]) >= (shown is None)


def test_the_tasks_own_answer_stands_in_and_ends():
    known = dataclasses.replace(WRONG, facts=fact("7"))
    view, _ = laid("{solution}{response}", known, RIGHT)
    assert row(view, 0)[:-3] == [20, EOS]  # a sibling's words come first
    view, _ = laid("{solution}{response}", known)
    assert row(view, 0)[:-3] == [*Letters().encode("7"), EOS]
    same = dataclasses.replace(RIGHT, facts=fact(Letters().decode([20])))
    view, _ = laid("{solution}{response}", same)
    assert row(view, 0) == [20, EOS, 20, EOS]  # it is the task's, whoever says it too
    _, counts = laid("{wrong}{response}", known)  # there is no wrong answer of the task's
    assert counts["v_missing"] == 1


def test_the_same_text_in_other_tokens_is_the_same():
    """The contrast of a response with itself would be no contrast."""
    mine, twin, other = (
        dataclasses.replace(r, text=text)
        for r, text in ((WRONG, "12"), (OTHER, "12"), (rollout(7, 3, [10], [50], 0.0), "13"))
    )
    view, _ = laid("{wrong}{response}", mine, twin, other)
    assert row(view, 0)[:-3] == [50]
    _, counts = laid("{wrong}{response}", mine, twin)
    assert counts["v_missing"] == 2


def test_too_long_is_counted_and_never_cut():
    view, counts = laid("{prompt}{solution}{response}", WRONG, RIGHT, buckets=(4, 6))
    assert counts == {"v_missing": 1, "v_long": 1}
    assert view.tokens.shape == (3, 4) and not view.segment.any() and (view.index == -1).all()


@pytest.mark.parametrize(("prompt", "width"), [(1, 4), (2, 8), (5, 8), (6, 16)])
def test_the_smallest_bucket_that_holds_the_longest(prompt, width):
    one = rollout(7, 0, [1] * prompt, [2, 3, 4], 1.0)
    view, _ = laid("{prompt}{response}", one, buckets=(4, 8, 16))
    assert view.tokens.shape == (2, width) and view.index.shape == (2, 16)


def test_what_nothing_predicts_has_a_place_and_is_not_held():
    """Without a prompt, the first token of a response is part of the text but has no log-prob."""
    one = rollout(7, 0, [1], [2, 3], 1.0)
    view, _ = laid("{response}", one)
    assert row(view, 0) == [2, 3] and places(view, 0) == {1: 0, 2: 1}
    view, _ = laid("{prompt}{response}", one)
    assert places(view, 0) == {1: 1, 2: 2}
    view, _ = laid("{feedback}{history}{response}", TURNS)  # no segment's first token
    assert row(view, 0) == [5, 1, 2, 3, 4, 7, 8, 1, 2, 3, 4, 5, 6]
    assert places(view, 0) == {4: 0, 2: 3, 3: 4, 7: 6, 5: 12}


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{prompt}{answer}{response}",
            r"scorers.views.v='.*\['answer'\] are unknown; allowed: pro",
        ),
        ("{prompt}{ response}", r"\[' response'\] are unknown"),
        ("{prompt}{}{response}", r"\[''\] are unknown"),
        ("{prompt{response}", "scorers.views.v=.*a brace opens or closes nothing"),
        ("{prompt}{response}}", "a brace opens or closes nothing"),
        ("{prompt}{solution}", "allowed: {response} once"),
        ("{prompt}{response}{response}", "others at most once"),
        ("{prompt}{wrong}{wrong}{response}", "others at most once"),
        ("{prompt}{history}{response}", "{prompt} or {history}, not both"),
        (3, "scorers.views.v=3; allowed: a text"),
    ],
)
def test_templates_are_checked(template, words):
    with pytest.raises(ValueError, match=words):
        views.check({"good": "{prompt} {response}", "v": template})


def test_plain_is_no_name_for_a_view():
    with pytest.raises(ValueError, match="scorers.views.plain=.*the rollout as it was"):
        views.check({"plain": "{prompt}{response}"})


TEMPLATES = {
    "with_solution": "{prompt}{solution}{response}",
    "with_feedback": "{prompt}{feedback}{response}",
    "response_only": "{response}",
    "by_step": "x{history}{response}{feedback}",
}


def collated(groups, **templates):
    return collate(
        groups,
        token_buckets=(8, 16),
        groups_per_step=len(groups),
        rollouts_per_group=3,
        minibatches=1,
        needs=(),
        algorithm="toy",
        shown=Shown(templates, (8, 16), Letters()),
    )


def test_collate_lays_views_out_and_counts_what_has_no_place():
    long = rollout(7, 2, [10] * 8, [21] * 6, 0.0)
    batch, counts = collated([group(7, [RIGHT, WRONG, long])], **TEMPLATES)
    wanted = {"missing": {"with_solution": 1, "with_feedback": 3}, "long": {"with_solution": 0}}
    for what, views_ in wanted.items():
        for name, count in views_.items():
            assert counts[f"view_{name}_{what}"] == count, (name, what)
    assert counts["view_response_only_missing"] == counts["view_by_step_long"] == 0
    _, counts = collated([group(7, [WRONG, RIGHT, long])], wide="{prompt}123{response}")
    assert (counts["view_wide_long"], counts["view_wide_missing"]) == (1, 0)
    assert counts["failed"] == 0  # the others are still there
    held = {name: np.asarray(batch.held(name)) for name in TEMPLATES}
    np.testing.assert_array_equal(np.flatnonzero(held["with_solution"][1]), [2, 3, 4])
    assert not held["with_solution"][0].any() and not held["with_feedback"].any()
    np.testing.assert_array_equal(np.flatnonzero(held["response_only"][1]), [3, 4])
    np.testing.assert_array_equal(batch.held("plain"), batch.segment > 0)
    with pytest.raises(ValueError, match=r"view 'other' is not in the batch; it holds: \['by_step"):
        batch.held("other")


def test_without_a_rollout_there_is_an_empty_view():
    batch, counts = collated([group(7, [])], **TEMPLATES)
    assert batch.views["by_step"].tokens.shape == (3, 8) and not batch.held("by_step").any()
    assert not any(counts.values())


def test_refused_rollouts_are_shown_to_nobody():
    ragged = dataclasses.replace(RIGHT, logp=RIGHT.logp[:-1])
    batch, counts = collated([group(7, [ragged, WRONG])], seen=TEMPLATES["with_solution"])
    assert counts["rejected_ragged"] == 1 and counts["view_seen_missing"] == 1
    assert not batch.held("seen").any()


def test_at_its_place_stands_the_token_itself():
    """Any talk, any template: what is held is the same token, with one of its segment before it."""
    draw = np.random.default_rng(0)
    more = {"reversed": "{feedback}{response}{prompt}", "acts": "x{history}{response}"}
    shown = Shown(TEMPLATES | more, (64, 256), Letters())
    for _ in range(30):
        talks = []
        for sample in range(3):
            parts = [("P", draw.integers(3, 20, draw.integers(1, 4)).tolist(), -1)]
            for step in range(draw.integers(1, 4)):
                for kind, least in (("A", 1), ("I", 0), ("F", 0)):
                    ids = draw.integers(3, 20, draw.integers(least, 4)).tolist()
                    parts.append((kind, ids, step))
            right = bool(draw.integers(0, 2))
            talks.append(spoken(*parts, sample=sample, correct=right, reward=float(right)))
        batch, _ = collate(
            [group(7, talks)],
            token_buckets=(64,),
            groups_per_step=1,
            rollouts_per_group=3,
            minibatches=1,
            needs=(),
            algorithm="toy",
            shown=shown,
        )
        for name, view in batch.views.items():
            rows, columns = np.nonzero(batch.held(name))
            at = view.index[rows, columns]
            np.testing.assert_array_equal(view.tokens[rows, at], batch.tokens[rows, columns])
            np.testing.assert_array_equal(view.segment[rows, at], view.segment[rows, at - 1])
            assert (view.segment[rows, at] > 0).all() and (view.position[rows, at] > 0).all()
            assert len({(r, a) for r, a in zip(rows, at, strict=True)}) == len(rows)
        assert batch.held("acts")[batch.kind == ACTION].all()
