"""An engine behind HTTP, and how services listen. No jax here.

    POST /generate   one request of ids; waits for its answer, batched with all that wait
    POST /load       {"version": [epoch, step, digest], "path": ...}: take these weights
    GET  /health     503 until weights are loaded
    GET  /pressure   the load: {"usage": slots in use of all, "waiting": ..., "preempted": 0}

Everything takes the key (``Authorization: Bearer``), if there is one; without one a service listens
on loopback only.
"""

import dataclasses
import hmac
import json
import os
import pathlib
import socket
from typing import Any

import httptools
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jaxrl.pool import contract
from jaxrl.pool.engines import Engine, EngineError
from jaxrl.pool.pressure import write_pressure
from jaxrl.pool.rollout import Version
from jaxrl.pool.servers import write_sampled

LOOPBACK = ("127.0.0.1", "::1", "localhost")
BACKLOG = 2048  # connections that wait while a service is busy
GRACE_S = 3  # for requests that are under way when a service is told to end


class EngineService:
    """The routes in front of one engine."""

    def __init__(self, engine: Engine, key: str, max_body_bytes: int) -> None:
        self._engine, self._key, self._limit = engine, key, max_body_bytes

    def app(self) -> Starlette:
        """As an ASGI application."""
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/pressure", self._pressure),
                Route("/generate", self._generate, methods=["POST"]),
                Route("/load", self._load, methods=["POST"]),
            ]
        )

    async def _body(self, request: Request) -> Any:
        """The JSON of a request that has the key; a Response for one that has not."""
        told = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(told.encode(), self._key.encode()):
            return JSONResponse({"error": "the key is missing or wrong"}, 401)
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > self._limit:
                return JSONResponse({"error": f"the body is over {self._limit} bytes"}, 413)
        try:
            return json.loads(bytes(data) or b"{}")
        except ValueError as error:
            return JSONResponse({"error": f"the body is no JSON: {error}"}, 400)

    async def _health(self, request: Request) -> Response:
        version = self._engine.version
        told = {"version": version and dataclasses.astuple(version)}
        return JSONResponse(told, 200 if version else 503)

    async def _pressure(self, request: Request) -> Response:
        body = await self._body(request)
        if isinstance(body, Response):
            return body
        (told,) = await self._engine.pressure()
        if told is None:
            return JSONResponse({"error": "the engine does not tell its load"}, 404)
        return JSONResponse(write_pressure(told))

    async def _generate(self, request: Request) -> Response:
        body = await self._body(request)
        if isinstance(body, Response):
            return body
        try:
            asked = contract.Request(**{**body, "stop_ids": frozenset(body["stop_ids"])})
            return JSONResponse(write_sampled(await self._engine.generate(asked)))
        except EngineError as error:
            return JSONResponse({"error": str(error)}, 503)
        except (ValueError, TypeError, KeyError) as error:
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 400)

    async def _load(self, request: Request) -> Response:
        body = await self._body(request)
        if isinstance(body, Response):
            return body
        try:
            await self._engine.load(Version(*body["version"]), str(body["path"]))
        except EngineError as error:
            return JSONResponse({"error": str(error)}, 503)
        except (TypeError, KeyError) as error:
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 400)
        version = self._engine.version
        return JSONResponse({"version": version and dataclasses.astuple(version)})


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections from now on; port 0 takes a free one. OSError if the port
    is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen(BACKLOG)
    except OSError:
        found.close()
        raise
    return found


def url_of(at: socket.socket) -> str:
    """The address of a listening socket."""
    host, port = at.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def announce(path: pathlib.Path, url: str) -> None:
    """Write where a service is, whole at any time."""
    half = path.with_name(path.name + ".tmp")
    half.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    half.replace(path)


def serve(app: ASGIApp, at: socket.socket) -> None:
    """Serve until told to end. Requests are logged nowhere: their addresses hold tokens."""
    parser: Any = httptools.__name__  # left to itself, it would not say that it has none
    config = uvicorn.Config(
        app,
        http=parser,
        log_level="warning",
        access_log=False,
        proxy_headers=False,  # nobody asks who a client is
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=75,
    )
    uvicorn.Server(config).run(sockets=[at])
