"""A rollout: the facts of one attempt at a prompt, as every later method may need them. No advantage is computed here."""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SCHEMA_VERSION = 1

# Kinds of tokens; jaxrl.batch holds the same numbers for the device.
PAD, PROMPT, ACTION, FEEDBACK, INJECTED = range(5)


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
    """Whose fault a missing or untrainable rollout is; only NONE and POLICY_TIMEOUT may carry a reward."""

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
    """One attempt. Arrays have one entry a token, prompt and response together; there is no split, only kinds.

    ``logp`` is the sampler's, in nats under ``temperature``, 0 where the policy did not act. ``version_index`` points into
    ``versions`` (65535: not sampled). ``reward`` is None where a failure forbids one.
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
    temperature: np.ndarray  # float32 [token]
    versions: Sequence[Version]
    reward: float | None
    reward_components: Mapping[str, float]
    correct: bool  # the verifier's full mark; what accuracy counts
    stop_reason: StopReason
    failure: Failure
    text: str  # decoded response, for people and verifiers; never re-tokenised
    facts: Mapping[str, Any]
    times: Mapping[str, float]  # seconds since the epoch

    @property
    def idempotency_key(self) -> str:
        """Names this attempt for ever: H(run, group, sample, attempt)."""
        raise NotImplementedError
