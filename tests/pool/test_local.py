"""The pool in this process: what is drawn, what is handed over, what is refused, and how it ends.

The generators and sources are real small classes of ``scripted.py`` and of this file.
"""

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from jaxrl.pool import spool
from jaxrl.pool.contract import Completion, PoolEnd, PoolError, Request, RolloutPool
from jaxrl.pool.local import LocalPool
from jaxrl.pool.rollout import ACTION, PROMPT, Failure, StopReason, Version
from jaxrl.tasks.contract import Task, Verdict
from tests.pool.scripted import EOS, FIRST, Letters, Scripted, Sums, answer_of, local_pool


def prompts(groups) -> list[str]:
    return [group.rollouts[0].task_key for group in groups]


def restored(pool: RolloutPool, source: Sums, generator: Scripted, **settings) -> LocalPool:
    """A second pool from the first one's state, through JSON as in a checkpoint."""
    other = local_pool(generator, source, **settings)
    other.restore(json.loads(json.dumps(pool.state())))
    return other


def test_a_rollout_carries_its_facts():
    pool: RolloutPool = local_pool(Scripted(answer_of), Sums(4), temperature=0.5)
    groups, manifest = pool.take(3, step=0)
    assert [group.id for group in groups] == [0, 1, 2]
    for group in groups:
        assert [r.sample for r in group.rollouts] == [0, 1]
        for rollout in group.rollouts:
            assert rollout.group_id == group.id
            new = len(Letters().encode(rollout.text)) + 1
            prompt = len(rollout.tokens) - new
            assert rollout.kind.tolist() == [PROMPT] * prompt + [ACTION] * new
            assert rollout.tokens[-1] == EOS  # the sampled terminator is trained on (case 4)
            assert rollout.logp.tolist() == [0] * prompt + [-0.5] * new
            assert rollout.temperature.tolist() == [1] * prompt + [0.5] * new
            assert rollout.version_index.tolist() == [65535] * prompt + [0] * new
            assert rollout.versions == (FIRST,)
            assert (rollout.reward, rollout.correct) == (1.0, True)
            assert (rollout.stop_reason, rollout.failure) == (StopReason.STOP, Failure.NONE)
    assert manifest.step == 0
    assert list(manifest.groups) == [(group.id, group.content_hash) for group in groups]
    assert not any(v for name, v in manifest.counts.items() if name != "sampled_tokens")
    assert manifest.counts["sampled_tokens"] == 3 * 2 * 2


def test_same_prompt_drawn_twice_is_two_groups():
    """Case 17: the grouping key is the prompt instance, not the text."""
    groups, _ = local_pool(Scripted(), Sums(1)).take(3, step=0)
    assert [group.id for group in groups] == [0, 1, 2]
    assert len({group.rollouts[0].content_hash for group in groups}) == 1
    keys = [r.idempotency_key for group in groups for r in group.rollouts]
    assert len(set(keys)) == len(keys)


def test_each_sample_has_its_own_key_and_duplicates_are_kept():
    """Case 37: distinct (group, sample) for each request; equal responses are the policy's
    affair."""
    generator = Scripted(lambda request: "7")
    groups, _ = local_pool(generator, Sums(4), rollouts_per_group=4).take(2, step=0)
    identities = [(request.group, request.sample) for request in generator.requests]
    assert identities == [(group, sample) for group in (0, 1) for sample in range(4)]
    assert all(len(group.rollouts) == 4 for group in groups)
    assert {r.text for group in groups for r in group.rollouts} == {"7"}


def test_each_prompt_once_an_epoch_in_a_new_order():
    pool = local_pool(Scripted(), Sums(10), epochs=3)
    taken = [prompts(pool.take(10, step)[0]) for step in range(3)]
    assert all(Counter(epoch) == Counter(taken[0]) for epoch in taken)
    assert len({tuple(epoch) for epoch in taken}) == 3
    assert taken[0] != [f"sum/{n}" for n in range(10)]
    other = local_pool(Scripted(), Sums(10), epochs=3, seed=1)
    assert prompts(other.take(10, 0)[0]) != taken[0]
    with pytest.raises(PoolEnd, match="30 prompts"):
        pool.take(1, step=3)


