"""The one HTTP service of a remote pool: answers for agents, work for workers. No jax here.

    POST /<token>/v1/chat/completions, /<token>/v1/completions     OpenAI's, also streamed
    POST /<token>/generate           ids in, ids and log-probs out; with no prompt, the task's own
    GET  /<token>/v1/models
    POST /work/lease, heartbeat, generate, state, seal, fail       lists in, lists out; lease and
                                     generate in columns, if asked for them
    POST /work/news                  the trainer opened groups, or announced weights
    GET  /work/run                   what a worker must know of the run
    GET  /health, /counts

An attempt's token is its agent's base URL, or its key (``Authorization: Bearer``); the work calls
take the pool's key. In place of a token the evaluation key asks the newest weights something that
no sample is made of: nothing of it is kept, temperature 0 is allowed, and OpenAI's ``seed`` draws
the same answer again. Without a key nothing is served or accepted. Bodies are limited, and tokens
are logged nowhere. A streamed answer is complete, and kept, before its first piece is sent.
"""

import asyncio
import contextlib
import dataclasses
import hmac
import json
import os
import pathlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxrl.pool.answers import Ask, Attempt, ContextLimit
from jaxrl.pool.attempts import Attempts, Busy
from jaxrl.pool.compact import compact, parsed
from jaxrl.pool.contract import Tokenizer
from jaxrl.pool.conversation import Call
from jaxrl.pool.engines import Engine, EngineError
from jaxrl.pool.entrance import LOOK_S, Entrance
from jaxrl.pool.ledger import Lease, LedgerRefusal
from jaxrl.pool.openai_api import (
    Answer,
    are_ids,
    check_numbers,
    digest_of,
    read_ask,
    refusal,
    token_texts,
    usage,
)
from jaxrl.pool.order import Bell
from jaxrl.pool.rollout import Failure, Version
from jaxrl.pool.turns import Said

RETRY_S = 1  # when a busy gateway may be asked again
LONGEST_WAIT_S = 60  # of a worker for samples

Handler = Callable[[Request], Awaitable[Response]]


class _TooLarge(ValueError):
    """A body over the limit."""


class _NoKey(Exception):
    """The pool's key is missing or wrong."""


