"""The shapes of OpenAI's chat and text completions, requests and answers. No jax here.

What changes the distribution that is sampled from, without changing the log-probs that are
recorded, is refused by name: nucleus and top-k sampling, penalties, forced choices and formats.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl.pool.answers import Ask
from jaxrl.pool.conversation import Call, Conversation
from jaxrl.pool.dialogue import answer_message
from jaxrl.pool.rollout import StopReason

# Parameters that may be given only with these values, which change nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "functions": ([],),
}

IDS = 2**31  # more than any vocabulary has, and what arrays of ids hold

PIECE = 16  # characters of a streamed piece


def digest_of(kind: str, body: Any) -> str:
    """Of a request: the same when it is sent again. ValueError for one that is nested too
    deeply."""
    try:
        told = json.dumps([kind, body], sort_keys=True)
    except RecursionError as error:
        raise ValueError("values are nested too deeply") from error
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def are_ids(value: Any) -> bool:
    """Whether it is a list of what may be ids of tokens."""
    return isinstance(value, list) and all([type(x) is int and 0 <= x < IDS for x in value])


def check_numbers(whole: Mapping[str, Any], temperature: Any) -> None:
    """ValueError naming one of a request's numbers that is none, or a ``whole`` one that is not."""
    kinds = [(name, value, int) for name, value in whole.items()]
    for name, value, kind in (*kinds, ("temperature", temperature, int | float)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            raise ValueError(f"{name}={value!r}; allowed: a number")


def read_ask(kind: str, body: Mapping[str, Any], again: bool) -> Ask:
    """A request body of ``chat`` or ``text`` as what is asked. ValueError naming the field."""
    for name, allowed in NEUTRAL.items():
        if body.get(name) is not None and body[name] not in allowed:
            told = " or ".join(map(repr, allowed))
            raise ValueError(f"{name}={body[name]!r}; allowed: {told}")
    stops = body.get("stop") or ()
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    temperature, seed = body.get("temperature"), body.get("seed")
    check_numbers({"max_tokens": most, "seed": seed}, temperature)
    if not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"stop={stops!r}; allowed: texts")
    asked: dict[str, Any] = {}
    if kind == "chat":
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
            raise ValueError(f"messages={messages!r}; allowed: a list of messages")
        asked = {"messages": messages, "tools": body.get("tools") or ()}
    else:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            asked = {"text": prompt}
        elif are_ids(prompt):
            asked = {"ids": prompt}
        else:
            raise ValueError("prompt; allowed: one text, or one list of token ids")
    return Ask(
        request=digest_of(kind, body),
        again=again,
        temperature=temperature,
        max_tokens=most,
        stops=stops,
        seed=seed,
        **asked,
    )


def usage(conversation: Conversation, call: Call) -> dict[str, int]:
    """Tokens of a call."""
    made = len(call.tokens)
    asked = len(conversation.ids(call.index)) - made
    return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}


def finish(call: Call, message: Mapping[str, Any]) -> str:
    """Why an answer ended, in OpenAI's words."""
    if message.get("tool_calls"):
        return "tool_calls"
    return "stop" if call.stop_reason is StopReason.STOP else "length"


def message_of(call: Call, name: str) -> dict[str, Any]:
    """A call's answer as a message."""
    return answer_message(call.text, f"{name}_{call.index}")


def token_texts(call: Call, tokenizer: Any) -> list[dict[str, Any]]:
    """The sampled tokens with their log-probs."""
    texts = [tokenizer.decode([token]) for token in call.tokens]
    return [
        {"token": text, "logprob": logp, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logp in zip(texts, call.logp, strict=False)
    ]


class Answer:
    """One answer in the shape that was asked for, whole or in pieces."""

    def __init__(
        self,
        kind: str,
        model: str,
        conversation: Conversation,
        call: Call,
        name: str,
        logprobs: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        self._chat = kind == "chat"
        self._call, self._logprobs = call, logprobs
        self._message = message_of(call, name)
        self._usage = usage(conversation, call)
        shape = "chat.completion" if self._chat else "text_completion"
        self._frame = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{name}-{call.index}",
            "object": shape,
            "created": 0,  # the same answer twice is the same bytes
            "model": model,
        }

    def _told(self) -> Any:
        if self._logprobs is None:
            return None
        if self._chat:
            return {"content": list(self._logprobs), "refusal": None}
        return {
            "tokens": [one["token"] for one in self._logprobs],
            "token_logprobs": [one["logprob"] for one in self._logprobs],
            "top_logprobs": None,
            "text_offset": [],
        }

    def whole(self) -> dict[str, Any]:
        """As one object."""
        choice: dict[str, Any] = {"index": 0, "logprobs": self._told()}
        if self._chat:
            choice["message"] = {"refusal": None, **self._message}
            choice["finish_reason"] = finish(self._call, self._message)
        else:
            choice["text"] = self._call.text
            choice["finish_reason"] = finish(self._call, {})
        return {**self._frame, "choices": [choice], "usage": self._usage}

    def pieces(self, with_usage: bool) -> Iterator[bytes]:
        """As events of a stream."""
        frame = {**self._frame}
        if self._chat:
            frame["object"] = "chat.completion.chunk"
        for choice in self._choices():
            yield _event({**frame, "choices": [{"index": 0, "logprobs": None, **choice}]})
        if with_usage:
            yield _event({**frame, "choices": [], "usage": self._usage})
        yield b"data: [DONE]\n\n"

    def _choices(self) -> Iterator[dict[str, Any]]:
        text = (self._message["content"] if self._chat else self._call.text) or ""
        parts = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
        if not self._chat:
            for part in parts:
                yield {"text": part, "finish_reason": None}
            yield {"text": "", "finish_reason": finish(self._call, {}), "logprobs": self._told()}
            return
        yield {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        for part in parts:
            yield {"delta": {"content": part}, "finish_reason": None}
        for place, tool in enumerate(self._message.get("tool_calls", ())):
            yield {"delta": {"tool_calls": [{"index": place, **tool}]}, "finish_reason": None}
        reason = finish(self._call, self._message)
        yield {"delta": {}, "finish_reason": reason, "logprobs": self._told()}


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def refusal(message: str, kind: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
