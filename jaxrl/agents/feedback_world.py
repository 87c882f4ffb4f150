"""A planted terminal: a table becomes a JSON file and a plot, by routes of which one each works.

A route is tried by one action; there are ``budget`` of them. A dead route says why (exit 1), or,
with probability ``trap``, ends well and writes nothing. The scripted actor makes one output after
the other: it replays a path that it was told of, leaves out dead ends that it was told of, tries
the rest in random order, stops if it is told that all is done, and ends by saying that it finished,
whatever is there, which lists the files. Each attempt starts from the same fresh folder.

With a budget of the sum of all routes everything passes without feedback: the other end of the
knob. The stand-in of the reading model errs by knobs: it moves the end of a part by one step
(``misgroup``), and takes a good exit for what was asked (``credulous``).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.agents import worlds
from jaxrl.agents.artefacts import Artefact
from jaxrl.agents.journal import Json, digest
from jaxrl.agents.port import Script

OUTPUTS = ("out.json", "plot.png")
TEXT = "Turn data.csv into out.json and plot.png."
FRESH = ("data.csv",)


@dataclasses.dataclass(eq=False)
class World:
    """See above."""

    tasks: int
    held_out: int
    routes: tuple[int, ...]  # of each output
    budget: int
    trap: float
    misgroup: float
    credulous: float
    seed: int

    def __post_init__(self) -> None:
        if len(self.routes) != len(OUTPUTS) or min(self.routes) < 1:
            raise ValueError(f"world.routes={self.routes!r}; allowed: {len(OUTPUTS)} of >= 1")
        worlds.within("world", self, 1, math.inf, "tasks", "held_out", "budget")
        worlds.within("world", self, 0, 1, "trap", "misgroup", "credulous")

    def splits(self) -> Mapping[str, Sequence[str]]:
        """Tasks to compare methods on, and tasks to measure with."""
        return {
            "train": worlds.names_of("train", self.tasks),
            worlds.HELD_OUT: worlds.names_of("held", self.held_out),
        }

    def task(self, name: str) -> Json:
        """What is asked; that which route works is hidden in the terminal."""
        return {"id": name, "text": TEXT, "outputs": list(OUTPUTS)}

    def _routes(self, name: str) -> list[dict[str, tuple[int, str]]]:
        """Of each output: action -> (exit code, what is written)."""
        chance, found = worlds.sampled(self.seed, name), []
        for output, count in zip(OUTPUTS, self.routes, strict=True):
            right = int(chance.integers(count))
            traps = chance.random(count) < self.trap
            found.append(
                {
                    f"make {output} by route {i}": (0, output) if i == right else (int(not t), "")
                    for i, t in enumerate(traps.tolist())
                }
            )
        return found

    def run(self, artefacts: Sequence[Artefact], task: Json, scene: worlds.Scene) -> Json:
        """One attempt. ``steps`` is all that a reader of it may see."""
        told: Any = {"dead": [], "working": {}, "done": False}
        text = ""
        for one in artefacts:
            told, text = one.body, one.text
        files, steps, left = list(FRESH), [], self.budget
        for output, routes in zip(OUTPUTS, self._routes(task["id"]), strict=True):
            if output in told["working"]:
                order = [told["working"][output]]
            else:
                rest = [a for a in routes if a not in told["dead"] and not told["done"]]
                order = scene.chance.permutation(rest).tolist()
            for action in order[:left]:
                code, wrote = routes[action] if action in routes else (1, "")
                files += [wrote] if wrote else []
                said = f"wrote {wrote}" if wrote else "" if code == 0 else "ImportError"
                steps.append(_step(len(steps), action, output, code, wrote, said))
                left -= 1
                if wrote:
                    break
        calls = len(steps)
        said = "files: " + " ".join(files)
        steps.append(_step(calls, "say: finished with output", "", 0, "", said))
        return {
            "score": float(all(output in files for output in OUTPUTS)),
            "start": digest(list(FRESH)),
            "steps": steps,
            "calls": calls,
            "characters": len(text) + sum(len(s["action"] + s["observation"]) for s in steps),
        }

    def scripts(self) -> Mapping[str, Script]:
        """Stand-ins for the roles of ``feedback_tree``: they read typed observations."""
        return {"group": self._group, "reconcile": self._reconcile, "summarise": _summarise}

    def _group(self, payload: Any, chance: np.random.Generator) -> Json:
        """A part for each output, by what its actions aim at."""
        steps, parts = payload["steps"], []
        for output in payload["outputs"]:
            aimed = [step["number"] for step in steps if step["target"] == output]
            first, last = (aimed[0], aimed[-1]) if aimed else (-1, -1)
            if aimed and chance.random() < self.misgroup:
                last = min(last + 1, len(steps))  # one too far: at the end, a step that is not
            parts.append({"goal": output, "outputs": [output], "first": first, "last": last})
        return {"parts": parts}

    def _reconcile(self, payload: Any, chance: np.random.Generator) -> Json:
        """Where the goal is seen to be reached, and the later step that closes each issue."""
        whole, credulous = len(payload["outputs"]) > 1, chance.random() < self.credulous
        reached = -1
        for step in payload["steps"]:
            if whole:
                listed = step["observation"].removeprefix("files: ").split()
                seen = all(output in listed for output in payload["outputs"])
            else:
                seen = step["wrote"] == payload["outputs"][0]
                seen = seen or (credulous and step["exit"] == 0)
            if seen and reached < 0:
                reached = step["number"]
        later = [reached if reached > issue else -1 for issue in payload["issues"]]
        return {"reached": reached, "closed_by": later}


def _step(number: int, action: str, target: str, code: int, wrote: str, said: str) -> Json:
    return {
        "number": number,
        "action": action,
        "target": target,
        "exit": code,
        "wrote": wrote,
        "observation": said or f"exit {code}",
    }


def _summarise(payload: Any, chance: np.random.Generator) -> Json:
    """Believes what the attempt says of itself, as soon as it wrote anything."""
    wrote = [step["wrote"] for step in payload["steps"] if step["wrote"]]
    done = bool(wrote)
    text = f"Finished with output: {', '.join(wrote)}." if done else "No output yet."
    return {"text": text, "done": done}
