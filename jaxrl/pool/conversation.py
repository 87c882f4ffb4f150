"""The calls of one attempt as a graph: ids that were sampled stay what they are. No jax here.

A call is one answer of the model: context ids that are new, then the ids that were sampled. Its
parent is the call that it goes on from; a branch is the way from a first call to a last one.

    ids of a branch = context, sampled, context, sampled, ...

What an agent sends is matched with what is known: messages by their fingerprints, text by what was
shown before, ids by themselves. What is known is taken from the records, and only the rest is
tokenised. What does not go on from anything known begins a new branch; if it should have, that is
drift, counted by its cause:

    retokenise   ids that spell a known text otherwise
    retemplate   known messages that would now be rendered otherwise (other tools, other template)
    rewrite      a history that was changed: answers in it that nobody sampled
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxrl.pool.compact import compact
from jaxrl.pool.contract import Tokenizer
from jaxrl.pool.dialogue import Dialogue, Message, canonical, link
from jaxrl.pool.rollout import StopReason, Version

DRIFTS = ("retokenise", "retemplate", "rewrite")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where a request goes on: ``prompt`` is what the engine reads, ``context`` its new part."""

    parent: int  # a call's index, -1 for none
    prompt: list[int]
    context: list[int]
    drift: str  # of DRIFTS, or ""
    chain: str  # fingerprint of the messages asked with, "" if there were none
    shown: str  # text asked with, "" if there was none
    tools: str  # canonical JSON


@dataclasses.dataclass(frozen=True)
class Call:
    """One answer of the model, as the journal of an attempt holds it."""

    index: int
    parent: int
    context: list[int]
    tokens: list[int]  # sampled, the terminator included
    logp: list[float]
    version_index: list[int]  # of each sampled token, into `versions`
    versions: list[Version]
    temperature: float
    stop_reason: StopReason
    text: str
    chain: str  # fingerprint of the messages and the answer
    shown: str  # text asked with, and the answer's
    tools: str
    drift: str
    request: str  # digest of the request, to know it when it is sent again
    trainable: bool  # False: a server that tells no ids and log-probs; the ids are of the text
    sent: bool = True  # False: the answer stopped an attempt instead of being sent

    def encode(self) -> bytes:
        """As JSON; floats come back bit for bit."""
        return compact(self)

    @classmethod
    def decode(cls, data: bytes) -> "Call":
        """The inverse of ``encode``. ValueError for anything else."""
        try:
            fields = json.loads(data)
            fields["versions"] = [Version(**version) for version in fields["versions"]]
            fields["stop_reason"] = StopReason(fields["stop_reason"])
            return cls(**fields)
        except (TypeError, KeyError) as error:
            raise ValueError(f"no call of an attempt: {error}") from error