@pytest.mark.parametrize("stop_after", range(1, 10))
def test_resume_keeps_the_order_of_prompts(stop_after):
    """Case 34: 10 prompts, 2 a step, 2 epochs; stopping anywhere, also at the epoch's edge."""
    settings = {"epochs": 2}
    whole = local_pool(Scripted(), Sums(10), **settings)
    expected = [prompts(whole.take(2, step)[0]) for step in range(10)]
    first = local_pool(Scripted(), Sums(10), **settings)
    got = [prompts(first.take(2, step)[0]) for step in range(stop_after)]
    second = restored(first, Sums(10), Scripted(), **settings)
    first.commit(stop_after - 1)
    got += [prompts(second.take(2, step)[0]) for step in range(stop_after, 10)]
    assert got == expected
    assert set(Counter(sum(got, [])).values()) == {2}


def test_prompts_in_flight_are_issued_again():
    """Case 35: 8 prompts, two steps' worth pulled, one step trained, then a crash."""
    first = local_pool(Scripted(), Sums(8), epochs=1)
    trained = prompts(first.take(2, step=0)[0])
    ahead = prompts(first.take(2, step=1)[0])  # pulled, never trained
    second = restored(first, Sums(8), Scripted(), epochs=1)
    again = prompts(second.take(2, step=1)[0])
    assert again == ahead
    trained += again
    trained += prompts(second.take(2, step=2)[0]) + prompts(second.take(2, step=3)[0])
    assert sorted(trained) == [f"sum/{n}" for n in range(8)]
    with pytest.raises(PoolEnd):
        second.take(2, step=4)


def test_a_step_that_is_taken_again_gets_the_same_groups_until_it_is_committed():
    pool = local_pool(Scripted(), Sums(8))
    once, manifest = pool.take(3, step=0)
    again, same = pool.take(3, step=0)
    assert prompts(once) == prompts(again)
    assert manifest.groups == same.groups  # ids and content hashes
    pool.commit(0)
    with pytest.raises(PoolError, match="step 0 was committed"):
        pool.take(3, step=0)
    assert not set(prompts(once)) & set(prompts(pool.take(3, step=1)[0]))


def test_a_state_of_another_pool_is_refused():
    pool = local_pool(Scripted(), Sums(8))
    with pytest.raises(ValueError, match=r"tasks=8; allowed: 9"):
        local_pool(Scripted(), Sums(9)).restore(pool.state())
    with pytest.raises(ValueError, match="seed=0; allowed: 5"):
        local_pool(Scripted(), Sums(8), seed=5).restore(pool.state())


def test_refused_groups_are_refilled_one_for_one():
    """Dynamic sampling: groups whose rewards are all equal teach nothing and are replaced."""

    def respond(request: Request) -> str:
        mixed = request.group % 2  # odd groups: one right, one wrong
        return answer_of(request) if mixed and request.sample == 0 else "no"

    def keep(rewards: np.ndarray, facts) -> bool:
        return bool(rewards.std() > 0)

    generator = Scripted(respond)
    groups, manifest = local_pool(generator, Sums(32), keep=keep, max_refills=3).take(4, step=0)
    # 4 drawn: 1, 3 kept; 2 drawn: 5 kept; 1 drawn (6): none; 1 drawn (7): kept
    assert [group.id for group in groups] == [1, 3, 5, 7]
    assert (manifest.counts["filtered"], manifest.counts["refilled"]) == (4, 4)
    assert manifest.counts["short"] == 0
    assert len(generator.requests) == 8 * 2


def test_a_filter_that_drops_everything_ends():
    generator = Scripted()
    pool = local_pool(generator, Sums(32), keep=lambda rewards, facts: False, max_refills=2)
    groups, manifest = pool.take(4, step=0)
    assert groups == [] and list(manifest.groups) == []
    assert (manifest.counts["filtered"], manifest.counts["refilled"]) == (12, 8)
    assert manifest.counts["short"] == 4


def test_an_overlong_prompt_is_rejected_and_counted_never_cut():
    """Case 6. Sums 10.. have five characters, those below four."""
    pool = local_pool(Scripted(), Sums(12), max_prompt_tokens=4, epochs=1)
    groups, manifest = pool.take(12, step=0)
    assert sorted(prompts(groups)) == [f"sum/{n}" for n in range(10)]
    assert (manifest.counts["rejected_long"], manifest.counts["short"]) == (2, 2)
    assert all(len(r.tokens[r.kind == PROMPT]) == 4 for g in groups for r in g.rollouts)


