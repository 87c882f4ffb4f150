"""Three harnesses for one task: how a model is told of tools, calls them, and is answered.

    json   one JSON object a turn: {"tool": "find", "arguments": ["a", "b"]}, {"answer": "3 7"}
    react  Thought, Action: find(a, b), Observation; Final: 3 7
    code   one fenced block a turn with one call of literals, find('a', 'b') or answer('3 7'), which
           is read as a tree and never executed

All give the same trajectory (jaxrl/agents/trajectories.py): ``play`` is the only loop. A text that
a harness cannot read is answered with what it expects, at most ``patience`` times.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxrl.agents.journal import Json
from jaxrl.agents.trajectories import Segment, Trajectory

Tools = Mapping[str, Callable[..., str]]  # name -> function of any number of texts
LONGEST = 4000  # characters of a model's turn, and of a tool's answer


class Malformed(ValueError):
    """A turn that this harness cannot read."""


class ToolBroken(RuntimeError):
    """A tool failed for reasons of its own: the environment's fault."""


class Harness(Protocol):
    """How one harness speaks. ``render`` is the inverse of ``parse``."""

    def instruction(self, tools: Sequence[str]) -> str:
        """What a model is told before the task."""
        ...

    def parse(self, text: str) -> Json:
        """{"tool": name, "arguments": [texts]} or {"answer": text}; Malformed for anything else."""
        ...

    def render(self, call: Json) -> str:
        """How a model would write this."""
        ...

    def observed(self, text: str) -> str:
        """How a tool's answer stands in the conversation."""
        ...


def _call(tool: Any, arguments: Any) -> Json:
    if not isinstance(tool, str) or not tool.isidentifier() or not isinstance(arguments, list):
        raise Malformed(f"no call of a tool: {str(tool)[:40]!r}")
    if not all(isinstance(one, str | int | float) for one in arguments):
        raise Malformed("arguments are texts and numbers")
    return {"tool": tool, "arguments": [str(one) for one in arguments]}


