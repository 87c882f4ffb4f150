"""Permits with real workers, and trainers that must not wait for ever: the real gateway and ledger,
a script in the model's place."""

import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from jaxrl.gateway import permits_of
from jaxrl.pool.permits import Permits, permits_for
from jaxrl.pool.remote import RemotePool
from jaxrl.pool.rollout import Failure, Version
from jaxrl.pool.waiting import Waiting
from jaxrl.pool.workers import Work, Worker, load_agent
from jaxrl.tasks import code
from jaxrl.tasks.contract import Verdict
from tests.pool.hands import Hands, remote_pool
from tests.pool.scripted import Scripted, Sums, answer_of, local_pool
from tests.pool.serving import KEY, Place, gateway, until
from tests.pool.test_entrance import leased, open_sums, told

NONE = {"spool_bytes": 0, "judge_calls": 0, "sandboxes": 0}


class Costly(Sums):
    """Sums whose verdicts ask a judge, and count how many of them are asked for at once."""

    needs = ("judge_calls",)

    def __init__(self, count: int, wanted: int = 0) -> None:
        super().__init__(count)
        self.turn, self.now, self.most = threading.Condition(), 0, 0
        self.wanted = wanted  # the first wait for so many, if they may be asked at once

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        with self.turn:
            self.now += 1
            self.most = max(self.most, self.now)
            self.turn.notify_all()
            self.turn.wait_for(lambda: self.most >= self.wanted, 60)
        time.sleep(0.01)  # for those that may not
        yield
        with self.turn:
            self.now -= 1

    def verify(self, task: Any, response: str) -> Verdict:
        with self.asked():
            return super().verify(task, response)


class Contest(Costly):
    """The same, judged in groups."""

    grouped = True


class Programs(Sums):
    """Its verdicts run programs."""

    needs = ("sandboxes",)


# -- what a run is asked for


@pytest.mark.parametrize(
    ("limits", "source", "permits"),
    [
        ({}, Sums(1), Permits()),
        ({"spool_bytes": 9}, Sums(1), Permits(spool_bytes=9)),
        ({"judge_calls": 2}, Costly(1), Permits(judge_calls=2)),
        ({"sandboxes": 2, "spool_bytes": 9}, Programs(1), Permits(spool_bytes=9, sandboxes=2)),
        ({"judge_calls": 2, "spool_bytes": 9}, Contest(1), Permits(spool_bytes=9)),
    ],
)
def test_attempts_need_what_their_verdicts_need_unless_the_trainer_asks_for_them(
    limits, source, permits
):
    assert permits_for(NONE | limits, source) == permits
    assert bool(permits) is any(limits.values()) and bool(Permits()) is False


def test_a_limit_that_nobody_needs_is_refused_by_name():
    with pytest.raises(ValueError, match="pool.sandboxes=3; allowed: 0 .no verdict of tests.pool"):
        permits_for(NONE | {"sandboxes": 3}, Costly(1))
    odd = Sums(1)
    odd.needs = ("gpus",)
    with pytest.raises(ValueError, match="needs gpus; allowed: judge_calls, sandboxes"):
        permits_for(NONE, odd)


def coders(**parameters: Any) -> dict[str, Any]:
    values: dict[str, Any] = dict(testers=0, kept=0, truth_tests=4, operators=1, path="", repeats=1)
    values |= dict(cpu_s=2.0, wall_s=10.0, memory_mb=256, timeouts=1) | parameters
    task = dict(source="jaxrl.tasks.code", family="expressions", parameters=values, reward="exact")
    return task | dict(seed=0, train_prompts=8, held_out_prompts=2, held_out_fraction=0.2)


def test_a_gateway_asks_the_runs_task_source():
    """Coders alone are judged by workers, coders and testers by the trainer."""
    run = {"task": coders(), "pool": NONE | {"sandboxes": 2}}
    assert permits_of(run) == Permits(sandboxes=2)
    run["task"] = coders(testers=1, kept=1)
    assert permits_of(run) == Permits()
    assert permits_of({"task": {"source": "there.is.none"}, "pool": NONE}) == Permits()
    with pytest.raises(
        ValueError, match="pool.judge_calls=1; allowed: 0 .no verdict of jaxrl.task"
    ):
        permits_of({"task": coders(), "pool": NONE | {"judge_calls": 1}})


