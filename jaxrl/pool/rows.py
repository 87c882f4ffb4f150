"""Many rollouts as one record, in columns: what a sample costs is paid once for all of them.

They are alike: a prompt and one answer each, of one version. The header holds what they share
(run_id, version, temperature, times, facts; ``tasks``: of each group key, content hash, split,
source and facts) and ``rows`` (ROWS: lists of JSON values, one for each rollout). The columns are
prompts and answers, one after the other, with their lengths, and the answers' log-probs. All else
of a rollout's arrays follows from these.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.pool.rollout import (
    ACTION,
    NOT_SAMPLED,
    PROMPT,
    TYPES,
    Failure,
    Rollout,
    StopReason,
    Version,
    check_all,
    check_schema,
)

# Values of each rollout, in the header; ``task`` is its place among the tasks.
ROWS = (
    "task",
    "group_id",
    "sample",
    "attempt",
    "reward",
    "reward_components",
    "correct",
    "failure",
    "stop_reason",
    "text",
    "facts",
)
LENGTH = np.dtype("<u4")


def to_columns(
    prompts: Sequence[Sequence[int]], counts: np.ndarray, tokens: np.ndarray, logp: np.ndarray
) -> dict[str, np.ndarray]:
    """The numbers: ``tokens`` and ``logp`` [token] of the answers, ``counts`` [row] of each."""
    return {
        "prompts": np.array([token for prompt in prompts for token in prompt], TYPES["tokens"]),
        "prompt_counts": np.array([len(prompt) for prompt in prompts], LENGTH),
        "tokens": tokens.astype(TYPES["tokens"], copy=False),
        "counts": counts.astype(LENGTH, copy=False),
        "logp": logp.astype(TYPES["logp"], copy=False),
    }


def rollouts(header: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> list[Rollout]:
    """All that a record holds, checked. ValueError for a newer schema, for
    what does not fit together, and whatever ``Rollout.check`` refuses."""
    check_schema(header.get("schema_version"))
    arrays, ends = _arrays(header, columns)
    rows, tasks = header["rows"], header["tasks"]
    version = Version(*header["version"])
    made: list[Rollout] = []
    start = 0
    for end, *values in zip(ends, *(rows[name] for name in ROWS), strict=True):
        row = dict(zip(ROWS, values, strict=True))
        task_key, content_hash, split, source, facts = tasks[row.pop("task")]
        row["facts"] = {**facts, **row["facts"], **header["facts"]}
        row["failure"] = Failure(row["failure"])
        row["stop_reason"] = StopReason(row["stop_reason"])
        made.append(
            Rollout(
                run_id=header["run_id"],
                task_key=task_key,
                content_hash=content_hash,
                split=split,
                source=source,
                **{name: array[start:end] for name, array in arrays.items()},
                versions=(version,),
                times=header["times"],
                **row,
            )
        )
        start = end
    check_all(made)
    return made


def _arrays(
    header: Mapping[str, Any], columns: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], list[int]]:
    """Token arrays of all rollouts, one after the other, and where each ends."""
    parts = np.stack([columns["prompt_counts"], columns["counts"]], 1).astype(np.int64)
    kind = np.repeat(np.tile([PROMPT, ACTION], len(parts)), parts.ravel())
    acted = kind == ACTION
    tokens = np.empty(len(kind), TYPES["tokens"])
    logp = np.zeros(len(kind), TYPES["logp"])
    tokens[~acted], tokens[acted] = columns["prompts"], columns["tokens"]
    logp[acted] = columns["logp"]
    found = {
        "tokens": tokens,
        "kind": kind,
        "step": np.where(acted, 0, -1),
        "logp": logp,
        "version_index": np.where(acted, 0, NOT_SAMPLED),
        "temperature": np.where(acted, header["temperature"], 1.0),
    }
    arrays = {name: found[name].astype(dtype, copy=False) for name, dtype in TYPES.items()}
    return arrays, np.cumsum(parts.sum(1)).tolist()
