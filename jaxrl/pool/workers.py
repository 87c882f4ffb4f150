"""A worker of a remote pool: lease, run the harness, verify, seal or fail. No jax here.

It knows a gateway's address and the pool's key. It outlives restarts of the gateway, by asking
again for a bounded time, and it never makes a reward out of what went wrong: a failure is told with
its class.

    infra           the gateway or an engine did not answer: the sample is tried again
    env             the agent or its environment broke: tried again, in a new environment
    data            the task's verifier failed: its group is not trained on
    judge           the verdict is missing: the judge alone is asked again
    policy-timeout  the agent declares that the policy took too long: a result like any other
"""

import asyncio
import concurrent.futures
import contextlib
import importlib
import inspect
import json
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import httpx2

from jaxrl.pool.compact import compact
from jaxrl.pool.contract import Question, Questions
from jaxrl.pool.judging import judge
from jaxrl.pool.records import write_facts
from jaxrl.pool.rollout import Failure, StopReason

# agent(base URL of an OpenAI-compatible API, key, task) -> its answer, or None for what the model
# said last; may be a coroutine function
Agent = Callable[[str, str, Question], Any]

PATIENCE_S = 120.0  # how long a gateway that does not answer is asked again
IDLE_S = 5.0  # how long a gateway that has no work is waited for, at each request
UNSAYABLE = 422  # the status of what was never sent, as JSON has no form for it
BEATS = 3  # heartbeats in the time of a lease


class GatewayLost(ConnectionError):
    """The gateway did not answer for as long as a worker is patient."""


class Refused(RuntimeError):
    """The gateway refuses a request for good, with an HTTP status."""

    def __init__(self, status: int, what: str) -> None:
        super().__init__(f"{what}: {status}")
        self.status = status


class AttemptFailed(Exception):
    """Raised by an agent that knows whose fault it is."""

    def __init__(self, failure: Failure, reason: str) -> None:
        super().__init__(reason)
        self.failure = failure


class Work:
    """The work calls of a gateway at ``address``: a URL, or a file that holds one as JSON and is
    read again after each failure, for a gateway that comes back elsewhere."""

    def __init__(self, address: str, key: str, *, patience_s: float = PATIENCE_S) -> None:
        self._address, self._patience_s = address, patience_s
        headers = {"authorization": f"Bearer {key}"}
        self._client = httpx2.Client(headers=headers, timeout=patience_s)

    @property
    def url(self) -> str:
        """Where the gateway is. OSError where nobody says."""
        if "://" in self._address:
            return self._address
        return json.loads(pathlib.Path(self._address).read_text())["url"]

    def ask(self, verb: str, body: Mapping[str, Any] | None = None) -> Any:
        """A work call's JSON, asked again with growing pauses while the gateway is away or busy.
        GatewayLost after that, Refused where asking again is no use, UNSAYABLE for a body that JSON
        has no form for."""
        until, pause, again = time.monotonic() + self._patience_s, 0.05, False
        while True:
            try:  # escaped: what verifiers say may be no text
                told = None if body is None else compact({**body, "again": again})
            except (TypeError, ValueError) as error:
                raise Refused(UNSAYABLE, f"{verb}: {error}") from error
            try:
                url = f"{self.url}/work/{verb}"
                method = "GET" if body is None else "POST"
                response = self._client.request(method, url, content=told)
                if response.status_code == 200:
                    return response.json()
                if response.status_code < 500 and response.status_code != 429:
                    raise Refused(response.status_code, f"{verb}: {response.text[:500]}")
                fault, asked = f"{response.status_code} {response.text[:500]}", pause
                asked = float(response.headers.get("retry-after", pause))
            except (httpx2.HTTPError, OSError, ValueError) as error:
                fault, asked = f"{type(error).__name__}: {error}", pause
            again = True
            if time.monotonic() + asked > until:
                raise GatewayLost(f"{verb}: no answer for {self._patience_s} s; last: {fault}")
            time.sleep(asked)
            pause = min(2 * pause, 2.0)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


