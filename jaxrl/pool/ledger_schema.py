"""The tables of a ledger, and how its records are read from rows and written to them."""

import dataclasses
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from jaxrl.pool.compact import compact
from jaxrl.pool.ledger import GroupState, Lease, LedgerRefusal, Live, OpenGroup, Sealed, SlotState
from jaxrl.pool.rollout import Failure, StopReason, Version

# 1 had a table of all tokens, 2 whole ones in the slots, 3 knew no durations and no cancelling, 4
# weighed nothing
SCHEMA_VERSION = 5

# A group's sum of bytes is read from here; where nothing is weighed, nothing is in it.
WEIGHED = "CREATE INDEX IF NOT EXISTS weighed_slots ON slots (grp, bytes) WHERE bytes IS NOT NULL"

TABLES = (
    "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS tallies (name TEXT PRIMARY KEY, value BIGINT NOT NULL)",
    """CREATE TABLE IF NOT EXISTS rollout_groups (
        id BIGINT PRIMARY KEY, state TEXT NOT NULL, step BIGINT, reason TEXT, voided BIGINT,
        task_key TEXT NOT NULL, content_hash TEXT NOT NULL, split TEXT NOT NULL,
        source TEXT NOT NULL, facts TEXT NOT NULL, version TEXT NOT NULL,
        dispatched BIGINT NOT NULL, samples BIGINT NOT NULL, max_attempts BIGINT NOT NULL,
        min_group BIGINT NOT NULL, generation BIGINT NOT NULL, reissued BIGINT NOT NULL,
        opened DOUBLE PRECISION NOT NULL, sealed DOUBLE PRECISION,
        expected DOUBLE PRECISION NOT NULL DEFAULT 0, bytes BIGINT)""",
    "CREATE INDEX IF NOT EXISTS live_groups ON rollout_groups (id) "
    "WHERE state IN ('open', 'ready', 'reserved')",
    "CREATE INDEX IF NOT EXISTS void_groups ON rollout_groups (voided) WHERE state = 'void'",
    """CREATE TABLE IF NOT EXISTS slots (
        grp BIGINT NOT NULL, sample BIGINT NOT NULL, state TEXT NOT NULL, attempt BIGINT NOT NULL,
        spent BIGINT NOT NULL, prompt TEXT NOT NULL, token TEXT, owner TEXT,
        expires DOUBLE PRECISION, lease_s DOUBLE PRECISION, reason TEXT, segment TEXT,
        min_step BIGINT, max_step BIGINT, sealed TEXT, leased DOUBLE PRECISION,
        worked DOUBLE PRECISION, cancelled BIGINT, bytes BIGINT, PRIMARY KEY (grp, sample))""",
    "CREATE INDEX IF NOT EXISTS pending_slots ON slots (grp, sample) WHERE state = 'pending'",
    "CREATE INDEX IF NOT EXISTS lent_slots ON slots (expires) WHERE state IN ('leased', 'running')",
    WEIGHED,
)

# What an older ledger lacks, by the version that brought it.
BROUGHT = {
    4: (
        "ALTER TABLE rollout_groups ADD COLUMN expected DOUBLE PRECISION NOT NULL DEFAULT 0",
        "ALTER TABLE slots ADD COLUMN leased DOUBLE PRECISION",  # when the present attempt was
        "ALTER TABLE slots ADD COLUMN worked DOUBLE PRECISION",  # seconds from then to its seal
        "ALTER TABLE slots ADD COLUMN cancelled BIGINT",  # the last attempt that was given back
    ),
    5: (
        "ALTER TABLE rollout_groups ADD COLUMN bytes BIGINT",  # the sum of its slots'
        "ALTER TABLE slots ADD COLUMN bytes BIGINT",  # of a sealed one, on disk
        WEIGHED,
    ),
}

NO_SIGN = "?"  # in place of a character that no database holds

SHARED = Sealed._fields.index("reward")  # fields of a sealed sample that tell of its record

LENT = "('leased', 'running')"
LIVE = "('open', 'ready', 'reserved')"


# A row of a query: values by the names of its columns.
Row = Mapping[str, Any]


class Rows(Protocol):
    """An open transaction. Parameters stand as ``?``."""

    def all(self, sql: str, *values: Any) -> Sequence[Row]:
        """The rows of a query."""
        ...

    def run(self, sql: str, *values: Any) -> int:
        """Change rows; how many."""
        ...

    def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        """The same change with each of these values; how many rows it changed in all."""
        ...


def tally(db: Rows, name: str, more: int = 1) -> None:
    """Add to a named count."""
    db.run(
        "INSERT INTO tallies VALUES (?, ?) "
        "ON CONFLICT (name) DO UPDATE SET value = tallies.value + excluded.value",
        name,
        more,
    )


def tally_refusals(db: Rows, told: Sequence[LedgerRefusal | None]) -> list[LedgerRefusal | None]:
    """Count refusals, in an order that all have: a tally is locked until the transaction ends."""
    found = Counter(refusal.reason for refusal in told if refusal)
    for reason, count in sorted(found.items()):
        tally(db, f"refused_{reason}", count)
    return list(told)


def epoch_of(db: Rows) -> int:
    """The current lineage."""
    return int(db.all("SELECT value FROM meta WHERE name = 'epoch'")[0]["value"])


