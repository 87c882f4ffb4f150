"""Who may begin at a gateway, over real HTTP, with the real ledger and real workers. The engines
are stood in for: one by a script, one by a server that speaks vLLM's protocol and has no model."""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request as Asked
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from jaxrl.pool.admission import Admission, Marks, Move
from jaxrl.pool.announced import CURRENT, announce
from jaxrl.pool.contract import Request
from jaxrl.pool.engines import EngineError
from jaxrl.pool.entrance import Entrance
from jaxrl.pool.order import Bell
from jaxrl.pool.pressure import Pressure
from jaxrl.pool.rollout import Version
from jaxrl.pool.servers import VllmServer
from jaxrl.pool.workers import Work, Worker, load_agent
from tests.pool.scripted import EOS, FIRST, Letters, Scripted, Sums, answer_of
from tests.pool.serving import KEY, LOOK_S, Place, Stamping, gateway, until
from tests.pool.serving import served as serving
from tests.pool.test_engines import weights
from tests.pool.test_servers import Replayed

MARKS = Marks(0.7, 0.8, 0.9)


def leased(place: Place, most: int = 9, wait_s: float = 0.0) -> list[dict[str, Any]]:
    body = {"owner": "test", "most": most, "wait_s": wait_s}
    return place.work("lease", body).json()["leases"]


def told(place: Place) -> dict[str, Any]:
    """What a gateway counts of itself."""
    return place.attempts.entrance.counts() | dict(place.attempts.counts)


def open_sums(place: Place, groups: int, samples: int, **changes: Any) -> None:
    for number in range(groups):
        place.open(f"{number}+1=", samples, task_key=f"sum/{number}", **changes)


# -- leases


def test_no_more_is_leased_than_may_be_under_way(tmp_path):
    admission = Admission(2, 3, 3, None)
    with gateway(tmp_path, Scripted(answer_of), admission=admission) as place:
        open_sums(place, 3, 2)
        leases = leased(place)
        assert [(lease["group"], lease["sample"]) for lease in leases] == [(0, 0), (0, 1), (1, 0)]
        assert leased(place) == [] and told(place)["under_way"] == 3
        waiting: list[Any] = []
        other = threading.Thread(target=lambda: waiting.extend(leased(place, wait_s=30)))
        other.start()
        token = leases[0]["token"]
        place.post(f"/{token}/generate", {})
        assert place.seal(token) == {}
        other.join(30)  # it was told at once that there is room
        assert [(lease["group"], lease["sample"]) for lease in waiting] == [(1, 1)]
        failed = {"token": leases[1]["token"], "failure": "env", "reason": "x"}
        place.work("fail", {"attempts": [failed]})
        assert [lease["attempt"] for lease in leased(place)] == [1]
        assert leased(place) == [] and told(place)["limit"] == 3


def test_a_worker_that_died_takes_up_no_room_after_its_lease(tmp_path):
    admission = Admission(1, 1, 1, None)
    with gateway(tmp_path, Scripted(answer_of), admission=admission, lease_s=0.3) as place:
        open_sums(place, 1, 2)
        (dead,) = leased(place)
        (next_one,) = leased(place, wait_s=30)
        assert dead["token"] != next_one["token"] and told(place)["under_way"] == 1


def test_a_gateway_that_is_started_again_learns_what_is_under_way(tmp_path):
    with gateway(tmp_path, Scripted(answer_of)) as place:
        open_sums(place, 2, 2)
        tokens = [lease["token"] for lease in leased(place)]
    admission = Admission(2, 3, 3, None)
    with gateway(tmp_path, Scripted(answer_of), admission=admission) as place:
        assert place.work("heartbeat", {"tokens": tokens[:3]}).json()["refused"] == ["", "", ""]
        place.post(f"/{tokens[3]}/generate", {})
        assert told(place)["under_way"] == 4
        place.ids = iter([7])
        place.open("3+1=", 2)
        assert leased(place) == []
        for token in tokens:
            place.post(f"/{token}/generate", {})
            assert place.seal(token) == {}
        assert len(leased(place)) == 2


# -- over the limit