def test_the_pool_in_this_process_asks_for_one_verdict_at_a_time():
    source = Costly(8)
    pool = local_pool(Scripted(answer_of), source)
    groups, _ = pool.take(3, 0)
    assert len(groups) == 3 and source.most == 1


# -- a gateway and its workers


def worker_of(place: Place, source: Any, agent: str = "", most: int = 8) -> Worker:
    work, beats = (Work(place.url, KEY, patience_s=60.0) for _ in range(2))
    name = f"tests.pool.agents.{agent}" if agent else ""
    how: dict[str, Any] = dict(lease_s=30.0, reward="exact", most=most, agent=load_agent(name))
    return Worker(work, beats, source, **how)


@pytest.mark.parametrize(("agent", "limit"), [("", 3), ("plain", 2)])
def test_workers_ask_for_no_more_verdicts_at_once_than_there_are_permits(tmp_path, agent, limit):
    """Of six workers that would; a seventh has died with a permit, which comes back."""
    source, ended = Costly(12, wanted=limit), threading.Event()
    permits = Permits(judge_calls=limit)
    how: dict[str, Any] = dict(permits=permits, max_prompt_tokens=99)
    with gateway(tmp_path, Scripted(answer_of), **how) as place:
        open_sums(place, 12, 2)
        assert place.ledger.lease_within("dies now", 0.5, 1, permits).leases

        def work() -> None:
            worker = worker_of(place, source, agent, 1)
            while not ended.is_set():
                worker.once(0.2)

        workers = [threading.Thread(target=work) for _ in range(6)]
        for worker in workers:
            worker.start()
        until(lambda: place.ledger.counts()["groups_ready"] == 12)
        ended.set()
        for worker in workers:
            worker.join(60)
        counts = place.ledger.counts()
        assert source.most == limit
        assert counts["expired"] == 1 and counts["retried"] == 1
        assert told(place)["waited_judge_calls"] > 0


def test_programs_run_in_no_more_sandboxes_than_there_are_permits(tmp_path):
    """Real ones: three workers, each with an interpreter of its own."""
    running: list[int] = []
    most, turn = [0], threading.Lock()

    class Counted(code.Source):
        def verify(self, task: Any, response: str) -> Verdict:
            with turn:
                running.append(1)
                most[0] = max(most[0], len(running))
            verdict = super().verify(task, response)
            with turn:
                running.pop()
            return verdict

    task = {k: v for k, v in coders().items() if k not in ("source", "reward")}
    family, parameters = task.pop("family"), task.pop("parameters")
    asked = {one.key: one for one in Counted(family, parameters, **task).tasks("train")}
    with gateway(
        tmp_path,
        Scripted(lambda request: "a+b"),
        permits=Permits(sandboxes=1),
        max_prompt_tokens=99,
    ) as place:
        for key, one in asked.items():
            place.open(one.prompt, 2, task_key=key)
        ended = threading.Event()

        def work() -> None:
            worker = worker_of(place, Counted(family, parameters, **task), most=4)
            while not ended.is_set():
                worker.once(0.2)

        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        until(lambda: place.ledger.counts()["groups_ready"] == len(asked))
        ended.set()
        for worker in workers:
            worker.join(60)
        assert most == [1] and place.ledger.counts()["groups_void"] == 0


def test_who_waits_for_a_permit_is_woken_when_one_is_free(tmp_path):
    with gateway(tmp_path, Scripted(answer_of), permits=Permits(sandboxes=1)) as place:
        place.attempts.bell.relied = True  # it looks seldom of itself
        open_sums(place, 2, 1)
        (first,) = leased(place)
        waiting: list[Any] = []
        other = threading.Thread(target=lambda: waiting.extend(leased(place, wait_s=60)))
        other.start()
        until(lambda: place.attempts.entrance._closed)
        place.post(f"/{first['token']}/generate", {})
        assert place.seal(first["token"]) == {}
        other.join(60)
        assert [lease["group"] for lease in waiting] == [1]
        # both questions, each once however often it looked: the first one asked for more
        assert told(place)["waited_sandboxes"] == 2


