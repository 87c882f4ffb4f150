"""Workers against a real gateway: what each kind of end becomes, and what a restart costs."""

import dataclasses
import threading
import time
from typing import Any

import pytest

from jaxrl.pool.rollout import ACTION, Failure, StopReason
from jaxrl.pool.workers import (
    AttemptFailed,
    GatewayLost,
    Refused,
    Work,
    Worker,
    from_run,
    load_agent,
)
from tests.pool import agents
from tests.pool.scripted import Scripted, Sums, answer_of
from tests.pool.serving import KEY, Place, gateway


class Judged(Sums):
    """Sums that are judged in groups."""

    grouped = True


class Untrue(Sums):
    """Sums whose verifier fails."""

    def verify(self, task: Any, response: str) -> Any:
        raise ZeroDivisionError("the verifier")


def worker_of(place: Place, source: Sums | None = None, agent: str = "", **settings: Any) -> Worker:
    found: dict[str, Any] = dict(lease_s=30.0, reward="exact", most=8)
    name = f"tests.pool.agents.{agent}" if agent else ""
    return Worker(
        Work(place.url, KEY, patience_s=5.0),
        Work(place.url, KEY, patience_s=5.0),
        source or Sums(10),
        agent=load_agent(name),
        **(found | settings),
    )


@pytest.fixture
def place(tmp_path):
    with gateway(tmp_path, Scripted(answer_of), max_prompt_tokens=200) as found:
        yield found


def open_sums(place: Place, *numbers: int) -> None:
    for number in numbers:
        place.open(f"{number}+1=", task_key=f"sum/{number}")


def test_one_question_gets_one_answer_and_its_verdict(tmp_path):
    def answer(request) -> str:
        return answer_of(request) if request.group != 1 else "wrong"

    with gateway(tmp_path, Scripted(answer)) as place:
        open_sums(place, 3, 4, 5)
        assert worker_of(place).once() == 3
        rollouts = [place.sealed(group)[0] for group in range(3)]
        assert place.engine.counts()["batches"] == 1
        assert worker_of(place).once() == 0
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0, 1.0]
    assert [rollout.text for rollout in rollouts] == ["4", "wrong", "6"]
    assert rollouts[0].reward_components == {"score": 1.0} and rollouts[0].correct
    assert rollouts[0].facts["solution"] == "4"


def test_more_samples_than_may_be_answered_at_once_wait_and_none_fails(tmp_path):
    with gateway(tmp_path, Scripted(answer_of), under_way=2) as place:
        open_sums(place, *range(7))
        assert worker_of(place).once() == 7
        assert place.ledger.counts()["slots_sealed"] == 7


class Wordy(Sums):
    """Sums whose verifier says much, and too much to one answer."""

    def verify(self, task: Any, response: str) -> Any:
        mark = super().verify(task, response)
        return dataclasses.replace(mark, feedback="." * (70_000 if response == "4" else 20_000))


def test_seals_that_are_too_large_together_are_sent_in_parts(place):
    open_sums(place, 1, 2, 3, 4, 5, 6)
    assert worker_of(place, Wordy(10)).once() == 6
    assert place.ledger.counts()["slots_sealed"] == 5
    (void,) = place.ledger.voided(0)
    assert (void.id, void.reason) == (2, "data")  # over the limit alone


class Printing(Sums):
    """Sums whose verifier shows bytes that are no text, as the output of programs has them."""

    def verify(self, task: Any, response: str) -> Any:
        if response == "4":
            raise ValueError(b"\xff".decode(errors="surrogateescape"))
        return dataclasses.replace(super().verify(task, response), feedback="\udcff")


def test_what_is_no_text_does_not_lose_the_worker(place):
    open_sums(place, 3, 4)
    assert worker_of(place, Printing(10)).once() == 2
    assert [void.reason for void in place.ledger.voided(0)] == ["data"]
    assert place.sealed(1)[0].reward == 1.0


class Unsayable(Sums):
    """Sums of which one verdict has what no request can carry, and what ``judge`` lets through."""

    def verify(self, task: Any, response: str) -> Any:
        mark = super().verify(task, response)
        return dataclasses.replace(mark, feedback={1} if response == "4" else "")


