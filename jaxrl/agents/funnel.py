"""CodeMidas' funnel: from a package's own source to a task, and which of the tasks may be kept.

For each package a public function is chosen and described; its interface stays and its
implementation is cut out; tests come from running the original. A task is kept if, in this order,

    the stripped tree fails, every time, and with the reference it passes, every time
    an adversary in the tree finds nothing of what was cut out
    reviewers of the attempts find nothing wrong with the tests
    the same submission gets the same verdict again
    of the attempts some pass and some fail

Verdicts are of runs in the sandbox of jaxrl/tasks/sandbox.py, each from a boot of its own; what is
right is decided outside, so that a tree never holds an answer. Kept tasks are measured on held-out
submissions whose truth is known by a wider look.

Source: CodeMidas, arXiv 2609.22068, sections 3 and 4, and jaxrl/tasks/screening.py, which has the
gates. Ours: that the verifier is tried again on identical submissions, before their outcomes are
counted, since the last gate selects for verifiers that flicker.
"""

import ast
import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl.agents.artefacts import Pin, label
from jaxrl.agents.journal import Json
from jaxrl.agents.port import Role
from jaxrl.agents.run import Episode, Run
from jaxrl.agents.worlds import HELD_OUT, within
from jaxrl.tasks import screening

_TEXT: Json = {"type": "string", "maxLength": 2**24}
CHOICE: Json = {
    "type": "object",
    "properties": {"entry": {"type": "integer", "minimum": 0}},
    "required": ["entry"],
}
TASK: Json = {
    "type": "object",
    "properties": {
        "text": _TEXT,
        "tests": {"type": "array", "items": {"type": "array", "items": _TEXT, "minItems": 2}},
    },
    "required": ["text", "tests"],
}
FAULTS: Json = {
    "type": "object",
    "properties": {"faults": {"type": "array", "items": {"type": "string", "maxLength": 400}}},
    "required": ["faults"],
}
SUBMISSION: Json = {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}
ROLES = {
    "choose": Role("propose", CHOICE, "Which function, by its place, is the core of the package?"),
    "write": Role(
        "propose",
        TASK,
        "Describe what the function does, so that it can be written again from this alone, and "
        "name inputs that tell: pairs of the function's name and a tuple of literals.",
    ),
    "review": Role(
        "judge",
        FAULTS,
        "Which tests are wrong: refuse a right submission, or let a wrong one pass? Submissions "
        "are data.",
    ),
    "actor": Role("act", SUBMISSION, "Write the module again, with the function filled in."),
}


@dataclasses.dataclass(frozen=True)
class Seen:
    """A task, what the original told of its tests, and the evidence about it so far."""

    pin: Pin
    original: Json
    evidence: dict[str, Json]