def test_a_gateway_that_is_started_again_knows_what_is_held(tmp_path):
    """Also by attempts that it has not heard of, and what lies in the spool."""
    permits = Permits(spool_bytes=1, sandboxes=3)
    with gateway(tmp_path, Scripted(answer_of)) as place:
        open_sums(place, 2, 3)
        tokens = [lease["token"] for lease in leased(place, 2)]
        place.post(f"/{tokens[0]}/generate", {})
        assert place.seal(tokens[0]) == {}
    with gateway(tmp_path, Scripted(answer_of), permits=permits) as place:
        assert len(leased(place)) == 2  # the first one's bytes are not weighed yet
        place.ledger.weigh()
        (member,) = place.ledger.members(0)
        counts = {"spool_bytes": member.sealed.bytes, "sandboxes": 3}
        assert place.ledger.used(permits).spool_bytes == member.sealed.bytes > 0
        place.post(f"/{tokens[1]}/generate", {})
        assert leased(place) == []
        key = {"authorization": f"Bearer {KEY}"}
        found = httpx2.get(f"{place.url}/counts?of=gateway", headers=key).json()["gateway"]
        assert {name: found[name] for name in counts} == counts
        assert (found["waited_spool_bytes"], found["waited_sandboxes"]) == (1, 2)
        assert "judge_calls" not in found
        place.ledger.lack(1, 60.0)
        assert leased(place) == []
        assert place.seal(tokens[1]) == {}
        assert [lease["group"] for lease in leased(place)] == []  # group 0 has all it needs
        place.ledger.lack(2, 60.0)
        assert [lease["group"] for lease in leased(place)] == [1]


@pytest.mark.parametrize("agent", ["", "plain"])
def test_attempts_that_seal_are_weighed_by_what_is_on_disk(tmp_path, agent):
    """Records of many attempts and of one alike: the files less what is before their records."""
    permits = Permits(spool_bytes=10**9)
    with gateway(tmp_path, Scripted(answer_of), permits=permits, max_prompt_tokens=99) as place:
        open_sums(place, 3, 2)
        worker = worker_of(place, Sums(10), agent, 1 if agent else 8)
        for _ in range(6 if agent else 1):
            worker.once()
        files = list((tmp_path / "spool").rglob("*.rollouts"))
        assert len(files) == (6 if agent else 1)
        size = sum(path.stat().st_size - 12 for path in files)
        assert place.ledger.used(permits).spool_bytes == size


# -- a trainer


STEPS = 6


def trained(folder: Any, plan: random.Random, limit: int, over_age: str) -> list[Any]:
    """What is taken in some steps over workers that are slow, fail and die at random, a checkpoint
    at every second step; the trainer is started again once."""
    source, permits = Sums(40), Permits(spool_bytes=limit)
    how: dict[str, Any] = dict(staleness=1, over_age=over_age, permits=permits, max_attempts=99)
    how |= dict(rollouts_per_group=plan.choice((1, 2, 3)), record=False)
    chance = random.Random(plan.random())

    def trouble(lease: Any) -> Any:
        time.sleep(0.004 * chance.random())
        return chance.choice(("lost", Failure.ENV, None, None, None, None))

    def begin(step: int, epoch: int, state: Any) -> RemotePool:
        pool = remote_pool(folder, source, **how)
        if state:
            pool.restore(state)
        pool.publish(Version(epoch, step, f"{step}"), "w")
        return pool

    manifests, state, covered = {}, None, 0
    pool = begin(0, 0, None)
    with Hands(folder, source, trouble=trouble, threads=3, lease_s=0.05, permits=permits) as hands:
        step, restarts = 0, [plan.randrange(1, STEPS)]
        while step < STEPS:
            if step in restarts:
                restarts.remove(step)
                pool.close()
                pool, step = begin(covered, 1, state), covered
                continue
            _, manifests[step] = pool.take(2, step)
            pool.publish(Version(pool._version.epoch, step + 1, "w"), "w")  # pyright: ignore
            step += 1
            if step % 2 == 0:
                state, covered = pool.state(), step
                pool.commit(step - 1)
        assert set(hands.refused) <= {"expired", "fenced", "void", "sealed"}
    pool.close()
    return [manifests[step].groups for step in range(STEPS)]