class Worker:
    """One worker, a thread of a process: ``run`` until ``stop`` is called.

    ``most`` samples are leased at once. ``agent`` None is the default harness: the task's own
    prompt, one answer, for all of them together. An agent attempts one after the other.
    """

    def __init__(
        self,
        work: Work,
        beats: Work,
        source: Questions,
        *,
        lease_s: float,
        reward: Literal["exact", "score"],
        most: int,
        agent: Agent | None = None,
        owner: str = "",
    ) -> None:
        self._work, self._beats, self._source = work, beats, source
        self._lease_s, self._most = lease_s, most
        self._reward: Literal["exact", "score"] = reward
        self._agent = agent
        self._owner = owner or f"{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"
        self._tasks: dict[str, Question] = {}
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End ``run`` after what is under way."""
        self._stopped.set()

    def run(self) -> None:
        """Work until stopped. GatewayLost if the gateway stays away."""
        while not self._stopped.is_set():
            self.once(IDLE_S)

    def once(self, wait_s: float = 0) -> int:
        """Attempt what there is, or will be in ``wait_s`` seconds, at most ``most`` samples; how
        many there were."""
        asked = {"owner": self._owner, "most": self._most, "wait_s": wait_s, "columns": True}
        told = self._work.ask("lease", asked)
        tasks = {
            int(group): {"task_key": task_key, "split": split}
            for group, (task_key, split) in told["tasks"].items()
        }
        pairs = zip(told["tokens"], told["groups"], strict=True)
        leases = [{"token": token, **tasks[group]} for token, group in pairs]
        if not leases:
            return 0
        with self._beating([lease["token"] for lease in leases]):
            if self._agent is None:
                self._one_turn(leases)
            else:
                for lease in leases:
                    self._played(lease)
        return len(leases)

    @contextlib.contextmanager
    def _beating(self, tokens: Sequence[str]) -> Iterator[None]:
        """Extend leases from a thread of its own while the attempts are under way; those that are
        refused (sealed, or given to another attempt) no more."""
        ended = threading.Event()

        def beat() -> None:
            beating = list(tokens)
            while beating and not ended.wait(self._lease_s / BEATS):
                with contextlib.suppress(GatewayLost, Refused):
                    refused = self._beats.ask("heartbeat", {"tokens": beating})["refused"]
                    beating = [one for one, why in zip(beating, refused, strict=True) if not why]

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()

    # -- one question, one answer

    def _one_turn(self, leases: Sequence[Mapping[str, Any]]) -> None:
        asked = {"tokens": [lease["token"] for lease in leases], "columns": True}
        told = self._work.ask("generate", asked)
        answers = told.get("answers") or [{"text": text} for text in told["texts"]]
        sealed, failed = [], []
        for lease, answer in zip(leases, answers, strict=True):
            if "error" not in answer:
                sealed.append((lease, answer["text"], None))
            elif answer["status"] >= 500 or answer["status"] == 429:
                failed.append(_failed(lease, Failure.INFRA, answer["error"]))
            elif answer["status"] == 400:
                failed.append(_failed(lease, Failure.DATA, answer["error"]))
        self._end(sealed, failed)

    def _end(
        self,
        answered: Sequence[tuple[Mapping[str, Any], str, Mapping[str, Any] | None]],
        failed: list[dict[str, Any]],
    ) -> None:
        """Verify and seal what was answered, and tell what failed."""
        seals = []
        for lease, text, more in answered:
            told = self._verdict(lease, text)
            if told.get("failure") == Failure.DATA.value:
                failed.append(_failed(lease, Failure.DATA, told["reason"]))
            else:
                seals.append({"token": lease["token"], **told, **(more or {})})
        for seal, result in zip(seals, self._sealed(seals), strict=True):
            status = result.get("status", 0)
            if status >= 500:
                failed.append(_failed(seal, Failure.INFRA, result["error"]))
            elif status in (
                400,
                413,
                UNSAYABLE,
            ):  # 401, 403: another attempt has won, or nobody wants it
                failed.append(_failed(seal, Failure.DATA, result["error"]))
        if failed:
            self._work.ask("fail", {"attempts": failed})

    def _sealed(self, seals: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """What became of each seal; halves of them where all are too large for one request, or one
        is what no request can carry."""
        if not seals:
            return []
        try:
            return self._work.ask("seal", {"attempts": list(seals)})["results"]
        except Refused as refusal:
            if refusal.status not in (413, UNSAYABLE):
                raise
            if len(seals) == 1:
                return [{"error": str(refusal), "status": refusal.status}]
        half = len(seals) // 2
        return [*self._sealed(seals[:half]), *self._sealed(seals[half:])]

    def _verdict(self, lease: Mapping[str, Any], text: str) -> dict[str, Any]:
        """What a seal says of an answer. A source that judges whole groups is not asked here."""
        if self._source.grouped:
            return {"reward": None, "failure": Failure.JUDGE.value}
        task = self._task(lease)
        if task is None:
            reason = f"no task {lease['task_key']!r} in the {lease['split']} split"
            return {"failure": Failure.DATA.value, "reason": reason}
        (outcome,) = judge(self._source, task, [text], self._reward)
        if outcome.reward is None:
            reason = str(outcome.facts.get("error", "no score"))
            return {"failure": outcome.failure.value, "reason": reason}
        return {
            "reward": outcome.reward,
            "correct": outcome.correct,
            "components": dict(outcome.reward_components),
            "feedback": outcome.feedback,
            "facts": write_facts(outcome.facts),
        }

    def _task(self, lease: Mapping[str, Any]) -> Question | None:
        if lease["task_key"] not in self._tasks:
            self._tasks |= {task.key: task for task in self._source.tasks(lease["split"])}
        return self._tasks.get(lease["task_key"])

    # -- an agent

    def _played(self, lease: Mapping[str, Any]) -> None:
        """One attempt of an agent; nothing where the sample went to another one meanwhile."""
        try:
            self._play(lease)
        except Refused as refusal:
            if refusal.status != 403:
                raise

    def _play(self, lease: Mapping[str, Any]) -> None:
        """From its environment to its seal. Refused (403) where it may not act any more."""
        token = lease["token"]
        try:
            answered = self._asked_agent(lease)
        except AttemptFailed as failed:
            self._ended_by(lease, failed)
        except Exception as error:
            if _is_gone(error):
                return  # the lease went to another attempt
            if _is_infra(error):
                self._fail(lease, Failure.INFRA, error)
                return
            state = self._work.ask("state", {"token": token})
            if state["full"] and state["calls"]:
                stop = {"stop_reason": StopReason.CONTEXT_LIMIT.value}
                self._end([(lease, state["text"], stop)], [])
            else:
                self._fail(lease, Failure.ENV, error)
        else:
            text = self._said(token) if answered is None else str(answered)
            if text is None:
                self._fail(lease, Failure.ENV, ValueError("the agent asked the model nothing"))
            else:
                self._end([(lease, text, None)], [])

    def _asked_agent(self, lease: Mapping[str, Any]) -> Any:
        assert self._agent is not None
        task = self._task(lease)
        if task is None:
            raise AttemptFailed(Failure.DATA, f"no task {lease['task_key']!r}")
        base = f"{self._work.url}/{lease['token']}/v1"
        told = self._agent(base, lease["token"], task)
        if not inspect.isawaitable(told):
            return told

        async def waited() -> Any:
            return await told

        return asyncio.run(waited())

    def _ended_by(self, lease: Mapping[str, Any], failed: AttemptFailed) -> None:
        """An agent's own word on why it ended."""
        text = self._said(lease["token"])
        if failed.failure is Failure.POLICY_TIMEOUT and text is not None:
            stop = {
                "failure": Failure.POLICY_TIMEOUT.value,
                "stop_reason": StopReason.TIME_LIMIT.value,
            }
            self._end([(lease, text, stop)], [])
        elif failed.failure is Failure.JUDGE and text is not None:
            told = {"token": lease["token"], "reward": None, "failure": Failure.JUDGE.value}
            self._work.ask("seal", {"attempts": [told]})
        else:
            known = (Failure.INFRA, Failure.ENV, Failure.DATA)
            self._fail(lease, failed.failure if failed.failure in known else Failure.ENV, failed)

    def _said(self, token: str) -> str | None:
        """What the model said last; None for nothing."""
        state = self._work.ask("state", {"token": token})
        return state["text"] if state["calls"] else None

    def _fail(self, lease: Mapping[str, Any], failure: Failure, error: Exception) -> None:
        told = _failed(lease, failure, f"{type(error).__name__}: {error}")
        self._work.ask("fail", {"attempts": [told]})


