"""Reasoning Gym with a tournament over each group: facts for methods that learn from comparisons.

The judge here is scripted: it stands in for a language model that compares two responses. It knows
the right answer, errs as often as it is told to, and names the only step that a response has. What
it decides is kept beside the verifier's own verdict, which stays the reward.
"""

import dataclasses
import difflib
import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.tasks import reasoning
from jaxrl.tasks.arena import TOPOLOGIES, JudgeError, Match, Opinion, Outcome, hold, most_rounds
from jaxrl.tasks.contract import Task, Verdict

STEPS = 1  # a response is one step


@dataclasses.dataclass(frozen=True)
class ScriptedJudge:
    """Tells qualities right with probability ``accuracy``, else takes one player for the other.

    Its scores are the two qualities as it sees them, or with ``blunt`` 1 and 0. It names
    ``pivotal[player]`` of the one it prefers, and fails with probability ``failure_rate``. The same
    question has the same answer: draws come from ``name``, the players and the attempt.
    """

    quality: Mapping[int, float]
    pivotal: Mapping[int, Sequence[int]]
    accuracy: float
    failure_rate: float
    blunt: bool
    name: str

    def compare(self, first: int, second: int, attempt: int) -> Opinion:
        """An opinion on two players; JudgeError where it fails."""
        draw = random.Random(seed_of(self.name, first, second, attempt))
        if draw.random() < self.failure_rate:
            raise JudgeError(f"no opinion on {first} and {second}, attempt {attempt}")
        seen = (self.quality[first], self.quality[second])
        if draw.random() >= self.accuracy:
            seen = (seen[1], seen[0])
        if seen[0] == seen[1]:
            return Opinion(seen, ())
        if self.blunt:
            seen = (float(seen[0] > seen[1]), float(seen[1] > seen[0]))
        return Opinion(seen, self.pivotal[first if seen[0] > seen[1] else second])


@dataclasses.dataclass(frozen=True)
class Arena:
    """How a group is judged: ``task.parameters["arena"]``. ValueError naming a bad field."""

    topology: str  # one of jaxrl.tasks.arena.TOPOLOGIES
    swiss_rounds: int  # of the Swiss topology, > 0
    replays: int  # of a question that the judge failed on, >= 0
    accuracy: float  # of the judge, in [0, 1]
    failure_rate: float  # of the judge, in [0, 1]

    def __post_init__(self) -> None:
        bad = {
            "topology": (self.topology in TOPOLOGIES, ", ".join(TOPOLOGIES)),
            "swiss_rounds": (self.swiss_rounds > 0, "> 0"),
            "replays": (self.replays >= 0, ">= 0"),
            "accuracy": (0 <= self.accuracy <= 1, "0 to 1"),
            "failure_rate": (0 <= self.failure_rate <= 1, "0 to 1"),
        }
        for name, (good, allowed) in bad.items():
            if not good:
                raise ValueError(
                    f"task.parameters.arena.{name}={vars(self)[name]!r}; allowed: {allowed}"
                )


def seed_of(*parts: object) -> int:
    """A seed made of what it is for."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def quality(task: Task, response: str, verdict: Verdict) -> float:
    """1 for a right response; below, how much a wrong one looks like the answer, in [0, 0.9]."""
    if verdict.correct:
        return 1.0
    return 0.9 * difflib.SequenceMatcher(None, task.answer, response.strip()).ratio()


def _plain(match: Match) -> dict[str, Any]:
    """As it comes back from a record."""
    fields = dataclasses.asdict(match)
    return {name: list(x) if isinstance(x, tuple) else x for name, x in fields.items()}


class Source(reasoning.Source):
    """As ``jaxrl.tasks.reasoning``, with ``parameters["arena"]`` for ``Arena``.

    Facts of each response: ``points`` (minus its place, so that more is better), ``named`` [round,
    step] (won matches in which the step was named), ``comparisons`` (the matches it was in). An
    empty response is no valid trajectory.
    """

    grouped = True
    needs = ("judge_calls",)

    def __init__(self, family: str, parameters: Mapping[str, Any], **sizes: Any) -> None:
        own = dict(parameters)
        self.arena = Arena(**own.pop("arena"))
        super().__init__(family, own, **sizes)

    def verify_group(self, task: Task, responses: Sequence[str]) -> list[Verdict]:
        """The verifier's verdicts, with what a tournament among the responses tells as facts."""
        verdicts = [self.verify(task, response) for response in responses]
        outcome = self._outcome(task, responses, verdicts)
        rounds = most_rounds(self.arena.topology, len(responses), self.arena.swiss_rounds)
        return [
            dataclasses.replace(
                verdict,
                facts={
                    "points": -outcome.rank[player],
                    "named": outcome.named(player, rounds, STEPS).tolist(),
                    "comparisons": [_plain(m) for m in outcome.matches if player in m.players],
                },
            )
            for player, verdict in enumerate(verdicts)
        ]

    def _outcome(
        self, task: Task, responses: Sequence[str], verdicts: Sequence[Verdict]
    ) -> Outcome:
        players = range(len(responses))
        judge = ScriptedJudge(
            {i: quality(task, responses[i], verdicts[i]) for i in players},
            dict.fromkeys(players, (0,)),
            self.arena.accuracy,
            self.arena.failure_rate,
            blunt=False,
            name=f"{self.seed}/{task.key}",
        )
        return hold(
            judge,
            {i: bool(responses[i].strip()) for i in players},
            topology=self.arena.topology,
            swiss_rounds=self.arena.swiss_rounds,
            seed=seed_of(self.seed, task.key),
            replays=self.arena.replays,
        )