def test_a_verdict_that_cannot_be_sent_fails_alone(place):
    open_sums(place, 3, 4, 5)
    began = time.monotonic()
    assert worker_of(place, Unsayable(10)).once() == 3
    assert time.monotonic() - began < 4  # it is not taken for a gateway that is away
    assert [(void.id, void.reason) for void in place.ledger.voided(0)] == [(0, "data")]
    assert [place.sealed(group)[0].reward for group in (1, 2)] == [1.0, 1.0]


def test_groups_that_are_judged_together_are_sealed_without_a_reward(place):
    open_sums(place, 3)
    worker_of(place, Judged(10)).once()
    (rollout,) = place.sealed(0)
    assert (rollout.reward, rollout.failure) == (None, Failure.JUDGE)


@pytest.mark.parametrize("source", [Untrue(10), Sums(2)])
def test_a_verifier_that_fails_and_a_task_that_nobody_knows_are_faults_of_the_data(source, place):
    open_sums(place, 3)
    worker_of(place, source).once()
    (void,) = place.ledger.voided(0)
    assert void.reason == "data" and place.ledger.members(0) == []


def test_an_agent_by_its_dotted_name_knows_a_url_and_a_key(place):
    open_sums(place, 3, 4)
    worker_of(place, agent="plain").once()
    first, second = (place.sealed(group)[0] for group in range(2))
    assert (first.text, second.text) == ("4", "5") and first.reward == second.reward == 1.0
    open_sums(place, 5)
    worker_of(place, agent="later").once()
    assert place.sealed(2)[0].reward == 1.0


@pytest.mark.parametrize("agent", ["broken", "silent", "cut_off"])
def test_what_breaks_is_tried_again_and_never_becomes_a_reward(agent, place):
    open_sums(place, 3)
    worker = worker_of(place, agent=agent)
    for attempt in range(3):
        assert worker.once() == 1, attempt
    assert worker.once() == 0
    (void,) = place.ledger.voided(0)
    assert void.reason == "infra" and place.ledger.members(0) == []
    failed = "failed_infra" if agent == "cut_off" else "failed_env"
    assert place.attempts.counts[failed] == 3


def test_a_second_attempt_has_a_token_of_its_own_and_repeats_the_sample(place):
    agents.MET.clear()
    open_sums(place, 3)
    worker = worker_of(place, agent="broken_once")
    assert worker.once() + worker.once() == 2
    assert len(set(agents.MET)) == 2
    (rollout,) = place.sealed(0)
    assert rollout.attempt == 1 and rollout.reward == 1.0


@pytest.mark.parametrize("end", [None, RuntimeError("x"), AttemptFailed(Failure.JUDGE, "x")])
def test_a_worker_goes_on_where_an_attempt_was_given_back_between_two_calls(end, place):
    """The agent does not notice; the worker does, when it asks what was said."""
    open_sums(place, 3, 4)

    def agent(base_url: str, key: str, task: Any) -> None:
        agents.plain(base_url, key, task)
        if key == first:
            place.ledger.cancel([key], "pressure")
            if end is not None:
                raise end

    worker = worker_of(place, most=1)
    worker._agent = agent
    (lease,) = place.work("lease", {"owner": "test", "most": 1}).json()["leases"]
    first = lease["token"]
    worker._played(lease)
    assert place.ledger.counts()["slots_pending"] == 2
    assert worker.once() == worker.once() == 1
    assert [rollout.attempt for rollout in (place.sealed(0)[0], place.sealed(1)[0])] == [1, 0]
    assert "retried" not in place.ledger.counts()


def test_an_agent_that_fills_the_context_is_a_result_of_the_policy(place):
    open_sums(place, 3)
    worker_of(place, agent="endless").once()
    (rollout,) = place.sealed(0)
    assert rollout.stop_reason is StopReason.CONTEXT_LIMIT and rollout.failure is Failure.NONE
    assert rollout.reward is not None and int((rollout.kind == ACTION).sum()) > 4


