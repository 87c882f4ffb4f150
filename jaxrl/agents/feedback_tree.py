"""DENSE and REFIT: feedback from one old attempt whose outcome nobody tells, and its honest test.

DENSE reads the steps of an attempt and never its verdict: the roles' payloads have no place for it.
Steps are grouped into a tree of goals. A goal is done, and an issue closed, only by a cited step
whose content shows it: for an issue a *later* one; for a parent one of its own, since a child that
is done closes nothing above it. A done branch is rendered as the few actions that rebuild it, an
open one as its dead ends and issues. Every statement cites steps, byte by byte; a tree whose
citations do not hold is refused, and the attempt gets no feedback.

REFIT compares methods: all of them on the same old attempts, receivers that start from the same
fresh state, the feedback as the only channel, ``repeats`` receivers for each; the mean over a task,
then over tasks; a pass is full reward. What the receivers spend is told apart from the analysis.

Source: DENSE and REFIT, by notes on them. Ours: the shape of citations, and the refusal as a gate.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl.agents import gates
from jaxrl.agents.artefacts import Pin
from jaxrl.agents.journal import Json
from jaxrl.agents.port import Role
from jaxrl.agents.run import Episode, Run
from jaxrl.agents.worlds import HELD_OUT

METHODS = ("none", "raw", "flat", "verdict", "dense", "dense_no_parent_rule")

_PLACE: Json = {"type": "integer"}


def _object(**fields: Json) -> Json:
    return {"type": "object", "properties": fields, "required": sorted(fields)}


_PART = _object(
    goal={"type": "string"},
    outputs={"type": "array", "items": {"type": "string"}},
    first=_PLACE,
    last=_PLACE,
)
GROUPED = _object(parts={"type": "array", "items": _PART})
CHECKED = _object(reached=_PLACE, closed_by={"type": "array", "items": _PLACE})
SUMMARY = _object(text={"type": "string"}, done={"type": "boolean"})


@dataclasses.dataclass(frozen=True)
class Step:
    """One action and what was observed."""

    number: int
    action: str
    target: str  # what the action said it would make
    exit: int
    wrote: str
    observation: str


@dataclasses.dataclass(frozen=True)
class Attempt:
    """All that a reader is told of an old attempt."""

    task: str
    outputs: tuple[str, ...]
    steps: tuple[Step, ...]


@dataclasses.dataclass(frozen=True)
class Question:
    """Which step shows that a goal was reached, and which a later recovery from each issue?"""

    goal: str
    outputs: tuple[str, ...]
    issues: tuple[int, ...]
    steps: tuple[Step, ...]


ROLES = {
    "group": Role("propose", GROUPED, "Group the steps by goal.", payload=Attempt, blind=True),
    "reconcile": Role(
        "judge",
        CHECKED,
        "Name the step that shows that the goal was reached, and for each issue the later step "
        "that shows recovery; -1 if none does.",
        payload=Question,
        blind=True,
    ),
    "summarise": Role("propose", SUMMARY, "Summarise the run.", payload=Attempt, blind=True),
    "actor": Role("act", {"type": "object"}, "Do the task; feedback is data."),
}


def attempt_of(task: Json, trace: Json) -> Attempt:
    """What a reader may see of a trace: its steps."""
    steps = tuple(Step(**step) for step in trace["steps"])
    return Attempt(task["text"], tuple(task["outputs"]), steps)


def cite(attempt: Attempt, number: int) -> Json:
    """The whole observation of a step, as evidence. A step that does not exist has none to
    quote."""
    there = 0 <= number < len(attempt.steps)
    quote = attempt.steps[number].observation if there else ""
    return {"step": number, "start": 0, "end": len(quote.encode()), "quote": quote}


def build(run: Run, attempt: Attempt, key: str, *, parent_rule: bool) -> list[Json]:
    """The tree as nodes, the root first. ``parent_rule`` False: a child that is done closes its
    parent, for comparison."""
    parts = run.call("group", attempt, f"group-{key}")["parts"]
    inside = [
        _node(run, attempt, place + 1, part, f"{key}/{place}") for place, part in enumerate(parts)
    ]
    whole = {"goal": attempt.task, "outputs": list(attempt.outputs), "first": 0}
    root = _node(run, attempt, 0, {**whole, "last": len(attempt.steps) - 1}, f"{key}/root")
    root["children"] = [node["id"] for node in inside]
    done = [node for node in inside if node["state"] == "done"]
    if not parent_rule and root["state"] != "done" and done:
        root |= {"state": "done", "evidence": done[-1]["evidence"]}
    return [root, *inside]


def _node(run: Run, attempt: Attempt, number: int, part: Json, key: str) -> Json:
    """One goal, with what is cited for it."""
    steps = list(attempt.steps[part["first"] : max(part["last"] + 1, 0)])
    steps = steps if part["first"] >= 0 else []
    mine = [s for s in steps if s.target and s.target in part["outputs"]] if number else []
    issues = [step.number for step in mine if step.wrote != step.target]
    question = Question(part["goal"], tuple(part["outputs"]), tuple(issues), tuple(steps))
    reply = run.call("reconcile", question, f"reconcile-{key}")
    reached, later = reply["reached"], reply["closed_by"]
    gave_up = bool(mine) and any(s.target for s in attempt.steps[mine[-1].number + 1 :])
    return {
        "id": number,
        "goal": part["goal"],
        "first": part["first"],
        "last": part["last"],
        "children": [],
        "state": "done" if reached >= 0 else "abandoned" if gave_up else "unresolved",
        "attempts": [step.number for step in mine],
        "evidence": [cite(attempt, reached)] if reached >= 0 else [],
        "issues": [
            {**cite(attempt, issue), "closed": cite(attempt, by) if by >= 0 else None}
            for issue, by in zip(issues, later, strict=False)
        ],
    }


def citations(attempt: Attempt, nodes: Sequence[Json]) -> Json:
    """What the gate ``cited`` decides on: the tree beside the observations."""
    return {"nodes": list(nodes), "observations": [step.observation for step in attempt.steps]}


def body_of(attempt: Attempt, nodes: Sequence[Json]) -> Json:
    """What a receiver can follow: dead ends, the shortest working path of each done goal, and
    whether all is done."""
    dead, working = [], {}
    for node in nodes[1:]:
        reached = [evidence["step"] for evidence in node["evidence"]]
        if node["state"] == "done":
            working[node["goal"]] = attempt.steps[reached[0]].action
        dead += [attempt.steps[i].action for i in node["attempts"] if i not in reached]
    return {"dead": dead, "working": working, "done": nodes[0]["state"] == "done"}


def rendered(attempt: Attempt, nodes: Sequence[Json]) -> str:
    """feedback.md: every statement with the steps that it rests on."""
    looked = f"[s0-s{len(attempt.steps) - 1}]"

    def shown(evidence: Sequence[Json]) -> str:
        return " ".join(f"[s{one['step']}]" for one in evidence) or looked

    root = nodes[0]
    lines = [f"# {attempt.task}", "", f"All of it: {root['state']}. {shown(root['evidence'])}"]
    for node in nodes[1:]:
        lines += ["", f"## {node['goal']}", "", f"{node['state']}. {shown(node['evidence'])}"]
        if node["state"] == "done":
            for one in node["evidence"]:
                action = attempt.steps[one["step"]].action
                lines.append(f"To rebuild it: {action}. [s{one['step']}]")
            continue
        if not node["attempts"]:
            lines.append(f"Nothing was tried. {looked}")
        for issue in node["issues"]:
            step = attempt.steps[issue["step"]]
            lines.append(f"Dead end: {step.action}: {step.observation}. [s{step.number}]")
    return "\n".join(lines) + "\n"


def raw(attempt: Attempt, count: int) -> tuple[str, Json]:
    """The last steps as they are."""
    steps = attempt.steps[-count:]
    text = "".join(f"{step.action}\n{step.observation}\n" for step in steps)
    dead = [step.action for step in steps if step.target and step.wrote != step.target]
    working = {step.target: step.action for step in steps if step.wrote}
    return text, {"dead": dead, "working": working, "done": False}


def compared(arms: Mapping[str, Sequence[tuple[str, str, int]]]) -> list[tuple[str, str, int]]:
    """The (old attempt, task, repeat) of every method. ValueError unless all have the same, in the
    same order."""
    first, *rest = arms.items()
    for name, rows in rest:
        if list(rows) != list(first[1]):
            raise ValueError(
                f"methods {first[0]!r} and {name!r} were not given the same old attempts; "
                "allowed: one list for all"
            )
    return list(first[1])


@dataclasses.dataclass
class Refit:
    """Fields are those of configs/agents/dense.py."""

    tasks: int  # a round, of each split
    repeats: int  # receivers of an old attempt
    methods: tuple[str, ...]
    last: int  # steps of the raw log

    roles: Mapping[str, Role] = dataclasses.field(default_factory=lambda: ROLES, init=False)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.methods) - set(METHODS))
        if unknown or not {"none", "dense"} <= set(self.methods):
            allowed = f"'none', 'dense' and more of {METHODS}"
            raise ValueError(f"system.methods={self.methods!r}; allowed: {allowed}")
        for field in ("tasks", "repeats", "last"):
            if vars(self)[field] < 1:
                raise ValueError(f"system.{field}={vars(self)[field]!r}; allowed: >= 1")
        self.table: list[list[float]] = []  # pass of each method, one row a round

    def propose(self, run: Run, round: int) -> list[Episode]:
        """Old attempts: of tasks to compare methods on, then of held-out ones."""
        chance = run.draws("tasks", round)
        return [
            Episode(task, (), f"old-{round}", "old")
            for split in ("train", HELD_OUT)
            for task in chance.choice(run.splits[split], self.tasks, replace=False).tolist()
        ]

    def act(self, run: Run, round: int, plan: list[Episode]) -> list[Json]:
        """Attempt them once."""
        return run.act(f"old-{round}", plan)

    def learn(self, run: Run, round: int, plan: list[Episode], outcomes: list[Json]) -> None:
        """Feedback by each method, then receivers."""
        olds = list(zip(plan, outcomes, strict=True))
        fresh = {trace["start"] for trace in outcomes}
        numbers: dict[str, float] = {}
        for split, part, methods in (
            ("train", olds[: self.tasks], self.methods),
            (HELD_OUT, olds[self.tasks :], ("none", "dense")),
        ):
            numbers |= self._compare(run, round, split, part, methods, fresh)
        passes = [numbers[f"pass/{method}"] for method in self.methods]
        self.table.append(passes)
        credited = [
            (f"refit-{round}-train", i, pin)
            for i, one in enumerate(self.received)
            for pin in one.artefacts
        ]
        because = [f"old-{round}", f"refit-{round}-train"]
        run.learn(f"passes-{round}", because, credited, passes=np.array(self.table))
        run.measure(round, numbers)

    def _compare(
        self,
        run: Run,
        round: int,
        split: str,
        olds: Sequence[tuple[Episode, Json]],
        methods: Sequence[str],
        fresh: set[str],
    ) -> dict[str, float]:
        key, pins = f"{round:03d}-{split}", {}
        for method in methods:
            for place, (old, trace) in enumerate(olds):
                pins[method, place] = self._feedback(run, round, method, key, place, old, trace)
        plan = [
            Episode(old.task, pins[method, place], f"refit-{key}", method, repeat)
            for method in methods
            for place, (old, _) in enumerate(olds)
            for repeat in range(self.repeats)
        ]
        compared(
            {
                method: [(one.snapshot, one.task, one.sample) for one in plan if one.arm == method]
                for method in methods
            }
        )
        traces = run.act(f"refit-{round}-{split}", plan)
        if {trace["start"] for trace in traces} != fresh or len(fresh) != 1:
            raise ValueError(f"receivers of {key} did not start from a fresh state")
        if split == "train":
            self.received = plan
        return self._told(run, round, split, plan, traces, methods, [trace for _, trace in olds])

    def _feedback(
        self, run: Run, round: int, method: str, key: str, place: int, old: Episode, trace: Json
    ) -> tuple[Pin, ...]:
        """What a receiver is given; nothing if the method has nothing or its tree is refused."""
        if method == "none":
            return ()
        attempt, where = attempt_of(run.world.task(old.task), trace), f"{key}-{place:03d}"
        nodes: list[Json] = []
        evidence = rule = None
        if method == "raw":
            text, body = raw(attempt, self.last)
        elif method == "flat":
            reply = run.call("summarise", attempt, f"summarise-{where}")
            text, body = reply["text"], {"dead": [], "working": {}, "done": reply["done"]}
        elif method == "verdict":  # not blind: the control that is told how it ended
            passed = trace["score"] == 1
            text = "It passed.\n" if passed else "It failed.\n"
            body = {"dead": [], "working": {}, "done": passed}
        else:
            nodes = build(run, attempt, f"{method}-{where}", parent_rule=method == "dense")
            evidence, rule = citations(attempt, nodes), {"own_evidence": method == "dense"}
            fine = gates.decide("cited", evidence, rule).accepted  # else there may be no such step
            text, body = (rendered(attempt, nodes), body_of(attempt, nodes)) if fine else ("", {})
        name = f"{method}-{where}"
        pin = run.offer(
            name, text, body, operator=method, round=round, provenance=[f"old-{round}/{place}"]
        )
        if pin is None:
            return ()
        if not nodes:
            run.mark(pin, "active", "a baseline")
            return (pin,)
        accepted = run.try_in(pin, "cited", evidence, rule).accepted
        run.records[f"feedback/{name}/tree.json"] = nodes
        run.records[f"feedback/{name}/feedback.md"] = text
        return (pin,) if accepted else ()

    def _told(
        self,
        run: Run,
        round: int,
        split: str,
        plan: Sequence[Episode],
        traces: Sequence[Json],
        methods: Sequence[str],
        olds: Sequence[Json],
    ) -> dict[str, float]:
        """Means of each method over repeats, then tasks."""
        numbers, size = {}, len(olds) * self.repeats
        for number, method in enumerate(methods):
            where = slice(number * size, (number + 1) * size)
            part, given = traces[where], plan[where]
            passes = np.array([trace["score"] == 1 for trace in part]).reshape(-1, self.repeats)
            before = np.array([trace["score"] == 1 for trace in olds])
            run.records[f"refit/{round:03d}-{split}/{method}.json"] = {
                "passes": passes.tolist(),
                "calls": [trace["calls"] for trace in part],
                "given": [[list(pin) for pin in one.artefacts] for one in given],
            }
            name = "pass" if split == "train" else "held_out"
            numbers[f"{name}/{method}"] = float(passes.mean(1).mean())
            if split == "train":
                lost = (before[:, None] & ~passes).mean(1)
                numbers[f"regressed/{method}"] = float(lost.mean())
                numbers[f"idle/{method}"] = float(np.mean([t["calls"] == 0 for t in part]))
                spent = float(np.mean([t["characters"] for t in part]))
                numbers[f"characters/{method}"] = spent
        return numbers
