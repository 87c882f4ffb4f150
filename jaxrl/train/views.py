"""Rollouts behind another context: templates of ``config.scorers.views`` -> rows of a View.

A template is text with placeholders for token ids; text between them is encoded by the run's
tokenizer, what was sampled is never encoded again.

    {prompt}    the rollout's own tokens before its first action
    {history}   the same for each of the agent's steps: all that came before its action
    {response}  with {prompt}: all from the first action on, without feedback at the end; with
                {history}: the step's action
    {feedback}  the environment's answer: after the last action, or after the step's
    {solution}  the response of the first right sibling that said something else, else the fact
                ``solution`` (the task's own answer) and the end token
    {wrong}     the response of the first wrong sibling that said something else

With {history} a view row holds one segment for each step, else one. The tokens of {response} and of
{feedback} are found at their place there (``View.index``). A step whose placeholders cannot be
filled has no segment; a rollout that has none, or that does not fit into the last bucket, has no
place in the view. No sibling with the rollout's own tokens or text is ever shown to it; the task's
own answer is, also to a rollout that gave it.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.batch import ACTION, FEEDBACK, View
from jaxrl.pool.contract import Tokenizer
from jaxrl.pool.rollout import Rollout

PLACEHOLDERS = ("prompt", "history", "response", "feedback", "solution", "wrong")
SCORED = ("response", "feedback")  # parts whose tokens have a place in the view
_PART = re.compile(r"\{([^{}]*)\}")

# Ids, and for each the column of the rollout that it is, or -1.
Piece = tuple[np.ndarray, np.ndarray]


def check(views: Mapping[str, str]) -> None:
    """Raises ValueError naming the view for an unknown placeholder or a brace of none, one that
    comes twice, a template without {response} or with both {prompt} and {history}, and a view
    called plain."""
    for name, template in views.items():
        where = f"scorers.views.{name}={template!r}"
        if not isinstance(template, str):
            raise ValueError(f"{where}; allowed: a text with placeholders")
        found = _PART.findall(template)
        if name == "plain":
            raise ValueError(f"{where}: plain is the rollout as it was")
        unknown = sorted(set(found) - set(PLACEHOLDERS))
        if unknown:
            raise ValueError(f"{where}: {unknown} are unknown; allowed: {', '.join(PLACEHOLDERS)}")
        if {"{", "}"} & set(_PART.sub("", template)):
            raise ValueError(f"{where}: a brace opens or closes nothing; allowed: in placeholders")
        if "response" not in found or len(set(found)) != len(found):
            raise ValueError(f"{where}; allowed: {{response}} once, others at most once")
        if {"prompt", "history"} <= set(found):
            raise ValueError(f"{where}; allowed: {{prompt}} or {{history}}, not both")


def _spans(rollout: Rollout, by_step: bool) -> list[dict[str, np.ndarray]]:
    """Columns of the rollout's own parts: once, or once for each step that acts."""
    columns = np.arange(len(rollout.tokens))
    acted, told = rollout.kind == ACTION, rollout.kind == FEEDBACK
    if not acted.any():
        return []
    if not by_step:
        first, last = columns[acted][[0, -1]]
        return [
            {
                "prompt": columns[:first],
                "response": columns[first : last + 1],
                "feedback": columns[told & (columns > last)],
            }
        ]
    spans = []
    for step in np.unique(rollout.step[acted]):
        mine = columns[acted & (rollout.step == step)]
        spans.append(
            {
                "history": columns[: mine[0]],
                "response": mine,
                "feedback": columns[told & (rollout.step == step) & (columns > mine[-1])],
            }
        )
    return spans


def _response(rollout: Rollout) -> np.ndarray:
    return rollout.tokens[rollout.kind == ACTION].astype(np.int64)


def _repeats(one: Rollout, other: Rollout) -> bool:
    """Whether two rollouts said the same, perhaps in other tokens."""
    if np.array_equal(_response(one), _response(other)):
        return True
    return bool(one.text) and one.text == other.text


