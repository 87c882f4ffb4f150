"""The helpers of a run on this machine: a gateway, and workers for it. No jax here.

<pool>/pool.json       what they must know of the run; see ``jaxrl.gateway``
<pool>/key             the pool's key, for this user's eyes
<pool>/evaluation_key  asks the newest weights what is not trained on; as secret
<pool>/gateway.json    where the gateway is, once it is there
<pool>/logs/           what they say
"""

import contextlib
import json
import os
import pathlib
import secrets
import sys
import time
from collections.abc import Mapping
from typing import Any

import httpx2

from jaxrl.pool.contract import PoolError
from jaxrl.pool.launchers import (
    KEY_VARIABLE,
    Launcher,
    RayWorkers,
    Subprocesses,
    worker_command,
)

RUN = "pool.json"
KEY = "key"
EVALUATION_KEY = "evaluation_key"
GATEWAY = "gateway.json"
LOGS = "logs"

# How often helpers may die in a run before it is told to a person.
RESTARTS = 20
# Samples that a worker asks for together, or agents that it runs at a time.
MOST = 1024


def pool_key(folder: pathlib.Path, name: str = KEY) -> str:
    """A key of the pool: made once, readable for this user alone."""
    path = folder / name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        half = path.with_suffix(f".{os.getpid()}")
        with os.fdopen(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32))
        half.replace(path)
    return path.read_text()


class Services:
    """Starts what a run asks for, and keeps it running.

    ``run`` is written to pool.json. ``gateway`` is the URL of one that others started, or "" to
    start one; ``launcher`` is "subprocess", "ray", or "none" for workers that others start.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        run: Mapping[str, Any],
        *,
        gateway: str,
        launcher: str,
        workers: int,
        patience_s: float,
    ) -> None:
        folder = pathlib.Path(folder).absolute()
        self.key = pool_key(folder)
        half = folder / (RUN + ".tmp")
        half.unlink(missing_ok=True)
        half.touch(mode=0o600)  # a ledger's address may hold a password
        half.write_text(json.dumps(run, indent=1))
        half.replace(folder / RUN)
        self._folder, self._patience_s = folder, patience_s
        headers = {"authorization": f"Bearer {self.key}"}
        self._client = httpx2.Client(headers=headers, timeout=5)  # a connection for all questions
        self._helpers: list[Launcher] = []
        self._address = gateway or str(folder / GATEWAY)
        try:
            if not gateway:
                self._start_gateway()
            self._start_workers(launcher, workers)
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """Where the gateway is."""
        if "://" in self._address:
            return self._address
        return json.loads(pathlib.Path(self._address).read_text())["url"]

    def ensure(self) -> None:
        """Start again what has died. PoolError when that happened too often."""
        for helper in self._helpers:
            helper.ensure()

    def tell(self) -> None:
        """Tell the gateway that there is news: groups to sample, or weights. Who is not told looks
        now and then."""
        with contextlib.suppress(httpx2.HTTPError, OSError, ValueError):
            self._client.post(f"{self.url}/work/news", timeout=1)

    def counts(self, of: str = "gateway") -> dict[str, float]:
        """What the gateway counts of itself, its engine or its ledger; {} if it does not answer
        now."""
        try:
            response = self._client.get(f"{self.url}/counts?of={of}")
            return response.json()[of] if response.status_code == 200 else {}
        except (httpx2.HTTPError, OSError, ValueError):
            return {}

    def close(self) -> None:
        """End what was started, workers first."""
        for helper in reversed(self._helpers):
            helper.close()
        self._helpers = []
        self._client.close()

    def _start_gateway(self) -> None:
        address = self._folder / GATEWAY
        address.unlink(missing_ok=True)
        command = [sys.executable, "-m", "jaxrl.gateway", f"--pool={self._folder}"]
        gateway = Subprocesses(
            command, 1, name="gateway", logs=self._folder / LOGS, restarts=RESTARTS
        )
        self._helpers.append(gateway)
        gateway.ensure()
        until = time.monotonic() + self._patience_s
        while not address.exists():
            gateway_status = gateway.status()
            if gateway_status != ["running"] or time.monotonic() > until:
                log = self._folder / LOGS / "gateway-0.log"
                raise PoolError(f"the gateway is {gateway_status}:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)

    def _start_workers(self, launcher: str, workers: int) -> None:
        if launcher == "none" or not workers:
            return
        if launcher == "ray":
            helper: Launcher = RayWorkers(
                self.url,
                self.key,
                workers,
                most=MOST,
                restarts=RESTARTS,
                resources={"num_cpus": 0},
            )
        else:
            helper = Subprocesses(
                worker_command(self._address, MOST),
                workers,
                name="worker",
                logs=self._folder / LOGS,
                restarts=RESTARTS,
                environment={KEY_VARIABLE: self.key},
            )
        self._helpers.append(helper)
        helper.ensure()
