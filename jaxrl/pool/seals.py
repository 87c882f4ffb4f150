"""What attempts come to, written to the spool and taken by the ledger. No jax here."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.pool.answers import Attempt, Limits
from jaxrl.pool.contract import Tokenizer
from jaxrl.pool.ledger import Ledger, LedgerRefusal, Sealed
from jaxrl.pool.records import Outcome, Records, is_plain, read_outcome
from jaxrl.pool.rollout import ACTION, Rollout, check_all
from jaxrl.pool.segments import Placed, Spool
from jaxrl.pool.spool import encode
from jaxrl.pool.turns import Part

# What reading a worker's words raises: they are wrong, and one integer may be more than a float is.
WRONG = (ValueError, TypeError, AttributeError, OverflowError)


class Seals:
    """Seals attempts, many at once, from a thread that may wait for a disk."""

    def __init__(self, ledger: Ledger, spool: Spool, tokenizer: Tokenizer, limits: Limits) -> None:
        self._ledger, self._spool = ledger, spool
        self._tokenizer, self._limits = tokenizer, limits

    def sealed(
        self, attempts: Mapping[str, Attempt], told: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Exception]:
        """What could not be sealed, and why. Plain verdicts on attempts that stand in columns are
        sealed together; of the others each is looked at by itself."""
        alike = [token for token, one in attempts.items() if one.said and is_plain(told[token])]
        failed: dict[str, Exception] = {}
        try:
            failed |= self._sealed_together({t: attempts[t] for t in alike}, told)
        except WRONG:  # of one of them: each is looked at by itself
            alike = []
        except OSError as error:
            failed |= dict.fromkeys(alike, error)
        outcomes: dict[str, Outcome] = {}
        for token in attempts.keys() - set(alike):
            try:
                outcomes[token] = read_outcome(told[token])
            except WRONG as error:
                failed[token] = error
        rest = {token: attempts[token] for token in told if token in outcomes}
        return failed | (self._sealed_apart(rest, outcomes) if rest else {})

    def _sealed_together(
        self, attempts: Mapping[str, Attempt], told: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Exception]:
        """Attempts that stand in columns, as a record of each turn. ValueError or TypeError, with
        nothing written, for what JSON has not; OSError."""
        parts: dict[int, Part] = {}
        for token, one in attempts.items():
            if one.said is None:
                continue
            turn, row = one.said
            part = parts.get(id(turn)) or parts.setdefault(id(turn), Part(turn, one.began))
            part.rows.append((row, one.lease, told[token]))
        if not parts:
            return {}
        data = [part.encode(self._limits.run_id) for part in parts.values()]
        first = next(iter(attempts.values())).lease
        places = self._spool.seal((first.group, first.sample, first.attempt), data)
        pairs = zip(parts.values(), places, strict=True)
        # A row of another attempt's slot is refused with the rest of its seal: nothing names it.
        return self._taken([seal for part, at in pairs for seal in part.seals(at)])

    def _taken(self, seals: Sequence[tuple[str, Sealed]]) -> dict[str, Exception]:
        """Have the ledger take what is in one segment; what it refuses."""
        told = self._ledger.seal_many(seals, self._limits.permits.spool_bytes > 0)
        if all(told):
            self._spool.gc([seals[0][1].segment])
        return _refused([token for token, _ in seals], told)

    def _sealed_apart(
        self, attempts: Mapping[str, Attempt], outcomes: Mapping[str, Outcome]
    ) -> dict[str, Exception]:
        """Attempts as their conversations tell them."""
        failed: dict[str, Exception] = {}
        trained: dict[str, Rollout] = {}
        data: list[bytes] = []
        limits = self._limits
        records = Records(self._tokenizer, limits.run_id, limits.max_feedback_tokens)
        whole: list[str] = []
        try:
            # Another one may have sealed, or failed it: then nothing is written.
            may = zip(attempts, self._ledger.check(list(attempts), late=True), strict=True)
            for token, refusal in may:
                try:
                    if refusal:
                        raise refusal
                    one = attempts[token]
                    times = {"dispatched": one.began, "sealed": time.time()}
                    facts = {"generate_s": one.generate_s}
                    records.add(one.lease, one.conversation, outcomes[token], times, facts)
                    whole.append(token)
                except (LedgerRefusal, *WRONG) as error:
                    failed[token] = error
            made = records.rollouts()
            checked = _all_fit(made)
            for token, branches in zip(whole, made, strict=True):
                try:
                    data.append(b"".join([encode(one, checked=checked) for one in branches]))
                    trained[token] = branches[0]
                except WRONG as error:
                    failed[token] = error
            if not trained:
                return failed
            first = attempts[next(iter(trained))].lease
            places = self._spool.seal((first.group, first.sample, first.attempt), data)
            seals = zip(trained, map(_told, trained.values(), places), strict=True)
            return failed | self._taken(list(seals))
        except OSError as error:
            return {token: failed.get(token, error) for token in attempts}


def _told(trained: Rollout, placed: Placed) -> Sealed:
    """What the ledger keeps of an attempt's trained branch."""
    return Sealed(
        **placed._asdict(),
        min_version=min(trained.versions),
        max_version=max(trained.versions),
        reward=trained.reward,
        failure=trained.failure,
        stop_reason=trained.stop_reason,
        correct=trained.correct,
        tokens=int(np.count_nonzero(trained.kind == ACTION)),
    )


def _refused(tokens: Iterable[str], told: Sequence[LedgerRefusal | None]) -> dict[str, Exception]:
    """The tokens that the ledger refuses, and why."""
    return {token: why for token, why in zip(tokens, told, strict=True) if why}


def _all_fit(made: Iterable[Sequence[Rollout]]) -> bool:
    """Whether all branches of attempts fit together: else each is looked at by itself."""
    try:
        check_all([branch for branches in made for branch in branches])
    except ValueError:
        return False
    return True