def test_prompts_that_are_all_too_long_are_an_error_not_a_loop():
    with pytest.raises(PoolError, match=r"none of 12 prompts.*max_prompt_tokens=3.*rejected_long"):
        local_pool(Scripted(), Sums(12), max_prompt_tokens=3).take(2, step=0)


class Ragged(Scripted):
    """Loses the last log-prob of sample 1 of group 0."""

    def completion(self, request: Request) -> Completion:
        whole = super().completion(request)
        if (request.group, request.sample) == (0, 1):
            return dataclasses.replace(whole, logp=whole.logp[:-1])
        return whole


def test_ids_without_their_log_probs_are_rejected_and_counted():
    """Case 7, second input: 3 ids with 2 log-probs."""
    groups, manifest = local_pool(Ragged(lambda r: "12"), Sums(8)).take(2, step=0)
    assert manifest.counts["rejected_ragged"] == 1
    assert (manifest.counts["voided"], manifest.counts["refilled"]) == (1, 1)
    assert [group.id for group in groups] == [1, 2]


class Pairs(Letters):
    """Vocabulary a=3, b=4, ab=5: encoding the text of sampled ids would merge them."""

    def encode(self, text: str) -> list[int]:
        return [5 if text == "ab" else 3]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join({3: "a", 4: "b", 5: "ab"}.get(token, "") for token in ids)


class Unmerged(Scripted):
    """Samples a and b one by one."""

    def completion(self, request: Request) -> Completion:
        assert self.version is not None
        logp = np.array([-0.1, -0.2, -0.3], np.float32)
        return Completion(np.array([3, 4, EOS]), logp, self.version, StopReason.STOP)


def test_sampled_ids_are_trained_on_and_never_encoded_again():
    """Case 7, first input: ids [a, b] stay two ids with two log-probs, though "ab" is one id."""
    pool = LocalPool(
        Unmerged(),
        Pairs(),
        Sums(4),
        run_id="run",
        seed=0,
        rollouts_per_group=1,
        temperature=1.0,
        max_new_tokens=4,
        max_prompt_tokens=4,
        watchdog_s=30.0,
        max_refills=0,
    )
    pool.publish(FIRST, "nowhere")
    (group,), _ = pool.take(1, step=0)
    (rollout,) = group.rollouts
    acted = rollout.kind == ACTION
    assert rollout.text == "ab" and Pairs().encode(rollout.text) == [5]
    assert rollout.tokens[acted].tolist() == [3, 4, EOS]
    np.testing.assert_allclose(rollout.logp[acted], [-0.1, -0.2, -0.3], rtol=1e-6)


def test_a_cut_response_is_truncated_and_nothing_is_appended():
    """Case 4: reason length, no terminator added."""
    groups, _ = local_pool(Scripted(lambda r: "123456789"), Sums(4), max_new_tokens=3).take(1, 0)
    rollout = groups[0].rollouts[0]
    assert rollout.stop_reason is StopReason.LENGTH
    assert rollout.tokens[rollout.kind == ACTION].tolist() == Letters().encode("123")


def test_a_response_that_is_one_terminator_trains():
    """Case 4, edge: the completion is a single eos."""
    groups, _ = local_pool(Scripted(lambda r: ""), Sums(4)).take(1, step=0)
    rollout = groups[0].rollouts[0]
    assert rollout.tokens[rollout.kind == ACTION].tolist() == [EOS]
    assert (rollout.text, rollout.stop_reason) == ("", StopReason.STOP)


class Several(Letters):
    """Two ids end a response."""

    stop_ids = frozenset({1, 109})


