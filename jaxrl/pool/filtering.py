"""Which recorded rollouts a student may copy: of each problem the shortest that is right and sound.

Source: the filter of ExpDis, arXiv 2610.10536, as its authors' code has it. Rewards and novelty
rank nothing: they were the explorer's business.
"""

import os
import pathlib
from collections.abc import Iterable

from jaxrl.pool.rollout import ACTION, Failure, Rollout, StopReason
from jaxrl.pool.spool import SUFFIX, Writer, read

# Why a rollout is refused, in the order of asking; each is a count.
REASONS = ("failed", "incorrect", "unfinished", "empty", "looping")


def loops(text: str, *, characters: int, repeats: int) -> bool:
    """Whether some span of so many characters comes ``repeats`` times in a row.

    That is a stretch of characters * (repeats - 1) places that all equal the one ``characters``
    further on.
    """
    stretch = 0
    for one, other in zip(text, text[characters:], strict=False):
        stretch = stretch + 1 if one == other else 0
        if stretch == characters * (repeats - 1):
            return True
    return False


def refusal(rollout: Rollout, *, characters: int, repeats: int) -> str | None:
    """The first of REASONS that speaks against a rollout; None if none does.

    Unfinished is whatever did not stop by itself: cut off by a limit of length, time or tools.
    """
    if rollout.failure is not Failure.NONE:
        return "failed"
    if not rollout.correct:
        return "incorrect"
    if rollout.stop_reason is not StopReason.STOP:
        return "unfinished"
    if not (rollout.kind == ACTION).any():
        return "empty"
    return "looping" if loops(rollout.text, characters=characters, repeats=repeats) else None


def _order(rollout: Rollout) -> tuple[int, str, str, str]:
    """Shortest first; the rest makes ties independent of who was read first."""
    length = int((rollout.kind == ACTION).sum())
    return length, rollout.text, rollout.digest, rollout.idempotency_key


def survivors(
    rollouts: Iterable[Rollout], *, limit: int, characters: int, repeats: int
) -> tuple[list[Rollout], dict[str, int]]:
    """At most one rollout for each content hash, at most ``limit`` (> 0) in the order of hashes.

    The order of ``rollouts`` does not matter, and survivors survive again. Returns them with
    counts: ``read``, one for each of REASONS, ``longer`` (right and sound, but not the shortest),
    ``over_limit``, ``kept``.
    """
    counts = {"read": 0, **dict.fromkeys(REASONS, 0), "longer": 0}
    best: dict[str, Rollout] = {}
    for rollout in rollouts:
        counts["read"] += 1
        reason = refusal(rollout, characters=characters, repeats=repeats)
        if reason is not None:
            counts[reason] += 1
            continue
        other = best.get(rollout.content_hash)
        counts["longer"] += other is not None
        if other is None or _order(rollout) < _order(other):
            best[rollout.content_hash] = rollout
    kept = [best[problem] for problem in sorted(best)[:limit]]
    return kept, counts | {"over_limit": len(best) - len(kept), "kept": len(kept)}


def distil(
    records: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    run_id: str,
    limit: int,
    characters: int,
    repeats: int,
) -> dict[str, int]:
    """Write the survivors of a run's records in a directory to ``target/survivors.rollouts``.

    Records of other runs that lie there do not count. The same records give the same bytes,
    whatever lay at the target, which must not be below ``records``. Returns the counts of
    ``survivors``; where none was kept the file has no record.
    FileNotFoundError without records, RecordError, naming file and offset, for a damaged one.
    """
    files = sorted(pathlib.Path(records).glob("**/*" + SUFFIX))
    if not files:
        raise FileNotFoundError(f"{records}: no file of rollouts (*{SUFFIX}) there")
    found = (rollout for file in files for rollout in read(file) if rollout.run_id == run_id)
    kept, counts = survivors(found, limit=limit, characters=characters, repeats=repeats)
    with Writer(pathlib.Path(target) / f"survivors{SUFFIX}") as writer:
        for rollout in kept:
            writer.append(rollout)
    return counts
