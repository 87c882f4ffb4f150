"""Messages of agents <-> token ids: what is asked anew, and what follows a sampled answer.

A tool call is text that the model writes, as models of the Hermes and Qwen families do:

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>

It is shown to the agent in the shape of its API, and recognised when it comes back, however its
arguments are spelt.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxrl.pool.contract import Tokenizer

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def content_of(message: Message) -> str:
    """A message's text: nothing for null, parts of text joined. ValueError for parts of another
    kind."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise ValueError(f"messages: content part {part!r}; allowed: {{'type': 'text', ...}}")
        texts.append(str(part["text"]))
    return "".join(texts)


def called(message: Message) -> list[dict[str, Any]]:
    """A message's tool calls as [{name, arguments}]: without ids, arguments read as JSON where they
    are some."""
    found = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function.get("arguments", {})
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except json.JSONDecodeError:
            pass  # what is no JSON is compared as it is spelt
        found.append({"name": function["name"], "arguments": arguments})
    return found


def plain(message: Message) -> dict[str, Any]:
    """A message as templates read it: role, text, and tool calls where there are any. ValueError
    for an unknown role."""
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"messages: role={role!r}; allowed: {', '.join(ROLES)}")
    read: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": content_of(message),
    }
    calls = called(message)
    if calls:
        read["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    if role == "tool" and message.get("name"):
        read["name"] = str(message["name"])
    return read


def link(chain: str, message: Message) -> str:
    """The fingerprint of a chain of messages and one more; "" is the empty chain."""
    told = canonical([chain, plain(message)])
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def answer_message(text: str, name: str) -> dict[str, Any]:
    """What the model wrote as an assistant's message; ``name`` makes the ids of its tool calls.

    A call that is no JSON object with a name stays text.
    """
    calls: list[dict[str, Any]] = []

    def take(match: re.Match[str]) -> str:
        try:
            call = json.loads(match[1])
            function = {"name": call["name"], "arguments": canonical(call.get("arguments", {}))}
        except (json.JSONDecodeError, KeyError, TypeError):
            return match[0]
        if not isinstance(function["name"], str):
            return match[0]
        place = f"call_{name}_{len(calls)}"
        calls.append({"id": place, "type": "function", "function": function})
        return ""

    content = _CALL.sub(take, text)
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": content.strip() or None, "tool_calls": calls}


def spoken(message: Message) -> str:
    """An assistant's message as the model would have written it."""
    calls = (f"<tool_call>\n{canonical(call)}\n</tool_call>" for call in called(message))
    return "\n".join(filter(None, [content_of(message), *calls]))


class Dialogue(Protocol):
    """How messages become ids."""

    def whole(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        """Ids of a conversation up to where the next answer begins. ValueError if it cannot be
        had."""
        ...

    def more(
        self, messages: Sequence[Message], known: int, tools: Sequence[Any]
    ) -> list[int] | None:
        """Ids from the end of the answer ``messages[known - 1]``, its terminator included, to where
        the next answer begins; None if that cannot be told."""
        ...


class PlainDialogue:
    """Messages without a template: texts side by side, an assistant's with its terminator.

    A single message is the prompt that a task's question is. Tools are not shown to the model: such
    a tokenizer has no words for them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def whole(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        """Ids of all messages."""
        first, *rest = [plain(message) for message in messages]
        return [*self._tokenizer.prompt(first["content"]), *self._ids(rest)]

    def more(
        self, messages: Sequence[Message], known: int, tools: Sequence[Any]
    ) -> list[int] | None:
        """Terminator and ids of the messages after the known ones."""
        return [self._tokenizer.eos_id, *self._ids([plain(m) for m in messages[known:]])]

    def _ids(self, messages: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            said = message["role"] == "assistant"
            ids += self._tokenizer.encode(spoken(message) if said else message["content"])
            ids += [self._tokenizer.eos_id] if said else []
        return ids


class Templated(Protocol):
    """A tokenizer with a chat template (jaxrl.pool.published_tokenizer.PublishedTokenizer)."""

    def chat_ids(self, messages: Sequence[Message], *, tools: Sequence[Any]) -> list[int]:
        """Ids of messages, up to where the answer begins."""
        ...

    def following_ids(
        self, messages: Sequence[Message], known: int, *, tools: Sequence[Any]
    ) -> list[int] | None:
        """As ``Dialogue.more``."""
        ...


class TemplateDialogue:
    """Messages as a published chat template has them."""

    def __init__(self, tokenizer: Templated) -> None:
        self._tokenizer = tokenizer

    def whole(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        """As the template renders them."""
        return self._tokenizer.chat_ids([plain(message) for message in messages], tools=tools)

    def more(
        self, messages: Sequence[Message], known: int, tools: Sequence[Any]
    ) -> list[int] | None:
        """What the template puts behind the answer."""
        read = [plain(message) for message in messages]
        return self._tokenizer.following_ids(read, known, tools=tools)