@pytest.mark.parametrize(
    ("ids", "reason", "fits"),
    [
        ([7, 109], StopReason.STOP, True),  # the second of two stop ids
        ([7, 1], StopReason.STOP, True),
        ([7, 8], StopReason.LENGTH, True),
        ([7, 8], StopReason.STOP, False),  # the terminator was lost
        ([7, 109], StopReason.LENGTH, False),  # only one of the stop ids was known
        ([7, 109, 0, 0], StopReason.STOP, False),  # padding handed over as tokens
    ],
)
def test_the_terminator_is_whole_or_the_engine_is_at_fault(ids, reason, fits):
    """Case 4, with several stop ids."""

    class Fixed(Scripted):
        def completion(self, request: Request) -> Completion:
            assert self.version is not None
            logp = np.full(len(ids), -1, np.float32)
            return Completion(np.array(ids), logp, self.version, reason)

    pool = local_pool(Fixed(), Sums(2))
    pool._tokenizer = Several()
    if fits:
        (group,), _ = pool.take(1, step=0)
        rollout = group.rollouts[0]
        assert rollout.tokens[rollout.kind == ACTION].tolist() == ids
    else:
        with pytest.raises(PoolError, match="do not fit stop reason"):
            pool.take(1, step=0)


class Flaky(Sums):
    """Its verifier fails on some tasks."""

    def __init__(self, count: int, bad: dict[str, float | None]) -> None:
        super().__init__(count)
        self.bad = bad

    def verify(self, task: Task, response: str) -> Verdict:
        if task.key in self.bad:
            score = self.bad[task.key]
            if score is None:
                raise RuntimeError("the checker crashed")
            return Verdict(score, score >= 1, {})
        return super().verify(task, response)