@pytest.mark.parametrize("harness", ["agent", "plain"])
def test_a_first_call_over_a_limit_that_fell_comes_again_later(tmp_path, harness):
    """The youngest is told so with 429 and Retry-After; if its agent gives up, it is given back,
    and its budget of one attempt is as it was."""
    engine, admission = Stamping(), Admission(1, 9, 4, MARKS)
    with gateway(tmp_path, engine, admission=admission) as place:
        open_sums(place, 4, 1, max_attempts=1)
        tokens = [lease["token"] for lease in leased(place)]
        engine.told = [Pressure(0.85, 0, 0)]
        asyncio.run(place.attempts.entrance.look())
        assert told(place)["limit"] == 3 and told(place)["trimmed"] == 1
        if harness == "agent":
            refused = place.post(f"/{tokens[3]}/generate", {})
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            answers = [place.post(f"/{token}/generate", {}).status_code for token in tokens[:3]]
        else:
            each = place.work("generate", {"tokens": tokens}).json()["answers"]
            answers = [one.get("status", 200) for one in each]
            assert answers.pop() == 429
        assert answers == [200] * 3
        failed = {"token": tokens[3], "failure": "infra", "reason": "429"}
        assert place.work("fail", {"attempts": [failed]}).json() == {"results": [{}]}
        counts = place.ledger.counts()
        assert counts["cancelled_busy"] == 1 and counts["groups_void"] == 0
        assert told(place)["refused_busy"] == 1 and "failed_infra" not in told(place)
        assert place.seal(tokens[0]) == {}
        (again,) = leased(place)
        assert (again["group"], again["attempt"]) == (3, 1)
        assert place.post(f"/{again['token']}/generate", {}).status_code == 200
        failed = {"token": again["token"], "failure": "infra", "reason": "a real one"}
        place.work("fail", {"attempts": [failed]})
        assert place.ledger.counts()["void_infra"] == 1


# -- while weights are loaded