class Gateway:
    """The routes of one run over its attempts. ``run`` is what workers are told of it."""

    def __init__(
        self,
        attempts: Attempts,
        tokenizer: Tokenizer,
        *,
        key: str,
        evaluation_key: str,
        max_body_bytes: int,
        run: Mapping[str, Any],
    ) -> None:
        if not (key and evaluation_key) or key == evaluation_key:
            raise ValueError("key, evaluation_key; allowed: two different ones, neither empty")
        self._attempts, self._tokenizer = attempts, tokenizer
        self._evaluation_key = evaluation_key
        self._key, self._limit, self._run = key, max_body_bytes, dict(run)

    def app(self, lifespan: Callable[[Starlette], Any] | None = None) -> ASGIApp:
        """As an ASGI application. Work calls, which are most of what comes, go past the router."""
        agent: dict[str, Handler] = {
            "/v1/chat/completions": self._completion("chat"),
            "/v1/completions": self._completion("text"),
            "/generate": self._generate,
        }
        work: dict[str, Handler] = {
            "lease": self._lease,
            "heartbeat": self._heartbeat,
            "generate": self._generate_many,
            "state": self._state,
            "seal": self._seal,
            "fail": self._fail,
            "news": self._news,
        }
        routes = [Route("/health", self._health), Route("/counts", self._guard(self._counts))]
        routes.append(Route("/work/run", self._guard(self._told_run)))
        direct = {f"/work/{name}": self._guard(handler) for name, handler in work.items()}
        for path, handler in direct.items():  # of another method: the router refuses it
            routes.append(Route(path, handler, methods=["POST"]))
        for before in ("", "/{token}"):
            routes.append(Route(before + "/v1/models", self._guard(self._models)))
            for path, handler in agent.items():
                routes.append(Route(before + path, self._guard(handler), methods=["POST"]))
        routed = Starlette(routes=routes, lifespan=lifespan)

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            called = scope["type"] == "http" and scope["method"] == "POST"
            handler = direct.get(scope["path"]) if called else None
            if handler is None:
                await routed(scope, receive, send)
            else:
                response = await handler(Request(scope, receive))
                await response(scope, receive, send)

        return application

    # -- what is common to all routes

    def _guard(self, handler: Handler) -> Handler:
        """Every failure as an error in OpenAI's shape."""

        async def guarded(request: Request) -> Response:
            try:
                path = request.scope["path"]
                if path.startswith("/work/") or path == "/counts":
                    self._check_key(request)
                return await handler(request)
            except Exception as error:
                return _failure(error)

        return guarded

    def _check_key(self, request: Request) -> None:
        if not hmac.compare_digest(_bearer(request).encode(), self._key.encode()):
            raise _NoKey("the pool's key is missing or wrong")

    async def _body(self, request: Request) -> dict[str, Any]:
        """The JSON object of a body that is not over the limit."""
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > self._limit:
                raise _TooLarge(f"the body is over {self._limit} bytes (pool.max_body_bytes)")
        try:
            body = parsed(bytes(data) or b"{}")
        except ValueError as error:
            raise ValueError(f"the body is no JSON: {error}") from error
        if not isinstance(body, dict):
            raise ValueError("the body is no JSON object")
        return body

    async def _begin(self, request: Request) -> Attempt:
        token = request.path_params.get("token") or _bearer(request)
        if hmac.compare_digest(token.encode(), self._evaluation_key.encode()):
            return self._attempts.visitor()
        (found,) = await self._attempts.begin([token])
        if not isinstance(found, Attempt):
            raise found
        return found

    # -- for agents

    def _completion(self, kind: str) -> Handler:
        async def complete(request: Request) -> Response:
            body = await self._body(request)
            attempt = await self._begin(request)
            ask = read_ask(kind, body, _is_again(request))
            call = await self._attempts.answer(attempt, ask)
            lease = attempt.lease
            answer = Answer(
                kind,
                str(body.get("model", "")),
                attempt.conversation,
                call,
                f"{lease.group}_{lease.sample}",
                token_texts(call, self._tokenizer) if _wants_logprobs(kind, body) else None,
            )
            if not body.get("stream"):
                return JSONResponse(answer.whole())
            wanted = bool((body.get("stream_options") or {}).get("include_usage"))
            return StreamingResponse(answer.pieces(wanted), media_type="text/event-stream")

        return complete

    async def _generate(self, request: Request) -> Response:
        body = await self._body(request)
        attempt = await self._begin(request)
        call = await self._attempts.answer(attempt, _ids_ask(body, _is_again(request)))
        return JSONResponse(_told(attempt, call))

    async def _models(self, request: Request) -> Response:
        await self._begin(request)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "jaxrl"}
        return JSONResponse({"object": "list", "data": [model]})

    # -- for workers

    async def _lease(self, request: Request) -> Response:
        body = await self._body(request)
        wait_s = float(body.get("wait_s", 0))
        if not 0 <= wait_s <= LONGEST_WAIT_S:
            raise ValueError(f"wait_s={wait_s}; allowed: 0 to {LONGEST_WAIT_S} seconds")
        owner, most = str(body["owner"]), int(body.get("most", 1))
        left = asyncio.create_task(_left(request))
        try:
            leases = await self._attempts.lease(owner, most, wait_s, left.done)
        finally:
            left.cancel()
        if body.get("columns"):
            return _json(_columns(leases))
        return _json({"leases": [_told_lease(lease) for lease in leases]})

    async def _heartbeat(self, request: Request) -> Response:
        body = await self._body(request)
        tokens = list(body["tokens"])
        if not all([isinstance(token, str) for token in tokens]):  # before any is extended
            raise ValueError("tokens; allowed: a list of texts")
        return JSONResponse({"refused": await self._attempts.heartbeat(tokens)})

    async def _generate_many(self, request: Request) -> Response:
        """The tasks' own prompts of many attempts: one request for a batch."""
        body = await self._body(request)
        tokens = [str(token) for token in body["tokens"]]
        if len(set(tokens)) < len(tokens):
            raise ValueError("tokens: one is there twice; allowed: each once")
        found = await self._attempts.begin(tokens, plain=True)
        begun = [one for one in found if isinstance(one, Attempt)]
        ask = dataclasses.replace(_ids_ask({}, bool(body.get("again"))), plain=True)
        told = iter(await self._attempts.answers(begun, ask))
        each = [next(told) if isinstance(one, Attempt) else one for one in found]
        if body.get("columns") and all([isinstance(one, Said) for one in each]):
            return _json({"texts": [one.text for one in each if isinstance(one, Said)]})
        return _json({"answers": [_short(one) for one in each]})

    async def _state(self, request: Request) -> Response:
        """What an attempt has come to: its calls, the last answer, whether its context is full."""
        body = await self._body(request)
        attempt = await self._attempts.attempt(str(body["token"]))
        calls = attempt.conversation.calls
        text = calls[-1].text if calls else ""
        return JSONResponse({"calls": len(calls), "text": text, "full": attempt.full})

    async def _seal(self, request: Request) -> Response:
        body = await self._body(request)

        results: list[dict[str, Any]] = [{} for _ in body["attempts"]]
        told: dict[str, Mapping[str, Any]] = {}
        asked: list[tuple[str, dict[str, Any]]] = []
        for one, result in zip(body["attempts"], results, strict=True):
            try:
                token = str(one["token"])
                if token in told:
                    raise LedgerRefusal("sealed", "it is sealed twice in one request")
                told[token] = one
                asked.append((token, result))
            except Exception as error:
                result |= _reason(error)
        failed = await self._attempts.seal(told)
        for token, result in asked:
            if token in failed:
                result |= _reason(failed[token])
        return _json({"results": results})

    async def _fail(self, request: Request) -> Response:
        body = await self._body(request)

        async def one(told: Mapping[str, Any]) -> dict[str, Any]:
            try:
                failure = Failure(told["failure"])
                await self._attempts.fail(str(told["token"]), failure, str(told["reason"]))
            except Exception as error:
                return _reason(error)
            return {}

        return JSONResponse({"results": await asyncio.gather(*map(one, body["attempts"]))})

    async def _told_run(self, request: Request) -> Response:
        return JSONResponse(self._run)

    # -- for whoever watches

    async def _health(self, request: Request) -> Response:
        version = self._attempts.engine.version
        told = {"version": version and dataclasses.asdict(version)}
        return JSONResponse(told, status_code=200 if version else 503)

    async def _news(self, request: Request) -> Response:
        """Whoever waits looks now; and seldom of itself from now on."""
        self._attempts.bell.relied = True
        self._attempts.bell.ring()
        return Response()

    async def _counts(self, request: Request) -> Response:
        """Of the gateway and its ledger, which is not asked where ``of`` names another part.
        ``own_s`` is the processor time of everything but the
        engine, since the start."""
        own = self._attempts.own_s + time.thread_time()
        attempts = self._attempts
        mine = {**attempts.counts, **attempts.entrance.counts(), **await attempts.held()}
        told = {"gateway": {**mine, "own_s": own}, "engine": attempts.engine.counts()}
        if request.query_params.get("of") not in told:
            told["ledger"] = await attempts.ledger_counts()
        return JSONResponse(told)