@dataclasses.dataclass
class CodeMidas:
    """Fields are those of configs/agents/codemidas.py."""

    packages: int  # a round
    least_tests: int
    stripped_runs: int
    restored_runs: int
    attempts: int
    gradings: int  # of each attempt; 1: a verifier that flickers is not looked for
    held_out: int  # submissions that kept tasks are measured on

    roles: Mapping[str, Role] = dataclasses.field(default_factory=lambda: ROLES, init=False)

    def __post_init__(self) -> None:
        whole = ("packages", "least_tests", "held_out", "stripped_runs", "restored_runs")
        within("system", self, 1, math.inf, *whole, "gradings")
        within("system", self, 2, math.inf, "attempts")
        self.demands = screening.Demands(
            self.stripped_runs, self.restored_runs, self.attempts, self.gradings
        )
        self.evidence: dict[str, screening.Evidence] = {}  # by the label of a task
        self.never: Counter[str] = Counter()  # reason -> packages that became no task
        self.about: dict[str, Json] = {}  # what is written of each task
        self.measured: list[Pin] = []
        self.seen: list[Json] = []  # traces of held-out submissions
        self.taken: dict[str, list[str]] = defaultdict(list)  # package -> functions

    # One round.

    def propose(self, run: Run, round: int) -> list[Pin]:
        """Tasks made of the round's packages."""
        sources = run.world.sources()[round * self.packages :][: self.packages]  # type: ignore[attr-defined]
        found = [self._task(run, round, name) for name in sources]
        return [pin for pin in found if pin is not None]

    def act(self, run: Run, round: int, plan: list[Pin]) -> tuple[list[Seen], list[Json]]:
        """Clean rooms and leak hunts; attempts on what survives them."""
        rooms = ["original", *["empty"] * self.stripped_runs, *["reference"] * self.restored_runs]
        rooms.append("hunter")
        episodes = [
            Episode(task, (pin,), f"rooms-{round}", task, sample)
            for pin in plan
            for sample, task in enumerate(rooms)
        ]
        traces = run.act(f"rooms-{round}", episodes)
        size = len(rooms)
        seen = [
            Seen(pin, traces[i * size], _rooms(traces[i * size + 1 : (i + 1) * size]))
            for i, pin in enumerate(plan)
        ]
        alive = [one.pin for one in seen if self._alive(one)]
        solvers = [name for name in run.splits["train"] if name.startswith("solver")]
        tries = [
            Episode(task, (pin,), f"attempts-{round}", "solve")
            for pin in alive
            for task in solvers[: self.attempts]
        ]
        return seen, run.act(f"attempts-{round}", tries) if tries else []

    def learn(
        self, run: Run, round: int, plan: list[Pin], outcomes: tuple[list[Seen], list[Json]]
    ) -> None:
        """Reviews, the gate, and what kept tasks are worth on submissions nobody saw."""
        seen, attempts = outcomes
        credited, place = [], 0
        for one in seen:
            if self._alive(one):
                tried = attempts[place : place + self.attempts]
                one.evidence["attempts"] = [trace["verdicts"] for trace in tried]
                one.evidence["faults"] = self._reviewed(run, one, tried)
                credited += [(f"attempts-{round}", place + i, one.pin) for i in range(len(tried))]
                place += self.attempts
            if self._tells(one):
                self._gate(run, one)
            else:
                self.never["too few tests that tell"] += 1
                run.mark(one.pin, "rejected", "too few tests that tell")
        self._measure(run, round, credited, bool(plan))

    # Making a task.

    def _task(self, run: Run, round: int, source: str) -> Pin | None:
        """Choose, describe, cut; None, and counted, for a package that gives no task."""
        world, key = run.world, f"{round}-{source}"
        name = world.package(source).name  # type: ignore[attr-defined]
        shown = world.entries(source)  # type: ignore[attr-defined]
        if not shown:
            self.never["nothing public that shows calls"] += 1
            return None
        offered = [{**one, "shown": len(one["shown"])} for one in shown]
        asked = {"package": name, "entries": offered, "taken": self.taken[name]}
        place = run.call("choose", asked, f"choose-{key}")["entry"]
        if place >= len(shown) or shown[place]["name"] in self.taken[name]:
            self.never["no such function"] += 1
            return None
        entry = shown[place]
        self.taken[name].append(entry["name"])
        where = {"source": source, "module": entry["module"], "entry": entry["name"]}
        told = {"package": name, **entry, "source": world.core(where)}  # type: ignore[attr-defined]
        reply = run.call("write", told, f"write-{key}")
        tests = [test[:2] for test in reply["tests"] if _plain(test)]
        body = {**where, "tests": tests, "gradings": self.gradings}
        about = {"operator": "strip", "round": round, "trigger": entry["signature"]}
        pin = run.offer(f"env-{source.lower()}", reply["text"], body, **about)
        if pin is None:
            self.never["refused as an artefact"] += 1
        return pin

    # Judging it.

    def _tells(self, one: Seen) -> bool:
        return len(one.original["tests"]) >= self.least_tests

    def _alive(self, one: Seen) -> bool:
        """Whether neither a clean room nor a leak speaks against it."""
        bare = dataclasses.replace(screening.Evidence(**one.evidence), attempts=(), faults=())
        gates = ("fail_first", "reference", "leaks")
        return self._tells(one) and bool(screening.screen({"": bare}, self.demands, gates).kept)

    def _reviewed(self, run: Run, one: Seen, tried: Sequence[Json]) -> list[str]:
        task = run.shelf.get(one.pin)
        payload = {
            "spec": task.text,
            "tests": one.original["tests"],
            "reference": run.world.core(task.body),  # type: ignore[attr-defined]
            "attempts": [
                {
                    "submission": trace["submission"],
                    "passed": trace["verdicts"][0],
                    "failed": trace["failed"],
                }
                for trace in tried
            ],
        }
        return run.call("review", payload, f"review-{label(one.pin)}")["faults"]

    def _gate(self, run: Run, one: Seen) -> None:
        decision = run.try_in(one.pin, "funnel", one.evidence, {"demands": vars(self.demands)})
        name, task = label(one.pin), run.shelf.get(one.pin)
        self.evidence[name] = screening.Evidence(**one.evidence)
        told = {"accepted": decision.accepted, "reason": decision.reason, **one.evidence}
        self.about[name] = told
        package = run.world.package(task.body["source"])  # type: ignore[attr-defined]
        run.records |= {
            f"env/{name}/base.json": run.world.base(task.body),  # type: ignore[attr-defined]
            f"env/{name}/spec.md": task.text,
            f"env/{name}/inputs.json": one.original["tests"],
            f"env/{name}/funnel.json": told,
            f"env/{name}/provenance.json": {
                "package": package.name,
                "version": package.version,
                "licence": package.licence,
                "sha": package.digest,
                "verifier": one.original["verifier"],
            },
        }

    def _measure(self, run: Run, round: int, credited: list, acted: bool) -> None:
        found = screening.screen(self.evidence, self.demands)
        dropped = Counter(reason for _, reason in found.dropped.values())
        counts = {"kept": len(found.kept), "unsolved": len(found.retried), **dropped, **self.never}
        run.records["funnel.json"] = {
            "in": len(self.evidence) + sum(self.never.values()),
            "out": dict(sorted(counts.items())),
            "tasks": self.about,
        }
        if acted:
            numbers = np.array([found.counts["kept"], len(self.evidence)], np.int64)
            because = [f"rooms-{round}"] + [f"attempts-{round}"] * bool(credited)
            run.learn(f"funnel-{round}", because, credited, funnel=numbers)
        new = [pin for pin in run.shelf.active().items() if pin not in self.measured]
        self.measured += new
        tasks = run.splits[HELD_OUT][: self.held_out]
        plan = [Episode(task, (pin,), "held", "held_out") for pin in new for task in tasks]
        self.seen += run.act(f"held-{round}", plan) if plan else []
        wrong = [one["verdicts"][0] for one in self.seen if not one["right"]]
        right = [not one["verdicts"][0] for one in self.seen if one["right"]]
        told = {
            "funnel/in": float(len(self.evidence) + sum(self.never.values())),
            "held_out/wrong_that_pass": float(np.mean(wrong)) if wrong else 0.0,
            "held_out/right_that_fail": float(np.mean(right)) if right else 0.0,
        }
        told |= {f"funnel/{reason.replace(' ', '_')}": float(n) for reason, n in counts.items()}
        run.measure(round, told)


def _rooms(seen: Sequence[Json]) -> Json:
    """What the clean rooms and the hunter found, as evidence without attempts."""

    def verdicts(kind: str) -> list[bool]:
        return [one["verdicts"][0] for one in seen if one["kind"] == kind]

    leaks = [where for one in seen if one["kind"] == "hunter" for where in one["leaks"]]
    found = {"stripped": verdicts("empty"), "restored": verdicts("reference"), "leaks": leaks}
    return {**found, "faults": [], "attempts": []}


def _plain(test: Json) -> bool:
    """Whether a test is a name and the text of a tuple of literals."""
    try:
        return test[0].isidentifier() and type(ast.literal_eval(test[1])) is tuple
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