def _failed(lease: Mapping[str, Any], failure: Failure, reason: str) -> dict[str, Any]:
    return {"token": lease["token"], "failure": failure.value, "reason": reason[:2000]}


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it came of."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int:
    """The HTTP status that a client's error tells of, 0 for none."""
    return int(vars(error).get("status_code", 0) or 0)


def _is_gone(error: Exception) -> bool:
    """Whether the gateway refused the attempt itself."""
    return any(_status(one) in (401, 403) for one in _chain(error))


def _is_infra(error: Exception) -> bool:
    """Whether the way to the model broke: connections, time-outs, servers' errors."""
    for one in _chain(error):
        status = _status(one)
        if status:
            return status >= 500 or status == 429
        kinds = {kind.__name__ for kind in type(one).__mro__}
        lost = {"APIConnectionError", "TransportError"}  # of whatever client the agent has
        if kinds & lost or isinstance(one, ConnectionError):
            return True
    return False


def load_agent(name: str) -> Agent | None:
    """An agent by its dotted name, ``package.module.function``; None for "". ValueError if there is
    none."""
    if not name:
        return None
    module, _, function = name.rpartition(".")
    try:
        found = vars(importlib.import_module(module))[function]
    except (ImportError, KeyError, ValueError) as error:
        raise ValueError(f"pool.harness={name!r}; allowed: package.module.function") from error
    if not callable(found):
        raise ValueError(f"pool.harness={name!r} is no function")
    return found


