"""Whole groups judged at once, what an environment answers, and what is recorded of a verdict."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from jaxrl.pool import spool
from jaxrl.pool.contract import Completion, PoolError, Request
from jaxrl.pool.local import LocalPool
from jaxrl.pool.rollout import ACTION, FEEDBACK, NOT_SAMPLED, PROMPT, Failure, Rollout
from jaxrl.tasks.contract import Task, Verdict
from jaxrl.train.collate import collate
from tests.pool.scripted import EOS, Letters, Scripted, Sums, answer_of, local_pool


class Roles(Sums):
    """Samples of a group are asked differently and judged together: the n-th verdict scores n."""

    grouped = True

    def __init__(self, count: int, judge: Callable[[Sequence[str]], Any] | None = None) -> None:
        super().__init__(count)
        self.judge = judge
        self.asked: list[tuple[str, ...]] = []

    def prompts(self, task: Task, samples: int) -> Sequence[str]:
        return [f"{task.prompt}{'ab'[sample % 2]}" for sample in range(samples)]

    def verify(self, task: Task, response: str) -> Verdict:
        raise AssertionError("a grouped source is asked for whole groups")

    def verify_group(self, task: Task, responses: Sequence[str]) -> Sequence[Verdict]:
        self.asked.append(tuple(responses))
        if self.judge is not None:
            return self.judge(responses)
        beaten = {"wins": list(range(len(responses)))}
        return [Verdict(i / 2, i >= 2, {}, facts=beaten) for i in range(len(responses))]


def asked_of(rollout: Rollout) -> str:
    return Letters().decode(rollout.tokens[rollout.kind == PROMPT].tolist())


def test_a_group_is_judged_once_and_each_sample_has_its_prompt():
    source = Roles(8)
    generator = Scripted(lambda request: str(request.sample))
    pool = local_pool(generator, source, rollouts_per_group=3, reward="score")
    groups, manifest = pool.take(2, step=0)
    assert source.asked == [("0", "1", "2")] * 2  # in the order of samples, once a group
    for group in groups:
        task = group.rollouts[0].task_key.removeprefix("sum/")
        assert [asked_of(r) for r in group.rollouts] == [f"{task}+1={x}" for x in "aba"]
        assert [r.reward for r in group.rollouts] == [0, 0.5, 1]
        assert [r.correct for r in group.rollouts] == [False, False, True]
        assert all(r.facts["wins"] == [0, 1, 2] for r in group.rollouts)
    assert not any(count for name, count in manifest.counts.items() if name != "sampled_tokens")


def test_equal_prompts_are_encoded_once():
    class Counting(Letters):
        texts: list[str] = []

        def encode(self, text: str) -> list[int]:
            self.texts.append(text)
            return super().encode(text)

    pool = local_pool(Scripted(), Roles(1), rollouts_per_group=4)
    pool._tokenizer = Counting()
    pool.take(1, step=0)
    assert Counting.texts == ["0+1=a", "0+1=b"]


class Ragged(Scripted):
    """Loses a log-prob in the first group."""

    def completion(self, request: Request) -> Completion:
        whole = super().completion(request)
        broken = (request.group, request.sample) == (0, 1)
        return dataclasses.replace(whole, logp=whole.logp[1:]) if broken else whole


def test_a_group_that_is_not_whole_is_not_judged():
    source = Roles(8)
    groups, manifest = local_pool(Ragged(), source).take(2, step=0)
    assert len(source.asked) == 2 and all(len(responses) == 2 for responses in source.asked)
    assert [group.id for group in groups] == [1, 2]
    counts = manifest.counts
    assert (counts["rejected_ragged"], counts["voided"], counts["refilled"]) == (1, 1, 1)
    assert counts["failed"] == 0  # the verifier was not at fault


def crashing(responses: Sequence[str]) -> Any:
    raise RuntimeError("the arena is closed")


def scored(*scores: float, **more: Any) -> Any:
    return lambda responses: [Verdict(score, score >= 1, {}, **more) for score in scores]


def nested(deep: int) -> Any:
    inner: Any = 0
    for _ in range(deep):
        inner = [inner]
    return inner


@pytest.mark.parametrize(
    ("judge", "words", "failed"),
    [
        (crashing, "RuntimeError: the arena is closed", 2),
        (scored(1.0), "ValueError: 1 verdicts for 2 responses", 2),
        (scored(1.0, 1.0, 1.0), "ValueError: 3 verdicts for 2 responses", 2),
        (scored(1.0, float("nan")), "the verifier's score is nan", 1),
        (scored(1.0, 0.0, facts={"wins": np.zeros((2, 2))}), "'wins' is float64[2, 2], not a c", 2),
        (scored(1.0, 0.0, facts={"wins": np.array(["a"])}), "'wins' is <U1[1], not a column", 2),
        (scored(1.0, 0.0, facts={"grade": float("inf")}), "'grade' cannot be recorded: Out", 2),
        (scored(1.0, 0.0, facts={"grade": {1, 2}}), "'grade' cannot be recorded: Object of", 2),
        (scored(1.0, 0.0, facts={"grade": nested(5000)}), "'grade' cannot be recorded: ", 2),
        (
            scored(1.0, 0.0, facts={"off": np.array([1, np.nan])}),
            "'off' has a number that is no",
            2,
        ),
    ],
)
def test_what_a_judge_fails_at_is_a_fault_of_the_data(judge, words, failed, tmp_path):
    """Case 36: it is counted, nobody gets a reward of 0 for it, and the group is not handed out."""
    settings = {"max_refills": 0, "record_dir": tmp_path, "reward": "score"}
    groups, manifest = local_pool(Scripted(), Roles(4, judge), **settings).take(1, step=0)
    assert groups == []
    assert (manifest.counts["failed"], manifest.counts["voided"]) == (failed, 1)
    recorded = [rollout for path in tmp_path.iterdir() for rollout in spool.read(path)]
    lost = [rollout for rollout in recorded if rollout.reward is None]
    assert len(recorded) == 2 and len(lost) == failed
    for rollout in lost:
        assert words in rollout.facts["error"] and rollout.failure is Failure.DATA
        assert not rollout.correct and rollout.reward_components == {}


def test_prompts_that_do_not_fit_the_samples_end_the_run():
    class Short(Roles):
        def prompts(self, task: Task, samples: int) -> Sequence[str]:
            return [task.prompt]

    class Broken(Roles):
        def prompts(self, task: Task, samples: int) -> Sequence[str]:
            raise KeyError("role")

    with pytest.raises(PoolError, match="task 'sum/.' has 1 prompts for 2 samples"):
        local_pool(Scripted(), Short(4)).take(1, step=0)
    with pytest.raises(PoolError, match="prompts of task 'sum/.' failed: KeyError: 'role'"):
        local_pool(Scripted(), Broken(4)).take(1, step=0)


class Answers(Sums):
    """An environment that says what was right, and notes how far off the response was."""

    def verify(self, task: Task, response: str) -> Verdict:
        off = np.array([len(response), int(task.answer)], np.int32)
        facts = {"off": off, "grade": 0.5, "words": ["not", response]}
        return dataclasses.replace(
            super().verify(task, response), feedback=f"no:{task.answer}", facts=facts
        )


def test_numbers_of_numpy_are_numbers(tmp_path):
    facts = {"rank": np.int64(3), "grade": np.float32(0.5), "won": np.bool_(True)}
    judge = scored(1.0, 0.0, facts=facts)
    (group,), _ = local_pool(Scripted(), Roles(1, judge), record_dir=tmp_path).take(1, step=0)
    (path,) = tmp_path.iterdir()
    for rollout in (*group.rollouts, *spool.read(path)):
        assert {name: rollout.facts[name] for name in facts} == {
            "rank": 3,
            "grade": 0.5,
            "won": True,
        }


def test_feedback_follows_the_response_as_tokens_that_nobody_sampled():
    pool = local_pool(Scripted(lambda r: "9"), Answers(1), max_feedback_tokens=8)
    (group,), manifest = pool.take(1, step=0)
    for rollout in group.rollouts:
        said, told = [*Letters().encode("9"), EOS], Letters().encode("no:1")
        prompt = Letters().encode("0+1=")
        assert rollout.tokens.tolist() == [*prompt, *said, *told]
        assert rollout.kind.tolist() == [PROMPT] * 4 + [ACTION] * 2 + [FEEDBACK] * 4
        assert rollout.step.tolist() == [-1] * 4 + [0] * 6  # it belongs to the step it answers
        assert rollout.logp.tolist() == [0] * 4 + [-0.5] * 2 + [0] * 4
        assert rollout.version_index.tolist() == [NOT_SAMPLED] * 4 + [0] * 2 + [NOT_SAMPLED] * 4
        assert (rollout.temperature[6:] == 1).all()
        assert rollout.text == "9"  # what the verifier saw
    assert manifest.counts["feedback_cut"] == 0


@pytest.mark.parametrize(("limit", "kept", "cut"), [(0, "", 0), (2, "no", 2), (4, "no:1", 0)])
def test_feedback_is_cut_at_its_limit_and_counted(limit, kept, cut):
    pool = local_pool(Scripted(lambda r: "9"), Answers(1), max_feedback_tokens=limit)
    (group,), manifest = pool.take(1, step=0)
    for rollout in group.rollouts:
        told = rollout.tokens[rollout.kind == FEEDBACK].tolist()
        assert Letters().decode(told) == kept
    assert manifest.counts["feedback_cut"] == cut  # rollouts; one that keeps none cuts none


def test_a_silent_environment_leaves_no_feedback():
    (group,), _ = local_pool(Scripted(), Sums(1), max_feedback_tokens=8).take(1, step=0)
    assert not any((rollout.kind == FEEDBACK).any() for rollout in group.rollouts)


def test_facts_and_the_right_answer_are_recorded_and_survive_the_disk(tmp_path):
    pool = local_pool(Scripted(answer_of), Answers(2), record_dir=tmp_path)
    groups, _ = pool.take(2, step=0)
    (path,) = tmp_path.iterdir()
    for given, read in zip(
        [rollout for group in groups for rollout in group.rollouts], spool.read(path), strict=True
    ):
        answer = given.task_key.removeprefix("sum/")
        wanted = {"solution": str(int(answer) + 1), "grade": 0.5, "words": ["not", given.text]}
        for facts in (given.facts, read.facts):
            assert {name: facts[name] for name in wanted} == wanted
            assert facts["off"].tolist() == [1, int(answer) + 1]
            assert facts["off"].dtype == np.int32
            assert set(facts) == {*wanted, "off"}


def test_a_task_without_an_answer_has_no_solution():
    class Open(Sums):
        def _task(self, n: int) -> Task:
            return dataclasses.replace(super()._task(n), answer="")

    (group,), _ = local_pool(Scripted(), Open(1)).take(1, step=0)
    assert all("solution" not in rollout.facts for rollout in group.rollouts)


def test_the_right_answer_stays_beside_an_error(tmp_path):
    local_pool(Scripted(), Roles(2, crashing), max_refills=0, record_dir=tmp_path).take(1, step=0)
    (path,) = tmp_path.iterdir()
    assert [set(r.facts) for r in spool.read(path)] == [{"solution", "error"}] * 2


def with_scores(rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    """What only a trainer can add: a number for each token, and one for the group."""
    assert len({rollout.group_id for rollout in rollouts}) == 1
    return [
        {"token_scores": -np.arange(len(r.tokens), dtype=np.float32), "size": len(rollouts)}
        for r in rollouts
    ]


def annotated(**settings: Any) -> LocalPool:
    return local_pool(Scripted(answer_of), Answers(12), annotate=with_scores, **settings)


def test_annotations_are_facts_and_reach_the_batch(tmp_path):
    groups, _ = annotated(max_feedback_tokens=3, record_dir=tmp_path).take(2, step=0)
    batch, _ = collate(
        groups,
        token_buckets=(16,),
        groups_per_step=2,
        rollouts_per_group=2,
        minibatches=1,
        needs=("token_scores", "size", "off", "grade"),
        algorithm="toy",
    )
    for row, rollout in enumerate(r for group in groups for r in group.rollouts):
        length = len(rollout.tokens)
        np.testing.assert_array_equal(batch.facts["token_scores"][row, :length], -np.arange(length))
        assert not batch.facts["token_scores"][row, length:].any()
        np.testing.assert_array_equal(batch.facts["off"][row], rollout.facts["off"])
    assert batch.facts["size"].tolist() == [2] * 4 and batch.facts["grade"].tolist() == [0.5] * 4
    (path,) = tmp_path.iterdir()
    assert all("size" not in rollout.facts for rollout in spool.read(path))  # not observed there


def test_only_groups_that_are_handed_over_are_annotated():
    seen: list[int] = []

    def note(rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
        seen.append(rollouts[0].group_id)
        return [{} for _ in rollouts]

    pool = local_pool(
        Scripted(answer_of),
        Answers(12),
        annotate=note,
        keep=lambda rewards, facts: facts["off"][0][1] % 2 == 0,
    )
    groups, _ = pool.take(3, step=0)
    assert seen == [group.id for group in groups] and len(seen) == 3


@pytest.mark.parametrize("faulty", ["raises", "too few"])
def test_an_annotation_that_fails_ends_the_run_with_its_cause(faulty):
    def fails(rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
        if faulty == "raises":
            raise RuntimeError("the teacher is out of memory")
        return [{}]

    pool = local_pool(Scripted(answer_of), Answers(2), annotate=fails)
    words = "the teacher is out of memory" if faulty == "raises" else "ValueError: zip"
    with pytest.raises(PoolError, match=f"annotation of group 0 failed: .*{words}"):
        pool.take(1, step=0)
