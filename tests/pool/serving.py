"""A gateway for tests: real HTTP, a real ledger and spool; only the model follows a script."""

import asyncio
import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import uvicorn

from jaxrl.pool.admission import Admission
from jaxrl.pool.attempts import Attempts, Limits
from jaxrl.pool.contract import Generator, Request, Tokenizer
from jaxrl.pool.dialogue import Dialogue, PlainDialogue
from jaxrl.pool.engines import Batching, Engine, Sampled
from jaxrl.pool.gateway import Gateway, living
from jaxrl.pool.ledger import Ledger, OpenGroup, open_ledger
from jaxrl.pool.pressure import Pressure
from jaxrl.pool.rollout import Rollout, StopReason, Version
from jaxrl.pool.segments import Spool
from tests.pool.scripted import EOS, FIRST, Letters

KEY = "the-pool's-key"
EVALUATION_KEY = "who-evaluates"
LOOK_S = 0.05  # between two looks at an engine's load


def until(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What comes true, once it does; AssertionError if it never does."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)
    return found


@contextlib.contextmanager
def served(app: Any, port: int = 0) -> Iterator[str]:
    """An ASGI application behind a real server on loopback; its URL."""
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    at = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{at}"
    finally:
        server.should_exit = True
        thread.join(10)


@dataclasses.dataclass
class Place:
    """A gateway that runs, and what it is made of."""

    url: str
    ledger: Ledger
    spool: Spool
    attempts: Attempts
    engine: Engine
    ids: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def work(self, verb: str, body: Any, key: str = KEY) -> httpx2.Response:
        """A work call."""
        headers = {"authorization": f"Bearer {key}"}
        return httpx2.post(f"{self.url}/work/{verb}", json=body, headers=headers, timeout=30)

    def post(self, path: str, body: Any, **how: Any) -> httpx2.Response:
        """A call of an agent."""
        return httpx2.post(self.url + path, json=body, timeout=30, **how)

    def lease(self, prompt: str = "1+1=", **changes: Any) -> str:
        """The token of a new group's only sample."""
        self.open(prompt, **changes)
        (lease,) = self.work("lease", {"owner": "test", "most": 1}).json()["leases"]
        return lease["token"]

    def open(self, prompt: str = "1+1=", samples: int = 1, **changes: Any) -> int:
        """A new group; its id."""
        number = next(self.ids)
        values: dict[str, Any] = dict(
            id=number,
            task_key="sum/1",
            content_hash="abcd",
            split="train",
            source="sums",
            prompts=[Letters().prompt(prompt)] * samples,
            facts={"task_probability": 0.5},
            version=FIRST,
            max_attempts=3,
            min_group=0,
        )
        self.ledger.open_groups([OpenGroup(**(values | changes))])
        return number

    def seal(self, token: str, **told: Any) -> dict[str, Any]:
        """Seal an attempt; what is told of it."""
        body = {"attempts": [{"token": token, "reward": 1.0, **told}]}
        (result,) = self.work("seal", body).json()["results"]
        return result

    def sealed(self, group: int) -> list[Rollout]:
        """The branches of a group's first sample."""
        (member, *_) = self.ledger.members(group)
        return self.spool.fetch(member.sealed)


def client_of(place, token: str, **settings: Any) -> openai.OpenAI:
    """An agent's client: it knows a base URL and a key."""
    settings = {"max_retries": 0, **settings}
    return openai.OpenAI(base_url=f"{place.url}/{token}/v1", api_key="unused", **settings)


def ask(client: openai.OpenAI, *contents: str, **settings: Any) -> Any:
    """A chat of these messages, a user's and an assistant's in turn."""
    roles = ("user", "assistant")
    messages: Any = [{"role": roles[n % 2], "content": said} for n, said in enumerate(contents)]
    return client.chat.completions.create(model="policy", messages=messages, **settings)


@contextlib.contextmanager
def gateway(
    folder: Path,
    generator: Generator | Engine,
    *,
    tokenizer: Tokenizer | None = None,
    dialogue: Dialogue | None = None,
    version: Version | None = FIRST,
    port: int = 0,
    max_body_bytes: int = 2**16,
    path: str = "nowhere",
    chunk_tokens: int = 0,
    run: Any = None,
    admission: Admission | None = None,
    follows: bool = False,
    **limits: Any,
) -> Iterator[Place]:
    """A gateway over ``folder``, its engine loaded with ``version``; one that ``follows`` loads
    what is announced there, and looks at its engine's load often."""
    ledger = open_ledger(str(folder / "ledger.sqlite"), "run")
    if ledger.epoch() < 0:
        ledger.begin_epoch()
    tokenizer = tokenizer or Letters()
    values: dict[str, Any] = dict(
        run_id="run",
        temperature=1.0,
        max_new_tokens=64,
        max_prompt_tokens=512,
        max_feedback_tokens=16,
        lease_s=30.0,
        wait_s=5.0,
        under_way=64,
    )
    engine: Any = generator
    if hasattr(generator, "requests") or not asyncio.iscoroutinefunction(generator.generate):
        engine = Batching(generator, chunk_tokens=chunk_tokens, room=512)  # pyright: ignore
    if version is not None:
        asyncio.run(engine.load(version, path))
    spool = Spool(folder / "spool")
    attempts = Attempts(
        ledger,
        spool,
        engine,
        tokenizer,
        dialogue or PlainDialogue(tokenizer),
        Limits(**(values | limits)),
        admission,
    )
    keys = {"key": KEY, "evaluation_key": EVALUATION_KEY}
    made = Gateway(attempts, tokenizer, **keys, max_body_bytes=max_body_bytes, run=run or {})
    life = living(engine, attempts, folder, "gateway", 0.02, LOOK_S) if follows else None
    with served(made.app(life), port) as url:
        yield Place(url, ledger, spool, attempts, engine)
    if not follows:
        asyncio.run(attempts.close())
        asyncio.run(engine.close())


class Stamping:
    """An engine of a given answer; loading changes what it says its version is."""

    def __init__(self, **changes: Any) -> None:
        self.version: Version | None = None
        self.changes = changes
        self.told: list[Pressure | None] = [None]  # of its load

    async def generate(self, request: Request) -> Sampled:
        values: dict[str, Any] = dict(
            tokens=[55, EOS],
            logp=[-0.5, -0.5],
            version_index=[0, 0],
            versions=[self.version],
            stop_reason=StopReason.STOP,
        )
        return Sampled(**(values | self.changes))

    async def load(self, version: Version, path: str) -> None:
        self.version = version

    def counts(self) -> dict[str, float]:
        return {}

    async def pressure(self) -> list[Pressure | None]:
        return list(self.told)

    async def close(self) -> None:
        self.version = None
