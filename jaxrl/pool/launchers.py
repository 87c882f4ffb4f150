"""How the helpers of a pool are started, and started again when they die. No jax here.

A launcher places and restarts processes; it never carries samples. Three of them: subprocesses of
this process, Ray actors, and a JobSet for Kubernetes, which is a manifest: the cluster does the
rest.
"""

import contextlib
import importlib
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxrl.pool.contract import PoolError

KEY_VARIABLE = "JAXRL_POOL_KEY"  # the pool's key, in a worker's environment
PARENT_VARIABLE = "JAXRL_DIES_WITH_PARENT"  # set: standard input is a pipe of the parent

TAIL = 2000  # characters of a dead helper's log that are told


class Launcher(Protocol):
    """Keeps helpers running."""

    def ensure(self) -> None:
        """Start those that do not run, while the budget lasts; PoolError, with the end of the log,
        when it is spent."""
        ...

    def status(self) -> list[str]:
        """A word for each helper: running, or how it ended."""
        ...

    def kill(self, place: int) -> None:
        """End one helper at once, as a crash would."""
        ...

    def close(self) -> None:
        """End all of them."""
        ...


def die_with_parent() -> None:
    """Called by a helper at its start: end this process when the parent's end of the pipe on
    standard input is closed, however the parent ended. Nothing where no parent asked for it."""
    if PARENT_VARIABLE not in os.environ:
        return

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


class Subprocesses:
    """``count`` processes of one command; each writes to ``<logs>/<name>-<place>.log``.

    They die with this process, and at ``close``. ``restarts`` is the budget of all of them
    together.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        *,
        name: str,
        logs: str | os.PathLike[str],
        restarts: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command, self._count, self._name = list(command), count, name
        self._logs, self._left = pathlib.Path(logs), restarts
        self._environment = {**os.environ, **(environment or {}), PARENT_VARIABLE: "1"}
        self._helpers: dict[int, subprocess.Popen[bytes]] = {}

    def ensure(self) -> None:
        """Start what does not run."""
        for place in range(self._count):
            held = self._helpers.get(place)
            if held is not None and held.poll() is None:
                continue
            if held is not None:
                if self._left < 1:
                    code = held.returncode
                    raise PoolError(
                        f"{self._name} {place} ended with {code}, and all restarts are spent; its "
                        f"log ends:\n{self._tail(place)}"
                    )
                self._left -= 1
                _release(held)
            self._helpers[place] = self._start(place)

    def status(self) -> list[str]:
        """running, or the exit code."""
        codes = (held.poll() for _, held in sorted(self._helpers.items()))
        return ["running" if code is None else f"ended with {code}" for code in codes]

    def kill(self, place: int) -> None:
        """End one at once."""
        self._helpers[place].kill()
        self._helpers[place].wait()

    def close(self) -> None:
        """Ask all of them to end, and make them after five seconds."""
        for held in self._helpers.values():
            held.terminate()
        for held in self._helpers.values():
            try:
                held.wait(5)
            except subprocess.TimeoutExpired:
                held.kill()
                held.wait()
            _release(held)
        self._helpers = {}

    def _log(self, place: int) -> pathlib.Path:
        return self._logs / f"{self._name}-{place}.log"

    def _tail(self, place: int) -> str:
        path = self._log(place)
        return path.read_text(errors="replace")[-TAIL:] if path.exists() else "(no log)"

    def _start(self, place: int) -> subprocess.Popen[bytes]:
        self._logs.mkdir(parents=True, exist_ok=True)
        with self._log(place).open("ab") as log:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,  # its end tells the helper that this process is gone
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )


def _release(held: subprocess.Popen[bytes]) -> None:
    """Close the pipe that kept a helper alive."""
    if held.stdin is not None:
        with contextlib.suppress(OSError):
            held.stdin.close()


def worker_command(address: str, most: int) -> list[str]:
    """What starts a worker on this machine; the pool's key is in its environment."""
    return [sys.executable, "-m", "jaxrl.worker", f"--gateway={address}", f"--most={most}"]


class RayWorkers:
    """Workers as Ray actors: Ray places them, and this class starts dead ones again.

    ImportError, naming the extra, where ray is not installed. ``resources`` are an actor's options
    (num_cpus, resources), by which they reach machines that have them.
    """

    def __init__(
        self,
        address: str,
        key: str,
        count: int,
        *,
        most: int,
        restarts: int,
        resources: Mapping[str, Any],
    ) -> None:
        try:
            self._ray = importlib.import_module("ray")
        except ImportError as error:
            raise ImportError("pool.launcher='ray' needs the extra ray: jaxrl[ray]") from error
        if not self._ray.is_initialized():
            self._ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        self._actor = self._ray.remote(**resources)(_RayWorker)
        self._told, self._left = (address, key, most), restarts
        self._count = count
        self._actors: dict[int, Any] = {}
        self._runs: dict[int, Any] = {}

    def ensure(self) -> None:
        """Start actors that are missing or whose work has ended."""
        for place in range(self._count):
            run = self._runs.get(place)
            if run is not None and not self._ray.wait([run], timeout=0)[0]:
                continue
            if run is not None:
                if self._left < 1:
                    raise PoolError(
                        f"worker {place}: {self._ended(run)}, and all restarts are spent"
                    )
                self._left -= 1
            self._actors[place] = self._actor.remote(*self._told)
            self._runs[place] = self._actors[place].run.remote()

    def status(self) -> list[str]:
        """running, or how the actor ended."""
        return [
            self._ended(run) if self._ray.wait([run], timeout=0)[0] else "running"
            for _, run in sorted(self._runs.items())
        ]

    def kill(self, place: int) -> None:
        """Kill an actor; it is not restarted by Ray."""
        self._ray.kill(self._actors[place])

    def close(self) -> None:
        """Kill all actors. Ray itself keeps running: others may use it."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors, self._runs = {}, {}

    def _ended(self, run: Any) -> str:
        try:
            self._ray.get(run, timeout=1)
        except Exception as error:
            return f"ended with {type(error).__name__}"
        return "ended"


class _RayWorker:
    """The body of an actor."""

    def __init__(self, address: str, key: str, most: int) -> None:
        self._told = address, key, most

    def run(self) -> None:
        """Work until killed."""
        from jaxrl.pool.workers import work_for

        work_for(*self._told)


def jobset(
    name: str, image: str, address: str, count: int, *, secret: str, most: int, restarts: int
) -> dict[str, Any]:
    """A JobSet (jobset.x-k8s.io/v1alpha2) of workers for a gateway at ``address``, a URL.

    The pool's key is the field ``key`` of the Secret ``secret``. Each worker is a Job of one pod,
    so that one which fails is started again alone; the set as a whole restarts ``restarts`` times.
    """
    command = ["python", "-m", "jaxrl.worker", f"--gateway={address}", f"--most={most}"]
    key = {"secretKeyRef": {"name": secret, "key": "key"}}
    container = {
        "name": "worker",
        "image": image,
        "command": command,
        "env": [{"name": KEY_VARIABLE, "valueFrom": key}],
    }
    pod = {"spec": {"restartPolicy": "OnFailure", "containers": [container]}}
    job = {"spec": {"backoffLimit": restarts, "parallelism": 1, "completions": 1, "template": pod}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": {"maxRestarts": restarts},
            "replicatedJobs": [{"name": "workers", "replicas": count, "template": job}],
        },
    }
