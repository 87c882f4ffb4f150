"""One answer to each of many tasks' own prompts, in columns: attempts without an agent. No jax.

These are most of what a gateway has to do, and what it does for each of them is all that it costs.
So they are looked at together and kept together, as long as there is nothing to be said of one
alone: answers of several versions, or one that has a fault, go the way of agents' (``answers``),
and so does an attempt that asks again (``Turn.call``).
"""

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.pool.compact import compact
from jaxrl.pool.contract import Request, Tokenizer
from jaxrl.pool.conversation import Call
from jaxrl.pool.engines import Sampled
from jaxrl.pool.ledger import Lease, Sealed
from jaxrl.pool.rollout import ROUNDING, TYPES, Failure, StopReason, Version
from jaxrl.pool.rows import to_columns
from jaxrl.pool.segments import Placed
from jaxrl.pool.spool import encode_rows


class Said(NamedTuple):
    """What is told of an answer."""

    text: str
    stop_reason: StopReason


@dataclasses.dataclass(frozen=True)
class Turn:
    """Answers that one version sampled: a row for each attempt."""

    names: Sequence[str]  # of the attempts, as the spool knows them
    prompts: Sequence[Sequence[int]]
    counts: np.ndarray  # [row] tokens of the answers
    tokens: np.ndarray  # uint32 [token], terminators included
    logp: np.ndarray  # float32 [token]
    version: Version
    temperature: float
    stop_reasons: Sequence[StopReason]
    texts: Sequence[str]
    request: str  # digest, as of a call
    seconds: float  # that they took, all together

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        requests: Sequence[Request],
        answers: Sequence[Sampled],
        tokenizer: Tokenizer,
        request: str,
        seconds: float,
    ) -> "Turn":
        """Answers that ``fit``, to requests for the tasks' own prompts."""
        chained = itertools.chain.from_iterable
        return cls(
            names=names,
            prompts=[one.prompt for one in requests],
            counts=np.array([len(one.tokens) for one in answers], ARRAYS["counts"]),
            tokens=np.array(list(chained([one.tokens for one in answers])), ARRAYS["tokens"]),
            logp=np.array(list(chained([one.logp for one in answers])), ARRAYS["logp"]),
            version=answers[0].versions[0],
            temperature=requests[0].temperature,
            stop_reasons=[one.stop_reason for one in answers],
            texts=[tokenizer.decode(one.tokens) for one in answers],
            request=request,
            seconds=seconds,
        )

    def encode(self) -> bytes:
        """As one line of JSON; numbers come back bit for bit."""
        told = vars(self) | {name: vars(self)[name].tolist() for name in ARRAYS}
        return compact(told)

    @classmethod
    def decode(cls, data: bytes) -> "Turn":
        """The inverse of ``encode``. ValueError for anything else."""
        try:
            told = json.loads(data)
            told |= {name: np.array(told[name], dtype) for name, dtype in ARRAYS.items()}
            told["version"] = Version(**told["version"])
            told["stop_reasons"] = [StopReason(one) for one in told["stop_reasons"]]
            return cls(**told)
        except (TypeError, KeyError) as error:
            raise ValueError(f"no turn of attempts: {error}") from error

    def said(self) -> list[Said]:
        """What is told of each answer."""
        return list(map(Said, self.texts, self.stop_reasons))

    def call(self, row: int) -> Call:
        """A row as the first call of its attempt."""
        end = int(self.counts[: row + 1].sum())
        mine = slice(end - int(self.counts[row]), end)
        return Call(
            index=0,
            parent=-1,
            context=list(self.prompts[row]),
            tokens=self.tokens[mine].tolist(),
            logp=self.logp[mine].tolist(),
            version_index=[0] * int(self.counts[row]),
            versions=[self.version],
            temperature=self.temperature,
            stop_reason=self.stop_reasons[row],
            text=self.texts[row],
            chain="",
            shown="",
            tools="",
            drift="",
            request=self.request,
            trainable=True,
        )


