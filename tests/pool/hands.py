"""A gateway and its workers in threads: the real ledger and spool, a script in the model's place.

``Hands`` does what a gateway does with an attempt, without HTTP: lease, wait for weights that are
young enough, answer, verify, seal. The responses follow from the request alone.
"""

import json
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl.pool.announced import CURRENT
from jaxrl.pool.contract import Request
from jaxrl.pool.judging import judge
from jaxrl.pool.ledger import Lease, Ledger, LedgerRefusal, Sealed
from jaxrl.pool.ledger_sqlite import SqliteLedger
from jaxrl.pool.permits import Permits
from jaxrl.pool.remote import RemotePool, Rules
from jaxrl.pool.rollout import (
    ACTION,
    NOT_SAMPLED,
    PROMPT,
    Failure,
    Rollout,
    StopReason,
    Version,
)
from jaxrl.pool.segments import Placed, Spool
from jaxrl.pool.spool import encode
from tests.pool.scripted import EOS, Letters, Sums, answer_of

RULES: dict[str, Any] = dict(
    staleness=0,
    over_age="drop",
    max_refills=2,
    max_attempts=3,
    min_group=0,
    watchdog_s=20.0,
    poll_s=0.002,
    keep_checkpoints=2,
    record=True,
    quotas=(),
    permits=Permits(),
)


def newest(folder: pathlib.Path) -> Version | None:
    """The version that is announced."""
    path = folder / CURRENT
    if not path.exists():
        return None
    told = json.loads(path.read_text())
    return Version(told["epoch"], told["step"], told["digest"])


def rollout_of(
    lease: Lease, respond: Callable[[Request], str], source: Any, version: Version, **changes
) -> Rollout:
    """What an attempt comes to. A grouped source's samples wait for their judge."""
    request = Request(lease.prompt, lease.group, lease.sample, 1.0, 8, frozenset({EOS}))
    text = respond(request)
    ids = [*Letters().encode(text), EOS]
    sizes = [len(lease.prompt), len(ids)]
    outcome: dict[str, Any] = dict(reward=None, correct=False, failure=Failure.JUDGE, facts={})
    if not source.grouped:
        task = next(one for one in source.tasks("train") if one.key == lease.task_key)
        told = judge(source, task, [text], "exact")[0]
        failure = Failure.JUDGE if told.failure is Failure.DATA else told.failure
        outcome = dict(
            reward=told.reward, correct=told.correct, failure=failure, facts=dict(told.facts)
        )
    outcome["facts"] |= dict(lease.facts)
    values: dict[str, Any] = dict(
        run_id="run",
        group_id=lease.group,
        sample=lease.sample,
        attempt=lease.attempt,
        task_key=lease.task_key,
        content_hash=lease.content_hash,
        split=lease.split,
        source=lease.source,
        tokens=np.array([*lease.prompt, *ids], np.uint32),
        kind=np.repeat([PROMPT, ACTION], sizes).astype(np.uint8),
        step=np.repeat([-1, 0], sizes).astype(np.int32),
        logp=np.repeat([0, -0.5], sizes).astype(np.float32),
        version_index=np.repeat([NOT_SAMPLED, 0], sizes).astype(np.uint16),
        temperature=np.ones(sum(sizes), np.float32),
        versions=(version,),
        reward_components={},
        stop_reason=StopReason.STOP,
        text=text,
        times={},
        **outcome,
    )
    return Rollout(**(values | changes))


def seal(
    ledger: Ledger,
    spool: Spool,
    lease: Lease,
    rollout: Rollout,
    damage: Callable[[pathlib.Path], None] = lambda path: None,
    weigh: bool = False,
) -> None:
    """Write a rollout and seal the attempt with it; ``damage`` is done to the segment in
    between."""
    (refusal,) = seal_all(ledger, spool, [lease], [rollout], damage, weigh)
    if refusal:
        raise refusal


