"""The accounts of a pool that lives outside of the trainer: which sample is whose, and what became
of it.

    slot  (group, sample)  PENDING -> LEASED -> RUNNING -> SEALED, or back to PENDING for a new
                           attempt, or FAILED when its attempts are spent
    group                  OPEN -> READY -> RESERVED(step) -> COMMITTED(step), or VOID(reason)

Delivery is at least once, effect exactly once: every transition has a condition, and what does not
meet it is refused, counted and changes nothing. It is a short transaction of its own, or one with
others of its kind (``..._many``), which it neither helps nor hinders. Only metadata is kept
here; tokens lie in the spool (``jaxrl.pool.segments``).

Three parties use a ledger. The *trainer* begins an epoch, opens, reserves, commits and voids
groups. A *gateway* leases slots to workers and seals or fails them. Workers know their token only.
"""

import dataclasses
import enum
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from jaxrl.pool.permits import Permits, Used
from jaxrl.pool.rollout import Failure, StopReason, Version

# Why something is refused. Each refusal is counted as ``refused_<reason>`` in ``counts``.
Reason = Literal["fenced", "expired", "cancelled", "sealed", "void", "unknown", "stale", "state"]


class SlotState(enum.StrEnum):
    """Where a sample stands."""

    PENDING = "pending"  # to be leased
    LEASED = "leased"  # a worker has it
    RUNNING = "running"  # its agent made a first call; one without an agent stays leased
    SEALED = "sealed"  # its segment is in the spool: final
    FAILED = "failed"  # out of attempts: final


class GroupState(enum.StrEnum):
    """Where a group stands."""

    OPEN = "open"  # samples are missing
    READY = "ready"  # all samples are sealed
    RESERVED = "reserved"  # of a step that no checkpoint covers yet
    COMMITTED = "committed"  # a checkpoint covers its step: final
    VOID = "void"  # never trained on, for a reason: final


class LedgerError(OSError):
    """The database did not answer, or refused (a full disk); the message says why."""


class LedgerRefusal(Exception):
    """A transition whose condition does not hold. Nothing was changed.

    reason: fenced (an older epoch), expired (its slot went to another attempt), cancelled (it was
    given back), sealed (the sample has its one result), void (its group is not wanted), unknown (no
    such token), stale (tokens older than the step allows), state (the group is not where it must
    be).
    """

    def __init__(self, reason: Reason, what: str) -> None:
        super().__init__(f"{reason}: {what}")
        self.reason: Reason = reason


@dataclasses.dataclass(frozen=True)
class OpenGroup:
    """A group to be sampled. ``id`` is the number of its draw; ``prompts`` has the ids of each
    sample's prompt."""

    id: int
    task_key: str
    content_hash: str  # of the task
    split: str
    source: str
    prompts: Sequence[Sequence[int]]
    facts: Mapping[str, Any]  # JSON: known at the draw (task_probability), copied to every rollout
    version: Version  # the newest published one: nothing older may sample it
    max_attempts: int  # of a sample that infrastructure fails, before its group is void
    min_group: int  # samples that make a group when infrastructure failed the others; 0: all
    generation: int = 0  # 0 of a first draw, one more for each refill of a refill
    expected: float = 0.0  # seconds that its longest sample may take; of a version, longer first


class Lease(NamedTuple):
    """A sample lent to a worker. ``token`` is its only identity: unguessable, of one attempt.

    ``version`` is the oldest that may sample it: an engine that has an older one is waited for, and
    a response that is stamped older, or not at all, is refused.
    """

    token: str
    epoch: int
    group: int
    sample: int
    attempt: int
    expires: float  # seconds since 1970, of the clock of the process that granted it
    prompt: tuple[int, ...]
    task_key: str
    content_hash: str
    split: str
    source: str
    facts: Mapping[str, Any]
    version: Version


class Granted(NamedTuple):
    """Leases, and the units that more of them wait for."""

    leases: list[Lease]
    short: tuple[str, ...]


class Sealed(NamedTuple):
    """What is known of a sealed sample without reading its segment.

    ``failure=judge`` with no reward says «not judged»: the trainer's pool asks the judge (again);
    that is also how samples of a source that judges whole groups are sealed. Other failures are
    not sealed, they are failed.
    """

    segment: str  # a file, relative to the spool
    offset: int  # of the attempt's records in it
    bytes: int
    digest: str  # of these bytes: sha256
    min_version: Version  # oldest and newest that sampled a token
    max_version: Version
    reward: float | None
    failure: Failure
    stop_reason: StopReason
    correct: bool
    tokens: int  # sampled ones
    row: int = -1  # of these bytes, where they are a record of many attempts; -1 where not


