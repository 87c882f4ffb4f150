"""A rollout: the facts of one attempt at a prompt, as every later method may need them.

No advantage is computed here.
"""

import dataclasses
import enum
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

SCHEMA_VERSION = 2  # 1 knew no records of many rollouts

# Kinds of tokens; jaxrl.batch holds the same numbers for the device.
PAD, PROMPT, ACTION, FEEDBACK, INJECTED = range(5)

# Token arrays of a rollout and their types, on disk little-endian. Temperature is no half: the
# trainer divides by it.
COLUMNS: Mapping[str, str] = {
    "tokens": "<u4",
    "kind": "<u1",
    "step": "<i4",
    "logp": "<f4",
    "version_index": "<u2",
    "temperature": "<f4",
}
TYPES = {name: np.dtype(dtype) for name, dtype in COLUMNS.items()}
NOT_SAMPLED = 65535  # version_index of a token that no policy sampled
ROUNDING = 1e-6  # nats by which a float32 log-prob may come out above 0

# Columns that a fact may have beside numbers and text: named arrays, an open set.
FACT_COLUMN = "facts/"
# The fact that holds recorded routes: int [token, layer, k], experts, -1 where none was recorded.
ROUTES = "token_routes"


class RaggedError(ValueError):
    """Token arrays of one rollout that do not fit each other."""


class StopReason(enum.StrEnum):
    """Why generation ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_LIMIT = "tool-limit"
    TIME_LIMIT = "time-limit"
    CONTEXT_LIMIT = "context-limit"
    ABORTED = "aborted"
    PARSE_ERROR = "parse-error"


class Failure(enum.StrEnum):
    """Whose fault a missing or untrainable rollout is; only NONE and POLICY_TIMEOUT may carry a
    reward."""

    NONE = "none"
    INFRA = "infra"
    ENV = "env"
    DATA = "data"
    POLICY_TIMEOUT = "policy-timeout"
    JUDGE = "judge"


@dataclasses.dataclass(frozen=True, order=True)
class Version:
    """Which weights: after a rollback the epoch grows, so a reused step number never aliases."""

    epoch: int
    step: int
    digest: str


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One attempt. Arrays have one entry a token, prompt and response together; there is no split,
    only kinds.

    ``logp`` is the sampler's, in nats under ``temperature``, 0 where the policy did not act.
    ``version_index`` points into ``versions`` (65535: not sampled). ``reward`` is None where a
    failure forbids one.
    """

    run_id: str
    group_id: int
    sample: int
    attempt: int
    task_key: str
    content_hash: str  # of the task
    split: str
    source: str
    tokens: np.ndarray  # uint32 [token]
    kind: np.ndarray  # uint8 [token]
    step: np.ndarray  # int32 [token], -1 outside of the agent's steps
    logp: np.ndarray  # float32 [token]
    version_index: np.ndarray  # uint16 [token]
    temperature: np.ndarray  # float32 [token], 1 where nothing was sampled
    versions: Sequence[Version]
    reward: float | None
    reward_components: Mapping[str, float]
    correct: bool  # the verifier's full mark; what accuracy counts
    stop_reason: StopReason
    failure: Failure
    text: str  # decoded response, for people and verifiers; never re-tokenised
    facts: Mapping[str, Any]  # JSON values, or arrays
    times: Mapping[str, float]  # seconds since the epoch

    def check(self) -> None:
        """Refuse what does not fit together. Called wherever a rollout enters: at the pool and when
        read from disk.

        RaggedError if the arrays' lengths differ; ValueError, naming the field, for a wrong type or
        kind, a version that is not in the table, a log-prob above 0 or not finite, a temperature
        that is not positive, a reward that is not finite or that the failure forbids. Nothing is
        repaired.
        """
        self._check_lengths()
        self._check_outcome()
        _check_numbers([self])

    def _check_outcome(self) -> None:
        if self.reward is not None:
            if not math.isfinite(self.reward):
                raise ValueError(
                    f"reward={self.reward!r}; allowed: a finite number, or None beside a failure"
                )
            if self.failure not in (Failure.NONE, Failure.POLICY_TIMEOUT):
                raise ValueError(
                    f"reward={self.reward!r} with failure={self.failure.value!r}; allowed: None"
                )
        elif self.failure is Failure.NONE:
            raise ValueError("reward=None with failure='none'; allowed: a finite number")

    def _check_lengths(self) -> None:
        lengths: dict[str, int] = {}
        for name, dtype in TYPES.items():
            array = self.__dict__[name]
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != dtype:
                shape = (
                    f"{array.dtype}{list(array.shape)}"
                    if isinstance(array, np.ndarray)
                    else type(array).__name__
                )
                raise ValueError(f"{name} is {shape}; allowed: {dtype.name}[token]")
            lengths[name] = len(array)
        if len(set(lengths.values())) > 1:
            raise RaggedError(
                f"token arrays differ in length: {lengths}; allowed: one length for all"
            )

    @property
    def idempotency_key(self) -> str:
        """Names this attempt for ever: H(run, group, sample, attempt)."""
        numbers = f"{self.group_id},{self.sample},{self.attempt}"
        identity = f"[{json.dumps(self.run_id)},{numbers}]"
        return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()

    @property
    def digest(self) -> str:
        """Hex digest of what was observed: tokens, log-probs, weights, outcome; not of identity,
        lineage or times."""
        hasher = hashlib.blake2b(digest_size=16)
        for name, dtype in COLUMNS.items():
            hasher.update(self.__dict__[name].astype(dtype).tobytes())
        outcome = [
            self.content_hash,
            # Not the epoch: steps that are run again after a restart observe the same.
            [(version.step, version.digest) for version in self.versions],
            self.reward,
            self.correct,
            self.stop_reason,
            self.failure,
        ]
        hasher.update(json.dumps(outcome, separators=(",", ":")).encode())
        return hasher.hexdigest()

    def to_header(self) -> dict[str, Any]:
        """Everything but the arrays, as JSON values, with ``schema_version`` and the idempotency
        key."""
        header: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "idempotency_key": self.idempotency_key,
        }
        header |= vars(self)
        for name in COLUMNS:
            del header[name]
        header["versions"] = [(one.epoch, one.step, one.digest) for one in self.versions]
        header["reward_components"] = dict(self.reward_components)
        header["times"] = dict(self.times)
        header["facts"] = {
            name: fact for name, fact in self.facts.items() if not isinstance(fact, np.ndarray)
        }
        return header

    def to_columns(self) -> dict[str, np.ndarray]:
        """The token arrays, and those of the facts under ``facts/``, little-endian."""
        columns = {
            name: self.__dict__[name].astype(dtype, copy=False) for name, dtype in TYPES.items()
        }
        for name, fact in self.facts.items():
            if isinstance(fact, np.ndarray):
                columns[FACT_COLUMN + name] = fact.astype(fact.dtype.newbyteorder("<"))
        return columns

    @classmethod
    def from_header(cls, header: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> "Rollout":
        """The inverse of ``to_header`` and ``to_columns``, checked.

        ValueError for a newer schema, a missing field or column, and whatever ``check`` refuses.
        """
        check_schema(header.get("schema_version"))
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: header[name] for name in known if name in header}
        values |= {
            name: columns[name].astype(dtype[1:])
            for name, dtype in COLUMNS.items()
            if name in columns
        }
        if missing := sorted(known - set(values)):
            raise ValueError(f"record lacks {', '.join(missing)}")
        values["versions"] = tuple(Version(*version) for version in values["versions"])
        values["stop_reason"] = StopReason(values["stop_reason"])
        values["failure"] = Failure(values["failure"])
        arrays = {
            name.removeprefix(FACT_COLUMN): columns[name]
            for name in columns
            if name.startswith(FACT_COLUMN)
        }
        values["facts"] = {**values["facts"], **arrays}
        rollout = cls(**values)
        rollout.check()
        return rollout