def _sibling(
    rollout: Rollout, group: Sequence[Rollout], correct: bool, tokenizer: Tokenizer
) -> np.ndarray | None:
    """The tokens that {solution} or {wrong} stands for; None if there are none."""
    for other in group:
        if other.reward is None or other.correct != correct or _repeats(rollout, other):
            continue
        if (theirs := _response(other)).size:
            return theirs
    if correct and rollout.facts.get("solution"):
        shown = [*tokenizer.encode(str(rollout.facts["solution"])), tokenizer.eos_id]
        return np.array(shown, np.int64)
    return None


def _piece(
    template: str,
    own: Mapping[str, np.ndarray],
    shown: Mapping[str, Any],
    rollout: Rollout,
    encode: Callable[[str], Sequence[int]],
) -> Piece | None:
    """One segment; None if a placeholder cannot be filled."""
    ids: list[np.ndarray] = []
    columns: list[np.ndarray] = []
    for number, part in enumerate(_PART.split(template)):
        if number % 2 == 0:
            literal = np.array(encode(part) if part else [], np.int64)
            ids.append(literal)
            columns.append(np.full(len(literal), -1))
        elif part in own:
            if part == "feedback" and not own[part].size:
                return None
            found = own[part] if part in SCORED else np.full(len(own[part]), -1)
            ids.append(rollout.tokens[own[part]].astype(np.int64))
            columns.append(found)
        else:
            if shown[part] is None:
                return None
            ids.append(shown[part])
            columns.append(np.full(len(shown[part]), -1))
    return np.concatenate(ids), np.concatenate(columns)


def pieces(
    template: str, rollout: Rollout, group: Sequence[Rollout], tokenizer: Tokenizer
) -> list[Piece]:
    """The segments of a rollout's row under a template; [] if it has no place in the view."""
    shown: dict[str, Any] = {}
    if "{solution}" in template:
        shown["solution"] = _sibling(rollout, group, True, tokenizer)
    if "{wrong}" in template:
        shown["wrong"] = _sibling(rollout, group, False, tokenizer)
    spans = _spans(rollout, "{history}" in template)
    found = [_piece(template, own, shown, rollout, tokenizer.encode) for own in spans]
    return [piece for piece in found if piece is not None]


def lay_out(
    name: str,
    template: str,
    placed: Mapping[int, Rollout],
    groups: Mapping[int, Sequence[Rollout]],
    *,
    rows: int,
    tokens: int,
    token_buckets: Sequence[int],
    tokenizer: Tokenizer,
) -> tuple[View, Counter]:
    """Rows of one view, padded to the smallest bucket that holds the longest.

    ``placed`` maps rows to rollouts, ``groups`` group ids to theirs, ``tokens`` is the width of the
    plain row. Counts: ``<name>_missing`` rollouts whose placeholders cannot be filled,
    ``<name>_long`` those over the last bucket.
    """
    longest = max(token_buckets)
    counts = Counter({f"{name}_missing": 0, f"{name}_long": 0})
    laid: dict[int, list[Piece]] = {}
    for row, rollout in placed.items():
        found = pieces(template, rollout, groups[rollout.group_id], tokenizer)
        size = sum(len(ids) for ids, _ in found)
        if not found:
            counts[f"{name}_missing"] += 1
        elif size > longest:
            counts[f"{name}_long"] += 1
        else:
            laid[row] = found
    widest = max((sum(len(ids) for ids, _ in found) for found in laid.values()), default=0)
    width = min(bucket for bucket in token_buckets if bucket >= widest)
    arrays: dict[str, Any] = {
        name: np.zeros((rows, width), np.int32) for name in ("tokens", "position", "segment")
    }
    index: Any = np.full((rows, tokens), -1, np.int32)
    for row, found in laid.items():
        start = 0
        for number, (ids, columns) in enumerate(found):
            places = np.arange(start, start + len(ids))
            arrays["tokens"][row, places] = ids
            arrays["position"][row, places] = np.arange(len(ids))
            arrays["segment"][row, places] = number + 1
            # Nothing predicts the first token of a segment; the first place of all says so itself.
            own = (columns >= 0) & ((places > start) | (places == 0))
            index[row, columns[own]] = places[own]
            start += len(ids)
    return View(**arrays, index=index), counts