class JsonCalls:
    """See the module."""

    def instruction(self, tools: Sequence[str]) -> str:
        """What a model is told before the task."""
        shape = '{"tool": NAME, "arguments": [...]} or {"answer": TEXT}'
        return f"Reply with one JSON object: {shape}. Tools: {', '.join(tools)}.\n"

    def parse(self, text: str) -> Json:
        """See ``Harness``."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Malformed("expected one JSON object") from error
        if isinstance(found, dict) and set(found) == {"answer"}:
            return {"answer": str(found["answer"])}
        if isinstance(found, dict) and set(found) == {"tool", "arguments"}:
            return _call(found["tool"], found["arguments"])
        raise Malformed("expected tool and arguments, or answer")

    def render(self, call: Json) -> str:
        """See ``Harness``."""
        return json.dumps(call)

    def observed(self, text: str) -> str:
        """See ``Harness``."""
        return json.dumps({"result": text}) + "\n"


class React:
    """See the module."""

    _ACTION = re.compile(r"^Action:\s*(\w+)\((.*)\)\s*$", re.M)
    _FINAL = re.compile(r"^Final:\s*(.*?)\s*$", re.M)

    def instruction(self, tools: Sequence[str]) -> str:
        """What a model is told before the task."""
        lines = "Thought: ...\nAction: NAME(arguments)\nor\nThought: ...\nFinal: TEXT"
        return f"Each turn is\n{lines}\nTools: {', '.join(tools)}.\n"

    def parse(self, text: str) -> Json:
        """See ``Harness``."""
        actions, finals = self._ACTION.findall(text), self._FINAL.findall(text)
        if len(actions) + len(finals) != 1:
            raise Malformed("expected one line Action: NAME(...) or Final: TEXT")
        if finals:
            return {"answer": finals[0]}
        name, inside = actions[0]
        return _call(name, [one.strip() for one in inside.split(",")] if inside.strip() else [])

    def render(self, call: Json) -> str:
        """See ``Harness``."""
        if "answer" in call:
            return f"Thought: that is all.\nFinal: {call['answer']}"
        return f"Thought: I look.\nAction: {call['tool']}({', '.join(call['arguments'])})"

    def observed(self, text: str) -> str:
        """See ``Harness``."""
        return f"\nObservation: {text}\n"


class CodeBlocks:
    """See the module."""

    def instruction(self, tools: Sequence[str]) -> str:
        """What a model is told before the task."""
        return (
            "Reply with one fenced block that holds one call with literal arguments, "
            f"or answer(TEXT). Functions: {', '.join(tools)}, answer.\n"
        )

    def parse(self, text: str) -> Json:
        """See ``Harness``."""
        blocks = re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL)
        if len(blocks) != 1:
            raise Malformed("expected one fenced block")
        try:
            node = ast.parse(blocks[0].strip(), mode="eval").body
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                raise Malformed("expected one call")
            arguments = [ast.literal_eval(one) for one in node.args]
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise Malformed(f"expected one call with literals: {type(error).__name__}") from error
        if node.keywords:
            raise Malformed("arguments go by place")
        if node.func.id == "answer":
            if len(arguments) != 1:
                raise Malformed("answer takes one text")
            return {"answer": str(arguments[0])}
        return _call(node.func.id, arguments)

    def render(self, call: Json) -> str:
        """See ``Harness``."""
        name, arguments = call.get("tool", "answer"), call.get("arguments", [call.get("answer")])
        return f"```python\n{name}({', '.join(map(repr, arguments))})\n```"

    def observed(self, text: str) -> str:
        """See ``Harness``."""
        return f"\n# -> {text}\n"


HARNESSES: Mapping[str, Harness] = {"json": JsonCalls(), "react": React(), "code": CodeBlocks()}


def harness(name: str) -> Harness:
    """By name. ValueError for one that does not exist."""
    if name not in HARNESSES:
        raise ValueError(f"harness={name!r}; allowed: {', '.join(HARNESSES)}")
    return HARNESSES[name]


def play(
    name: str,
    brief: str,
    tools: Tools,
    ask: Callable[[Sequence[Segment]], str],
    *,
    steps: int,
    patience: int,
) -> Trajectory:
    """Let a model act on a task under a harness, until it answers or may no more.

    ``ask`` is given the segments so far and writes the next turn. At most ``steps`` turns,
    ``patience`` of them malformed. An unknown tool is told so; a tool that breaks ends the episode
    as the environment's fault.
    """
    spoken = harness(name)
    segments = [Segment("system", spoken.instruction(sorted(tools)))]
    segments.append(Segment("user", brief + "\n"))

    def ended(stop: str, answer: str = "") -> Trajectory:
        return Trajectory(name, tuple(segments), answer, stop)

    for _ in range(steps):
        text = ask(segments)[:LONGEST]
        try:
            call = spoken.parse(text)
        except Malformed as error:
            segments += [Segment("model", text), Segment("harness", f"\n{error}\n")]
            patience -= 1
            if patience < 0:
                return ended("malformed")
            continue
        segments.append(Segment("model", text, call))
        if "answer" in call:
            return ended("answered", call["answer"])
        try:
            told = used(tools, call)
        except ToolBroken as error:
            segments.append(Segment("env", f"\n{error}\n"))
            return ended("environment")
        segments.append(Segment("tool", spoken.observed(told[:LONGEST])))
    return ended("steps")


def used(tools: Tools, call: Json) -> str:
    """What a tool answers to a call; that there is none, if so."""
    if call["tool"] not in tools:
        return f"ERR no tool {call['tool'][:40]}"
    return tools[call["tool"]](*call["arguments"])


def supported(trajectory: Trajectory, tools: Tools) -> bool:
    """Whether the calls of a trajectory, run again on these tools, tell every word of its answer.

    A check that needs no opinion: with the tools that a task allows, an answer that was read where
    nobody should look stands there without support. An answer without words is supported by
    nothing.
    """
    heard: set[str] = set()
    for call in trajectory.calls:
        try:
            heard |= set(used(tools, call).split())
        except ToolBroken:
            continue
    words = trajectory.answer.split()
    return bool(words) and set(words) <= heard
