"""Engines behind HTTP: jaxrl's own server, vLLM and SGLang. No jax here.

All three are asked with token ids and answer with ids and log-probs. What they do not say is not
made up: an answer without ids or log-probs is marked as not trainable, one without a version is
refused.
"""

import asyncio
import contextlib
import hashlib
import json
import pathlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2

from jaxrl.pool.contract import Request
from jaxrl.pool.engines import EngineError, Sampled
from jaxrl.pool.pressure import SGLANG, VLLM, Names, Pressure, read_metrics, read_pressure
from jaxrl.pool.rollout import StopReason, Version

LOOK_TIMEOUT_S = 5.0  # of a question how a server is

# Connections: the gateway bounds its answers itself, and each has one while it is generated. With
# the client's own bound (100), others would wait for it, and so would the question for the load.
UNBOUNDED = httpx2.Limits(max_connections=None, max_keepalive_connections=None)

# A directory of a published version -> one that the server reads, and its digest is checked before.
Convert = Callable[[str], str]


def label(version: Version) -> str:
    """A version as a server keeps it, an opaque text."""
    return f"{version.epoch}-{version.step}-{version.digest}"


def check_digest(version: Version, path: str) -> None:
    """EngineError unless the directory holds this very version, byte for byte."""
    folder = pathlib.Path(path)
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        held = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read: {error}") from error
    told = Version(manifest["epoch"], manifest["step"], manifest["digest"])
    if told != version or held != version.digest:
        raise EngineError(f"{path} holds {told} with digest {held}, asked for was {version}")


class Server:
    """What the three have in common: a client, and that no answer is under way while weights
    change."""

    METRICS = Names((), "", "")  # what it calls its load

    def __init__(self, url: str, *, timeout_s: float, convert: Convert, key: str = "") -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx2.AsyncClient(
            base_url=url, timeout=timeout_s, headers=headers, limits=UNBOUNDED
        )
        self._convert = convert
        self._version: Version | None = None
        self._under_way, self._answers = 0, 0
        self._open = asyncio.Condition()
        self._loading = False

    @property
    def version(self) -> Version | None:
        """The last one that the server acknowledged."""
        return None if self._loading else self._version

    async def generate(self, request: Request) -> Sampled:
        """One answer."""
        async with self._turn() as version:
            return await self._asked(request, version)

    async def load(self, version: Version, path: str) -> None:
        """Wait for the answers that are under way, then change the weights."""
        await asyncio.to_thread(check_digest, version, path)
        async with self._open:
            await self._open.wait_for(lambda: not self._loading)
            self._loading, self._version = True, None
            await self._open.wait_for(lambda: self._under_way == 0)
        try:
            await self._taken(version, await asyncio.to_thread(self._convert, path))
            self._version = version
        finally:
            async with self._open:
                self._loading = False
                self._open.notify_all()

    def counts(self) -> dict[str, float]:
        """Answers so far."""
        return {"answers": self._answers}

    async def pressure(self) -> list[Pressure | None]:
        """What its metrics tell."""
        try:
            response = await self._client.get("/metrics", timeout=LOOK_TIMEOUT_S)
        except httpx2.HTTPError:
            return [None]
        text = response.text if response.status_code == 200 else ""
        return [read_metrics(text, self.METRICS)]

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[Version]:
        async with self._open:
            await self._open.wait_for(lambda: not self._loading)
            if self._version is None:
                raise EngineError("the server has acknowledged no version")
            version = self._version
            self._under_way += 1
            self._answers += 1
        try:
            yield version
        finally:
            async with self._open:
                self._under_way -= 1
                self._open.notify_all()

    async def _asked(self, request: Request, version: Version) -> Sampled:
        """One answer of this version."""
        raise EngineError(f"{type(self).__name__} asks nothing: {request}, {version}")

    async def _taken(self, version: Version, path: str) -> None:
        """Have the server take weights from its own kind of directory."""
        raise EngineError(f"{type(self).__name__} loads nothing: {version}, {path}")

    async def _call(self, method: str, path: str, **how: Any) -> Any:
        """A call's JSON. EngineError for anything but success, ValueError if the request is
        refused."""
        try:
            response = await self._client.request(method, path, **how)
        except httpx2.HTTPError as error:
            raise EngineError(f"{path}: {type(error).__name__}: {error}") from error
        if response.status_code in (400, 422):
            raise ValueError(f"{path} refused the request: {response.text[:500]}")
        if response.status_code != 200:
            raise EngineError(f"{path} answered {response.status_code}: {response.text[:500]}")
        try:
            return response.json() if response.content else {}
        except ValueError as error:
            raise EngineError(f"{path} gave no JSON: {response.text[:500]}") from error


