"""Tools whose answer is worth more than a number: a look-up that is answered in words. No jax here.

``lookup``: each pair of names hides a code of two digits, which no prompt tells; it is found by
trying. A right call is answered "OK d1 d2". A wrong one is answered "ERR expected d1 d2" for some
of the tasks and "ERR" for the others, always the same ones. The digits come from a hidden table,
one for the left name and one for the right: what some calls are told holds for pairs never called.

Some tasks are ``shown``: their prompt ends with an answer of the tool, whose code (not the hidden
one) is to be given back. Only these state an answer, so that a supervised start teaches to read the
tool's words and tells nothing of the table.
"""

import hashlib
import random
import string
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.tasks.contract import Split, Task, Verdict, content_hash, split_of

FAMILIES = ("lookup",)

# Draws without a new question for a split that lacks some, after which the family counts as too
# small; besides it, one for each distinct question seen.
PATIENCE = 1000


def families() -> list[str]:
    """Names of the environments there are."""
    return list(FAMILIES)


class Source:
    """A tool environment as prompts with a verifier that answers.

    Parameters: ``names``, how many names stand at either place, 2 .. 26; ``told_fraction``, of the
    tasks whose wrong calls are told the code; ``shown_fraction``, of the tasks that are shown. The
    table depends on the seed. Asking for more tasks only appends.

    ValueError naming the field for an unknown family or parameter, a value out of range, and more
    tasks than there are.
    """

    grouped = False
    needs: tuple[str, ...] = ()

    def __init__(
        self,
        family: str,
        parameters: Mapping[str, Any],
        *,
        seed: int,
        train_prompts: int,
        held_out_prompts: int,
        held_out_fraction: float,
    ) -> None:
        if family not in FAMILIES:
            raise ValueError(f"task.family={family!r} is unknown; allowed: {', '.join(FAMILIES)}")
        wanted = ("names", "told_fraction", "shown_fraction")
        if set(parameters) != set(wanted):
            raise ValueError(f"task.parameters={dict(parameters)!r}; allowed: {', '.join(wanted)}")
        names, told, shown = (parameters[name] for name in wanted)
        if not 2 <= names <= len(string.ascii_lowercase):
            raise ValueError(f"task.parameters.names={names!r}; allowed: 2 .. 26")
        for name, value in (("told_fraction", told), ("shown_fraction", shown)):
            if not 0 <= value <= 1:
                raise ValueError(f"task.parameters.{name}={value!r}; allowed: 0 .. 1")
        if not 0 < held_out_fraction < 1:
            raise ValueError(
                f"task.held_out_fraction={held_out_fraction!r}; allowed: between 0 and 1"
            )
        self.family, self.seed, self.held_out_fraction = family, seed, held_out_fraction
        self._names, self._told, self._shown = string.ascii_lowercase[:names], told, shown
        hidden = random.Random(f"table {seed}")
        self._table = [{name: hidden.randrange(10) for name in self._names} for _ in range(2)]
        self._wanted: dict[Split, int] = {"train": train_prompts, "held_out": held_out_prompts}
        self._found: dict[Split, list[Task]] = {}

    def tasks(self, split: Split) -> Sequence[Task]:
        """Distinct calls of a split, always in the same order; drawn when first asked for."""
        if not self._found:
            self._found = self._draw()
        return self._found[split]

    def verify(self, task: Task, response: str) -> Verdict:
        """1 for the code, a space between its digits, else 0; ``digits``: the share that is right.

        White space around the response does not count.
        """
        code, said = task.metadata["code"], response.strip()
        digits = [a == b for a, b in zip(said.split(), code.split(), strict=False)]
        share = sum(digits) / 2 if len(said.split()) == 2 else 0.0
        score, told = float(said == code), task.metadata["told"]
        if score:
            feedback = f"OK {code}\n"
        else:
            feedback = f"ERR expected {code}\n" if told else "ERR\n"
        parts = {"score": score, "digits": share}
        return Verdict(score, score >= 1, parts, feedback=feedback, facts={"told": told})

    def prompts(self, task: Task, samples: int) -> list[str]:
        """The task's prompt, for every sample."""
        return [task.prompt] * samples

    def verify_group(self, task: Task, responses: Sequence[str]) -> list[Verdict]:
        """Each response on its own."""
        return [self.verify(task, response) for response in responses]

    def _draw(self) -> dict[Split, list[Task]]:
        found: dict[Split, list[Task]] = {"train": [], "held_out": []}
        seen: set[str] = set()
        order = random.Random(f"order {self.seed}")
        dry = 0
        while any(len(found[split]) < wanted for split, wanted in self._wanted.items()):
            if dry > PATIENCE + len(seen):
                raise ValueError(
                    f"task.family={self.family!r} with task.parameters.names={len(self._names)} is "
                    f"too small: it gave {len(found['train'])} of task.train_prompts="
                    f"{self._wanted['train']} and {len(found['held_out'])} of "
                    f"task.held_out_prompts={self._wanted['held_out']} tasks; allowed: at most "
                    "what was found"
                )
            task = self._call(order)
            dry += 1
            if task.content_hash not in seen and len(found[task.split]) < self._wanted[task.split]:
                found[task.split].append(task)
                dry = 0
            seen.add(task.content_hash)
        return found

    def _call(self, order: random.Random) -> Task:
        """One call, drawn: of the hidden table, or with the tool's words before it."""
        left, right = order.choice(self._names), order.choice(self._names)
        shown = order.random() < self._shown
        code = f"{self._table[0][left]} {self._table[1][right]}"
        prompt = f"find {left} {right}\n"  # a line each: encoded apart or joined, the same ids
        if shown:
            code = f"{order.randrange(10)} {order.randrange(10)}"
            prompt += order.choice(("ERR expected", "OK")) + f" {code}\n"
        digest = content_hash(prompt)
        lot = hashlib.blake2b(f"told {digest}".encode(), digest_size=8).hexdigest()
        return Task(
            key=f"{self.family}/{self.seed}/{digest}",
            source=f"tools/{self.family}",
            split=split_of(digest, self.held_out_fraction),
            prompt=prompt,
            answer=code if shown else "",
            content_hash=digest,
            metadata={
                "code": code,
                "shown": shown,
                "told": shown or int(lot, 16) < self._told * 2**64,
            },
        )
