"""The tokenizer of a published model: text <-> ids, and prompts as its chat template has them. No
jax here.

Three ways in, three rules. ``encode`` reads text: an answer, what an environment says. No control
token comes of it, whatever is typed. ``prompt`` puts a question where the model expects it: the
control tokens are the template's (or the one that a sequence begins with), those in the question
stay text. Ids that were sampled are never encoded again.

Control tokens are those that the files call special. A piece that they merely add, as many do with
<think>, is text with an id of its own, wherever it stands.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from jaxrl.pool.chat import ChatTemplate, Messages, Stretch
from jaxrl.pool.pieces import spelled
from jaxrl.pool.published_files import published
from jaxrl.pool.tokenizer import NO_TEXT

# What no template changes, to see what a template puts around it.
_QUESTION, _ANSWER = "x0x", "y1y"


class PublishedTokenizer:
    """A published tokenizer; see ``jaxrl.pool.published_files`` for what may stand at ``path``.

    ``chat`` is "off" (a prompt is the text, behind bos if the files ask for it) or "template" (a
    prompt is a user's message, behind the ``system`` message if there is one, rendered by the
    published template with the header of the answer). ``eos_id`` ends a response: the token that
    the template puts behind an answer, else the published eos. ``stop_ids`` holds it, the published
    eos and the ids that generation_config.json names. ``pad_id`` is the published one, else eos.
    ``vocab_size`` is the largest id and one; a model may have rows beyond it.

    ``decode(encode(text)) == text`` where the vocabulary covers bytes and nothing is normalised;
    Metaspace and SentencePiece give their own sign (U+2581) back as a space, and Metaspace takes a
    space at the start for its own. Text that is cut within a character shows U+FFFD there, so
    decoding runs of ids one by one may differ from decoding them together. ValueError naming file
    and field for what cannot be opened, and for a template that is missing or that fails.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, chat: Literal["off", "template"], system: str
    ) -> None:
        found = published(path)
        self._pieces, self._system = found.pieces, system
        ids = {control.text: token for token, control in found.pieces.controls.items()}
        named = {name: ids[text] for name, text in found.names.items() if text in ids}
        self.vocab_size: int = found.pieces.vocab_size
        self._first: int | None = self._begins(path, found.adds_bos, named)
        self._template: ChatTemplate | None = None
        if chat == "template":
            if found.template is None:
                raise ValueError(
                    f"{path}: chat='template', but no chat_template.jinja and no chat_template in "
                    "tokenizer_config.json; allowed: chat='off'"
                )
            self._template = ChatTemplate(
                found.template, found.names, found.pieces.controls.values()
            )
            self.prompt(_QUESTION)  # what the template refuses is refused now
        ends = [self._end_of_turn(), named.get("eos_token"), *found.stop_ids]
        stops = [token for token in ends if token is not None]
        if not stops:
            raise ValueError(f"{path}: nothing says eos_token; allowed: the text of a token")
        self.eos_id: int = stops[0]
        self.stop_ids = frozenset(stops)
        if max(self.stop_ids) >= self.vocab_size:
            raise ValueError(
                f"{path}: eos_token_id has {max(self.stop_ids)}; allowed: < {self.vocab_size}, "
                "the vocabulary's size"
            )
        self.pad_id: int = named.get("pad_token", named.get("eos_token", self.eos_id))
        self.digest = self._digest(found.names, found.template)

    def _begins(
        self, path: str | os.PathLike[str], adds_bos: bool | None, named: dict[str, int]
    ) -> int | None:
        """The control token that a plain sequence begins with."""
        first = self._pieces.added_first
        if adds_bos is None:
            return first
        if not adds_bos:
            return None
        if "bos_token" not in named and first is None:
            raise ValueError(f"{path}: add_bos_token=True without a bos_token")
        return named.get("bos_token", first)

    def _digest(self, names: object, template: str | None) -> str:
        """Of all that decides which ids a text has."""
        told = [self._pieces.digest, names, self._first, sorted(self.stop_ids), template]
        return hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest()

    def _end_of_turn(self) -> int | None:
        """The control token that the template puts behind what the assistant says."""
        if self._template is None:
            return None
        answered = [*self._messages(_QUESTION), {"role": "assistant", "content": _ANSWER}]
        found = self._template.stretches(answered, add_generation_prompt=False)
        places = [place for place, one in enumerate(found) if _ANSWER in one.text]
        behind = found[places[-1] + 1 :] if places else []
        return next((one.control.id for one in behind if one.control), None)

    # -- text -> ids

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without bos and eos. A control token that is typed in it is spelled."""
        return spelled(self._pieces, text, inside=False) if text else []

    def prompt(self, text: str) -> list[int]:
        """Ids that ask a question, up to where the answer begins."""
        if self._template is not None:
            return self.chat_ids(self._messages(text)) if text else []
        begin = [] if self._first is None else [self._first]
        return [*begin, *self.encode(text)] if text else []

    def chat_ids(
        self,
        messages: Messages,
        *,
        tools: Sequence[Any] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Ids of a conversation (each message: role and content) as the template renders it.
        ValueError if it refuses it, or if there is none."""
        found = self._chat(messages, tools, add_generation_prompt)
        return self._spelled(found, inside=False)

    def following_ids(
        self, messages: Messages, known: int, *, tools: Sequence[Any] = ()
    ) -> list[int] | None:
        """Ids from the end of the answer ``messages[known - 1]``, the turn's end included, to where
        the next answer begins: what is put behind an answer's own ids, which stay as they are,
        whatever the template would now make of them.

        None if the template shows that answer no more, or refuses an answer without the tool calls
        that it made.
        """
        sign = _ANSWER
        while sign in str([messages, tools]):
            sign += _ANSWER[-1]
        said = [dict(one) for one in messages]
        said[known - 1] = {"role": "assistant", "content": sign}
        try:
            found = self._chat(said, tools, True)
        except ValueError:
            return None
        at = next((place for place, one in enumerate(found) if sign in one.text), None)
        if at is None:
            return None
        after = found[at].text.split(sign, 1)[1]
        tail = [Stretch(after, None), *found[at + 1 :]] if after else found[at + 1 :]
        return self._spelled(tail, inside=True)

    def _chat(self, messages: Messages, tools: Sequence[Any], asks: bool) -> list[Stretch]:
        if self._template is None:
            raise ValueError("chat='off'; allowed with messages: chat='template'")
        return self._template.stretches(messages, tools=tools, add_generation_prompt=asks)

    def _spelled(self, found: Sequence[Stretch], inside: bool) -> list[int]:
        """Ids of stretches; ``inside``: others stand before them."""
        ids: list[int] = []
        for place, one in enumerate(found):
            inside = (inside or place > 0) and self._pieces.prefix_once
            control, text = one.control, one.text
            ids += [control.id] if control else spelled(self._pieces, text, inside=inside)
        return ids

    def render(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation, for people. Errors as ``chat_ids``."""
        if self._template is None:
            raise ValueError("chat='off'; allowed with messages: chat='template'")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    def _messages(self, text: str) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": text}]

    # -- ids -> text

    def decode(
        self, ids: Iterable[int], control: Literal["marked", "left_out", "shown"] = "marked"
    ) -> str:
        """Text of ids. Control tokens are ``marked`` (stop ids have no text, others show as
        U+FFFD, so that they never complete a right answer), ``left_out``, or ``shown``; ids that
        stand for nothing are U+FFFD."""
        text: list[str] = []
        run: list[int] = []
        for token in (int(token) for token in ids):
            steers = token in self._pieces.controls
            known = self._pieces.has(token)
            if known and (not steers or control == "shown"):
                run.append(token)
            elif not known or (control == "marked" and token not in self.stop_ids):
                text += [self._pieces.decode(run), NO_TEXT]
                run = []
        return "".join([*text, self._pieces.decode(run)])

    def question(self, ids: Iterable[int]) -> str:
        """The text that a prompt asks: ``prompt(question(ids)) == ids`` for ids that it made of a
        text that comes back."""
        ids = [int(token) for token in ids]
        if self._template is None:
            return self.decode(ids[1:] if ids[:1] == [self._first] else ids)
        before, after = self.render(self._messages(_QUESTION)).split(_QUESTION, 1)
        shown = self.decode(ids, "shown")
        if shown.startswith(before) and shown.endswith(after):
            return shown[len(before) : len(shown) - len(after)]
        return shown