def _stop_ids(request: Request) -> list[int]:
    return sorted(request.stop_ids)


class JaxrlServer(Server):
    """``python -m jaxrl.serve``: it stamps each token itself and batches what it is asked."""

    async def _asked(self, request: Request, version: Version) -> Sampled:
        body = {
            "prompt": list(request.prompt),
            "group": request.group,
            "sample": request.sample,
            "call": request.call,
            "first": request.first,
            "temperature": request.temperature,
            "max_new_tokens": request.max_new_tokens,
            "stop_ids": _stop_ids(request),
        }
        told = await self._call("POST", "/generate", json=body)
        return read_sampled(told)

    async def pressure(self) -> list[Pressure | None]:
        """As its engine tells; None where it does not answer."""
        try:
            told = await self._call("GET", "/pressure", timeout=LOOK_TIMEOUT_S)
            return [read_pressure(told)]
        except (EngineError, ValueError, KeyError, TypeError):
            return [None]

    async def _taken(self, version: Version, path: str) -> None:
        wanted = [version.epoch, version.step, version.digest]
        told = await self._call("POST", "/load", json={"version": wanted, "path": path})
        if told.get("version") != wanted:
            raise EngineError(f"/load acknowledged {told.get('version')!r}, asked for was {wanted}")


def write_sampled(sampled: Sampled) -> dict[str, Any]:
    """An answer as JSON values."""
    return {
        "tokens": sampled.tokens,
        "logp": sampled.logp,
        "version_index": sampled.version_index,
        "versions": [[v.epoch, v.step, v.digest] for v in sampled.versions],
        "stop_reason": sampled.stop_reason.value,
    }


