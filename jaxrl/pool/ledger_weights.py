"""What sealed samples take on disk, as a ledger keeps it: of each, and of each group their sum.

Only where ``spool_bytes`` are limited (``jaxrl.pool.permits``); elsewhere nothing is weighed.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from jaxrl.pool.ledger import Sealed
from jaxrl.pool.ledger_schema import Rows


def weights(seals: Sequence[Sealed]) -> list[int]:
    """Bytes on disk of each: rows of one record share it, the first has what is left over."""
    rows = Counter((one.segment, one.offset) for one in seals)
    seen: set[tuple[str, int]] = set()
    found: list[int] = []
    for one in seals:
        record = (one.segment, one.offset)
        part, left = divmod(one.bytes, rows[record])
        found.append(part + (left if record not in seen else 0))
        seen.add(record)
    return found


def weigh_groups(db: Rows, groups: Iterable[int]) -> None:
    """Add up what the sealed samples of each group take."""
    db.many(
        "UPDATE rollout_groups SET bytes = (SELECT SUM(bytes) FROM slots "
        "WHERE grp = rollout_groups.id AND bytes IS NOT NULL) WHERE id = ?",
        [(group,) for group in groups],
    )
