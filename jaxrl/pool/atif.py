"""Rollouts as documents of the Agent Trajectory Interchange Format, version 1.7. No jax here.

One document is one attempt. Its root is the branch of the last call, which is the trained one; what
else the attempt holds (a history that was compacted or changed, a subagent of the same URL) stands
in ``subagent_trajectories``, a whole trajectory for each branch from its first call to its last.
``session_id`` names the attempt, ``trajectory_id`` the branch.

    prompt     a user's step; a system's before it where the run's own system message is in it
    action     an agent's step: ids and log-probs in ``metrics``
    injected   an agent's step without log-probs; ``is_copied_context`` where an earlier branch of
               the attempt has the call as an action
    feedback   the observation of the agent's step before it, if that called tools or nothing
               follows; else a user's step

``metrics.prompt_token_ids`` is all that a call read. Ids that no call sampled stand in the
``extra`` of their own step or result (``token_ids``), so the steps one after the other give the
rollout's tokens; ``kind``, ``step`` and ``loss_eligible`` stand beside them, and ``version_index``
(into ``extra.versions`` of the trajectory; null: not sampled) and ``temperature`` in
``metrics.extra``, a value for each token. A column that says nothing is left out: log-prob 0, no
version, temperature 1. All else of a record is the trajectory's ``extra``: identity, reward and its
components, stop reason, failure, facts. An attempt without a reward has null there. Numbers that
are not finite, which JSON has not, are "NaN", "Infinity" and "-Infinity".

Not in records, so not told: times of single steps, definitions of tools (a template writes them
into the prompt's text), the ids that an agent was shown for its tool calls. Several results of one
step are one observation: where one ends is not recorded.

Source: the models of Harbor's package 0.26.0 (harbor/models/trajectories), which take versions 1.0
to 1.8 and say what each added; the format itself is Harbor's docs/rfcs/0001-trajectory-format.md.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.pool.contract import Tokenizer
from jaxrl.pool.dialogue import answer_message, called
from jaxrl.pool.records import write_facts
from jaxrl.pool.rollout import ACTION, FEEDBACK, INJECTED, NOT_SAMPLED, PROMPT, Rollout, Version

SCHEMA = "ATIF-v1.7"
KINDS = ("pad", "prompt", "action", "feedback", "injected")  # names of the numbers

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Reader:
    """How ids become text: the run's tokenizer, and the system message of its chat template."""

    tokenizer: Tokenizer
    system: str


class _Run(NamedTuple):
    """Tokens of one kind and step that stand together."""

    start: int
    end: int
    kind: int
    step: int


def branch_of(rollout: Rollout) -> int:
    """Which branch of its attempt a record is; 0 is the trained one."""
    return int(rollout.facts.get("branch", 0))


def name_of(rollout: Rollout) -> str:
    """group-sample-attempt."""
    return f"{rollout.group_id}-{rollout.sample}-{rollout.attempt}"


def document(branches: Sequence[Rollout], agent: Mapping[str, Any], reader: Reader | None) -> Json:
    """The branches of one attempt, those that could be read, as one document.

    ``agent`` has name and version. Without a ``reader`` only an answer that is alone in its branch
    has a text. ValueError for a branch without a token: the format has no trajectory without steps.
    """
    made = [_trajectory(one, branches[:place], agent, reader) for place, one in enumerate(branches)]
    first, *rest = made
    whole = int(branches[0].facts.get("branches", len(branches)))
    if len(branches) != whole:
        first["notes"] = f"{len(branches)} of {whole} branches could be read"
    return first | ({"subagent_trajectories": rest} if rest else {})


def _trajectory(
    rollout: Rollout, earlier: Sequence[Rollout], agent: Mapping[str, Any], reader: Reader | None
) -> Json:
    session, branch = f"{rollout.run_id}/{name_of(rollout)}", branch_of(rollout)
    steps = _Steps(rollout, earlier, reader).made()
    if not steps:
        raise ValueError(f"{session} branch {branch} has no token; allowed: one or more")
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    header = rollout.to_header() | {
        "digest": rollout.digest,
        "branch": branch,
        "trained_branch": branch == 0,
        "facts": write_facts(rollout.facts),
        "versions": [dataclasses.asdict(version) for version in rollout.versions],
    }
    single = len(rollout.versions) == 1
    return {
        "schema_version": SCHEMA,
        "session_id": session,
        "trajectory_id": f"{session}/{branch}",
        "agent": dict(agent) | ({"model_name": _model(rollout.versions[0])} if single else {}),
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(one["prompt_tokens"] for one in metrics),
            "total_completion_tokens": sum(one["completion_tokens"] for one in metrics),
            "total_steps": len(steps),
            "extra": {"action_tokens": int(np.count_nonzero(rollout.kind == ACTION))},
        },
        "extra": _finite(header),
    }


def _model(version: Version) -> str:
    """The name that published weights have."""
    return f"v={version.epoch}-{version.step}"