class Loading(Stamping):
    """Loads when it is told to, or fails to."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.loading = threading.Event(), threading.Event()
        self.fails, self.tried = False, 0

    async def load(self, version: Version, path: str) -> None:
        self.tried += 1
        self.loading.set()
        await asyncio.to_thread(self.go.wait, 60)
        if self.fails:
            raise EngineError("the digest does not match")
        self.version = version


@contextlib.contextmanager
def loading(folder: Path) -> Iterator[tuple[Loading, Place]]:
    """An engine that is loading its second weights, and a gateway before it."""
    engine = Loading()
    engine.version = FIRST
    with gateway(folder, engine, version=None, follows=True) as place:
        open_sums(place, 3, 1)
        yield engine, place
        engine.go.set()


def begin_load(engine: Loading, folder: Path) -> None:
    second = dataclasses.asdict(Version(0, 1, "second"))
    announce(folder / CURRENT, {**second, "path": "nowhere"})
    assert engine.loading.wait(60)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_begins_during_a_load_and_what_is_under_way_goes_on(tmp_path, fails):
    with loading(tmp_path) as (engine, place):
        engine.fails = fails
        running, new = (leased(place, 1)[0]["token"] for _ in range(2))
        assert place.post(f"/{running}/generate", {}).status_code == 200
        begin_load(engine, tmp_path)
        assert leased(place) == []
        first: list[int] = []
        body = {"tokens": [new]}
        callers = [
            threading.Thread(
                target=lambda: first.append(place.post(f"/{new}/generate", {}).status_code)
            ),
            threading.Thread(target=lambda: first.append(place.work("generate", body).status_code)),
        ]
        callers[0].start()
        for _ in range(3):  # calls of the one that is under way are answered meanwhile
            assert place.post(f"/{running}/generate", {"prompt": [5]}).status_code == 200
        assert place.seal(running) == {}
        assert place.ledger.counts()["slots_leased"] == 1 and first == []  # not even RUNNING
        callers[1].start()
        assert leased(place) == [] and first == []
        engine.go.set()
        for caller in callers:
            caller.join(60)
        assert first == [200, 200]
        assert len(until(lambda: leased(place))) == 1
        if fails:
            until(lambda: engine.tried > 1)  # it is tried again


def test_an_engine_that_is_idle_for_a_load_lets_no_limit_grow(tmp_path):
    engine, admission = Loading(), Admission(1, 99, 2, MARKS)
    engine.version, engine.told = FIRST, [Pressure(0.75, 0, 0)]
    with gateway(tmp_path, engine, version=None, follows=True, admission=admission) as place:
        open_sums(place, 4, 1)
        assert len(leased(place)) == 2
        until(lambda: told(place)["kv_usage"] == 0.75)
        begin_load(engine, tmp_path)
        engine.told = [Pressure(0.0, 0, 0)]
        time.sleep(5 * LOOK_S)  # it would have been asked
        assert told(place)["limit"] == 2 and told(place)["kv_usage"] == 0.75
        engine.go.set()
        until(lambda: told(place)["limit"] > 2)


def test_an_engine_that_began_to_load_while_it_was_asked_lets_no_limit_grow():
    async def scene() -> tuple[Move, int]:
        asked, said = asyncio.Event(), asyncio.Event()

        class Late(Stamping):
            async def pressure(self) -> list[Pressure | None]:
                asked.set()
                await said.wait()
                return [Pressure(0.0, 0, 0)]

            async def load(self, version: Version, path: str) -> None:
                await asyncio.Event().wait()

        async def cancel(tokens: Sequence[str]) -> None:
            raise AssertionError(tokens)

        entrance = Entrance(Admission(1, 9, 4, MARKS), Late(), Bell(), 30.0, cancel)
        looking = asyncio.create_task(entrance.look())
        await asked.wait()
        entrance._most = 4  # so many were under way
        load = asyncio.create_task(entrance.load(FIRST, "nowhere"))
        await asyncio.sleep(0)
        said.set()
        move = await looking
        load.cancel()
        return move, entrance.admission.limit

    assert asyncio.run(scene()) == (Move.HELD, 4)


def test_a_load_that_takes_too_long_is_told_to_those_who_wait(tmp_path):
    engine = Loading()
    engine.version = FIRST
    with gateway(tmp_path, engine, version=None, follows=True, wait_s=0.2) as place:
        open_sums(place, 1, 1)
        (lease,) = leased(place)
        begin_load(engine, tmp_path)
        refused = place.post(f"/{lease['token']}/generate", {})
        assert refused.status_code == 503 and "for more than 0.2 s" in refused.text
        engine.go.set()


# -- a burst of preemptions


class Vllm(Replayed):
    """As vLLM, which holds its answers until it is told to give them; what its clients leave it
    forgets, as vLLM does. Its metrics are text in vLLM's form."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.running, self.aborted, self.preempted = False, 0, 0, 0

    def app(self) -> Starlette:
        app = super().app()
        app.router.routes.insert(0, Route("/metrics", self.metrics))
        return app

    async def metrics(self, asked: Asked) -> PlainTextResponse:
        labels = '{engine="0",model_name="served-name"}'
        numbers = {
            "vllm:num_requests_running": self.running,
            "vllm:num_requests_waiting": int(self.preempted > 0),  # what it put back
            "vllm:kv_cache_usage_perc": 0.01 * self.running,
            "vllm:num_preemptions_total": self.preempted,
        }
        lines = [f"# TYPE {name} x\n{name}{labels} {float(x)}" for name, x in numbers.items()]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def completions(self, asked: Asked) -> JSONResponse:
        body = await asked.json()
        self.running += 1
        try:
            while not self.go:
                if await asked.is_disconnected():
                    self.aborted += 1
                    return JSONResponse({})
                await asyncio.sleep(0.005)
        finally:
            self.running -= 1
        ids = [*Letters().encode(answer_of(request_of(body["prompt"]))), EOS]
        choice = {
            "text": Letters().decode(ids),
            "logprobs": {"token_logprobs": [-0.5] * len(ids)},
            "finish_reason": "stop",
            "token_ids": ids,
        }
        return JSONResponse({"choices": [choice]})


def request_of(prompt: list[int]) -> Request:
    return Request(prompt, 0, 0, 1.0, 8, frozenset({EOS}))


def worker_of(place: Place, agent: str) -> Worker:
    name = f"tests.pool.agents.{agent}" if agent else ""
    return Worker(
        Work(place.url, KEY, patience_s=60.0),
        Work(place.url, KEY, patience_s=60.0),
        Sums(10),
        lease_s=30.0,
        reward="exact",
        most=1 if agent else 8,
        agent=load_agent(name),
    )


