"""What engines tell of their load. Servers are stood in for by one that serves text in the form
that vLLM and SGLang were recorded to serve; it has no model."""

import asyncio
import threading
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request as Asked
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from jaxrl.pool.engines import Batching, Fleet
from jaxrl.pool.pressure import SGLANG, VLLM, Pressure, read_metrics, read_pressure
from jaxrl.pool.servers import JaxrlServer, SglangServer, VllmServer
from jaxrl.pool.serving import EngineService
from tests.pool.scripted import FIRST, Scripted, answer_of
from tests.pool.serving import served
from tests.pool.test_engines import request

# vLLM with two engines behind one address (--data-parallel-size 2)
VLLM_TEXT = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="Qwen/Qwen3-0.6B"} 24.0
vllm:num_requests_running{engine="1",model_name="Qwen/Qwen3-0.6B"} 31.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="Qwen/Qwen3-0.6B"} 3.0
vllm:num_requests_waiting{engine="1",model_name="Qwen/Qwen3-0.6B"} 4.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="Qwen/Qwen3-0.6B",reason="capacity"} 3.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="Qwen/Qwen3-0.6B"} 0.3412
vllm:kv_cache_usage_perc{engine="1",model_name="Qwen/Qwen3-0.6B"} 0.8725
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="Qwen/Qwen3-0.6B"} 2.0
vllm:num_preemptions_total{engine="1",model_name="Qwen/Qwen3-0.6B"} 15.0
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="Qwen/Qwen3-0.6B"} 1.7e+09
"""
SGLANG_TEXT = """\
# HELP sglang:token_usage The token usage.
# TYPE sglang:token_usage gauge
sglang:token_usage{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.28
# HELP sglang:num_queue_reqs The number of requests in the waiting queue.
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 2826.0
# HELP sglang:num_retracted_reqs The number of retracted requests.
# TYPE sglang:num_retracted_reqs gauge
sglang:num_retracted_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 1.0
# HELP sglang:num_retracted_requests_total Total number of retracted requests.
# TYPE sglang:num_retracted_requests_total counter
sglang:num_retracted_requests_total{engine_type="unified",model_name="m",tp_rank="0"} 41.0
"""
TOLD = {"vllm": Pressure(0.8725, 7, 17), "sglang": Pressure(0.28, 2826, 41)}


def test_several_engines_of_a_server_are_the_fullest_and_the_sums():
    assert read_metrics(VLLM_TEXT, VLLM) == TOLD["vllm"]
    assert read_metrics(SGLANG_TEXT, SGLANG) == TOLD["sglang"]


def test_the_older_name_of_the_usage_is_known():
    older = VLLM_TEXT.replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    assert read_metrics(older, VLLM) == TOLD["vllm"]


@pytest.mark.parametrize(
    ("line", "usage"),
    [
        ("vllm:kv_cache_usage_perc 0.5", 0.5),
        ("vllm:kv_cache_usage_perc{} 5e-1 1700000000000", 0.5),
        ('  vllm:kv_cache_usage_perc { model_name = "a} 0.9 #{b\\"\\\\" , }\t0.5  ', 0.5),
        ('vllm:kv_cache_usage_perc{model_name="a"} NaN', None),
        ('vllm:kv_cache_usage_perc{model_name="a"} +Inf', None),
        ('vllm:kv_cache_usage_perc{model_name="a"} half', None),
        ('vllm:kv_cache_usage_perc{model_name="a} 0.5', None),  # a quote is missing
        ("vllm:kv_cache_usage_percentile 0.5", None),
        ('other{text="vllm:kv_cache_usage_perc 0.5"} 1', None),
        ("# vllm:kv_cache_usage_perc 0.5", None),
    ],
)
def test_a_sample_is_a_name_labels_and_a_number(line, usage):
    told = read_metrics(f"{line}\nvllm:num_requests_waiting 0\n", VLLM)
    assert told == (None if usage is None else Pressure(usage, 0, 0))


@pytest.mark.parametrize("text", ["", "<html>404</html>", "vllm:num_requests_waiting 3"])
def test_text_that_lacks_the_usage_or_the_queue_tells_nothing(text):
    assert read_metrics(text, VLLM) is None


class Telling:
    """A server that has metrics only."""

    def __init__(self, text: str) -> None:
        self.text, self.status = text, 200

    def app(self) -> Starlette:
        async def metrics(asked: Asked) -> PlainTextResponse:
            return PlainTextResponse(self.text, self.status)

        return Starlette(routes=[Route("/metrics", metrics)])


def asked(*servers: Any) -> list[Pressure | None]:
    """What servers tell as a fleet."""

    async def run() -> list[Pressure | None]:
        fleet = Fleet(servers)
        told = await fleet.pressure()
        await fleet.close()
        return told

    return asyncio.run(run())


def test_a_fleet_tells_of_each_server_what_its_metrics_say_and_none_of_those_that_say_nothing():
    vllm, sglang = Telling(VLLM_TEXT), Telling(SGLANG_TEXT)
    with served(vllm.app()) as one, served(sglang.app()) as two:

        def fleet() -> list[Any]:
            made = {"timeout_s": 5, "convert": str}
            gone = VllmServer("http://127.0.0.1:9", **made)
            return [VllmServer(one, **made), gone, SglangServer(two, **made)]

        assert asked(*fleet()) == [TOLD["vllm"], None, TOLD["sglang"]]
        sglang.status = 404  # started without --enable-metrics
        assert asked(*fleet()) == [TOLD["vllm"], None, None]


class Held(Scripted):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(answer_of)
        self.begun, self.go = threading.Event(), threading.Event()

    def generate(self, requests):
        self.begun.set()
        assert self.go.wait(30)
        return super().generate(requests)


def test_a_sampler_tells_its_slots_and_what_is_beyond_them_also_behind_http():
    model = Held()

    async def run(url: str, engine: Batching) -> tuple[Any, Any, Any, Any]:
        server = JaxrlServer(url, timeout_s=10, convert=str, key="secret")
        stranger = JaxrlServer(url, timeout_s=10, convert=str, key="wrong")
        idle = await server.pressure()
        calls = [asyncio.create_task(engine.generate(request())) for _ in range(6)]
        await asyncio.to_thread(model.begun.wait, 30)
        busy, unknown = await server.pressure(), await stranger.pressure()
        model.go.set()
        await asyncio.gather(*calls)
        after = await server.pressure()
        await server.close()
        await stranger.close()
        return idle, busy, unknown, after

    engine = Batching(model, chunk_tokens=0, room=64, slots=4)
    asyncio.run(engine.load(FIRST, "nowhere"))
    with served(EngineService(engine, "secret", 2**16).app()) as url:
        told = asyncio.run(run(url, engine))
    asyncio.run(engine.close())
    calm = [Pressure(0.0, 0, 0)]
    assert told == (calm, [Pressure(1.0, 2, 0)], [None], calm)


def test_a_sampler_that_does_not_know_its_slots_tells_nothing():
    engine = Batching(Scripted(), chunk_tokens=0, room=64)
    assert asyncio.run(engine.pressure()) == [None]
    asyncio.run(engine.close())
    with pytest.raises(ValueError, match="usage=1.5; allowed: 0 to 1"):
        read_pressure({"usage": 1.5, "waiting": 0, "preempted": 0})