def insert_group(db: Rows, group: OpenGroup, now: float) -> bool:
    """Whether the group is new; its rows are there in any case."""
    values = {
        "id": group.id,
        "state": GroupState.OPEN.value,
        "task_key": group.task_key,
        "content_hash": group.content_hash,
        "split": group.split,
        "source": group.source,
        "facts": json.dumps(dict(group.facts), allow_nan=False),
        "version": json.dumps(dataclasses.astuple(group.version)),
        "dispatched": group.version.step,
        "samples": len(group.prompts),
        "max_attempts": group.max_attempts,
        "min_group": group.min_group or len(group.prompts),
        "generation": group.generation,
        "reissued": 0,
        "opened": now,
        "expected": group.expected,
    }
    places = ", ".join("?" * len(values))
    statement = f"INSERT INTO rollout_groups ({', '.join(values)}) VALUES ({places}) "
    if not db.run(statement + "ON CONFLICT (id) DO NOTHING", *values.values()):
        return False
    for sample, prompt in enumerate(group.prompts):
        db.run(
            "INSERT INTO slots (grp, sample, state, attempt, spent, prompt) "
            "VALUES (?, ?, 'pending', 0, 0, ?)",
            group.id,
            sample,
            json.dumps([int(token) for token in prompt]),
        )
    return True


def storable(text: str) -> str:
    """A text as every database holds it: without zeros and halves of surrogate pairs."""
    return text.replace("\0", NO_SIGN).encode("utf-8", "replace").decode()


def places_of(values: Collection[Any]) -> str:
    """As many places for values as there are values, in brackets."""
    return f"({', '.join('?' * len(values))})"


def shared_of(db: Rows, slots: Sequence[Row]) -> Sequence[Row]:
    """What the samples of the slots' groups have in common."""
    groups = {slot["grp"] for slot in slots}
    return db.all(
        "SELECT id, task_key, content_hash, split, source, facts, version, dispatched, expected "
        f"FROM rollout_groups WHERE id IN {places_of(groups)}",
        *groups,
    )


def leases_of(
    slots: Sequence[tuple[Row, str]], groups: Sequence[Row], epoch: int, expires: float
) -> list[Lease]:
    """The leases of slots, each beside its token, and their groups. What siblings share is read
    once."""
    prompts = {text: tuple(json.loads(text)) for text in {slot["prompt"] for slot, _ in slots}}
    shared = {
        row["id"]: (
            *(row["task_key"], row["content_hash"], row["split"], row["source"]),
            *(dict(json.loads(row["facts"])), Version(*json.loads(row["version"]))),
        )
        for row in groups
    }
    made = Lease._make  # a call by its fields takes thrice as long
    return [
        made(
            (
                *(token, epoch, group := slot["grp"], slot["sample"], slot["attempt"], expires),
                prompts[slot["prompt"]],
                *shared[group],
            )
        )
        for slot, token in slots
    ]


def rows_of(seals: Sequence[Sealed]) -> list[tuple[str, int, int, str]]:
    """Sealed samples as segment, oldest and newest step, and JSON: the fields in their order. What
    neighbours share, as rows of one record do, is written once."""
    rows: list[tuple[str, int, int, str]] = []
    shared, start, steps = (), "", (0, 0)
    for sealed in seals:
        if sealed[:SHARED] != shared:
            shared, steps = sealed[:SHARED], (sealed.min_version.step, sealed.max_version.step)
            start = compact(shared).decode()[:-1] + ","
        rows.append((sealed.segment, *steps, start + compact(sealed[SHARED:]).decode()[1:]))
    return rows


def sealed_of(text: str) -> Sealed:
    """The inverse of the JSON of ``rows_of``."""
    told = json.loads(text)
    found = Sealed(**told) if isinstance(told, dict) else Sealed(*told)  # dict: schema 1
    versions: list[Any] = [found.min_version, found.max_version]
    oldest, newest = (Version(**version) for version in versions)
    return found._replace(
        min_version=oldest,
        max_version=newest,
        failure=Failure(found.failure),
        stop_reason=StopReason(found.stop_reason),
    )


def live_of(row: Row) -> Live:
    """A group beside the sums over its slots."""
    return Live(
        id=row["id"],
        state=GroupState(row["state"]),
        step=row["step"],
        content_hash=row["content_hash"],
        source=row["source"],
        dispatched=row["dispatched"],
        oldest=row["oldest"],
        youngest=row["youngest"],
        slots={state: int(row[f"slots_{state}"]) for state in SlotState},
        generation=row["generation"],
        reissued=row["reissued"],
        seconds=max(row["sealed"] - row["opened"], 0.0) if row["sealed"] else 0.0,
        worked=max(row["worked"] or 0.0, 0.0),
    )


def line_of(row: Row, now: float) -> str:
    """A slot as a line of a dump."""
    step = "" if row["step"] is None else f"({row['step']})"
    text = f"group {row['id']} {row['group_state']}{step} of version {row['dispatched']}: "
    text += f"sample {row['sample']} {row['state']} attempt {row['attempt']}"
    if row["state"] in (SlotState.LEASED, SlotState.RUNNING):
        text += f", {row['owner']}, {row['expires'] - now:.1f} s left"
    return text + (f", last: {row['reason']}" if row["reason"] else "")
