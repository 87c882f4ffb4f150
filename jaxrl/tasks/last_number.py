"""Reasoning Gym for models that answer in sentences: the last number of a response is its answer.

A published instruction model says «The answer is 42.» where the data set asks for «42». Whole texts
that must equal the answer would reward the form before the sum.
"""

import dataclasses
import re

from jaxrl.tasks import reasoning
from jaxrl.tasks.contract import Task, Verdict

# A minus belongs to a number unless it stands behind a digit, a letter or a bracket: «5 - 3» and
# «5-3» state 3. Commas group thousands.
_NUMBER = re.compile(
    r"(?:(?<![\w)\].])-)?(?<![\d.])(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?",
    re.ASCII,
)


def last_number(text: str) -> str:
    """The last number in ``text`` without commas; "" if there is none. «3.» and «**3**» are 3."""
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else ""


class Source(reasoning.Source):
    """``jaxrl.tasks.reasoning`` that scores the last number instead of the whole response.

    ``components["stated"]`` is 1 where there is a number. One without scores 0, which no family's
    scorer is asked about.
    """

    def verify(self, task: Task, response: str) -> Verdict:
        """Score in [0, 1] of the last number, by the family's own ``score_answer``."""
        stated = last_number(response)
        if not stated:
            return Verdict(score=0.0, correct=False, components={"score": 0.0, "stated": 0.0})
        verdict = super().verify(task, stated)
        return dataclasses.replace(verdict, components={**verdict.components, "stated": 1.0})