def seal_all(
    ledger: Ledger,
    spool: Spool,
    leases: Sequence[Lease],
    rollouts: Sequence[Rollout],
    damage: Callable[[pathlib.Path], None] = lambda path: None,
    weigh: bool = False,
) -> list[LedgerRefusal | None]:
    """``seal`` several into one segment, and in one transaction."""
    first = (leases[0].group, leases[0].sample, leases[0].attempt)
    placed = spool.seal(first, [encode(rollout) for rollout in rollouts])
    damage(spool.root / placed[0].segment)
    seals = zip(leases, map(sealed_of, rollouts, placed), strict=True)
    return ledger.seal_many([(lease.token, sealed) for lease, sealed in seals], weigh)


def sealed_of(rollout: Rollout, placed: Placed) -> Sealed:
    """What the ledger keeps of a rollout."""
    return Sealed(
        **placed._asdict(),
        min_version=min(rollout.versions),
        max_version=max(rollout.versions),
        reward=rollout.reward,
        failure=rollout.failure,
        stop_reason=rollout.stop_reason,
        correct=rollout.correct,
        tokens=int((rollout.kind == ACTION).sum()),
    )


class Hands:
    """Threads that sample for a pool in ``folder`` until they are told to stop.

    ``trouble(lease)`` may fail the attempt (a Failure), change it (a dict of a rollout's fields),
    lose it ("lost": neither sealed nor failed), or wait.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        source: Any,
        respond: Callable[[Request], str] = answer_of,
        trouble: Callable[[Lease], Any] = lambda lease: None,
        threads: int = 1,
        lease_s: float = 30.0,
        ledger: Ledger | None = None,
        permits: Permits | None = None,
    ) -> None:
        self.folder, self.source, self.respond, self.trouble = folder, source, respond, trouble
        self.spool, self.lease_s, self.ledger = Spool(folder / "spool"), lease_s, ledger
        self.permits = permits or Permits()
        self.faults: list[BaseException] = []
        self.refused: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]

    def __enter__(self) -> "Hands":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        if kind is None and self.faults:
            raise self.faults[0]

    def _run(self) -> None:
        ledger = self.ledger or SqliteLedger(str(self.folder / "ledger.sqlite"), "run")
        try:
            while not self._stop.is_set():
                granted = ledger.lease_within("hands", self.lease_s, 1, self.permits)
                if not granted.leases:
                    time.sleep(0.002)
                    continue
                (lease,) = granted.leases
                try:
                    self._attempt(ledger, lease)
                except LedgerRefusal as refusal:
                    self.refused.append(refusal.reason)
        except BaseException as error:  # raised where the threads are joined
            self.faults.append(error)
        finally:
            if ledger is not self.ledger:
                ledger.close()

    def _attempt(self, ledger: Ledger, lease: Lease) -> None:
        while (version := newest(self.folder)) is None or version < lease.version:
            time.sleep(0.002)
            if self._stop.is_set():
                return
        ledger.start(lease.token)
        trouble = self.trouble(lease)
        if trouble == "lost":
            return
        if isinstance(trouble, Failure):
            ledger.fail(lease.token, trouble, "as the test says")
            return
        rollout = rollout_of(lease, self.respond, self.source, version, **(trouble or {}))
        seal(ledger, self.spool, lease, rollout, weigh=self.permits.spool_bytes > 0)


def remote_pool(
    folder: pathlib.Path, source: Any = None, ledger: Ledger | None = None, **changes
) -> RemotePool:
    """A RemotePool with small settings, nothing published."""
    rules = {name: changes.pop(name) for name in RULES if name in changes}
    settings: dict[str, Any] = dict(seed=0, rollouts_per_group=2, max_prompt_tokens=16)
    return RemotePool(
        ledger or SqliteLedger(str(folder / "ledger.sqlite"), "run"),
        Spool(folder / "spool"),
        folder,
        Letters(),
        source or Sums(8),
        Rules(**(RULES | rules)),
        **(settings | changes),
    )
