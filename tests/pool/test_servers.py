"""Engines on vLLM and SGLang, which are replayed here: what they are asked, and what is refused."""

import asyncio
import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request as Asked
from starlette.responses import JSONResponse
from starlette.routing import Route

from jaxrl.pool.engines import EngineError, Sampled
from jaxrl.pool.rollout import StopReason
from jaxrl.pool.servers import SglangServer, VllmServer, label
from tests.pool.scripted import EOS, Letters
from tests.pool.serving import served
from tests.pool.test_engines import request, weights


class Replayed:
    """A server that answers as the documentation of vLLM and SGLang says, and notes what it is
    asked. It has no model."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.version, self.paused = "default", False
        self.changes: dict[str, Any] = {}  # what it says otherwise
        self.slow = 0.0

    def app(self) -> Starlette:
        paths = {
            "/v1/completions": self.completions,
            "/generate": self.generate,
            "/pause": self.control,
            "/resume": self.control,
            "/collective_rpc": self.control,
            "/reset_prefix_cache": self.control,
            "/weight_checker": self.checksums,
            "/update_weight_version": self.control,
            "/pause_generation": self.control,
            "/continue_generation": self.control,
            "/update_weights_from_disk": self.control,
        }
        routes = [Route(path, handler, methods=["POST"]) for path, handler in paths.items()]
        routes += [Route("/weight_info", self.weight_info), Route("/v1/models", self.models)]
        return Starlette(routes=routes)

    async def noted(self, asked: Asked) -> Any:
        body = await asked.body()
        told = json.loads(body) if body else dict(asked.query_params)
        self.asked.append((asked.url.path, told))
        return told

    async def models(self, asked: Asked) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "served-name"}]})

    async def weight_info(self, asked: Asked) -> JSONResponse:
        return JSONResponse({"weight_version": self.version})

    async def checksums(self, asked: Asked) -> JSONResponse:
        assert await self.noted(asked) == {"action": "checksum"}
        names = ("model.embed_tokens.weight", "lm_head.weight")
        sums = {f"dp0:pp0:pcp0:tp0:{name}": "d3b7" for name in names}
        return JSONResponse(self.changes.get("/weight_checker", {"checksums": sums}))

    async def control(self, asked: Asked) -> JSONResponse:
        told = await self.noted(asked)
        path = asked.url.path
        if path in self.changes:
            return JSONResponse(self.changes[path], self.changes.get("status", 200))
        self.paused = path.startswith("/pause") or (self.paused and "resume" not in path)
        if path == "/update_weight_version":
            self.version = told["new_version"]
        if path == "/update_weights_from_disk":
            self.version = told["weight_version"]
            return JSONResponse({"success": True, "message": "ok", "num_paused_requests": 0})
        return JSONResponse({"success": True})

    async def completions(self, asked: Asked) -> JSONResponse:
        body = await self.noted(asked)
        assert not self.paused
        await asyncio.sleep(self.slow)
        choice = {
            "index": 0,
            "text": "2",
            "logprobs": {
                "text_offset": [0, 1],
                "token_logprobs": [-0.25, -0.125],
                "tokens": ["2", ""],
                "top_logprobs": [{"2": -0.25}, {"": -0.125}],
            },
            "finish_reason": "stop",
            "stop_reason": EOS,
            "token_ids": [53, EOS],
            "prompt_logprobs": None,
            "prompt_token_ids": body["prompt"],
        }
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 2, "total_tokens": 6}
        told = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"]}
        return JSONResponse({**told, "choices": [choice | self.changes], "usage": usage})

    async def generate(self, asked: Asked) -> JSONResponse:
        await self.noted(asked)
        facts = {
            "id": "1",
            "finish_reason": {"type": "stop", "matched": EOS},
            "prompt_tokens": 4,
            "completion_tokens": 2,
            "cached_tokens": 0,
            "weight_version": self.version,
            "output_token_logprobs": [[-0.25, 53, None], [-0.125, EOS, None]],
            "e2e_latency": 0.1,
        }
        return JSONResponse(
            {"text": "2", "output_ids": [53, EOS], "meta_info": facts | self.changes}
        )


SERVERS = {"vllm": VllmServer, "sglang": SglangServer}


@pytest.fixture(params=SERVERS)
def replayed(request, tmp_path):
    """A server of a kind, and ours that asks it, in the same loop."""
    replay = Replayed()
    with served(replay.app()) as url:
        made = SERVERS[request.param](url, timeout_s=10, convert=lambda path: path + "/converted")
        yield request.param, replay, made, weights(tmp_path, 3)


def test_a_server_is_asked_with_ids_and_answers_with_ids(replayed):
    kind, replay, server, (version, path) = replayed

    async def run() -> Sampled:
        await server.load(version, path)
        answer = await server.generate(request(temperature=0.7))
        await server.close()
        return answer

    answer = asyncio.run(run())
    assert answer == Sampled(
        [53, EOS], [-0.25, -0.125], [0, 0], [version], StopReason.STOP, text="2"
    )
    called = [at for at, _ in replay.asked]
    told = dict(replay.asked)
    if kind == "vllm":
        assert called == [
            "/weight_checker",
            "/pause",
            "/collective_rpc",
            "/reset_prefix_cache",
            "/update_weight_version",
            "/resume",
            "/v1/completions",
        ]
        assert told["/pause"] == {"mode": "wait"}
        assert told["/collective_rpc"]["kwargs"] == {"weights_path": path + "/converted"}
        body = told["/v1/completions"]
        assert (body["model"], body["max_tokens"]) == ("served-name", 8)
        assert body["return_token_ids"] is True and body["logprobs"] == 0
    else:
        assert called == [
            "/pause_generation",
            "/update_weights_from_disk",
            "/continue_generation",
            "/generate",
        ]
        assert told["/update_weights_from_disk"]["model_path"] == path + "/converted"
        assert told["/update_weights_from_disk"]["flush_cache"] is True
        body = told["/generate"]
        assert body["return_logprob"] is True
        body = {**body, **body["sampling_params"], "prompt": body["input_ids"]}
    assert body["prompt"] == Letters().encode("1+1=") and body["temperature"] == 0.7
    assert body["stop_token_ids"] == [EOS]


UNSAID = {
    "vllm": ({"token_ids": None}, {"logprobs": None}),
    "sglang": ({"output_token_logprobs": None},),
}


def test_a_server_that_tells_no_ids_or_log_probs_is_not_trained_on(replayed):
    kind, replay, server, (version, path) = replayed

    async def run() -> list[Sampled]:
        await server.load(version, path)
        answers = []
        for changes in UNSAID[kind]:
            replay.changes = changes
            answers.append(await server.generate(request()))
        await server.close()
        return answers

    for answer in asyncio.run(run()):
        assert not answer.trainable and answer.text == "2" and answer.tokens == []


def test_a_server_that_lost_its_weights_gives_no_answer(replayed):
    kind, replay, server, (version, path) = replayed

    async def run() -> None:
        await server.load(version, path)
        replay.version = "default"  # it was started again
        with pytest.raises(EngineError, match="'default'"):
            await server.generate(request())
        if kind == "sglang":
            replay.changes = {"weight_version": None}
            with pytest.raises(EngineError, match="None"):
                await server.generate(request())
        await server.close()

    asyncio.run(run())


def test_an_answer_during_which_others_changed_the_weights_does_not_count(tmp_path):
    replay = Replayed()
    version, path = weights(tmp_path, 0)

    async def run(url: str) -> None:
        server = VllmServer(url, timeout_s=10, convert=str)
        await server.load(version, path)
        replay.slow = 0.1
        answer = asyncio.create_task(server.generate(request()))
        await asyncio.sleep(0.05)
        replay.version = "somebody's"
        with pytest.raises(EngineError, match="somebody's"):
            await answer
        await server.close()

    with served(replay.app()) as url:
        asyncio.run(run(url))


def test_weights_wait_for_answers_and_answers_for_weights(tmp_path):
    replay = Replayed()
    old, new = weights(tmp_path, 0), weights(tmp_path, 1)

    async def run(url: str) -> list[Sampled]:
        server = VllmServer(url, timeout_s=10, convert=str)
        await server.load(*old)
        replay.slow = 0.05
        early = asyncio.create_task(server.generate(request()))
        await asyncio.sleep(0.02)
        load = asyncio.create_task(server.load(*new))
        await asyncio.sleep(0.01)
        late = asyncio.create_task(server.generate(request()))
        told = [await early, await late]
        await load
        await server.close()
        return told

    with served(replay.app()) as url:
        early, late = asyncio.run(run(url))
    assert (early.versions, late.versions) == ([old[0]], [new[0]])
    paths = [path for path, _ in replay.asked]
    assert paths.index("/v1/completions") < paths.index("/pause", 6)


def test_a_server_whose_head_is_tied_is_refused_before_anything_is_changed(tmp_path):
    """It would keep the head of the weights before: vLLM 0.32 answered so."""
    replay = Replayed()
    tied = {"checksums": {"dp0:pp0:pcp0:tp0:model.embed_tokens.weight": "d3b7"}}
    replay.changes = {"/weight_checker": tied}

    async def run(url: str) -> None:
        server = VllmServer(url, timeout_s=10, convert=str)
        with pytest.raises(EngineError, match="tie_word_embeddings"):
            await server.load(*weights(tmp_path, 0))
        await server.close()

    with served(replay.app()) as url:
        asyncio.run(run(url))
    assert [path for path, _ in replay.asked] == ["/weight_checker"]


FAILURES = {
    "vllm": ("/reset_prefix_cache", {"success": False}, "/resume"),
    "sglang": (
        "/update_weights_from_disk",
        {"success": False, "message": "shape mismatch"},
        "/continue_generation",
    ),
}


def test_a_server_that_fails_half_way_is_drained_and_stays_paused(replayed):
    kind, replay, server, (version, path) = replayed
    where, told, resumed = FAILURES[kind]

    async def run() -> None:
        replay.changes = {where: told}
        with pytest.raises(EngineError, match=where):
            await server.load(version, path)
        assert server.version is None
        with pytest.raises(EngineError, match="no version"):
            await server.generate(request())
        replay.changes = {}
        await server.load(version, path)  # tried again
        assert (await server.generate(request())).versions == [version]
        await server.close()

    asyncio.run(run())
    called = [at for at, _ in replay.asked]
    assert called.count(resumed) == 1


def test_a_server_that_is_not_there_is_infrastructure(tmp_path):
    version, path = weights(tmp_path, 0)

    async def run() -> None:
        server = SglangServer("http://127.0.0.1:9", timeout_s=1, convert=str)
        with pytest.raises(EngineError, match="Connect"):
            await server.load(version, path)
        await server.close()

    asyncio.run(run())
    assert label(version) == f"0-0-{version.digest}"