@dataclasses.dataclass(frozen=True)
class Live:
    """A group that is OPEN, READY or RESERVED. Versions are steps."""

    id: int
    state: GroupState
    step: int | None  # RESERVED: its step; else a step that must have it again (replay), or None
    content_hash: str
    source: str
    dispatched: int  # the oldest version that may sample it
    oldest: int | None  # version of a token of its sealed samples; None before the first
    youngest: int | None  # the smallest, over its sealed samples, of their newest version
    slots: Mapping[SlotState, int]
    generation: int
    reissued: int  # times that it was sampled anew because it had grown too old
    seconds: float  # from being opened (or opened anew) to its last seal so far; 0 before the first
    worked: float  # seconds from lease to seal, of its longest sealed sample; 0 before the first


@dataclasses.dataclass(frozen=True)
class Member:
    """A sealed sample of a group."""

    sample: int
    attempt: int
    sealed: Sealed


@dataclasses.dataclass(frozen=True)
class Voided:
    """A group that is void, and why."""

    id: int
    content_hash: str
    reason: str
    generation: int


class Ledger(Protocol):
    """The accounts. Every method is one transaction; several processes may use one ledger. What
    the trainer does, a seal and a failure survive a power cut; a lease survives the end of any
    process.

    All but ``close`` raise LedgerRefusal where it is said so, and LedgerError where the database
    cannot be reached: then nothing is known to have happened, and asking again is safe (a second
    seal of the same attempt is refused as ``sealed``). What a trainer changes is refused (fenced)
    to an object that began an epoch which was followed by another one.
    """

    # -- both sides

    def epoch(self) -> int:
        """The current lineage; -1 before the first ``begin_epoch``."""
        ...

    def counts(self) -> dict[str, int]:
        """Groups by state (``groups_<state>``), voids (``void_<reason>``), live slots by state
        (``slots_<state>``), refusals (``refused_<reason>``), ``retried``, ``expired``, and what
        ``count`` added."""
        ...

    def count(self, name: str, more: int = 1) -> None:
        """Add to a tally of that name: drift, damage, whatever is rare."""
        ...

    def changes(self) -> int | None:
        """Grows, at hardly any cost, when there may be more to lease, or when any attempt may have
        lost its lease, other than by a seal of this object; None where only asking tells."""
        ...

    def dump(self) -> str:
        """All that is live, as text: for a person who asks why nothing happens."""
        ...

    def close(self) -> None:
        """Free the connection."""
        ...

    # -- the trainer

    def begin_epoch(self, least: int = 0) -> int:
        """A trainer starts: the next epoch, at least ``least``. Every older lease is fenced, its
        slot pending again with a new attempt that costs nothing of its budget."""
        ...

    def open_groups(self, groups: Sequence[OpenGroup]) -> None:
        """New groups. One that exists already is left as it is."""
        ...

    def live(self) -> list[Live]:
        """Groups that are OPEN, READY or RESERVED, in the order of their ids."""
        ...

    def members(self, group: int) -> list[Member]:
        """The sealed samples of a group, in their order."""
        ...

    def voided(self, after: int) -> list[Voided]:
        """The void groups after the first ``after`` ones, in the order in which they became so."""
        ...

    def next_id(self) -> int:
        """One more than the largest group id; 0 of an empty ledger."""
        ...

    def reserve(
        self, step: int, groups: Sequence[int], oldest: int, by: Literal["min", "max"] = "min"
    ) -> None:
        """READY -> RESERVED(step), all or none. Refused (stale) if a token's version is of a step
        before ``oldest``; with ``by="max"`` only if all tokens of a sample are. Refused (state) if
        a group is not READY."""
        ...

    def commit(self, step: int) -> None:
        """RESERVED -> COMMITTED for all steps up to this one: a checkpoint covers them."""
        ...

    def void(self, group: int, reason: str) -> None:
        """OPEN or READY -> VOID; refused (state) otherwise."""
        ...

    def reissue(self, group: int, version: Version) -> None:
        """Sample a group anew, with weights not older than ``version``: all its slots are pending
        again. OPEN or READY only; refused (state) otherwise."""
        ...

    def reopen(self, group: int, sample: int, reason: str) -> None:
        """Sample a sealed slot anew, because its segment is damaged: an attempt of its budget.
        OPEN or READY only; refused (state) otherwise."""
        ...

    def reconcile(self, step: int, consumed: Sequence[tuple[int, int]]) -> int:
        """Follow a checkpoint whose next step is ``step``: the groups of ``consumed`` (ranges of
        ids, both ends included) become COMMITTED, all other RESERVED and COMMITTED ones READY
        again, due at the step that they had (``Live.step``). How many those are. Groups whose
        slots were pruned are forgotten: they may be opened anew. Refused (void) if a consumed group
        is void here: then this ledger is another run's."""
        ...

    def prune(self, before_step: int) -> list[str]:
        """Forget the slots of groups that were committed at steps before this one, and of void
        ones; returns the segments that no other slot has a part of."""
        ...

    def weigh(self) -> None:
        """Weigh what is sealed and live and was not weighed: by a gateway without a limit, or by
        older code."""
        ...

    def lack(self, groups: int, seconds: float) -> None:
        """A trainer waits for so many groups; believed for so many seconds, or until it is said
        again."""
        ...

    def ask_judge(self, seconds: float, permits: Permits) -> bool:
        """Keep a permit of each unit for the trainer, which judges one group at a time: whether it
        may, in so many seconds. If not, no lease gets what becomes free; ask again soon."""
        ...

    def end_judging(self) -> None:
        """The trainer needs no permit any more."""
        ...

    # -- a gateway

    def lease(self, owner: str, lease_s: float) -> Lease | None:
        """The first pending slot: of the oldest version, there of the group that is expected to
        take longest (``OpenGroup.expected``), of equal ones the first; None if there is none.
        Expired leases are taken back first: an attempt more each, and of their budget."""
        ...

    def lease_many(self, owner: str, lease_s: float, most: int) -> list[Lease]:
        """At most so many pending slots, as ``lease`` gives them, in one transaction."""
        ...

    def lease_within(self, owner: str, lease_s: float, most: int, permits: Permits) -> Granted:
        """``lease_many``, but no more than there are permits for, over all gateways of the ledger.
        Over ``spool_bytes`` only groups that a trainer said that it lacks: first those that a step
        must have again, then as they are leased."""
        ...

    def used(self, permits: Permits) -> Used:
        """What is held now of the units that have a limit; 0 of others."""
        ...

    def find(self, token: str) -> Lease:
        """The lease of a token that may still act. Refused: unknown, fenced, expired, sealed,
        void."""
        ...

    def still(self, seen: int | None, ends: Collection[float], lease_s: float) -> bool:
        """Whether leases that end then may act for certain: ``changes`` are what was ``seen``
        before they were granted for ``lease_s`` seconds. Nothing is asked."""
        ...

    def check(self, tokens: Sequence[str], late: bool = False) -> list[LedgerRefusal | None]:
        """For each token why it may not act, as ``find`` would say (``late``: as ``seal`` would);
        None if it may."""
        ...

    def heartbeat(self, token: str, lease_s: float) -> float:
        """Extend a lease; returns when it expires. Refused as ``find`` does."""
        ...

    def start(self, token: str) -> None:
        """LEASED -> RUNNING, at the first call. Refused as ``find`` does; nothing if it runs."""
        ...

    def start_many(self, tokens: Sequence[str]) -> list[LedgerRefusal | None]:
        """``start`` each token, in one transaction: its refusal, or None. What is refused does not
        hinder the others."""
        ...

    def seal(self, token: str, sealed: Sealed) -> None:
        """LEASED or RUNNING -> SEALED, the group READY with the last one. The first seal wins;
        later ones are refused as ``find`` does. A lease that is past its time and was not taken
        back yet may still seal: its work is whole."""
        ...

    def seal_many(
        self, seals: Sequence[tuple[str, Sealed]], weigh: bool = False
    ) -> list[LedgerRefusal | None]:
        """``seal`` each token, in one transaction: its refusal, or None. What is refused does not
        hinder the others. With ``weigh`` their bytes count as ``spool_bytes``; rows of one record
        share it. ValueError, with nothing done, for a token that is there twice."""
        ...

    def fail(self, token: str, failure: Failure, reason: str) -> None:
        """The attempt ended without a result. Infra, env: the slot is pending again, or out of
        attempts: then its group is void (infra), unless ``min_group`` can still be met. Data: the
        group is void (data). Judge: refused as a ValueError, for such a sample is sealed. Refused
        as ``find`` does."""
        ...

    def cancel(self, tokens: Sequence[str], cause: str) -> list[LedgerRefusal | None]:
        """Give attempts back, in one transaction, for no fault of theirs: each slot is pending
        again with a new attempt, which costs nothing of its budget; for each token its refusal, as
        ``find`` does, or None. Counted as ``cancelled_<cause>``."""
        ...

    def expire(self) -> int:
        """Take back leases past their time, and those further ahead than they were granted for (a
        clock was set back); how many."""
        ...


def open_ledger(address: str, run: str) -> Ledger:
    """The ledger of a run: a file of SQLite (a path, on a local disk), or ``postgresql://...``,
    where each run has a schema of its own. It is made where there is none.

    ValueError if the file is another run's, or of a newer schema; ImportError, naming the extra,
    where PostgreSQL's client is not installed.
    """
    if address.startswith("postgresql://"):
        from jaxrl.pool.ledger_postgres import PostgresLedger

        return PostgresLedger(address, run)
    from jaxrl.pool.ledger_sqlite import SqliteLedger

    return SqliteLedger(address, run)