ARRAYS = {"counts": np.dtype(np.int64), "tokens": TYPES["tokens"], "logp": TYPES["logp"]}


def calls_of(name: str, data: bytes) -> list[Call]:
    """What a line of a journal holds of the attempt of a name: its call, of whichever kind."""
    if not data.startswith(b'{"counts":'):
        return [Call.decode(data)]
    turn = Turn.decode(data)
    return [turn.call(row) for row, one in enumerate(turn.names) if one == name]


def fit(answers: Sequence[Sampled], oldest: tuple[int, int], most: int) -> bool:
    """Whether answers may stand in one turn: whole, of one version, which is the oldest (epoch and
    step) or newer, and with no more than ``most`` ids each. What is wrong of which one is not said
    here."""
    versions = answers[0].versions
    counts = [len(one.tokens) for one in answers]
    logp = list(itertools.chain.from_iterable([one.logp for one in answers]))
    return (
        len(versions) == 1
        and (versions[0].epoch, versions[0].step) >= oldest
        and all([one.versions == versions and one.trainable for one in answers])
        and 0 < min(counts) <= max(counts) <= most
        and counts == [len(one.logp) for one in answers]
        and counts == [len(one.version_index) for one in answers]
        and not any(itertools.chain.from_iterable([one.version_index for one in answers]))
        and math.isfinite(sum(logp))
        and max(logp) <= ROUNDING
    )


class Part:
    """Rows of a turn that are sealed together, each with its lease and what a worker says of it."""

    def __init__(self, turn: Turn, began: float) -> None:
        self._turn, self._began = turn, began
        self.rows: list[tuple[int, Lease, Mapping[str, Any]]] = []

    def encode(self, run_id: str) -> bytes:
        """As one record. ValueError or TypeError for what JSON has not."""
        turn, self.rows = self._turn, sorted(self.rows, key=lambda row: row[0])
        places, leases, told = zip(*self.rows, strict=True)
        groups = {lease.group: lease for lease in leases}
        tasks = {group: place for place, group in enumerate(groups)}
        shared = {
            "run_id": run_id,
            "version": dataclasses.astuple(turn.version),
            "temperature": turn.temperature,
            "times": {"dispatched": self._began, "sealed": time.time()},
            "facts": {"generate_s": turn.seconds, "calls": 1, "branches": 1, "branch": 0},
            "tasks": [
                (one.task_key, one.content_hash, one.split, one.source, one.facts)
                for one in groups.values()
            ],
        }
        rows = {
            "task": [tasks[lease.group] for lease in leases],
            "group_id": [lease.group for lease in leases],
            "sample": [lease.sample for lease in leases],
            "attempt": [lease.attempt for lease in leases],
            "reward": [one.get("reward") for one in told],
            "reward_components": [one.get("components", {}) for one in told],
            "correct": [one.get("correct", False) for one in told],
            "failure": [one.get("failure", Failure.NONE) for one in told],
            "stop_reason": [turn.stop_reasons[place] for place in places],
            "text": [turn.texts[place] for place in places],
            "facts": [one.get("facts", {}) for one in told],
        }
        mine = np.isin(np.arange(len(turn.counts)), places)
        sampled = np.repeat(mine, turn.counts)
        columns = to_columns(
            [turn.prompts[place] for place in places],
            turn.counts[mine],
            turn.tokens[sampled],
            turn.logp[sampled],
        )
        return encode_rows(shared, rows, columns)

    def seals(self, place: Placed) -> list[tuple[str, Sealed]]:
        """What the ledger is told of each attempt. What has no reward waits for its judge."""
        turn, counts = self._turn, self._turn.counts.tolist()
        shared = (*place, turn.version, turn.version)
        seals: list[tuple[str, Sealed]] = []
        for number, (row, lease, told) in enumerate(self.rows):
            reward = told.get("reward")
            failure = Failure.JUDGE if reward is None else Failure.NONE
            mine = (reward, failure, turn.stop_reasons[row], told.get("correct", False))
            seals.append((lease.token, Sealed._make(shared + mine + (counts[row], number))))
        return seals
