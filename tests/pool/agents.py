"""Agents for the tests of workers: functions of a base URL, a key and a task, by dotted name."""

import threading
from typing import Any

import openai

from jaxrl.pool.rollout import Failure
from jaxrl.pool.workers import AttemptFailed

MET: list[str] = []  # how often each agent was at work
WAIT = threading.Event()


def _ask(base_url: str, key: str, *contents: str, **settings: Any) -> str:
    client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)
    roles = ("user", "assistant")
    messages: Any = [{"role": roles[n % 2], "content": said} for n, said in enumerate(contents)]
    answer = client.chat.completions.create(model="policy", messages=messages, **settings)
    return answer.choices[0].message.content or ""


def plain(base_url: str, key: str, task: Any) -> None:
    """Asks the task's question; the model's answer is the attempt's."""
    _ask(base_url, key, task.prompt)


async def later(base_url: str, key: str, task: Any) -> str:
    """The same from a coroutine, with an answer of its own."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key) as client:
        messages: Any = [{"role": "user", "content": task.prompt}]
        await client.chat.completions.create(model="policy", messages=messages)
    return task.answer


def silent(base_url: str, key: str, task: Any) -> None:
    """Asks the model nothing."""


def broken(base_url: str, key: str, task: Any) -> None:
    """Its environment breaks after the model was asked."""
    _ask(base_url, key, task.prompt)
    raise RuntimeError("the sandbox is gone")


def broken_once(base_url: str, key: str, task: Any) -> None:
    """Breaks at its first attempt, and works at the second."""
    MET.append(key)
    if len(MET) == 1:
        raise RuntimeError("the sandbox is gone")
    _ask(base_url, key, task.prompt)


def endless(base_url: str, key: str, task: Any) -> None:
    """Goes on until the context is full."""
    said = [task.prompt]
    while True:
        said += [_ask(base_url, key, *said), "more? " * 8]


def timed_out(base_url: str, key: str, task: Any) -> None:
    """Declares that the policy took too long."""
    _ask(base_url, key, task.prompt)
    raise AttemptFailed(Failure.POLICY_TIMEOUT, "300 s")


def unjudged(base_url: str, key: str, task: Any) -> None:
    """Declares that its judge did not answer."""
    _ask(base_url, key, task.prompt)
    raise AttemptFailed(Failure.JUDGE, "the judge is away")


def unset(base_url: str, key: str, task: Any) -> None:
    """Declares that the task cannot be set up."""
    raise AttemptFailed(Failure.DATA, "no such repository")


def cut_off(base_url: str, key: str, task: Any) -> None:
    """Its connection to the model breaks."""
    client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key=key, max_retries=0)
    client.models.list()
