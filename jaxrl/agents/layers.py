"""Better Turns: five layers of looking at one policy, each with its own denominator.

    L1 text     gold history  ROUGE-L of text decisions            text decisions
    L2 turn     gold history  a judge: the action is reasonable    all decisions
    L3 tool     gold history  exact call, arguments normalised     tool decisions
    L4 closed   own history   every required call in order, at most ``retries`` after an error
                                                                   conversations with calls
    L5 whole    own history   L4, the goal reached, no rule broken, every result used rightly  same

With gold history a mistake costs one decision; with its own history it is the ground of the next.
Nothing here makes a policy better: policies are looked at one after another, and the gate shows
which of two would be chosen by which layer (``chosen_by``). L4 counts alternative ways as failures
and is a lower bound. A decision under gold history is never an on-policy sample.

Source: Better Turns, by notes on it. Ours: the retries' bound in ``within``, the gate.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl import evaluate
from jaxrl.agents.artefacts import Pin, label
from jaxrl.agents.journal import Json, canonical
from jaxrl.agents.port import Role
from jaxrl.agents.run import Episode, Run
from jaxrl.agents.worlds import HELD_OUT
from jaxrl.tasks.turns import NORMALISERS, called

LAYERS = ("L1", "L2", "L3", "L4", "L5")
VERDICTS: Json = {
    "type": "object",
    "properties": {"reasonable": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["reasonable"],
}
ROLES = {
    "judge": Role(
        "judge", VERDICTS, "Which of these actions are reasonable where they were taken?"
    ),
    "actor": Role("act", {"type": "object"}, ""),
}


def rouge_l(gold: str, said: str) -> float:
    """F1 of the longest common subsequence of words, in [0, 1]."""
    one, other = gold.lower().split(), said.lower().split()
    row = [0] * (len(other) + 1)
    for word in one:
        above = 0  # of the row before, one place to the left
        for place, found in enumerate(other, 1):
            best = above + 1 if word == found else max(row[place], row[place - 1])
            above, row[place] = row[place], best
    return 2 * row[-1] / (len(one) + len(other)) if one and other else 0.0


def exact(gold: str, said: str) -> bool:
    """Same tool, same arguments once normalised."""
    return called(said) is not None and called(gold) == called(said)


def on_policy(records: Sequence[Json]) -> Sequence[Json]:
    """The records, if they may be trained on as samples of the policy. ValueError where a history
    was not its own."""
    for record in records:
        if record["history"] != "own" or not record["on_policy"]:
            raise ValueError(f"history={record['history']!r}; allowed: own")
    return records


@dataclasses.dataclass(frozen=True)
class Readings:
    """A policy's score on each item of each layer's denominator."""

    L1: Sequence[float]
    L2: Sequence[float]
    L3: Sequence[float]
    L4: Sequence[float]
    L5: Sequence[float]
    text: Sequence[float]  # the parts of L2, with counts that say how it is weighed
    tool: Sequence[float]
    within: Sequence[float]  # own history: tool decisions that were right in the end

    def table(self) -> dict[str, Json]:
        """Mean, 95 % interval and denominator of each."""
        found = {}
        for name, values in vars(self).items():
            about = evaluate.interval([float(x) for x in values], "normal")
            found[name] = {**dataclasses.asdict(about), "count": len(values)}
        return found


def read(traces: Sequence[Json], reasonable: Sequence[bool]) -> Readings:
    """Layers of traces (layers_world.World.run). ``reasonable``: of all decisions under gold
    history, in order. ValueError if their numbers differ."""
    gold = [one for trace in traces for one in trace["gold"]]
    judged = list(zip(gold, reasonable, strict=True))
    needing = [trace for trace in traces if any(d["kind"] == "tool" for d in trace["gold"])]
    closed = [all(one["match"] for one in trace["own"] if one["last"]) for trace in needing]
    whole = [
        match and trace["goal"] and trace["used"] and not trace["violations"]
        for match, trace in zip(closed, needing, strict=True)
    ]
    return Readings(
        L1=[rouge_l(one["gold"], one["said"]) for one in gold if one["kind"] == "text"],
        L2=[float(fine) for _, fine in judged],
        L3=[float(one["match"]) for one in gold if one["kind"] == "tool"],
        L4=[float(x) for x in closed],
        L5=[float(x) for x in whole],
        text=[float(fine) for one, fine in judged if one["kind"] == "text"],
        tool=[float(fine) for one, fine in judged if one["kind"] == "tool"],
        within=[float(one["match"]) for trace in traces for one in trace["own"] if one["last"]],
    )


@dataclasses.dataclass
class BetterTurns:
    """Fields are those of configs/agents/better_turns.py."""

    conversations: int  # that a choice between policies is made on
    held_out: int  # that policies are reported on
    chosen_by: str  # L1 .. L5

    roles: Mapping[str, Role] = dataclasses.field(default_factory=lambda: ROLES, init=False)

    def __post_init__(self) -> None:
        if self.chosen_by not in LAYERS:
            raise ValueError(f"system.chosen_by={self.chosen_by!r}; allowed: {', '.join(LAYERS)}")
        for field in ("conversations", "held_out"):
            if vars(self)[field] < 1:
                raise ValueError(f"system.{field}={vars(self)[field]!r}; allowed: >= 1")
        self.known: dict[Pin, Readings] = {}  # on the conversations of the choice

    def propose(self, run: Run, round: int) -> Pin:
        """The round's policy."""
        listed = run.world.listed()  # type: ignore[attr-defined]
        body = listed[round % len(listed)]
        parents = list(run.shelf.active().items())
        pin = run.offer("policy", "", body, operator="train", round=round, parents=parents)
        assert pin is not None
        return pin

    def act(self, run: Run, round: int, plan: Pin) -> tuple[list[Json], list[Json]]:
        """Both splits, gold and own history."""
        found = []
        for split, count in (("gold", self.conversations), (HELD_OUT, self.held_out)):
            tasks = run.splits[split][:count]
            episodes = [Episode(task, (plan,), split, "policy") for task in tasks]
            found.append(run.act(f"{split}-{round}", episodes))
        return found[0], found[1]

    def learn(
        self, run: Run, round: int, plan: Pin, outcomes: tuple[list[Json], list[Json]]
    ) -> None:
        """Five numbers, and whether one of them would choose this policy over the best so far."""
        mine, told = (
            read(traces, self._judged(run, f"{name}-{round}", traces))
            for name, traces in zip(("gold", HELD_OUT), outcomes, strict=True)
        )
        best = list(run.shelf.active().items())
        new = vars(mine)[self.chosen_by]
        old = vars(self.known[best[0]])[self.chosen_by] if best else [0.0] * len(new)
        run.try_in(plan, "strict_improvement", {"old": list(old), "new": list(new)}, {})
        self.known[plan] = mine
        credited = [(f"gold-{round}", place, plan) for place in range(len(outcomes[0]))]
        numbers = np.array([np.mean(vars(mine)[layer]) for layer in LAYERS])
        run.learn(
            f"layers-{round}", [f"gold-{round}", f"{HELD_OUT}-{round}"], credited, layers=numbers
        )
        self._keep(run, round, plan, outcomes[1], told)

    def _judged(self, run: Run, key: str, traces: Sequence[Json]) -> list[bool]:
        asked = [
            {name: one[name] for name in ("before", "kind", "gold", "said")}
            for trace in traces
            for one in trace["gold"]
        ]
        reply = run.call("judge", {"decisions": asked}, f"judge-{key}")["reasonable"]
        if len(reply) != len(asked):
            return [False] * len(asked)  # nobody knows what these verdicts are of
        return reply

    def _keep(self, run: Run, round: int, pin: Pin, traces: list[Json], told: Readings) -> None:
        table = told.table()
        run.measure(round, {f"layers/{name}": table[name]["mean"] for name in (*LAYERS, "within")})
        name = label(pin)
        run.records["normalisers.json"] = dict(NORMALISERS)
        run.records[f"eval/{name}/layers.json"] = table
        for history in ("gold", "own"):
            rows = [one for trace in traces for one in trace[history]]
            run.records[f"eval/{name}/{history}.jsonl"] = "".join(
                canonical({key: x for key, x in one.items() if key != "before"}) + "\n"
                for one in rows
            )
