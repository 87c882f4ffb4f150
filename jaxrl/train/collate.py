"""Groups of rollouts -> one padded Batch of numpy arrays.

Whatever is wrong with a rollout is refused and counted here, never repaired.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxrl.batch import ACTION, PAD, Batch, View
from jaxrl.pool.contract import Group, Tokenizer
from jaxrl.pool.rollout import Failure, Rollout, StopReason
from jaxrl.train import views
from jaxrl.train.packing import Packing

TOKEN_FACT = "token_"  # names of facts with a number for each token begin so

# Failures that are the policy's own: the reward that the verifier gave stands.
REWARDED = (Failure.NONE, Failure.POLICY_TIMEOUT)
NOT_SAMPLED = 65535  # Rollout.version_index of a token that no weights sampled

# Every count is in every answer, so that a curve starts at 0 and not where trouble does.
REJECTED = (
    "rejected_ragged",
    "rejected_long",
    "rejected_duplicate",
    "rejected_unscored",
    "nonfinite_logp",
)
INVALID = ("nonfinite_reward", "failed")

# name: (dtype, what stands on padding). Padding is such that every elementwise formula is finite
# there.
COLUMNS: Mapping[str, tuple[Any, float]] = {
    "tokens": (np.int32, 0),
    "position": (np.int32, 0),
    "segment": (np.int32, 0),
    "kind": (np.int32, PAD),
    "step": (np.int32, -1),
    "sampler_logp": (np.float32, 0.0),
    "version": (np.int32, -1),
    "temperature": (np.float32, 1.0),
}


@dataclasses.dataclass(frozen=True)
class Shown:
    """The views that an algorithm reads, and what laying them out takes."""

    templates: Mapping[str, str]
    token_buckets: Sequence[int]
    tokenizer: Tokenizer

    def lay_out(
        self, placed: Mapping[int, Rollout], rows: int, tokens: int, counts: Counter
    ) -> dict[str, View]:
        """Every view of the placed rollouts; what has no place is added to ``counts``."""
        groups: dict[int, list[Rollout]] = {}
        for rollout in placed.values():
            groups.setdefault(rollout.group_id, []).append(rollout)
        laid: dict[str, View] = {}
        for name, template in self.templates.items():
            laid[name], missed = views.lay_out(
                name,
                template,
                placed,
                groups,
                rows=rows,
                tokens=tokens,
                token_buckets=self.token_buckets,
                tokenizer=self.tokenizer,
            )
            for what, count in missed.items():
                counts[f"view_{what}"] = count
        return laid


def bucket(longest: int, token_buckets: Sequence[int]) -> int:
    """The smallest bucket that holds ``longest`` tokens; ValueError naming the buckets if none
    does."""
    for size in sorted(token_buckets):
        if longest <= size:
            return size
    raise ValueError(
        f"a row of {longest} tokens; allowed: at most max(train.token_buckets)={max(token_buckets)}"
    )


def _columns(rollout: Rollout) -> dict[str, np.ndarray]:
    """The per-token columns of one rollout, not padded; log-probs and temperatures where it acted
    only."""
    acted = rollout.kind == ACTION
    steps = np.array([version.step for version in rollout.versions] + [-1], np.int32)
    sampled = rollout.version_index != NOT_SAMPLED
    return {
        "tokens": rollout.tokens,
        "position": np.arange(len(rollout.tokens)),
        "segment": np.ones(len(rollout.tokens)),
        "kind": rollout.kind,
        "step": rollout.step,
        "sampler_logp": np.where(acted, rollout.logp, 0),
        "version": steps[np.where(sampled, rollout.version_index.astype(np.int64), -1)],
        "temperature": np.where(acted, rollout.temperature, 1),
    }


def _refusal(rollout: Rollout, longest: int, seen: set[tuple[int, int]]) -> str | None:
    """Why a record cannot be a row at all; None if it can. Raises ValueError for what is a setting,
    not an accident."""
    columns = (rollout.kind, rollout.step, rollout.logp, rollout.version_index, rollout.temperature)
    if any(len(column) != len(rollout.tokens) for column in columns):
        return "rejected_ragged"
    if len(rollout.tokens) > longest:
        return "rejected_long"
    if (rollout.group_id, rollout.sample) in seen:
        return "rejected_duplicate"
    acted = rollout.kind == ACTION
    if acted[:1].any():  # nothing stands before it, so no log-prob of it exists
        return "rejected_unscored"
    if not np.isfinite(rollout.logp[acted]).all():
        return "nonfinite_logp"
    if not (rollout.temperature[acted] > 0).all():
        raise ValueError(
            f"group {rollout.group_id} sample {rollout.sample}: "
            f"temperature={rollout.temperature[acted].min()}; "
            "allowed: > 0 (greedy samples are refused for training)"
        )
    return None


def _unusable(rollout: Rollout) -> str | None:
    """Why a well-formed record carries no reward to train on; None if it does."""
    if rollout.failure not in REWARDED or rollout.reward is None:
        return "failed"
    return None if math.isfinite(rollout.reward) else "nonfinite_reward"


def _slots(groups: Sequence[Group], groups_per_step: int, minibatches: int) -> list[Group | None]:
    """Groups in their slots. A short take is spread evenly, so that no update is left empty while
    another is full."""
    if len(groups) > groups_per_step:
        raise ValueError(
            f"{len(groups)} groups were taken; allowed: at most train.groups={groups_per_step}"
        )
    if groups_per_step % minibatches:
        raise ValueError(
            f"train.minibatches={minibatches}; allowed: divisors of train.groups={groups_per_step}"
        )
    slots: list[Group | None] = []
    for update in range(minibatches):
        first, last = (len(groups) * cut // minibatches for cut in (update, update + 1))
        share = list(groups[first:last])
        slots += share + [None] * (groups_per_step // minibatches - len(share))
    return slots


def _fact(name: str, rollout: Rollout) -> np.ndarray:
    """A fact as an array. Raises ValueError naming it if it is not made of numbers."""
    value = np.asarray(rollout.facts[name])
    if value.dtype.kind not in "biuf":
        raise ValueError(
            f"the fact {name!r} of group {rollout.group_id} sample {rollout.sample} is "
            f"{rollout.facts[name]!r}; allowed for an algorithm: numbers"
        )
    return value.astype(np.float32 if value.dtype.kind == "f" else np.int32)


def _facts(
    placed: Mapping[int, Rollout], needs: Sequence[str], rows: int, tokens: int, algorithm: str
) -> dict:
    """Facts that the algorithm asked for, 0 in empty slots. Those whose names begin with ``token_``
    have an entry for each token and are padded with 0, others go as they are. None where nothing
    is placed: then nobody knows their shapes. Raises ValueError naming the fact that is missing or
    of another shape."""
    facts = {}
    for name in needs:
        for rollout in placed.values():
            if name not in rollout.facts:
                raise ValueError(
                    f"algorithm {algorithm!r} needs the fact {name!r}, which group "
                    f"{rollout.group_id} sample "
                    f"{rollout.sample} lacks; it has: {sorted(rollout.facts)}"
                )
        values = {row: _fact(name, rollout) for row, rollout in placed.items()}
        if name.startswith(TOKEN_FACT):
            for row, rollout in placed.items():
                length = len(rollout.tokens)
                if values[row].shape[:1] != (length,):
                    raise ValueError(
                        f"the fact {name!r} of group {rollout.group_id} sample {rollout.sample} "
                        f"has shape {values[row].shape}; allowed: ({length}, ...), an entry for "
                        "each token"
                    )
            values = {
                row: np.pad(value, ((0, tokens - len(value)), *((0, 0),) * (value.ndim - 1)))
                for row, value in values.items()
            }
        shapes = {value.shape for value in values.values()}
        if len(shapes) > 1:
            raise ValueError(
                f"the fact {name!r} comes in shapes {sorted(shapes)}; allowed: one shape a take"
            )
        if values:
            example = next(iter(values.values()))
            dtype = np.result_type(*values.values())  # a grade of 1 stands beside one of 0.5
            wide = np.float32 if dtype.kind == "f" else np.int32
            facts[name] = np.zeros((rows, *example.shape), wide)
            for row, value in values.items():
                facts[name][row] = value
    return facts


def _place(
    slots: Sequence[Group | None], rollouts_per_group: int, longest: int
) -> tuple[dict[int, Rollout], np.ndarray, Counter]:
    """Accepted rollouts by row, the group label of every row, and counts. Empty slots get labels of
    their own."""
    placed: dict[int, Rollout] = {}
    labels = -1 - np.arange(len(slots)).repeat(rollouts_per_group)
    counts: Counter = Counter()
    seen: set[tuple[int, int]] = set()
    for slot, group in enumerate(slots):
        if group is None:
            continue
        if len(group.rollouts) > rollouts_per_group:
            raise ValueError(
                f"group {group.id} has {len(group.rollouts)} rollouts; allowed: at most "
                f"pool.rollouts_per_group={rollouts_per_group}"
            )
        if not 0 <= group.id < 2**31 or group.id in labels:
            raise ValueError(f"group id {group.id}; allowed: 0 .. 2**31 - 1, each once a take")
        row = slot * rollouts_per_group
        labels[row : row + rollouts_per_group] = group.id
        for rollout in group.rollouts:
            if rollout.group_id != group.id:
                raise ValueError(
                    f"a rollout of group {rollout.group_id} lies in group {group.id}; allowed: its "
                    "own"
                )
            refusal = _refusal(rollout, longest, seen)
            if refusal is not None:
                counts[refusal] += 1
                continue
            seen.add((rollout.group_id, rollout.sample))
            placed[row] = rollout
            row += 1
    return placed, labels, counts


def duplicate_frac(rollouts: Sequence[Rollout]) -> float:
    """Share of rollouts whose token ids repeat those of another of their group: 1 - distinct / all;
    0 for none."""
    distinct = {(rollout.group_id, rollout.tokens.tobytes()) for rollout in rollouts}
    return 1 - len(distinct) / len(rollouts) if rollouts else 0.0


def form(
    rows: int,
    tokens: int,
    *,
    minibatches: int,
    facts: Mapping[str, Any],
    views: Mapping[str, int],
    where: NamedSharding,
) -> Batch:
    """A Batch as shapes: what ``collate`` makes of a full take, its rows lying ``where``; ``views``
    are names and lengths of their rows.
    """
    arrays = _blank(np.zeros(rows, np.int32), tokens, minibatches)

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    def view(length: int) -> View:
        row = np.zeros((rows, length), np.int32)
        return View(row, row, row, np.zeros((rows, tokens), np.int32))  # pyright: ignore

    laid = {name: view(length) for name, length in views.items()}
    return jax.tree.map(shape, Batch(**arrays, facts=facts, views=laid))


def _blank(labels: np.ndarray, tokens: int, minibatches: int) -> dict[str, Any]:
    """The arrays of a Batch in which nothing is placed, by the label of each row's group."""
    rows = len(labels)
    arrays: dict[str, Any] = {
        name: np.full((rows, tokens), fill, dtype) for name, (dtype, fill) in COLUMNS.items()
    }
    return arrays | {
        "rollout": np.arange(rows, dtype=np.int32),
        "reward": np.zeros(rows, np.float32),
        "valid": np.zeros(rows, bool),
        "truncated": np.zeros(rows, bool),
        "group": labels.astype(np.int32),
        "minibatch": np.arange(minibatches, dtype=np.int32).repeat(rows // minibatches),
        "branch_weight": np.ones(rows, np.float32),
    }


def collate(
    groups: Sequence[Group],
    *,
    token_buckets: Sequence[int],
    groups_per_step: int,
    rollouts_per_group: int,
    minibatches: int,
    needs: Sequence[str],
    algorithm: str,
    shown: Shown | None = None,
    packing: Packing | None = None,
) -> tuple[Batch, dict[str, float]]:
    """Lay whole groups out as rows, padded to the smallest bucket that holds the longest.

    Rows are ``groups_per_step * rollouts_per_group`` whatever was taken; a group's slots are
    contiguous, and slots that nothing fills are padding: kind PAD, not valid, a label that no group
    has. A take without a usable rollout is a Batch without a valid one (a skipped step).

    Counts (rollouts, all names always present): ``rejected_ragged`` columns of different lengths;
    ``rejected_long`` longer than the last bucket; ``rejected_duplicate`` a (group, sample) seen
    before; ``rejected_unscored`` acts at the very first token; ``nonfinite_logp``; and among those
    that stay in the batch but are not valid ``nonfinite_reward`` and ``failed``. ``duplicate_frac``
    is a fraction. ``shown`` are the views to lay out, each with two counts more (see ``views``).
    With ``packing`` the batch carries packed rows beside the plain ones, if they fit (see
    ``Packing.lay_out``, with three counts more).

    Raises ValueError for a needed fact that is missing, a greedy sample, a group too many or too
    large, an id twice.
    """
    longest = max(token_buckets)
    slots = _slots(groups, groups_per_step, minibatches)
    placed, labels, counts = _place(slots, rollouts_per_group, longest)
    rows = len(labels)
    tokens = bucket(
        max((len(rollout.tokens) for rollout in placed.values()), default=0), token_buckets
    )

    arrays = _blank(labels, tokens, minibatches)
    for row, rollout in placed.items():
        for name, column in _columns(rollout).items():
            arrays[name][row, : len(column)] = column
        trouble = _unusable(rollout)
        if trouble is not None:
            counts[trouble] += 1
            continue
        arrays["reward"][row], arrays["valid"][row] = rollout.reward, True
        arrays["truncated"][row] = rollout.stop_reason in (
            StopReason.LENGTH,
            StopReason.CONTEXT_LIMIT,
        )
    laid = shown.lay_out(placed, rows, tokens, counts) if shown else {}
    batch = Batch(**arrays, facts=_facts(placed, needs, rows, tokens, algorithm), views=laid)
    if packing is not None:
        usable = {row: rollout for row, rollout in placed.items() if arrays["valid"][row]}
        packed, more = packing.lay_out(usable, groups_per_step, rollouts_per_group, tokens)
        batch = dataclasses.replace(batch, packed=packed)
        counts.update(more)
    names = dict.fromkeys((*REJECTED, *INVALID, *counts))
    counted = {name: float(counts[name]) for name in names}
    return batch, counted | {"duplicate_frac": duplicate_frac(list(placed.values()))}
