"""What ends an attempt before its worker does, and what an engine is then still asked."""

import asyncio
import threading
import time
from typing import Any

import pytest

from jaxrl.pool.admission import Admission
from jaxrl.pool.contract import Request
from jaxrl.pool.engines import Sampled
from jaxrl.pool.pressure import Pressure
from jaxrl.pool.servers import VllmServer
from tests.pool.scripted import FIRST, Letters
from tests.pool.serving import Stamping, gateway, until
from tests.pool.serving import served as serving
from tests.pool.test_engines import weights
from tests.pool.test_entrance import MARKS, Vllm, leased, open_sums, request_of, told


@pytest.mark.parametrize("end", ["fail", "state", "cut"])
def test_an_attempt_whose_group_is_not_wanted_takes_up_no_room_once_that_is_told(tmp_path, end):
    engine, admission = Stamping(), Admission(1, 9, 2, MARKS)
    with gateway(tmp_path, engine, admission=admission) as place:
        open_sums(place, 2, 1)
        token = leased(place)[1]["token"]
        place.ledger.void(1, "filtered")
        if end == "fail":
            failed = {"token": token, "failure": "env", "reason": "x"}
            (result,) = place.work("fail", {"attempts": [failed]}).json()["results"]
            assert (result["status"], result["code"]) == (403, "void")
        elif end == "state":
            assert place.work("state", {"token": token}).status_code == 403
        else:
            engine.told = [Pressure(0.95, 0, 0)]
            asyncio.run(place.attempts.entrance.look())
            assert told(place)["cut"] == 1 and "cancelled_pressure" not in place.ledger.counts()
        assert told(place)["under_way"] == 1


def test_a_server_that_answers_many_at_once_still_tells_its_load(tmp_path):
    """More than a client's default of connections, of which each answer holds one."""
    many, server = 130, Vllm()
    version, path = weights(tmp_path, 0)
    prompt = Letters().prompt("1+1=")

    async def scene(url: str) -> list[Pressure | None]:
        engine = VllmServer(url, timeout_s=60, convert=str)
        await engine.load(version, path)
        calls = [asyncio.create_task(engine.generate(request_of(prompt))) for _ in range(many)]
        told: list[Pressure | None] = []
        end = time.monotonic() + 60
        while told != [Pressure(0.01 * many, 0, 0)] and time.monotonic() < end:
            told = await engine.pressure()
            if None in told:
                break
        server.go = True
        assert len(await asyncio.gather(*calls)) == many
        await engine.close()
        return told

    with serving(server.app()) as url:
        assert asyncio.run(scene(url)) == [Pressure(0.01 * many, 0, 0)]


class Slow(Stamping):
    """Answers when it is told to, and counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.asked = threading.Event(), list[int]()

    async def generate(self, request: Request) -> Sampled:
        self.asked.append(request.group)
        await asyncio.to_thread(self.go.wait, 60)
        return await super().generate(request)


@pytest.mark.parametrize("waits", ["for room", "for weights"])
def test_what_is_given_back_before_an_engine_was_asked_is_never_asked_for(tmp_path, waits):
    """One of two waits until the other one is answered, or both for weights."""
    engine, admission = Slow(), Admission(1, 9, 2, MARKS)
    room = 1 if waits == "for room" else 2
    with gateway(
        tmp_path, engine, version=None, admission=admission, follows=True, under_way=room
    ) as place:
        engine.version = FIRST if waits == "for room" else None
        open_sums(place, 2, 1)
        body = {"tokens": [lease["token"] for lease in leased(place)]}
        answers: list[dict[str, Any]] = []
        asking = threading.Thread(
            target=lambda: answers.extend(place.work("generate", body).json()["answers"])
        )
        asking.start()
        until(lambda: place.attempts._room.full and bool(engine.asked) == (room == 1))
        engine.told = [Pressure(0.95, 0, 0)]
        until(lambda: told(place).get("cancelled_pressure") == 1)
        engine.version = FIRST
        engine.go.set()
        asking.join(60)
        assert [one.get("code") for one in answers] == [None, "cancelled"]
        assert engine.asked == [0]


@pytest.mark.parametrize("failure", ["infra", "env"])
def test_an_agent_that_gave_up_over_the_limit_spends_no_attempt(tmp_path, failure):
    """Of most clients' errors a worker cannot tell that the gateway was busy; the gateway can."""
    engine, admission = Stamping(), Admission(1, 9, 4, MARKS)
    with gateway(tmp_path, engine, admission=admission) as place:
        open_sums(place, 4, 1, max_attempts=1)
        token = leased(place)[3]["token"]
        engine.told = [Pressure(0.85, 0, 0)]
        asyncio.run(place.attempts.entrance.look())
        assert place.post(f"/{token}/generate", {}).status_code == 429
        failed = {"token": token, "failure": failure, "reason": "HTTP Error 429"}
        assert place.work("fail", {"attempts": [failed]}).json() == {"results": [{}]}
        counts = place.ledger.counts()
        assert counts["cancelled_busy"] == 1 and counts["groups_void"] == 0
