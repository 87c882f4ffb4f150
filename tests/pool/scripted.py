"""Small real parts for the tests of the pool: a generator that follows a script, sums as questions.

Nothing here stands in for another class by imitation: each is a whole, working implementation of
its protocol, only simple enough that the right answer is known beforehand.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxrl.pool.contract import Completion, Request
from jaxrl.pool.local import LocalPool
from jaxrl.pool.rollout import StopReason, Version
from jaxrl.tasks.contract import Split, Task, Verdict, content_hash

EOS = 2
FIRST = Version(0, 0, "first")


class Letters:
    """A tokenizer with one id a character: its code, shifted past eos. Merges nothing."""

    eos_id = EOS
    stop_ids = frozenset({EOS})

    def encode(self, text: str) -> list[int]:
        return [ord(sign) + 3 for sign in text]

    def prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def question(self, ids: Iterable[int]) -> str:
        return self.decode(ids)

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(chr(token - 3) for token in ids if token > EOS)


class Sums:
    """Questions 0+1=, 1+1=, ...; a right response is the sum."""

    grouped = False
    needs: tuple[str, ...] = ()

    def __init__(self, count: int) -> None:
        self._tasks = [self._task(n) for n in range(count)]

    def _task(self, n: int) -> Task:
        prompt = f"{n}+1="
        return Task(f"sum/{n}", "sums", "train", prompt, str(n + 1), content_hash(prompt), {})

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks if split == "train" else []

    def verify(self, task: Task, response: str) -> Verdict:
        score = float(response == task.answer)
        return Verdict(score, score >= 1, {"score": score})

    def prompts(self, task: Task, samples: int) -> Sequence[str]:
        return [task.prompt] * samples

    def verify_group(self, task: Task, responses: Sequence[str]) -> Sequence[Verdict]:
        return [self.verify(task, response) for response in responses]


class Scripted:
    """A generator whose responses are a function of the request: deterministic, and it keeps
    count."""

    def __init__(self, respond: Callable[[Request], str] | None = None) -> None:
        self.respond = respond or (lambda request: "1")
        self.version: Version | None = None
        self.requests: list[Request] = []

    def load(self, version: Version, path: str) -> None:
        self.version = version

    def completion(self, request: Request) -> Completion:
        assert self.version is not None
        ids = [*Letters().encode(self.respond(request)), EOS]
        reason = StopReason.STOP
        if len(ids) > request.max_new_tokens:
            ids, reason = ids[: request.max_new_tokens], StopReason.LENGTH
        logp = np.full(len(ids), -0.5, np.float32)
        return Completion(np.array(ids, np.int32), logp, self.version, reason)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.requests += requests
        return [self.completion(request) for request in requests]


def answer_of(request: Request) -> str:
    """The right answer to a question of ``Sums``, for generators that should be right."""
    prompt = Letters().decode(request.prompt)
    return str(int(prompt.split("+")[0]) + 1)


def local_pool(generator: Scripted, source: Sums, **changes) -> LocalPool:
    """A LocalPool with small settings, its first weights published."""
    settings: dict[str, Any] = dict(
        run_id="run",
        seed=0,
        rollouts_per_group=2,
        temperature=1.0,
        max_new_tokens=8,
        max_prompt_tokens=16,
        watchdog_s=30.0,
        max_refills=2,
    )
    pool = LocalPool(generator, Letters(), source, **(settings | changes))
    pool.publish(FIRST, "nowhere")
    return pool
