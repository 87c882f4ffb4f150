"""Ledgers for tests, on both databases, and what is put into them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from jaxrl.pool.ledger import Lease, Ledger, LedgerRefusal, OpenGroup, Sealed
from jaxrl.pool.ledger_sqlite import SqliteLedger
from jaxrl.pool.rollout import Failure, StopReason, Version


@dataclasses.dataclass
class Place:
    """Where ledgers of one run are opened, with a clock that a test may turn."""

    address: str
    run: str
    now: float = 1000.0
    opened: list[Ledger] = dataclasses.field(default_factory=list)

    def open(self) -> Ledger:
        if self.address.startswith("postgresql://"):
            from jaxrl.pool.ledger_postgres import PostgresLedger

            ledger: Ledger = PostgresLedger(self.address, self.run, lambda: self.now)
        else:
            ledger = SqliteLedger(self.address, self.run, lambda: self.now)
        self.opened.append(ledger)
        return ledger


def group(number: int, samples: int = 2, **changes) -> OpenGroup:
    values: dict[str, Any] = dict(
        id=number,
        task_key=f"sum/{number}",
        content_hash=f"hash {number}",
        split="train",
        source="sums",
        prompts=[[5, 6 + sample] for sample in range(samples)],
        facts={"task_probability": 0.5},
        version=Version(0, 3, "w"),
        max_attempts=3,
        min_group=0,
    )
    return OpenGroup(**(values | changes))


def sealed(step: int = 3, newest: int | None = None, **changes) -> Sealed:
    values: dict[str, Any] = dict(
        segment="0/0-0-0.rollouts",
        offset=0,
        digest="d",
        bytes=9,
        min_version=Version(0, step, "w"),
        max_version=Version(0, step if newest is None else newest, "w"),
        reward=1.0,
        failure=Failure.NONE,
        stop_reason=StopReason.STOP,
        correct=True,
        tokens=2,
    )
    return Sealed(**(values | changes))


def lease_of(ledger: Ledger, owner: str = "w") -> Lease:
    lease = ledger.lease(owner, 60)
    assert lease is not None
    return lease


def fill(ledger: Ledger, count: int = 1, step: int = 3) -> None:
    """Seal all that is pending of ``count`` groups of two."""
    for _ in range(2 * count):
        ledger.seal(lease_of(ledger).token, sealed(step))


def refused(reason: str, act: Callable[[], object]) -> None:
    with pytest.raises(LedgerRefusal) as refusal:
        act()
    assert refusal.value.reason == reason