def test_what_an_agent_declares_is_what_is_recorded(place):
    open_sums(place, 3, 4, 5)
    for agent in ("timed_out", "unjudged", "unset"):
        worker_of(place, agent=agent, most=1).once()
    late, waiting = place.sealed(0)[0], place.sealed(1)[0]
    assert (late.failure, late.stop_reason) == (Failure.POLICY_TIMEOUT, StopReason.TIME_LIMIT)
    assert late.reward == 1.0
    assert (waiting.failure, waiting.reward) == (Failure.JUDGE, None)
    assert place.ledger.voided(0)[0].reason == "data"


class Held(Scripted):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(answer_of)
        self.go = threading.Event()

    def generate(self, requests):
        assert self.go.wait(20)
        return super().generate(requests)


def test_heartbeats_keep_a_lease_that_is_shorter_than_its_attempt(tmp_path):
    model = Held()
    with gateway(tmp_path, model, lease_s=2.0) as place:
        open_sums(place, 3)
        working = threading.Thread(target=worker_of(place, lease_s=0.3).once)
        working.start()
        time.sleep(3.0)
        assert place.ledger.expire() == 0
        model.go.set()
        working.join()
        assert place.sealed(0)[0].attempt == 0


def test_without_heartbeats_the_sample_goes_to_another_attempt_and_the_late_seal_is_refused(
    tmp_path,
):
    model = Held()
    with gateway(tmp_path, model, lease_s=0.2) as place:
        open_sums(place, 3)
        late = threading.Thread(target=worker_of(place, lease_s=1000.0).once)
        late.start()
        while not place.ledger.expire():
            time.sleep(0.02)
        patient = dataclasses.replace(place.attempts.limits, lease_s=60.0)
        place.attempts.limits = patient
        (lease,) = place.work("lease", {"owner": "another", "most": 1}).json()["leases"]
        model.go.set()
        late.join()
        assert lease["attempt"] == 1 and place.ledger.members(0) == []
        assert place.ledger.counts()["refused_expired"] >= 1
        # The other attempt goes on as if nothing had been.
        assert place.post(f"/{lease['token']}/generate", {}).json()["text"] == "4"
        assert place.seal(lease["token"]) == {} and place.sealed(0)[0].attempt == 1


def test_a_worker_outlives_a_restart_of_the_gateway(tmp_path):
    with gateway(tmp_path, Scripted(answer_of)) as place:
        open_sums(place, 3)
        port = int(place.url.rpartition(":")[2])
    worker = worker_of(place)
    done = threading.Thread(target=worker.once)
    done.start()
    time.sleep(0.3)
    with gateway(tmp_path, Scripted(answer_of), port=port) as place:
        done.join(10)
        assert place.sealed(0)[0].reward == 1.0


def test_patience_ends_with_the_cause(tmp_path):
    work = Work("http://127.0.0.1:9", KEY, patience_s=0.2)
    began = time.monotonic()
    with pytest.raises(GatewayLost, match=r"no answer for 0.2 s; last: Connect"):
        work.ask("lease", {"owner": "a"})
    assert time.monotonic() - began < 2
    lost = Work(str(tmp_path / "gateway.json"), KEY, patience_s=0.2)
    with pytest.raises(GatewayLost, match="FileNotFoundError"):
        lost.ask("run")


def test_what_is_refused_for_good_is_not_asked_again(place):
    with pytest.raises(Refused, match="401"):
        Work(place.url, "wrong", patience_s=5.0).ask("lease", {"owner": "a"})


def test_a_worker_is_made_of_what_the_gateway_tells(place):
    task = {
        "source": "jaxrl.tasks.tools",
        "family": "lookup",
        "parameters": {"names": 4, "told_fraction": 0.5, "shown_fraction": 0.5},
        "seed": 0,
        "train_prompts": 8,
        "held_out_prompts": 2,
        "held_out_fraction": 0.3,
        "reward": "exact",
    }
    work = Work(place.url, KEY)
    run = {"task": task, "harness": "", "lease_s": 30.0}
    assert from_run(work, work, run, 4).once() == 0
    assert run["task"]["reward"] == "exact"  # nothing was taken out of it
    with pytest.raises(ValueError, match="pool.harness='tests.pool.agents.nobody'"):
        from_run(work, work, {**run, "harness": "tests.pool.agents.nobody"}, 4)
    with pytest.raises(ValueError, match="is no function"):
        load_agent("tests.pool.agents.MET")