def _finite(value: Any) -> Any:
    """A nest with numbers that JSON has."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


class _Steps:
    """The steps of one branch."""

    def __init__(self, rollout: Rollout, earlier: Sequence[Rollout], reader: Reader | None) -> None:
        self._rollout, self._earlier, self._reader = rollout, earlier, reader
        self._ids: list[int] = rollout.tokens.tolist()
        self._runs = _runs(rollout)
        self._steps: list[Json] = []

    def made(self) -> list[Json]:
        """All of them, in order."""
        for run in self._runs:
            if run.kind in (ACTION, INJECTED):
                self._answer(run)
            elif run.kind == FEEDBACK and self._observed(run):
                self._observe(run)
            else:
                self._ask(run)
        return self._steps

    def _add(self, source: str, message: str, **more: Any) -> None:
        number = len(self._steps) + 1
        self._steps.append({"step_id": number, "source": source, "message": message, **more})

    # -- what nobody sampled

    def _ask(self, run: _Run) -> None:
        text, ids = self._asked(run), self._ids[run.start : run.end]
        reader = self._reader
        if run == self._runs[0] and run.kind == PROMPT and reader and reader.system:
            if reader.tokenizer.prompt(text) == ids:
                extra = {"kind": KINDS[PROMPT], "step": run.step, "token_ids": []}
                self._add("system", reader.system, extra=extra)
        self._add("user", text, extra=self._own(run))

    def _observed(self, run: _Run) -> bool:
        """Whether feedback is the observation of the step before it."""
        if not self._steps or self._steps[-1]["source"] != "agent":
            return False
        return "tool_calls" in self._steps[-1] or run == self._runs[-1]

    def _observe(self, run: _Run) -> None:
        step = self._steps[-1]
        results = step.setdefault("observation", {"results": []})["results"]
        calls = step.get("tool_calls", ())
        result: Json = {"extra": self._own(run)}
        if len(calls) == 1:
            result["source_call_id"] = calls[0]["tool_call_id"]
        if self._reader:
            result["content"] = self._asked(run)
        results.append(result)

    def _asked(self, run: _Run) -> str:
        """The text of what a model read; control tokens show if it is no plain question."""
        ids = self._ids[run.start : run.end]
        return self._reader.tokenizer.question(ids) if self._reader else ""

    def _own(self, run: _Run) -> Json:
        told = {
            "kind": KINDS[run.kind],
            "step": run.step,
            "token_ids": self._ids[run.start : run.end],
        }
        columns = self._columns(run, all_of_them=False)
        return told | columns

    # -- what a model wrote

    def _answer(self, run: _Run) -> None:
        number = len(self._steps) + 1
        said = answer_message(self._said(run), str(number))
        more: Json = {"extra": {"kind": KINDS[run.kind], "step": run.step}}
        more["extra"]["loss_eligible"] = run.kind == ACTION
        if made := said.get("tool_calls"):
            pairs = zip(made, called(said), strict=True)
            more["tool_calls"] = [_tool_call(one["id"], read) for one, read in pairs]
        index = self._rollout.version_index[run.start : run.end]
        sampled = run.kind == ACTION and bool((index != NOT_SAMPLED).any())
        columns = self._columns(run, all_of_them=sampled)
        metrics: Json = {
            "prompt_tokens": run.start,
            "completion_tokens": run.end - run.start,
            "prompt_token_ids": self._ids[: run.start],
            "completion_token_ids": self._ids[run.start : run.end],
        }
        if run.kind == ACTION and "logp" in columns:
            metrics["logprobs"] = columns.pop("logp")
        more["metrics"] = metrics | ({"extra": columns} if columns else {})
        if sampled:
            more["llm_call_count"] = 1
        used = sorted({int(one) for one in index if one != NOT_SAMPLED})
        if len(used) == 1 and len(self._rollout.versions) > 1:
            more["model_name"] = _model(self._rollout.versions[used[0]])
        if run.kind == INJECTED and self._copied(run):
            more["is_copied_context"] = True
        self._add("agent", said["content"] or "", **more)

    def _said(self, run: _Run) -> str:
        """The text of an answer. The record has that of all answers in one; what a stop text cut
        off is in the ids of one of several, and not in the record's."""
        answers = [one for one in self._runs if one.kind in (ACTION, INJECTED)]
        if len(answers) == 1:
            return self._rollout.text
        return self._reader.tokenizer.decode(self._ids[run.start : run.end]) if self._reader else ""

    def _copied(self, run: _Run) -> bool:
        """Whether an earlier branch has the same ids up to here, and these as actions."""
        ids = self._rollout.tokens[: run.end]
        return any(
            np.array_equal(one.tokens[: run.end], ids)
            and bool((one.kind[run.start : run.end] == ACTION).all())
            for one in self._earlier
        )

    def _columns(self, run: _Run, *, all_of_them: bool) -> Json:
        """Log-probs, versions and temperatures of a run; those that say nothing only if asked."""
        mine, rollout = slice(run.start, run.end), self._rollout
        logp, index = rollout.logp[mine], rollout.version_index[mine]
        temperature = rollout.temperature[mine]
        told: Json = {}
        if all_of_them or logp.any() or np.signbit(logp).any():
            told["logp"] = logp.tolist()
        if all_of_them or (index != NOT_SAMPLED).any():
            told["version_index"] = [None if one == NOT_SAMPLED else one for one in index.tolist()]
        if all_of_them or (temperature != 1).any():
            told["temperature"] = temperature.tolist()
        return told


def _runs(rollout: Rollout) -> list[_Run]:
    """The tokens cut wherever kind or step change."""
    kind, step = rollout.kind, rollout.step
    if not len(kind):
        return []
    cuts = np.flatnonzero((kind[1:] != kind[:-1]) | (step[1:] != step[:-1])) + 1
    edges = [0, *cuts.tolist(), len(kind)]
    pairs = zip(edges, edges[1:], strict=False)
    return [_Run(start, end, int(kind[start]), int(step[start])) for start, end in pairs]


def _tool_call(name: str, read: Mapping[str, Any]) -> Json:
    """A tool call; arguments that are no object, which the format wants, stand in its extra."""
    told: Json = {"tool_call_id": name, "function_name": read["name"], "arguments": {}}
    if isinstance(read["arguments"], dict):
        return told | {"arguments": _finite(read["arguments"])}
    return told | {"extra": {"arguments": _finite(read["arguments"])}}