def read_sampled(told: Any) -> Sampled:
    """The inverse of ``write_sampled``. EngineError for anything else."""
    try:
        return Sampled(
            tokens=[int(token) for token in told["tokens"]],
            logp=[float(value) for value in told["logp"]],
            version_index=[int(place) for place in told["version_index"]],
            versions=[Version(*version) for version in told["versions"]],
            stop_reason=StopReason(told["stop_reason"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"the server's answer cannot be read: {error!r}") from error


class VllmServer(Server):
    """vLLM's OpenAI-compatible server, started with VLLM_SERVER_DEV_MODE=1 (for its control
    calls) and ``--logprobs-mode processed_logprobs`` (log-probs under the temperature).

    Its answers carry no version, so the server is asked for it before and after each one: an answer
    counts only if both are the version that was loaded. Weights are changed while it is paused, in
    mode "wait", and the prefix cache is reset.

    A head that is tied to the embedding stays as it is when weights are reloaded (0.32), so the
    server must have one of its own, whatever its checkpoint ties; one without is refused.
    """

    METRICS = VLLM
    _model = ""  # what the server calls its model

    async def _asked(self, request: Request, version: Version) -> Sampled:
        body = {
            "model": self._model,
            "prompt": list(request.prompt),
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "stop_token_ids": _stop_ids(request),
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "logprobs": 0,  # of the sampled token, none besides
            "return_token_ids": True,
        }
        await self._same(version)
        told = await self._call("POST", "/v1/completions", json=body)
        await self._same(version)
        choice = told["choices"][0]
        reason = StopReason.LENGTH if choice["finish_reason"] == "length" else StopReason.STOP
        tokens = choice.get("token_ids")
        logp = (choice.get("logprobs") or {}).get("token_logprobs")
        return _whole(tokens, logp, version, reason, choice["text"])

    async def _same(self, version: Version) -> None:
        """EngineError unless the server has the version that it was given."""
        told = await self._call("GET", "/weight_info")
        if told.get("weight_version") != label(version):
            raise EngineError(
                f"the server has weights {told.get('weight_version')!r}, loaded was "
                f"{label(version)!r}"
            )

    async def _meet(self) -> None:
        """Its model's name. EngineError if the head is tied. Once: all weights are summed."""
        told = await self._call("POST", "/weight_checker", json={"action": "checksum"})
        if not any(name.endswith("lm_head.weight") for name in told["checksums"]):
            raise EngineError(
                "the server has no lm_head.weight: a head that is tied to the embedding stays as "
                "it is when weights are reloaded; start the server with "
                """--hf-overrides '{"tie_word_embeddings": false}'"""
            )
        self._model = (await self._call("GET", "/v1/models"))["data"][0]["id"]

    async def _taken(self, version: Version, path: str) -> None:
        if not self._model:
            await self._meet()
        await self._call("POST", "/pause", params={"mode": "wait"})
        reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._call("POST", "/collective_rpc", json=reload)
        told = await self._call("POST", "/reset_prefix_cache")
        if told.get("success") is False:
            raise EngineError(f"/reset_prefix_cache: {told}")
        await self._call("POST", "/update_weight_version", json={"new_version": label(version)})
        await self._same(version)
        # Only now: a server that failed half way stays paused.
        await self._call("POST", "/resume")


class SglangServer(Server):
    """SGLang's native interface. Answers carry the version of the weights; log-probs are those
    under the temperature. Weights are changed while it is paused, and the radix cache is flushed.
    It tells its load if it was started with ``--enable-metrics``."""

    METRICS = SGLANG

    async def _asked(self, request: Request, version: Version) -> Sampled:
        body = {
            "input_ids": list(request.prompt),
            "sampling_params": {
                "temperature": request.temperature,
                "max_new_tokens": request.max_new_tokens,
                "stop_token_ids": _stop_ids(request),
                "skip_special_tokens": False,
                "no_stop_trim": True,
            },
            "return_logprob": True,
        }
        told = await self._call("POST", "/generate", json=body)
        facts = told["meta_info"]
        stamp = facts.get("weight_version")
        if stamp != label(version):
            raise EngineError(f"an answer of weights {stamp!r}; loaded was {label(version)!r}")
        kind = facts["finish_reason"]["type"]
        if kind not in ("stop", "length"):
            raise EngineError(f"an answer ended by {kind!r}; allowed: stop, length")
        rows = facts.get("output_token_logprobs")
        tokens = None if rows is None else [row[1] for row in rows]
        logp = None if rows is None else [row[0] for row in rows]
        reason = StopReason.LENGTH if kind == "length" else StopReason.STOP
        return _whole(tokens, logp, version, reason, told["text"])

    async def _taken(self, version: Version, path: str) -> None:
        await self._call("POST", "/pause_generation", json={"mode": "retract"})
        told = await self._call(
            "POST",
            "/update_weights_from_disk",
            json={
                "model_path": path,
                "weight_version": label(version),
                "abort_all_requests": False,
                "flush_cache": True,
            },
        )
        if told.get("success") is not True:
            raise EngineError(f"/update_weights_from_disk: {told}")
        await self._call("POST", "/continue_generation", json={})


def _whole(tokens: Any, logp: Any, version: Version, reason: StopReason, text: str) -> Sampled:
    """An answer of one version; one that lacks ids or log-probs is only text."""
    if not tokens or logp is None or None in logp:
        return Sampled([], [], [], [version], reason, text=text, trainable=False)
    tokens, logp = [int(token) for token in tokens], [float(value) for value in logp]
    return Sampled(tokens, logp, [0] * len(tokens), [version], reason, text=text)