async def _left(request: Request) -> None:
    """Wait until whoever asked is gone; to ask whether that is so costs more than to be told."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(told: Any) -> Response:
    """A work call's answer, of many attempts."""
    return Response(compact(told), media_type="application/json")


def _bearer(request: Request) -> str:
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    return value if kind.lower() == "bearer" else ""


def _is_again(request: Request) -> bool:
    """Whether a client says that it sends a request again, as OpenAI's does."""
    return request.headers.get("x-stainless-retry-count", "0") not in ("", "0")


def _wants_logprobs(kind: str, body: Mapping[str, Any]) -> bool:
    return bool(body.get("logprobs")) if kind == "chat" else body.get("logprobs") is not None


def _ids_ask(body: Mapping[str, Any], again: bool) -> Ask:
    """A native request: ``prompt`` ids or none, ``max_new_tokens``, ``temperature``,
    ``stop_ids``."""
    prompt, stops = body.get("prompt"), body.get("stop_ids", [])
    for name, ids in (("prompt", [] if prompt is None else prompt), ("stop_ids", stops)):
        if not are_ids(ids):
            raise ValueError(f"{name}; allowed: a list of token ids")
    most, seed, temperature = (body.get(x) for x in ("max_new_tokens", "seed", "temperature"))
    check_numbers({"max_new_tokens": most, "seed": seed}, temperature)
    return Ask(
        request=digest_of("ids", body),
        again=again,
        ids=prompt,
        temperature=temperature,
        max_tokens=most,
        stop_ids=frozenset(stops),
        seed=seed,
    )


def _told(attempt: Attempt, call: Call) -> dict[str, Any]:
    """A native answer."""
    told: dict[str, Any] = {"tokens": call.tokens, "logp": call.logp, **_short(call)}
    told["version_index"] = call.version_index
    told["versions"] = [dataclasses.astuple(version) for version in call.versions]
    told["usage"] = usage(attempt.conversation, call)
    return told


