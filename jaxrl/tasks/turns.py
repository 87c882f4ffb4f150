"""Conversations with a tool, each decision of which is a task: what a supervised start learns from.

``chain``: a user names a pair; the agent looks it up (a tool decision) and says what it was told (a
text decision); the two digits of the code name the next pair, so that an error in one turn is the
ground of the next. After ``steps`` look-ups the last code said is the answer:

    k trace a b           the user
    find a b              tool decision
    OK 3 7                the tool (jaxrl/tasks/tools.py's hidden table)
    so it is 3 7          text decision
    find d h              3 and 7 name d and h
    ...

A task's prompt is the history up to a decision, gold all the way; its answer is the gold decision.
A conversation is of one split, by the hash of its opening. No jax here.
"""

import dataclasses
import functools
import random
import string
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxrl.tasks.contract import Split, Task, Verdict, content_hash, split_of
from jaxrl.tasks.lookups import codes

FAMILIES = ("chain",)
NAMES = string.ascii_lowercase[:10]  # one for each digit
TAGS = string.ascii_lowercase  # of users: they make conversations many
TOOL = "find"

# How an argument of each tool is made comparable; a change of it is another version.
NORMALISERS: Mapping[str, Any] = {"version": 1, TOOL: ["case", "white space"]}


@dataclasses.dataclass(frozen=True)
class Decision:
    """What the agent does in the gold conversation, and what it is answered."""

    kind: Literal["tool", "text"]
    gold: str
    reply: str


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A gold conversation."""

    opening: str
    decisions: Sequence[Decision]

    @property
    def answer(self) -> str:
        """The last code."""
        return self.decisions[-2].reply.removeprefix("OK ").strip()

    def history(self, place: int) -> str:
        """All before a decision."""
        return self.opening + "".join(f"{d.gold}\n{d.reply}" for d in self.decisions[:place])


def called(text: str) -> tuple[str, ...] | None:
    """The normalised arguments of a call of the tool; None for a text that is none."""
    words = text.strip().lower().split()
    return tuple(words[1:]) if words[:1] == [TOOL] else None


def conversation(
    table: Mapping[tuple[str, ...], str], tag: str, pair: tuple[str, ...], steps: int
) -> Conversation:
    """The gold one that begins with this pair."""
    opening, decisions = f"{tag} trace {' '.join(pair)}\n", []
    for _ in range(steps):
        code = table[pair]
        decisions.append(Decision("tool", f"{TOOL} {' '.join(pair)}", f"OK {code}\n"))
        decisions.append(Decision("text", f"so it is {code}", ""))
        pair = tuple(NAMES[int(digit)] for digit in code.split())
    return Conversation(opening, decisions)


@functools.lru_cache(maxsize=8)
def every(seed: int, steps: int, fraction: float) -> Mapping[Split, Sequence[Conversation]]:
    """All conversations over the table of a seed, by split, in an order of the seed."""
    table = codes(len(NAMES), seed)
    pairs = [(tag, pair) for tag in TAGS for pair in table]
    random.Random(f"order {seed}").shuffle(pairs)
    found: dict[Split, list[Conversation]] = {"train": [], "held_out": []}
    for tag, pair in pairs:
        one = conversation(table, tag, pair, steps)
        found[split_of(content_hash(one.opening), fraction)].append(one)
    return found


class Source:
    """Decisions of gold conversations. Parameter: ``steps``, look-ups of a conversation, 1 or more.

    ValueError naming the field for an unknown family or parameter, and more tasks than there are.
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
        if set(parameters) != {"steps"} or parameters["steps"] < 1:
            raise ValueError(f"task.parameters={dict(parameters)!r}; allowed: steps, at least 1")
        self.family, self.seed, self.steps = family, seed, parameters["steps"]
        self._fraction = held_out_fraction
        self._wanted: dict[Split, int] = {"train": train_prompts, "held_out": held_out_prompts}
        self.table = codes(len(NAMES), seed)

    @property
    def conversations(self) -> Mapping[Split, Sequence[Conversation]]:
        """All there are, by split, in an order of the seed."""
        return every(self.seed, self.steps, self._fraction)

    @functools.cached_property
    def _tasks(self) -> Mapping[Split, Sequence[Task]]:
        found: dict[Split, list[Task]] = {"train": [], "held_out": []}
        for split, wanted in self._wanted.items():
            for one in self.conversations[split]:
                found[split] += [self._task(one, split, i) for i in range(len(one.decisions))]
            if len(found[split]) < wanted:
                raise ValueError(
                    f"task.{split}_prompts={wanted}; allowed: at most {len(found[split])}"
                )
            found[split] = found[split][:wanted]
        return found

    def _task(self, one: Conversation, split: Split, place: int) -> Task:
        prompt = one.history(place)
        digest = content_hash(prompt)
        return Task(
            key=f"{self.family}/{self.seed}/{digest}",
            source=f"turns/{self.family}",
            split=split,
            prompt=prompt,
            answer=one.decisions[place].gold,
            content_hash=digest,
            metadata={"kind": one.decisions[place].kind},
        )

    def tasks(self, split: Split) -> Sequence[Task]:
        """Decisions, conversation after conversation."""
        return self._tasks[split]

    def verify(self, task: Task, response: str) -> Verdict:
        """1 for the gold decision, white space and case aside."""
        score = float(response.lower().split() == task.answer.split())
        return Verdict(score, score >= 1, {"score": score, task.metadata["kind"]: score})

    def prompts(self, task: Task, samples: int) -> list[str]:
        """The task's prompt, for every sample."""
        return [task.prompt] * samples

    def verify_group(self, task: Task, responses: Sequence[str]) -> list[Verdict]:
        """Each response on its own."""
        return [self.verify(task, response) for response in responses]
