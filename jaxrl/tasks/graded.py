"""Reasoning Gym with a grader over each group: facts for methods that weigh passes by quality.

The grader here is scripted: it stands in for a language model that reads a whole group. It prefers
passes that say the answer and nothing else, and calls those exploits in which the answer is a small
part (some families' verifiers accept any text that holds it). It errs as often as it is told to.
The verifier's verdict stays the reward: what a grade does to it is the method's affair.
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.tasks import reasoning
from jaxrl.tasks.contract import Task, Verdict
from jaxrl.tasks.judged import seed_of


@dataclasses.dataclass(frozen=True)
class Grader:
    """How passes are graded: ``task.parameters["grader"]``. ValueError naming a bad field."""

    noise: float  # standard deviation of what is added to a quality, >= 0
    least: float  # lowest grade, in (0, 1]
    exploit_below: float  # passes of a true quality below it are exploits; 0: none is
    missed: float  # probability that an exploit is not flagged
    false_flags: float  # probability that an honest pass is
    failure_rate: float  # probability that a group comes back without a usable grade

    def __post_init__(self) -> None:
        rates = ("exploit_below", "missed", "false_flags", "failure_rate")
        bad = {name: (0 <= vars(self)[name] <= 1, "0 to 1") for name in rates} | {
            "noise": (self.noise >= 0, ">= 0"),
            "least": (0 < self.least <= 1, "above 0, at most 1"),
        }
        for name, (good, allowed) in bad.items():
            if not good:
                raise ValueError(
                    f"task.parameters.grader.{name}={vars(self)[name]!r}; allowed: {allowed}"
                )


def quality(task: Task, response: str) -> float:
    """Share of a passing response that the answer takes up, at most 1."""
    return min(len(task.answer) / max(len(response), 1), 1.0)


class Source(reasoning.Source):
    """As ``jaxrl.tasks.reasoning``, with ``parameters["grader"]`` for ``Grader``.

    Facts of each response: ``grade`` in (0, 1] (a failure's is 1 and means nothing), ``exploit``
    (1: a confirmed exploit), ``graded`` (1: the grade is usable).
    """

    grouped = True
    needs = ("judge_calls",)

    def __init__(self, family: str, parameters: Mapping[str, Any], **sizes: Any) -> None:
        own = dict(parameters)
        self.grader = Grader(**own.pop("grader"))
        super().__init__(family, own, **sizes)

    def verify_group(self, task: Task, responses: Sequence[str]) -> list[Verdict]:
        """The verifier's verdicts, with the grader's as facts."""
        grader, found = self.grader, []
        answered = self._draw(task, "group").random() >= grader.failure_rate
        for sample, response in enumerate(responses):
            verdict = self.verify(task, response)
            grade, exploit = 1.0, False
            if verdict.correct and answered:
                draw = self._draw(task, f"{sample}/{response}")
                worth = quality(task, response)
                wrong = grader.missed if worth < grader.exploit_below else grader.false_flags
                exploit = (worth < grader.exploit_below) != (draw.random() < wrong)
                grade = min(max(worth + draw.gauss(0, grader.noise), grader.least), 1.0)
            facts = {"grade": grade, "exploit": int(exploit), "graded": int(answered)}
            found.append(dataclasses.replace(verdict, facts=facts))
        return found

    def _draw(self, task: Task, what: str) -> random.Random:
        """The same question has the same grade."""
        return random.Random(seed_of(self.seed, task.key, what))