@pytest.mark.parametrize(("agent", "samples", "threads"), [("", 4, 3), ("plain", 2, 12)])
def test_a_burst_of_preemptions_gives_the_youngest_groups_back_and_nothing_is_lost(
    tmp_path, agent, samples, threads
):
    """Six groups, a budget of one attempt: were one given back at its cost, its group would
    be void. All are sealed once, and none with a reward but its own."""
    server = Vllm()
    every = 6 * samples
    admission = Admission(samples, 64, every, MARKS)
    version, path = weights(tmp_path / "weights", 0)
    with serving(server.app()) as url:
        engine = VllmServer(url, timeout_s=60, convert=str)
        with gateway(
            tmp_path, engine, version=None, follows=True, admission=admission, max_prompt_tokens=99
        ) as place:
            announce(tmp_path / CURRENT, {**dataclasses.asdict(version), "path": path})
            until(lambda: place.attempts.engine.version)
            open_sums(place, 6, samples, max_attempts=1, version=version)
            done = threading.Event()

            def work() -> None:
                worker = worker_of(place, agent)
                while not done.is_set():
                    worker.once(0.2)

            running = [threading.Thread(target=work) for _ in range(threads)]
            for thread in running:
                thread.start()
            until(lambda: server.running == every)
            until(lambda: told(place)["kv_usage"] == 0.01 * every)  # it was asked
            server.preempted += 5
            until(lambda: server.aborted == 2 * samples)
            counts = told(place)
            assert (counts["limit"], counts["cut"], counts["preempted"]) == (3 * every // 4, 1, 5)
            assert counts["cancelled_pressure"] == 2 * samples
            until(
                lambda: told(place)["under_way"] == 3 * every // 4
            )  # leased again, as far as may be
            server.go = True
            until(lambda: place.ledger.counts()["groups_ready"] == 6)
            done.set()
            for thread in running:
                thread.join(60)
            ledger = place.ledger.counts()
            assert ledger["groups_void"] == 0 and "retried" not in ledger
            members = [one for group in range(6) for one in place.ledger.members(group)]
            attempts = [[m.attempt for m in place.ledger.members(n)] for n in range(6)]
            assert attempts == [[0] * samples] * 4 + [[1] * samples] * 2
            assert [one.sealed.reward for one in members] == [1.0] * every
            assert ledger["cancelled_pressure"] == 2 * samples
            held = Counter(one.sealed.segment for one in members)
            files = {
                str(p.relative_to(place.spool.root)) for p in place.spool.root.rglob("*.rollouts")
            }
            assert files == set(held)  # and nothing else was written


def test_an_engine_that_tells_nothing_leaves_the_limit_and_is_counted(tmp_path):
    admission = Admission(1, 9, 2, MARKS)
    with gateway(tmp_path, Stamping(), admission=admission, follows=True) as place:
        open_sums(place, 3, 1)
        leased(place)
        until(lambda: told(place)["untold"] >= 2)
        assert told(place)["limit"] == 2 and leased(place) == []


def test_a_limit_that_grows_lets_those_in_who_wait(tmp_path):
    engine, admission = Stamping(), Admission(1, 9, 2, MARKS)
    with gateway(tmp_path, engine, admission=admission, follows=True) as place:
        open_sums(place, 9, 1)
        leased(place)
        engine.told = [Pressure(0.2, 0, 0)]
        seen = 2
        while seen < 9:
            seen += len(leased(place, wait_s=30))
        assert told(place)["limit"] == 9 and told(place)["grew"] >= 3


def test_the_counts_are_told_over_http(tmp_path):
    with gateway(tmp_path, Stamping(), admission=Admission(1, 9, 5, MARKS)) as place:
        open_sums(place, 1, 1)
        leased(place)
        key = {"authorization": f"Bearer {KEY}"}
        counts = httpx2.get(f"{place.url}/counts", headers=key).json()["gateway"]
    assert (counts["under_way"], counts["limit"]) == (1, 5)
    assert {"kv_usage", "waiting", "preempted", "cut", "trimmed", "grew", "untold"} <= set(counts)
