"""Published chat templates: messages -> text, with a note of who wrote what. No jax here.

A control token counts only where the template wrote it. What a message says is marked while the
template is rendered, so a token that a user or an environment types stays text.
"""

import dataclasses
import datetime
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

Messages = Sequence[Mapping[str, Any]]  # each: role and content, and what templates know besides

# Templates that ask for today's date get this day, the one that Llama's falls back to: a run that
# is continued tomorrow asks what it asked today.
DAY = datetime.datetime(2024, 7, 26)

# Private characters, of which two that occur nowhere mark what messages say.
_PRIVATE = [chr(code) for code in range(0xE000, 0xF900)]


class _Generation(Extension):
    """``{% generation %}`` shows what the assistant says to those who ask; here it is only text."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        """The body, as if the tags were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@dataclasses.dataclass(frozen=True)
class Control:
    """A control token: its text, its id, and whether it takes the whitespace beside it."""

    text: str
    id: int
    lstrip: bool = False
    rstrip: bool = False


@dataclasses.dataclass(frozen=True)
class Stretch:
    """A run of rendered text, or one control token that the template wrote."""

    text: str
    control: Control | None


class ChatTemplate:
    """A published Jinja template and the names that it may use, such as ``bos_token``.

    It runs in a sandbox: it sees the messages and nothing else. ValueError for a template that does
    not parse.
    """

    def __init__(self, source: str, names: Mapping[str, str], controls: Iterable[Control]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = DAY.strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is no Jinja template: {error}") from error
        self._source = source
        self._names = dict(names)
        # The longest first: where one token begins another, the longer one is meant.
        self._controls = sorted(controls, key=lambda control: -len(control.text))
        self._by_text = {control.text: control for control in self._controls}
        texts = [control.text for control in self._controls]
        self._any = "|".join(map(re.escape, texts))
        self._longest = max(map(len, texts), default=0)
        self._tails = {text[cut:] for text in texts for cut in range(1, len(text))}
        self._heads = {text[:cut] for text in texts for cut in range(1, len(text))}

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Any] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """The text that the template makes of messages, and of the tools that it may show.
        ValueError with the template's reason if it refuses them."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                **self._names,
            )
        except Exception as error:  # whatever code of somebody else raises
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"the chat template fails: {reason}") from error

    def stretches(
        self,
        messages: Messages,
        *,
        tools: Sequence[Any] = (),
        add_generation_prompt: bool = True,
    ) -> list[Stretch]:
        """The rendered text, cut at the control tokens that the template wrote.

        The texts together are ``render``'s, but for whitespace that control tokens take. Whatever
        messages and tools say counts as said, names and arguments too; a role does not.
        """
        said = "".join(_texts([messages, tools])) + self._source
        opens, closes, *_ = (sign for sign in _PRIVATE if sign not in said)

        def marked(value: Any) -> Any:
            return _mapped(value, lambda content: self._marked(content, opens, closes))

        text = self.render(
            marked(messages), tools=marked(tools), add_generation_prompt=add_generation_prompt
        )
        found: list[Stretch] = []
        start, taken = 0, False
        for match in self._written(text, opens, closes):
            control = self._by_text[match.group()]
            plain = _unmarked(text[start : match.start()], opens, closes)
            plain = plain.lstrip() if taken else plain
            plain = plain.rstrip() if control.lstrip else plain
            found += [Stretch(plain, None)] if plain else []
            found.append(Stretch(control.text, control))
            start, taken = match.end(), control.rstrip
        plain = _unmarked(text[start:], opens, closes)
        plain = plain.lstrip() if taken else plain
        return [*found, Stretch(plain, None)] if plain else found

    def _written(self, text: str, opens: str, closes: str) -> Iterator[re.Match[str]]:
        """Control tokens that no message said."""
        if not self._any:
            return
        pattern = re.compile(f"{opens}(?:{self._any}){closes}|(?:{self._any})")
        for match in pattern.finditer(text):
            if not match.group().startswith(opens):
                yield match

    def _marked(self, content: str, opens: str, closes: str) -> str:
        """A message's content with marks around each control token in it, and at an end that would
        make one together with the template's own text beside it."""
        body = content.strip()
        if not body or not self._any:
            return content
        marked = re.sub(self._any, rf"{opens}\g<0>{closes}", content)
        reach = range(1, min(len(body), self._longest) + 1)
        inner = len(body) < self._longest and any(body in one.text for one in self._controls)
        # Beside the first and the last sign that is no space: a template may strip spaces.
        if inner or any(body[:size] in self._tails for size in reach):
            start = len(marked) - len(marked.lstrip())
            marked = marked[:start] + opens + marked[start:]
        if inner or any(body[-size:] in self._heads for size in reach):
            end = len(marked.rstrip())
            marked = marked[:end] + closes + marked[end:]
        return marked


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A nest of lists and mappings with its texts changed, all but roles and keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {k: v if k == "role" else _mapped(v, change) for k, v in value.items()}
    if isinstance(value, Sequence):
        return [_mapped(one, change) for one in value]
    return value


def _texts(value: Any) -> list[str]:
    """All texts of a nest."""
    found: list[str] = []
    _mapped(value, lambda text: found.append(text) or text)
    return found


def _unmarked(text: str, opens: str, closes: str) -> str:
    return text.replace(opens, "").replace(closes, "")