@pytest.mark.parametrize("score", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("reward", ["exact", "score"])
def test_a_verifier_that_fails_gives_no_reward_and_never_zero(score, reward, tmp_path):
    """Case 36: a NaN reward is counted and not fatal; failures of data never become reward 0."""
    source = Flaky(4, {"sum/1": score})
    settings = {"reward": reward, "max_refills": 0, "record_dir": tmp_path}
    pool = local_pool(Scripted(answer_of), source, **settings)
    failed = voided = 0
    for step in range(2):
        groups, manifest = pool.take(4, step)
        assert all(r.reward == 1 for group in groups for r in group.rollouts)
        assert "sum/1" not in prompts(groups)
        failed += manifest.counts["failed"]
        voided += manifest.counts["voided"]
    assert (failed, voided) == (4, 2)
    recorded = [r for path in tmp_path.iterdir() for r in spool.read(path)]
    bad = [rollout for rollout in recorded if rollout.task_key == "sum/1"]
    assert len(bad) == 4
    assert all(r.reward is None and r.failure is Failure.DATA and not r.correct for r in bad)
    assert all(
        ("checker crashed" if score is None else str(score)) in r.facts["error"] for r in bad
    )


def test_a_task_whose_verifier_failed_in_two_groups_is_drawn_no_more():
    source = Flaky(4, {"sum/1": None})
    generator = Scripted(answer_of)
    pool = local_pool(generator, source, max_refills=0)
    counts: Counter[str] = Counter()
    for step in range(6):
        counts.update(pool.take(4, step)[1].counts)
    asked = Counter(Letters().decode(request.prompt) for request in generator.requests)
    assert asked["1+1="] == 2 * 2  # two groups of two
    assert counts["quarantined"] >= 4
    other = restored(pool, source, Scripted(answer_of))
    assert other.state() == pool.state()


def test_failures_of_a_step_that_is_taken_again_count_once():
    source = Flaky(1, {"sum/0": None})
    pool = local_pool(Scripted(), source, max_refills=0)
    for _ in range(4):
        assert pool.take(1, step=0)[1].counts["failed"] == 2
    assert sum(len(groups) for groups in pool.state()["failures"].values()) == 1


class Dies(Scripted):
    """Works for some groups, then raises."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        if len(self.requests) >= 4:
            raise RuntimeError("engine 3 lost its weights")
        return super().generate(requests)


def test_a_generator_that_dies_ends_the_run_with_its_message():
    """Case 36: two groups of two, then an exception."""
    pool = local_pool(Dies(), Sums(8))
    pool.take(2, step=0)
    began = time.monotonic()
    with pytest.raises(PoolError, match="step 1.*engine 3 lost its weights") as caught:
        pool.take(2, step=1)
    assert time.monotonic() - began < 5
    assert isinstance(caught.value.__cause__, RuntimeError)


class Hangs(Scripted):
    """Alive, but silent after the first call."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        if self.requests:
            time.sleep(60)
        return super().generate(requests)


def test_a_silent_generator_ends_the_run_after_the_limit():
    """Case 36, second input: within twice the limit, with the counts."""
    pool = local_pool(Hangs(), Sums(8), watchdog_s=0.5, keep=lambda r, f: False)
    began = time.monotonic()
    with pytest.raises(PoolError, match=r"0.5 s \(pool.watchdog_s\)") as caught:
        pool.take(2, step=0)
    assert time.monotonic() - began < 1.0
    assert "filtered 2" in str(caught.value)


def test_nothing_is_served_before_a_version_was_published():
    generator = Scripted()
    with pytest.raises(PoolError, match="no weights were published"):
        LocalPool(
            generator,
            Letters(),
            Sums(2),
            run_id="run",
            seed=0,
            rollouts_per_group=2,
            temperature=1.0,
            max_new_tokens=4,
            max_prompt_tokens=8,
            watchdog_s=30.0,
            max_refills=0,
        ).take(1, step=0)


class Refuses(Scripted):
    """Does not load what it is given."""

    def load(self, version: Version, path: str) -> None:
        if version.step:
            raise ValueError(f"digest of {path} does not match")
        super().load(version, path)


def test_weights_that_do_not_load_stop_the_pool():
    pool = local_pool(Refuses(), Sums(2))
    with pytest.raises(PoolError, match="digest of w1 does not match"):
        pool.publish(Version(0, 1, "other"), "w1")
    with pytest.raises(PoolError, match="no weights were published"):
        pool.take(1, step=0)


def test_stale_samples_are_an_error_when_synchronous():
    """K = 0: every sample is from the newest version, by step and by digest."""
    generator = Scripted()
    pool = local_pool(generator, Sums(4))
    pool.take(1, step=0)
    pool.publish(Version(0, 1, "second"), "nowhere")
    pool.take(1, step=1)
    generator.version = Version(0, 1, "first")  # the same step, other bytes
    with pytest.raises(PoolError, match="was sampled by"):
        pool.take(1, step=2)


def test_an_older_version_is_refused_but_a_new_lineage_is_not():
    pool = local_pool(Scripted(), Sums(4))
    pool.publish(Version(0, 5, "five"), "nowhere")
    with pytest.raises(PoolError, match="older than"):
        pool.publish(Version(0, 4, "four"), "nowhere")
    pool.publish(Version(1, 4, "four"), "nowhere")  # after a rollback the epoch grows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "sampler.temperature=0.0; allowed: > 0"),
        ({"reward": "partial"}, "task.reward='partial'"),
        ({"rollouts_per_group": 0}, "rollouts_per_group=0; allowed: >= 1"),
        ({"max_refills": -1}, "max_refills=-1; allowed: >= 0"),
        ({"split": "held_out"}, "no 'held_out' task"),
    ],
)
def test_settings_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        local_pool(Scripted(), Sums(4), **change)


def test_impossible_log_probs_are_an_error():
    class Positive(Scripted):
        def completion(self, request: Request) -> Completion:
            whole = super().completion(request)
            return dataclasses.replace(whole, logp=whole.logp + 1)

    with pytest.raises(PoolError, match=r"group 0 sample 0: logp=0.5; allowed"):
        local_pool(Positive(), Sums(4)).take(1, step=0)


def test_records_of_a_step_replace_those_of_its_first_run(tmp_path):
    pool = local_pool(Scripted(answer_of), Sums(4), record_dir=tmp_path)
    pool.take(2, step=0)
    groups, _ = pool.take(2, step=0)
    (path,) = tmp_path.iterdir()
    recorded = list(spool.read(path))
    given = [rollout for group in groups for rollout in group.rollouts]
    assert [r.digest for r in recorded] == [r.digest for r in given]
    assert [r.idempotency_key for r in recorded] == [r.idempotency_key for r in given]


def test_records_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    pool = local_pool(Scripted(), Sums(4), record_dir=tmp_path / "file" / "deeper")
    with pytest.raises(PoolError, match="rollouts of step 0 cannot be recorded at .*deeper"):
        pool.take(1, step=0)