def from_run(work: Work, beats: Work, run: Mapping[str, Any], most: int) -> Worker:
    """The worker that a gateway's run asks for: its task source, reward and harness."""
    task = dict(run["task"])
    reward = task.pop("reward")
    source = importlib.import_module(task.pop("source")).Source(
        task.pop("family"), task.pop("parameters"), **task
    )
    return Worker(
        work,
        beats,
        source,
        lease_s=run["lease_s"],
        reward=reward,
        most=most,
        agent=load_agent(run["harness"]),
    )


def work_for(address: str, key: str, most: int) -> None:
    """Work for a gateway until it is gone: what a worker process, or an actor, does.

    Agents run ``most`` at a time, each in a thread; the default harness has two threads of up to
    ``most`` samples each, so that one verifies while the other's answers are generated. GatewayLost
    where the gateway stays away.
    """
    with contextlib.closing(Work(address, key)) as work:
        run = work.ask("run")
    threads = most if run["harness"] else 2
    share = 1 if run["harness"] else most

    def one() -> None:
        from_run(Work(address, key), Work(address, key), run, share).run()

    with concurrent.futures.ThreadPoolExecutor(threads, "worker") as pool:
        for ended in concurrent.futures.as_completed([pool.submit(one) for _ in range(threads)]):
            ended.result()
