"""Packages, and who submits something to their tasks: nobody, the reference, a hunter, solvers.

The tree of a task is that of a real package of this environment, or of a small one with a planted
fault (jaxrl/agents/funnel_toys.py). Submissions are whole modules. Scripted solvers
stand in for a language model: the reference with other private parts, the reference with one small
mistake, one that looks for a copy of what was cut out, one that changes nothing. With ``solver =
"model"`` the role ``actor`` is asked instead.

Every run is a process of jaxrl/tasks/sandbox.py and a boot of its own; a boot's number is all in
which two of them differ, and is drawn by the run, so that what flickers can be run again.
"""

import ast
import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.agents import packages, worlds
from jaxrl.agents.artefacts import Artefact
from jaxrl.agents.funnel_toys import toys
from jaxrl.agents.journal import Json, digest, draws
from jaxrl.agents.packages import Package, Tree
from jaxrl.agents.port import Script
from jaxrl.tasks.sandbox import Cell, Limits, Sandbox, Status

LIMITS = Limits(cpu_s=1.0, wall_s=20.0, memory_bytes=2**29, output_bytes=4096, timeouts=1)
QUIET = 999  # a boot at which nothing flickers, from which the tests' answers come
WIDE = 40  # calls by which the truth of a held-out submission is known
SHOWN = 40  # entries that are offered to a chooser, those with most calls first
VARIANTS = ("restructured", "mistaken", "leak", "restructured")


@functools.cache
def sandbox() -> Sandbox:
    """One for the process; boots make programs differ, so little is worth remembering."""
    return Sandbox(LIMITS, repeats=1, memory=2000)