def check_all(rollouts: Sequence[Rollout]) -> None:
    """``check`` of each; quicker, for their numbers are looked at together."""
    for rollout in rollouts:
        rollout._check_lengths()
        rollout._check_outcome()
    if rollouts:
        _check_numbers(rollouts)


def _check_numbers(rollouts: Sequence[Rollout]) -> None:
    """What stands in the token arrays, of all rollouts at once."""

    def column(name: str) -> np.ndarray:
        found = [rollout.__dict__[name] for rollout in rollouts]
        return found[0] if len(found) == 1 else np.concatenate(found)

    kind = column("kind")
    if not kind.size:
        return
    if kind.max() > INJECTED:
        raise ValueError(f"kind={kind.max()} is unknown; allowed: 0..{INJECTED}")
    index, least = column("version_index"), min(len(rollout.versions) for rollout in rollouts)
    if (wrong := (index != NOT_SAMPLED) & (index >= least)).any():
        known = np.repeat([len(r.versions) for r in rollouts], [len(r.tokens) for r in rollouts])
        if (wrong := wrong & (index >= known)).any():
            raise ValueError(
                f"version_index={index[wrong].max()}; allowed: < {known[wrong][0]} or {NOT_SAMPLED}"
            )
    # Not a number comes out of a minimum and a maximum as such, and fits no bound.
    logp = column("logp")
    if not (logp.min() > -math.inf and logp.max() <= ROUNDING):
        possible = (logp <= ROUNDING) & np.isfinite(logp)
        raise ValueError(f"logp={logp[~possible][0]}; allowed: finite, at most 0 nats")
    temperature = column("temperature")
    worst = temperature.min()
    if not (worst > 0 and temperature.max() < math.inf):
        raise ValueError(f"temperature={worst}; allowed: > 0, greedy is refused for training")


def check_schema(version: Any) -> None:
    """ValueError for anything but a schema version that this code reads; a newer one is named as
    such."""
    if not isinstance(version, int) or version < 1:
        raise ValueError(f"schema_version={version!r}; allowed: 1..{SCHEMA_VERSION}")
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"schema_version={version} is newer than this jaxrl reads; "
            f"allowed: 1..{SCHEMA_VERSION}. Update jaxrl"
        )


def digest_of(rollouts: Iterable[Rollout]) -> str:
    """Content hash of a group: of its rollouts' digests, in order."""
    hasher = hashlib.blake2b(digest_size=16)
    for rollout in rollouts:
        hasher.update(rollout.digest.encode())
    return hasher.hexdigest()


def judged(rollouts: Sequence[Rollout]) -> tuple[np.ndarray, dict[str, list[Any]]]:
    """What ``keep`` sees of a group: rewards [rollout] (NaN where there is none) and facts, each a
    list [rollout]."""
    rewards = np.array([np.nan if r.reward is None else r.reward for r in rollouts], np.float64)
    names = sorted({name for rollout in rollouts for name in rollout.facts})
    return rewards, {name: [rollout.facts.get(name) for rollout in rollouts] for name in names}
