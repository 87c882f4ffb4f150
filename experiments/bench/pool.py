"""What a remote pool's accounts cost: transitions and sealed records a second of each ledger.

    python -m experiments.bench.pool [--seconds 5] [--threads 8] [--batch 256] [--samples 8]
        [--tokens 64]

No model: a sample's ids are made up. An attempt has three *transitions*, each a transaction: lease,
start, and seal, which waits for the disk. A *sealed record* is an attempt as a gateway does it:
with a segment that is flushed to the disk. By one thread, by several, and by one for a batch of
attempts at once, as the default worker asks for them. The reference is the embedded pool, which
writes its records once a take. PostgreSQL is a server of our own that waits for the disk; left out,
and said so, where none can be had. Prints JSON lines, then a table.
"""

import argparse
import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxrl.pool.ledger import Lease, Ledger, OpenGroup, Sealed, open_ledger
from jaxrl.pool.rollout import Failure, StopReason, Version
from jaxrl.pool.segments import Spool
from tests.pool import postgres
from tests.pool.hands import rollout_of, seal, seal_all
from tests.pool.scripted import Letters, Scripted, Sums, local_pool

VERSION = Version(0, 0, "bench")
SEALED = Sealed(
    segment="none",
    offset=0,
    digest="",
    bytes=0,
    min_version=VERSION,
    max_version=VERSION,
    reward=1.0,
    failure=Failure.NONE,
    stop_reason=StopReason.STOP,
    correct=True,
    tokens=64,
)


def opened(ledger: Ledger, source: Sums, groups: range, samples: int) -> None:
    """Groups to be sampled."""
    tasks = source.tasks("train")
    many = [
        OpenGroup(
            id=number,
            task_key=(task := tasks[number % len(tasks)]).key,
            content_hash=task.content_hash,
            split=task.split,
            source=task.source,
            prompts=[Letters().encode(task.prompt)] * samples,
            facts={},
            version=VERSION,
            max_attempts=3,
            min_group=0,
        )
        for number in groups
    ]
    for start in range(0, len(many), 64):
        ledger.open_groups(many[start : start + 64])


def in_threads(count: int, seconds: float, work: Callable[[], int]) -> float:
    """Sum of what ``work`` counts, a second, by so many threads until the time is over."""
    until, done, faults = time.monotonic() + seconds, [0] * count, []

    def run(place: int) -> None:
        try:
            while time.monotonic() < until:
                done[place] += work()
        except BaseException as error:
            faults.append(error)

    began = time.monotonic()
    threads = [threading.Thread(target=run, args=(place,)) for place in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    return sum(done) / (time.monotonic() - began)


def measure(ledger: Ledger, folder: Path, given: argparse.Namespace) -> dict[str, float]:
    """Transitions and sealed records a second, of one thread, of several, and in batches."""
    source, spool = Sums(64), Spool(folder)
    text = "1" * given.tokens
    ledger.begin_epoch()
    opened(ledger, source, range(given.groups), given.samples)

    def leased() -> Any:
        lease = ledger.lease("bench", 600.0)
        if lease is None:
            raise RuntimeError("all samples are sealed; more --groups")
        ledger.start(lease.token)
        return lease

    def transitions() -> int:
        lease = leased()
        ledger.seal(lease.token, SEALED)
        return 3

    def records() -> int:
        lease = leased()
        seal(ledger, spool, lease, rollout_of(lease, lambda _: text, source, VERSION))
        return 1

    def started() -> Sequence[Lease]:
        leases = ledger.lease_many("bench", 600.0, given.batch)
        if not leases:
            raise RuntimeError("all samples are sealed; more --groups")
        ledger.start_many([lease.token for lease in leases])
        return leases

    def many_transitions() -> int:
        leases = started()
        ledger.seal_many([(lease.token, SEALED) for lease in leases])
        return 3 * len(leases)

    def many_records() -> int:
        leases = started()
        rollouts = [rollout_of(lease, lambda _: text, source, VERSION) for lease in leases]
        seal_all(ledger, spool, leases, rollouts)
        return len(leases)

    told = {
        "transitions_batch": in_threads(1, given.seconds, many_transitions),
        "records_batch": in_threads(1, given.seconds, many_records),
    }
    for threads in (1, given.threads):
        told[f"transitions_{threads}"] = in_threads(threads, given.seconds, transitions)
        told[f"records_{threads}"] = in_threads(threads, given.seconds, records)
    return told


def embedded(folder: Path, given: argparse.Namespace) -> dict[str, float]:
    """Records a second of the embedded pool, 16 groups a take."""
    source = Sums(64)
    generator = Scripted(lambda _: "1" * given.tokens)
    settings = dict(rollouts_per_group=given.samples, max_new_tokens=given.tokens + 1)
    pool = local_pool(generator, source, record_dir=folder, **settings)
    steps = iter(range(10**9))
    rate = in_threads(
        1, given.seconds, lambda: sum(len(g.rollouts) for g in pool.take(16, next(steps))[0])
    )
    return {"records_1": rate}


@contextlib.contextmanager
def ledgers(folder: Path) -> Iterator[dict[str, Ledger]]:
    """Those that can be had here."""
    held = {"sqlite": open_ledger(str(folder / "ledger.sqlite"), "bench")}
    with contextlib.ExitStack() as stack:
        try:
            address = stack.enter_context(postgres.server(durable=True))
            held["postgresql"] = open_ledger(address, "bench")
        except (postgres.NoServer, ImportError) as missing:
            print(json.dumps({"ledger": "postgresql", "left_out": str(missing)}))
        yield held
        for ledger in held.values():
            ledger.close()


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--threads", type=int, default=8, help="beside one, that ask at once")
    parser.add_argument("--batch", type=int, default=256, help="attempts of one transaction")
    parser.add_argument("--groups", type=int, default=12000)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        rows["embedded pool"] = embedded(folder / "records", given)
        with ledgers(folder) as held:
            for name, ledger in held.items():
                rows[name] = measure(ledger, folder / name, given)
    for name, row in rows.items():
        print(json.dumps({"ledger": name, **{key: round(x, 1) for key, x in row.items()}}))
    columns = [
        f"{what}_{n}" for what in ("transitions", "records") for n in (1, given.threads, "batch")
    ]
    print("| | " + " | ".join(columns) + " |\n|:--|" + "--:|" * len(columns))
    for name, row in rows.items():
        cells = [f"{row[column]:,.0f}" if column in row else "" for column in columns]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