@dataclasses.dataclass(eq=False)
class World:
    """Fields are those of configs/agents/codemidas.py."""

    packages: Sequence[str]  # distributions of this environment; none: the planted ones
    planted: Sequence[str]  # faults, one package each
    tasks: int  # of each package
    flake: float  # rate at which a flaky one's verifier errs; 0: none is flaky
    solver: str  # variants (the four in turn) | rate | model
    rate: float  # of right submissions, with solver "rate"
    overlooked: float  # faults that a reviewer does not see
    seed: int

    ROOMS = ("original", "empty", "reference", "hunter")

    def __post_init__(self) -> None:
        if self.solver not in ("variants", "rate", "model"):
            raise ValueError(f"world.solver={self.solver!r}; allowed: variants, rate, model")
        for field in ("flake", "rate", "overlooked"):
            if not 0 <= vars(self)[field] <= 1:
                raise ValueError(f"world.{field}={vars(self)[field]!r}; allowed: 0 to 1")
        if self.tasks < 1:
            raise ValueError(f"world.tasks={self.tasks!r}; allowed: >= 1")
        found = [packages.installed(name) for name in self.packages]
        self.faults: dict[str, str] = {}
        self._sealed: dict[str, Json] = {}
        if not found:
            planted = toys(self.seed, self.planted, self.flake)
            found = [package for package, _ in planted]
            self.faults = {package.name: fault for package, fault in planted}
        self._packages = {
            package.name + (f"-{i}" if self.tasks > 1 else ""): package
            for package in found
            for i in range(self.tasks)
        }

    def splits(self) -> Mapping[str, Sequence[str]]:
        """Who submits: the rooms, then solvers; others for what is kept."""
        solvers = worlds.names_of("solver", 64)
        return {"train": [*self.ROOMS, *solvers], worlds.HELD_OUT: worlds.names_of("held", 64)}

    def task(self, name: str) -> Json:
        """A submitter."""
        return {"id": name, "kind": name.split("-")[0]}

    # What there is of a package.

    def sources(self) -> list[str]:
        """Names of what tasks are made of, in order."""
        return list(self._packages)

    def package(self, source: str) -> Package:
        """As it was published."""
        return self._packages[source]

    def entries(self, source: str) -> list[Json]:
        """Public functions that show calls, those with most first."""
        found = [dataclasses.asdict(one) for one in packages.entries(self.package(source))]
        return sorted(found, key=lambda one: -len(one["shown"]))[:SHOWN]

    def core(self, where: Json) -> str:
        """The text of what is cut out."""
        tree = self.package(where["source"]).tree
        module = ast.parse(tree[packages.file_of(tree, where["module"])])
        cut = packages.core(module, where["entry"])
        kept = [ast.unparse(node) for node in module.body if packages.defines(node) in cut]
        return "\n\n".join(kept)[:20_000]

    def base(self, body: Json) -> dict[str, str]:
        """What a solver sees: cleaned and cut."""
        return self._base(body["source"], body["module"], body["entry"])

    @functools.cache  # noqa: B019 (a world lives as long as its run)
    def _base(self, source: str, module: str, entry: str) -> dict[str, str]:
        tree = packages.cleaned(packages.needed(self.package(source).tree, module))
        path = packages.file_of(tree, module)
        return {**tree, path: packages.stripped(tree[path], entry)}

    def verifier(self, body: Json) -> Json:
        """What is never in a tree: calls, and what the original answered. A test that it could not
        answer, or answered so for want of a module, is none."""
        name = digest(body)
        if name not in self._sealed:
            tree = packages.needed(self.package(body["source"]).tree, body["module"])
            tests = [list(one) for one in dict.fromkeys(map(tuple, body["tests"]))]
            cells = _run(packages.program(tree, QUIET), body, tests)
            pairs = [
                (test, cell.text)
                for test, cell in zip(tests, cells, strict=True)
                if cell.status is Status.RETURNED and "ModuleNotFoundError" not in cell.text
            ]
            told = {"tests": [test for test, _ in pairs], "answers": [text for _, text in pairs]}
            self._sealed[name] = {**told, "sha": digest(told)}
        return self._sealed[name]

    # Submissions.

    def run(self, artefacts: Sequence[Artefact], task: Json, scene: worlds.Scene) -> Json:
        """Submit something, and have it verified as often as the task asks."""
        body, kind = artefacts[0].body, task["kind"]
        sealed, base = self.verifier(body), self.base(body)
        if kind == "original":
            return {"score": 1.0, "kind": kind, "tests": sealed["tests"], "verifier": sealed["sha"]}
        text = self._submission(artefacts[0], base, task, scene)
        tree = {**base, packages.file_of(base, body["module"]): text}
        boots = scene.chance.integers(2**31, size=body["gradings"] if kind == "solver" else 1)
        rows = [_failed(body, sealed, tree, boot) for boot in boots.tolist()]
        trace = {
            "score": float(not rows[0]),
            "kind": kind,
            "verdicts": [not failed for failed in rows],
            "failed": rows[0],
            "submission": text[:20_000] if kind == "solver" else "",
            "sha": packages.sha(text),
            "boots": boots.tolist(),
        }
        if kind == "hunter":
            (cell,) = _run(packages.program(base, int(boots[0])), body, None)
            found = ast.literal_eval(cell.text) if cell.status is Status.RETURNED else [cell.text]
            trace["leaks"] = [str(where) for where in found]
        if kind == "held":
            calls = [call for name, call in sealed["tests"] if name == body["entry"]]
            calls += varied(calls, WIDE)
            wide = self.verifier({**body, "tests": [[body["entry"], call] for call in calls]})
            trace["right"] = not _failed(body, wide, tree, QUIET)
        return trace

    def _submission(self, env: Artefact, base: Tree, task: Json, scene: worlds.Scene) -> str:
        """The text of the module. A scripted solver's is that of its name, whenever it is asked."""
        body = env.body
        path = packages.file_of(base, body["module"])
        original = self.package(body["source"]).tree[path]
        if task["kind"] in ("empty", "hunter"):
            return base[path]
        if task["kind"] == "reference":
            return original
        if self.solver == "model" and task["kind"] == "solver":
            return fenced(scene.ask({"spec": env.text, "module": base[path]})["text"])
        chance = draws("solver", self.seed, env.id, task["id"])
        place = int(task["id"].split("-")[1])
        variant = VARIANTS[place % len(VARIANTS)]
        if self.solver == "rate" or task["kind"] == "held":
            rate = self.rate if task["kind"] == "solver" else 0.5
            variant = "restructured" if chance.random() < rate else "mistaken"
        return self._variant(variant, base, path, body, original, chance)

    @staticmethod
    def _variant(
        variant: str,
        base: Tree,
        path: str,
        body: Json,
        original: str,
        chance: np.random.Generator,
    ) -> str:
        if variant == "restructured":
            return packages.restructured(original, body["entry"])
        if variant == "mistaken":
            found = packages.mutants(original, body["entry"])
            return found[int(chance.integers(len(found)))] if found else base[path]
        return base[path] + THIEF.replace("NAME", body["entry"])

    # Stand-ins for the roles of ``funnel.CodeMidas``.

    def scripts(self) -> Mapping[str, Script]:
        """A chooser, a writer and a reviewer."""
        return {"choose": self._choose, "write": self._write, "review": self._review}

    def _choose(self, payload: Any, chance: np.random.Generator) -> Json:
        """The first that is not taken: it shows most calls."""
        for place, entry in enumerate(payload["entries"]):
            if entry["name"] not in payload["taken"]:
                return {"entry": place}
        return {"entry": len(payload["entries"])}

    def _write(self, payload: Any, chance: np.random.Generator) -> Json:
        """What the documentation says, the calls that it shows, and others near them; where that
        fault is planted, a private name too."""
        name = payload["name"]
        tests = [[name, call] for call in (*payload["shown"], *varied(payload["shown"], 12))]
        private = re.findall(r"def (_\w+)", payload["source"])
        if self.faults.get(payload["package"]) == "private" and private:
            tests.append([private[0], "()"])
        text = f"# {payload['signature']}\n\n{payload['doc']}\n"
        return {"text": text[:60_000], "tests": tests}

    def _review(self, payload: Any, chance: np.random.Generator) -> Json:
        """Tests of private names that alone refuse a submission."""
        faults = [
            f"test of the private name {failed[0][0]}"
            for failed in (one["failed"] for one in payload["attempts"])
            if failed and all(name.startswith("_") for name, _ in failed)
        ]
        seen = chance.random() >= self.overlooked
        return {"faults": sorted(set(faults)) if seen else []}


