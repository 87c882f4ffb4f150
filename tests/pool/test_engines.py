"""Engines: a generator that batches, and servers that replay what their documentation answers."""

import asyncio
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from jaxrl.pool.contract import Request
from jaxrl.pool.engines import Batching, EngineError, Fleet, Sampled
from jaxrl.pool.rollout import Version
from jaxrl.pool.servers import JaxrlServer
from jaxrl.pool.serving import EngineService
from tests.pool.scripted import EOS, FIRST, Letters, Scripted, answer_of
from tests.pool.serving import served

SECOND = Version(0, 1, "second")


def request(prompt: str = "1+1=", **changes: Any) -> Request:
    values: dict[str, Any] = dict(
        prompt=Letters().encode(prompt),
        group=0,
        sample=0,
        temperature=1.0,
        max_new_tokens=8,
        stop_ids=frozenset({EOS}),
    )
    return Request(**(values | changes))


def weights(folder: Path, step: int) -> tuple[Version, str]:
    """A published directory: its bytes are nobody's weights, their digest is true."""
    path = folder / f"v=0-{step}"
    path.mkdir(parents=True)
    data = f"weights of step {step}".encode()
    version = Version(0, step, hashlib.sha256(data).hexdigest())
    (path / "model.safetensors").write_bytes(data)
    told = {"epoch": 0, "step": step, "digest": version.digest}
    (path / "manifest.json").write_text(json.dumps(told))
    return version, str(path)


# -- in this process


class Slow(Scripted):
    """A scripted model whose batches take a while, and which notes how large they were."""

    def __init__(self) -> None:
        super().__init__(answer_of)
        self.sizes: list[int] = []

    def generate(self, requests):
        self.sizes.append(len(requests))
        time.sleep(0.05)
        if any(not request.prompt for request in requests):
            raise ValueError("an empty prompt")
        return super().generate(requests)


def test_requests_that_wait_are_decoded_together():
    async def run() -> tuple[list[Sampled], list[int]]:
        model = Slow()
        engine = Batching(model, chunk_tokens=0, room=64)
        await engine.load(FIRST, "nowhere")
        answers = await asyncio.gather(*(engine.generate(request(f"{n}+1=")) for n in range(9)))
        await engine.close()
        return answers, model.sizes

    answers, sizes = asyncio.run(run())
    assert sizes == [9]
    assert [Letters().decode(answer.tokens) for answer in answers] == [*"123456789"]


def test_a_request_that_cannot_be_served_fails_alone():
    async def run() -> list[Any]:
        engine = Batching(Slow(), chunk_tokens=0, room=64)
        await engine.load(FIRST, "nowhere")
        asked = [request(), request(prompt=""), request("3+1=")]
        told = await asyncio.gather(*map(engine.generate, asked), return_exceptions=True)
        await engine.close()
        return told

    first, second, third = asyncio.run(run())
    assert isinstance(second, ValueError)
    assert (Letters().decode(first.tokens), Letters().decode(third.tokens)) == ("2", "4")


def test_without_weights_nothing_is_served_and_a_failed_load_serves_nothing():
    class Refusing(Slow):
        def load(self, version: Version, path: str) -> None:
            if path == "bad":
                raise ValueError("the digest does not match")
            super().load(version, path)

    async def run() -> None:
        engine = Batching(Refusing(), chunk_tokens=0, room=64)
        with pytest.raises(EngineError, match="no version"):
            await engine.generate(request())
        await engine.load(FIRST, "good")
        with pytest.raises(EngineError, match="does not match"):
            await engine.load(SECOND, "bad")
        assert engine.version is None
        with pytest.raises(EngineError, match="no version"):
            await engine.generate(request())
        await engine.close()

    asyncio.run(run())


class Counting(Scripted):
    """Answers with its version's step, a token at a time: each token tells who wrote it."""

    def completion(self, request: Request):
        assert self.version is not None
        self.respond = lambda _: str(self.version and self.version.step) * request.max_new_tokens
        return super().completion(request)

    def generate(self, requests):
        time.sleep(0.01)
        return super().generate(requests)


@pytest.mark.parametrize("chunk", [0, 2])
def test_new_weights_take_over_in_the_middle_of_an_answer_only_if_asked_to(chunk):
    async def run() -> tuple[Sampled, Sampled]:
        engine = Batching(Counting(), chunk_tokens=chunk, room=64)
        await engine.load(FIRST, "nowhere")
        answer = asyncio.create_task(engine.generate(request(max_new_tokens=20)))
        await asyncio.sleep(0.025)
        await engine.load(SECOND, "nowhere")
        after = await engine.generate(request(max_new_tokens=1))
        told = await answer
        await engine.close()
        return told, after

    answer, after = asyncio.run(run())
    wrote = [int(Letters().decode([token])) for token in answer.tokens]
    stamped = [answer.versions[place].step for place in answer.version_index]
    assert wrote == stamped and len(wrote) == 20
    assert after.versions == [SECOND]
    if chunk:
        assert sorted(wrote) == wrote and set(wrote) == {0, 1} and wrote.count(0) % chunk == 0
    else:
        assert answer.versions == [FIRST]


def test_a_fleet_leaves_out_the_engine_that_did_not_take_the_weights():
    class Stuck(Scripted):
        def load(self, version: Version, path: str) -> None:
            if version == SECOND:
                raise OSError("no connection")
            super().load(version, path)

    async def run() -> tuple[list[Version], int]:
        fleet = Fleet([Batching(m, chunk_tokens=0, room=64) for m in (Stuck(), Scripted())])
        await fleet.load(FIRST, "nowhere")
        await fleet.load(SECOND, "nowhere")
        answers = await asyncio.gather(*(fleet.generate(request()) for _ in range(4)))
        await fleet.close()
        return [version for answer in answers for version in answer.versions], int(
            fleet.counts()["lost"]
        )

    assert asyncio.run(run()) == ([SECOND] * 4, 1)


# -- jaxrl's own server


def test_the_engine_behind_http_is_the_engine(tmp_path):
    version, path = weights(tmp_path, 0)

    async def run(url: str) -> tuple[Sampled, list[int]]:
        server = JaxrlServer(url, timeout_s=10, convert=str, key="secret")
        with pytest.raises(EngineError, match="no version"):
            await server.generate(request())
        with pytest.raises(EngineError, match="digest"):
            await server.load(Version(0, 0, "another"), path)
        await server.load(version, path)
        answers = await asyncio.gather(*(server.generate(request()) for _ in range(6)))
        with pytest.raises(ValueError, match="empty"):
            await server.generate(request(prompt=""))
        await server.close()
        stranger = JaxrlServer(url, timeout_s=10, convert=str, key="wrong")
        with pytest.raises(EngineError, match="401"):
            await stranger.load(version, path)
        await stranger.close()
        return answers[0], model.sizes

    model = Slow()
    engine = Batching(model, chunk_tokens=0, room=64)
    with served(EngineService(engine, "secret", 2**16).app()) as url:
        answer, sizes = asyncio.run(run(url))
    asyncio.run(engine.close())
    assert answer.versions == [version] and answer.tokens == [*Letters().encode("2"), EOS]
    assert answer.logp == [-0.5, -0.5] and max(sizes) > 1