def _short(told: Call | Said | Exception) -> dict[str, Any]:
    """An answer for a worker, which reads text only, or why there is none."""
    if isinstance(told, Exception):
        return _reason(told)
    return {"text": told.text, "stop_reason": told.stop_reason}


def _columns(leases: Sequence[Lease]) -> dict[str, Any]:
    """What a worker needs of leases, without what those of a group share."""
    tasks = {str(one.group): (one.task_key, one.split) for one in leases}
    tokens, groups = [one.token for one in leases], [one.group for one in leases]
    return {"tokens": tokens, "groups": groups, "tasks": tasks}


def _told_lease(lease: Lease) -> dict[str, Any]:
    """What a worker needs of a lease."""
    return {
        "token": lease.token,
        "group": lease.group,
        "sample": lease.sample,
        "attempt": lease.attempt,
        "expires": lease.expires,
        "task_key": lease.task_key,
        "split": lease.split,
        "source": lease.source,
    }


def _classified(error: Exception) -> tuple[int, str, str | None]:
    """Status, OpenAI's type and code of an error."""
    match error:
        case _NoKey():
            return 401, "invalid_request_error", "invalid_api_key"
        case LedgerRefusal():
            known = error.reason != "unknown"
            code = error.reason if known else "invalid_api_key"
            return (403 if known else 401), "invalid_request_error", code
        case _TooLarge():
            return 413, "invalid_request_error", "body_too_large"
        case ContextLimit():
            return 400, "invalid_request_error", "context_length_exceeded"
        case Busy():
            return 429, "rate_limit_error", "rate_limit_exceeded"
        case EngineError():
            return 503, "server_error", "engine"
        case OSError():
            return 507, "server_error", "storage"
        case ValueError() | KeyError() | TypeError() | AttributeError() | OverflowError():
            return 400, "invalid_request_error", None
    return 500, "server_error", None


def _failure(error: Exception) -> Response:
    status, kind, code = _classified(error)
    wait = {"retry-after": str(RETRY_S)} if status in (429, 503) else {}
    told = str(error) if status != 500 else f"{type(error).__name__}: {error}"
    return JSONResponse(refusal(told, kind, code), status_code=status, headers=wait)


def _reason(error: Exception) -> dict[str, Any]:
    """An error inside of a list of results."""
    status, _, code = _classified(error)
    return {"error": str(error), "status": status, "code": code}


async def follow(
    engine: Engine | Entrance, bell: Bell, folder: pathlib.Path, name: str, poll_s: float
) -> None:
    """Load what the trainer publishes in ``folder/current.json``, and acknowledge it in
    ``folder/acks/<name>.json``. What cannot be loaded is tried again."""
    seen = ""
    ack, current = folder / "acks" / f"{name}.json", str(folder / "current.json")
    ack.parent.mkdir(parents=True, exist_ok=True)
    while True:
        news = bell.news
        try:
            seen = await _taken(engine, current, ack, seen)
        except (EngineError, ValueError, KeyError, OSError) as error:
            print(f"weights were not taken: {error}", flush=True)
            await asyncio.sleep(RETRY_S)
        await bell.wait(news, poll_s)


async def _taken(engine: Engine | Entrance, current: str, ack: pathlib.Path, seen: str) -> str:
    """Load what is announced, unless it was seen; what is seen now."""
    try:
        found = os.stat(current)  # it is replaced, never written to
    except FileNotFoundError:
        return seen
    told = f"{found.st_ino} {found.st_mtime_ns}"
    if told != seen:
        said = json.loads(pathlib.Path(current).read_text())
        version = Version(said["epoch"], said["step"], said["digest"])
        await engine.load(version, said["path"])
        half = ack.with_suffix(".tmp")
        half.write_text(json.dumps(dataclasses.asdict(version)))
        half.replace(ack)
    return told


def living(
    engine: Engine,
    attempts: Attempts,
    folder: pathlib.Path,
    name: str,
    poll_s: float,
    look_s: float = LOOK_S,
) -> Callable[[Starlette], Any]:
    """A lifespan: follow the weights, and the engine's load, while the service runs, then close
    what it used."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        entrance = attempts.entrance
        following = asyncio.create_task(follow(entrance, attempts.bell, folder, name, poll_s))
        try:
            async with entrance.watched(look_s):
                yield
        finally:
            following.cancel()
            await attempts.close()
            await engine.close()

    return lifespan