# A solver that writes nothing of its own: it looks for a copy and takes it.
THIEF = """

def _stolen():
    import marshal
    for path, text in sorted(FILES.items()):
        for start in (0, 16):
            try:
                names = {}
                exec(marshal.loads(text.encode("latin-1")[start:]), names)
                return names["NAME"]
            except Exception:
                pass
    raise NotImplementedError

def NAME(*args):
    return _stolen()(*args)
"""


def _failed(body: Json, sealed: Json, tree: Tree, boot: int) -> list[list[str]]:
    """The tests that a tree does not pass."""
    cells = _run(packages.program(tree, boot), body, sealed["tests"])
    rows = zip(sealed["tests"], sealed["answers"], cells, strict=True)
    return [test for test, text, cell in rows if cell.verdict(text) != Status.PASS]


def _run(program: str, body: Json, tests: Sequence[Sequence[str]] | None) -> list[Cell]:
    """Cells of tests; without any, of the hunt."""
    module = body["module"]
    if tests is None:
        return sandbox().run([program], "hunt", [repr((module, body["entry"]))])[0]
    calls = [repr((module, name, ast.literal_eval(args))) for name, args in tests]
    return sandbox().run([program], "check", calls)[0]


def fenced(text: str) -> str:
    """A reply's fenced block, if it has one."""
    found = re.search(r"```(?:python)?\n(.*?)```", text, re.DOTALL)
    return found.group(1) if found else text


def varied(calls: Sequence[str], most: int) -> list[str]:
    """Calls near those given: numbers moved, texts and lists cut, turned and doubled."""
    found: dict[str, None] = {}
    for call in calls:
        arguments = ast.literal_eval(call)
        for place, one in enumerate(arguments):
            for other in _near(one):
                found[repr((*arguments[:place], other, *arguments[place + 1 :]))] = None
    new = [call for call in found if call not in calls]
    step = max(1, len(new) // most)
    return new[::step][:most]


def _near(value: Any) -> list[Any]:
    many: Any = value
    if isinstance(value, bool) or value is None:
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value - 1, -value, value * 2 + 1, 0]
    if isinstance(value, str | list | tuple | bytes):
        return [many[1:], many[::-1], many + many, many[:0], many[:1]]
    return []