class Conversation:
    """All calls of one attempt. Rebuilt from its journal by adding the calls again."""

    def __init__(self, tokenizer: Tokenizer, dialogue: Dialogue) -> None:
        self._tokenizer, self._dialogue = tokenizer, dialogue
        self.calls: list[Call] = []
        self.drifts: Counter[str] = Counter()
        self._by_chain: dict[str, int] = {}
        self._by_request: dict[str, int] = {}

    def add(self, call: Call) -> None:
        """Keep a call. ValueError if it is not the next one."""
        if call.index != len(self.calls) or not -1 <= call.parent < call.index:
            raise ValueError(f"call {call.index} with parent {call.parent} after {len(self.calls)}")
        self.calls.append(call)
        self._by_request[call.request] = call.index
        if call.chain:
            self._by_chain[call.chain] = call.index
        if call.drift:
            self.drifts[call.drift] += 1

    def answered(self, request: str) -> Call | None:
        """The last call of a request with this digest."""
        index = self._by_request.get(request)
        return None if index is None else self.calls[index]

    def path(self, index: int) -> list[Call]:
        """The branch that ends with a call."""
        found: list[Call] = []
        while index >= 0:
            found.append(self.calls[index])
            index = found[-1].parent
        return found[::-1]

    def ids(self, index: int) -> list[int]:
        """All ids of the branch that ends with a call."""
        return [token for call in self.path(index) for token in (*call.context, *call.tokens)]

    def leaves(self) -> list[int]:
        """Last calls of all branches, the newest first: it is the one that an outcome is about."""
        parents = {call.parent for call in self.calls}
        return [call.index for call in reversed(self.calls) if call.index not in parents]

    # -- what a request goes on from

    def plan_messages(self, messages: Sequence[Message], tools: Sequence[Any]) -> Plan:
        """Where a list of messages goes on. ValueError for messages that cannot be read."""
        if not messages:
            raise ValueError("messages: []; allowed: at least one")
        links = [""]
        for message in messages:
            links.append(link(links[-1], message))
        known = next((n for n in range(len(messages), 0, -1) if links[n] in self._by_chain), 0)
        shape = canonical(list(tools))
        drift = ""
        if known:
            parent = self._by_chain[links[known]]
            if known == len(messages):
                raise ValueError("messages: the last one is an answer; allowed: one to be answered")
            more = self._dialogue.more(messages, known, tools)
            if more is not None and self.calls[parent].tools == shape:
                context = self._after(parent, more)
                drift = self._invented(messages[known:])
                return self._plan(parent, context, drift, links[-1], "", shape)
            drift = "retemplate"
        elif self.calls:
            drift = self._invented(messages)
        return self._plan(-1, self._dialogue.whole(messages, tools), drift, links[-1], "", shape)

    def plan_text(self, text: str) -> Plan:
        """Where a text goes on: behind the longest known one that it begins with."""
        parent = self._longest([call.shown for call in self.calls], text)
        rest = text[len(self.calls[parent].shown) :] if parent >= 0 else ""
        if parent >= 0 and rest:
            return self._plan(parent, self._tokenizer.encode(rest), "", "", text, "")
        return self._plan(-1, self._tokenizer.prompt(text), "", "", text, "")

    def plan_ids(self, prompt: Sequence[int]) -> Plan:
        """Where ids go on: behind the longest known ones that they begin with."""
        prompt = list(prompt)
        if not self.calls:
            return self._plan(-1, prompt, "", "", "", "")
        parent = self._longest([self.ids(call.index) for call in self.calls], prompt)
        known = len(self.ids(parent)) if parent >= 0 else 0
        if parent >= 0 and known < len(prompt):
            return self._plan(parent, prompt[known:], "", "", "", "")
        text = self._tokenizer.decode(prompt)
        spelt = [self._tokenizer.decode(self.ids(call.index)) for call in self.calls]
        drift = "retokenise" if any(one and text.startswith(one) for one in spelt) else ""
        return self._plan(-1, prompt, drift, "", "", "")

    def _plan(
        self, parent: int, context: list[int], drift: str, chain: str, shown: str, tools: str
    ) -> Plan:
        before = self.ids(parent) if parent >= 0 else []
        return Plan(parent, [*before, *context], context, drift, chain, shown, tools)

    def _after(self, parent: int, more: list[int]) -> list[int]:
        """What follows an answer, without the terminator that was sampled with it, or the space
        that a template puts before that."""
        ends = self._tokenizer.stop_ids
        if not ends & set(self.calls[parent].tokens[-1:]):
            return more
        place = next((place for place, token in enumerate(more) if token in ends), -1)
        return more if self._tokenizer.decode(more[: max(place, 0)]).strip() else more[place + 1 :]

    def _invented(self, messages: Sequence[Message]) -> str:
        return "rewrite" if any(one.get("role") == "assistant" for one in messages) else ""

    @staticmethod
    def _longest(known: Sequence[Any], asked: Any) -> int:
        """Index of the longest known text, or ids, that what is asked begins with; -1 for none."""
        fits = [place for place, one in enumerate(known) if one and asked[: len(one)] == one]
        return max(fits, key=lambda place: len(known[place]), default=-1)