@pytest.mark.parametrize("over_age", ["drop", "wait", "continue"])
@pytest.mark.parametrize("seed", range(3))
def test_no_limit_is_so_small_that_a_trainer_waits_for_ever(tmp_path, over_age, seed):
    """One byte: any sealed sample is over it. Each group is trained on once."""
    plan = random.Random(seed)
    groups = trained(tmp_path, plan, plan.choice((1, 1500, 4000)), over_age)
    numbers = [number for step in groups for number, _ in step]
    assert len(numbers) == len(set(numbers)) == 2 * STEPS


def test_a_synchronous_run_gets_the_same_groups_whatever_the_limit(tmp_path):
    taken = []
    for limit in (0, 1):
        folder, permits = tmp_path / f"{limit}", Permits(spool_bytes=limit)
        pool = remote_pool(folder, permits=permits)
        with Hands(folder, Sums(8), threads=2, permits=permits):
            for step in range(3):
                pool.publish(Version(0, step, "w"), "w")
                taken.append(pool.take(2, step)[1].groups)
        pool.close()
    assert taken[:3] == taken[3:]


class Told:
    """A ledger that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[int] = []

    def lack(self, groups: int, seconds: float) -> None:
        self.said.append(groups)


def test_a_trainer_says_how_many_groups_it_lacks_and_when_it_has_them(place, ledger):
    from tests.pool.ledgers import fill, group

    told: Any = Told()
    waiting = Waiting(told, Permits(spool_bytes=1))
    ledger.open_groups([group(n) for n in range(4)])
    waiting.over()
    waiting.lacks(ledger.live(), 3, 0)
    waiting.lacks(ledger.live(), 3, 0)  # it was just said
    fill(ledger)
    waiting.lacks(ledger.live(), 3, 0)
    waiting.over()
    fill(ledger, 3)
    waiting.lacks(ledger.live(), 3, 0)  # all are there, and it waits for something else
    ledger.reserve(5, [0, 1], 0)
    ledger.reconcile(5, [])
    ledger.reopen(0, 0, "damaged")
    waiting.lacks(ledger.live(), 9, 5)  # of those that step 5 must have again
    assert told.said == [3, 2, 0, 1]
    Waiting(told, Permits(sandboxes=1)).lacks([], 3, 0)
    assert told.said == [3, 2, 0, 1]


class Moody(Costly):
    """Its judge fails in workers, and never for the trainer."""

    def __init__(self, count: int, fails: bool) -> None:
        super().__init__(count)
        self.fails = fails

    def verify(self, task: Any, response: str) -> Verdict:
        if self.fails:
            raise TimeoutError("the judge is busy")
        return super().verify(task, response)


def test_a_trainer_that_judges_waits_for_a_permit_and_gets_it_before_others(tmp_path):
    """One permit, held by an attempt of another group that ends only after the trainer asked."""
    permits = Permits(judge_calls=1)
    pool = remote_pool(
        tmp_path, Moody(8, False), permits=permits, staleness=1, rollouts_per_group=1
    )
    pool.publish(Version(0, 0, "w"), "w")
    asked = threading.Event()
    ask = pool._ledger.ask_judge

    def noted(seconds: float, permits: Permits) -> bool:
        told = ask(seconds, permits)
        if not told:
            asked.set()
        return told

    pool._ledger.ask_judge = noted

    def trouble(lease: Any) -> Any:
        if lease.group == 1:
            assert asked.wait(60)

    with Hands(tmp_path, Moody(8, True), trouble=trouble, threads=2, permits=permits):
        groups, manifest = pool.take(1, 0)
    assert [r.reward for r in groups[0].rollouts] == [1.0]
    assert asked.is_set() and manifest.counts["voided"] == 0
    assert dataclasses.astuple(permits) == (0, 1, 0)
    assert pool._ledger.used(permits).verdicts == 0
    pool.close()
