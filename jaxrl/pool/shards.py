"""Disjoint parts of a task split, by content hash: rounds of training that share no prompt."""

import hashlib
from collections.abc import Sequence

from jaxrl.pool.contract import Question


def of_shard(tasks: Sequence[Question], shard: tuple[int, int]) -> list[Question]:
    """The tasks of part ``shard[0]`` of ``shard[1]``, in their order; (0, 1) holds all.

    A task's part depends on its content hash alone, so the parts share no prompt whatever the size
    of the data set, and equal prompts fall into one part. ValueError unless 0 <= shard[0] <
    shard[1].
    """
    part, parts = shard
    if not 0 <= part < parts:
        raise ValueError(f"shard={shard!r}; allowed: (part, parts) with 0 <= part < parts")
    return [task for task in tasks if _number(task) % parts == part]


def _number(task: Question) -> int:
    # Hashed once more: the split already looks at the high bits of the content hash.
    digest = hashlib.blake2b(f"shard {task.content_hash}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
