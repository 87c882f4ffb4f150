"""GraphSkillEvo: a population of graph skills under four operators; and a climber to compare with.

Each generation all members run the same training tasks; their failures go to four operators, one
child each: mutate or cross the Global Guidance (``other``) or the Node Lists and Task Graphs
(``graph``). What is out of scope is put back from the first parent, byte by byte. Parents are drawn
with weight 1 / (rank + n). Children run the whole validation split; the best n of parents and
children survive, ties go to parents. Rollouts: (n + n x generations) x V + n x tasks x generations.

``climber``: one document, one child a round over all sections, kept if its validation score is
*strictly* higher (SkillOpt's gate); its edits fall from ``edits`` to ``least_edits`` by a cosine.

The selected member's validation score is the best of many noisy ones: it is not what it is worth.
Only the held-out split is reported, and it is touched once, after the last generation.

Source: GraphSkillEvo and SkillOpt, by notes on their code. Ours: the first population is one
document and three that differ from it in two things.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.agents.artefacts import Pin, label
from jaxrl.agents.graph_document import Document, GrammarError, scoped
from jaxrl.agents.journal import Json, digest
from jaxrl.agents.port import Role
from jaxrl.agents.run import Episode, Run
from jaxrl.agents.skills import SKILL
from jaxrl.agents.worlds import HELD_OUT, within

OPERATORS = ("mutate_other", "mutate_graph", "cross_other", "cross_graph")
RETRIES = 3  # of an invalid child, before its parents are drawn again
REDRAWS = 3  # of parents, before a generation goes without that child
MOST_FAILURES = 5  # shown of a member

ROLES = {"write": Role("propose", SKILL, "Change the document as the operator says, in its form.")}


@dataclasses.dataclass
class SkillGraph:
    """Fields are those of configs/agents/skill_graph.py."""

    population: int
    tasks: int  # of a generation
    operators: tuple[str, ...]  # one child each, in this order
    climber: bool
    edits: int  # of a child
    least_edits: int
    rounds: int  # as the run's, for the cosine and the last look

    roles: Mapping[str, Role] = dataclasses.field(default_factory=lambda: ROLES, init=False)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.operators) - set(OPERATORS))
        if unknown:
            raise ValueError(f"system.operators={unknown}; allowed: {', '.join(OPERATORS)}")
        if self.climber and self.population != 1:
            raise ValueError(f"system.population={self.population!r}; a climber's is 1")
        within("system", self, 1, math.inf, "population", "tasks", "rounds")
        within("system", self, 0, math.inf, "edits", "least_edits")
        self.members: list[Pin] = []
        self.cache: dict[str, list[Json]] = {}  # digest of a text -> its validation traces
        self.spent = 0  # rollouts

    # A generation.

    def propose(self, run: Run, round: int) -> list[Episode]:
        """The same training tasks for every member; at first, the members."""
        if not round:
            world: Any = run.world
            for number, body in enumerate(world.first(self.population)):
                words: Any = {"operator": "doc", "round": 0, "trigger": ""}
                pin = run.offer(f"g00-{number}-doc", world.rendered(body), body, **words)
                assert pin is not None
                run.mark(pin, "active", "the first population")
                self.members.append(pin)
                self._validate(run, pin)
        chance = np.random.default_rng(run.seed + 10000 * round)
        tasks = chance.choice(run.splits["train"], self.tasks, replace=False).tolist()
        return [
            Episode(task, (pin,), f"generation-{round}", label(pin))
            for pin in self.members
            for task in tasks
        ]

    def act(self, run: Run, round: int, plan: list[Episode]) -> list[Json]:
        """Run them."""
        self.spent += len(plan)
        return run.act(f"generation-{round}", plan)

    def learn(self, run: Run, round: int, plan: list[Episode], outcomes: list[Json]) -> None:
        """Children, their validation, survival."""
        failures: dict[Pin, list[Json]] = {pin: [] for pin in self.members}
        for episode, trace in zip(plan, outcomes, strict=True):
            seen = failures[episode.artefacts[0]]
            if trace["score"] < 1e-9 and len(seen) < MOST_FAILURES:
                seen.append(trace)
        credited = [
            (f"generation-{round}", place, one.artefacts[0]) for place, one in enumerate(plan)
        ]
        scores = np.array([self._hard(run, pin) for pin in self.members])
        run.learn(f"members-{round}", [f"generation-{round}"], credited, validation=scores)
        if self.climber:
            self._climb(run, round, failures)
        else:
            self._survive(run, round, failures)
        self._report(run, round)

    def _climb(self, run: Run, round: int, failures: Mapping[Pin, list[Json]]) -> None:
        (old,) = self.members
        new = self._child(run, round, 0, "patch", failures)
        if new is None:
            return
        evidence = {
            name: [trace["score"] for trace in self._validate(run, pin)]
            for name, pin in (("old", old), ("new", new))
        }
        if run.try_in(new, "strict_improvement", evidence, {}).accepted:
            run.mark(old, "pruned", f"replaced by {label(new)}")
            self.members = [new]

    def _survive(self, run: Run, round: int, failures: Mapping[Pin, list[Json]]) -> None:
        children = [
            self._child(run, round, place, operator, failures)
            for place, operator in enumerate(self.operators)
        ]
        born = [pin for pin in children if pin is not None]
        order = [*self.members, *born]
        table = {label(pin): [t["score"] for t in self._validate(run, pin)] for pin in order}
        shown = {"order": [label(pin) for pin in order], "scores": table}
        for pin in born:
            run.try_in(
                pin, "survival", {**shown, "candidate": label(pin)}, {"keep": self.population}
            )
        best = sorted(order, key=lambda pin: -self._hard(run, pin))[: self.population]
        for pin in self.members:
            if pin not in best:
                run.mark(pin, "pruned", f"generation {round}")
        self.members = best

    # Children.

    def _ranked(self, run: Run) -> list[Pin]:
        return sorted(self.members, key=lambda pin: (-self._hard(run, pin), -self._soft(run, pin)))

    def _child(
        self,
        run: Run,
        round: int,
        place: int,
        operator: str,
        failures: Mapping[Pin, list[Json]],
    ) -> Pin | None:
        """A valid child, or None if nobody writes one."""
        ranked = self._ranked(run)
        weights = 1 / (np.arange(len(ranked)) + len(ranked))
        for draw in range(REDRAWS):
            chance = run.draws("parents", round, place, draw)
            count = 2 if operator.startswith("cross") else 1
            drawn = chance.choice(len(ranked), count, p=weights / weights.sum())
            parents = [ranked[i] for i in drawn]
            for attempt in range(RETRIES + 1):
                name = f"g{round + 1:02d}-{place}-{operator.replace('_', '-')}"
                key = f"{name}-{draw}-{attempt}"
                asked = self._asked(run, round, operator, parents, failures, key)
                reply = run.call("write", asked, key)
                try:
                    text, body = self._scoped(run, operator, parents[0], reply)
                except GrammarError:
                    continue
                words: Any = {"operator": operator, "round": round, "parents": parents}
                return run.offer(name, text, body, **words)
        return None

    def _asked(
        self,
        run: Run,
        round: int,
        operator: str,
        parents: Sequence[Pin],
        failures: Mapping[Pin, list[Json]],
        key: str,
    ) -> Json:
        progress = round / max(self.rounds - 1, 1)
        fall = (1 + math.cos(math.pi * progress)) / 2
        edits = self.least_edits + fall * (self.edits - self.least_edits)
        return {
            "operator": operator,
            "parents": [
                {"text": one.text, "body": one.body} for one in map(run.shelf.get, parents)
            ],
            "failures": [
                {name: x for name, x in trace.items() if name != "score"}
                for pin in dict.fromkeys(parents)
                for trace in failures[pin]
            ],
            "edits": int(edits + 0.5),
            "key": key,
        }

    def _scoped(self, run: Run, operator: str, parent: Pin, reply: Json) -> tuple[str, Json]:
        child = Document.of(reply["text"])
        if operator == "patch":
            return child.text, reply["body"]
        graph, old = operator.endswith("graph"), run.shelf.get(parent)
        body = run.world.spliced(old.body, reply["body"], graph)
        return scoped(Document.of(old.text), child, graph).text, body

    # Validation.

    def _validate(self, run: Run, pin: Pin) -> list[Json]:
        """The whole split, once for each text."""
        text = digest(run.shelf.get(pin).text)
        if text not in self.cache:
            tasks = run.splits["validation"]
            plan = [Episode(task, (pin,), "validation", label(pin)) for task in tasks]
            self.cache[text] = run.act(f"validation-{label(pin)}", plan)
            self.spent += len(tasks)
        return self.cache[text]

    def _hard(self, run: Run, pin: Pin) -> float:
        return float(np.mean([trace["score"] for trace in self._validate(run, pin)]))

    def _soft(self, run: Run, pin: Pin) -> float:
        return float(np.mean([trace["soft"] for trace in self._validate(run, pin)]))

    def best(self, run: Run) -> Pin:
        """The member to hand out."""
        return self._ranked(run)[0]

    def _report(self, run: Run, round: int) -> None:
        best = self.best(run)
        numbers = {
            "validation/best": self._hard(run, best),
            "population/size": len(self.members),
            "population/rollouts": self.spent,
        }
        run.records[f"population/generation_{round:04d}.json"] = {
            label(pin): self._hard(run, pin) for pin in self.members
        }
        if round == self.rounds - 1:
            plan = [Episode(task, (best,), "held-out", "best") for task in run.splits[HELD_OUT]]
            traces = run.act("held-out", plan)
            numbers["held_out/best"] = float(np.mean([trace["score"] for trace in traces]))
            run.records["best_skill.md"] = run.shelf.get(best).text
        run.measure(round, numbers)
