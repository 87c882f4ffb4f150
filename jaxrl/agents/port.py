"""The only place where a language model is called: a role, a payload of JSON, a schema, a key.

The payload is data. ``HttpPort`` alone makes text of it; ``ScriptedPort`` stands in for a model,
and says so: it is a function of the same data and reads no prose. A role that must not know how
something ended says so by ``blind``: its payload is a dataclass without a field for it.
"""

import dataclasses
import functools
import http.client
import json
import time
import typing
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import jsonschema
import numpy as np

from jaxrl.agents.journal import Journal, Json, canonical, digest, draws
from jaxrl.pool.contract import Generator, Request, Tokenizer

# Words that a blind payload may have in none of its fields: they tell how something ended.
VERDICTS = ("outcome", "reward", "score", "verdict", "verifier", "passed", "success", "correct")
VERDICTS += ("grade", "utility")

LONGEST_WAIT_S = 600.0  # whatever Retry-After says
FIRST_GROUP = 2**29  # of an actor's random keys: below those of evaluation, above those of training


class PortError(RuntimeError):
    """No usable reply. ``cost``: what was paid nevertheless."""

    cost = 0.0


class SpendingCap(PortError):
    """The next call could cost more than what is left."""


@dataclasses.dataclass(frozen=True)
class Role:
    """Who is asked: what for, in what words, and what a reply looks like (JSON Schema).

    ``payload`` is the dataclass that its payloads are of, None for any JSON. ``blind``: the role
    must not know how anything ended; ValueError unless its payload's fields can hold no verdict.
    """

    kind: Literal["propose", "judge", "act"]
    schema: Mapping[str, Any]
    template: str  # the instruction that HttpPort puts before the payload
    payload: type | None = None
    blind: bool = False

    def __post_init__(self) -> None:
        if self.blind and self.payload is None:
            raise ValueError("blind=True with payload=None; allowed: a dataclass")
        if self.blind:
            _check_blind(self.payload)

    @functools.cached_property
    def digest(self) -> str:
        """Names the template together with the schema."""
        return digest({"template": self.template, "schema": self.schema})


def _check_blind(kind: Any) -> None:
    """Walk a payload's types: plain values, tuples of them, and dataclasses of those."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if any(word in field.name.lower() for word in VERDICTS):
                raise ValueError(f"{kind}.{field.name}: a blind payload has no such field")
            _check_blind(hints[field.name])
    elif typing.get_origin(kind) is tuple:
        for part in typing.get_args(kind):
            if part is not Ellipsis:
                _check_blind(part)
    elif kind not in (str, int, float, bool):
        raise ValueError(
            f"{kind}: a blind payload holds str, int, float, bool, tuples, dataclasses"
        )


@dataclasses.dataclass(frozen=True)
class Reply:
    """What came back, of which model, and what it cost (in the currency of the port's prices)."""

    content: Json
    model: str
    template: str  # digest of the role's template and schema
    tokens_in: int
    tokens_out: int
    cost: float


class LLMPort(Protocol):
    """Calls a language model."""

    @property
    def model(self) -> str:
        """Names the model."""
        ...

    def call(self, role: str, payload: Json, schema: Mapping[str, Any], key: str) -> Reply:
        """A reply that fits the schema; ``key`` names this call in the run. PortError if there is
        none."""
        ...


def fault(content: str, schema: str) -> str:
    """What of a JSON text does not fit a schema; "" if all does."""
    validator = jsonschema.Draft202012Validator(json.loads(schema))
    for error in validator.iter_errors(json.loads(content)):
        return f"{error.json_path}: {error.message[:200]}"
    return ""


_fault = functools.lru_cache(maxsize=4096)(fault)  # short replies repeat


def check_reply(role: str, content: Json, schema: Mapping[str, Any]) -> None:
    """PortError naming the field if a reply does not fit its schema, or cannot be written down."""
    try:
        text = canonical(content)
    except (ValueError, TypeError, RecursionError) as error:
        raise PortError(f"role {role!r}: reply is no JSON: {error}") from error
    look = _fault if len(text) < 1000 else fault  # long ones are not kept
    if found := look(text, canonical(schema)):
        raise PortError(f"role {role!r}: reply {found}")


def _template(roles: Mapping[str, Role], role: str) -> Role:
    if role not in roles:
        raise ValueError(f"role={role!r}; allowed: {', '.join(sorted(roles))}")
    return roles[role]


Script = Callable[[Any, np.random.Generator], Json]  # (payload, its random numbers) -> reply


class ScriptedPort:
    """Stands in for a language model: for each role a function of (payload, seed).

    Errors are made on purpose, by knobs of those functions. The same payload has the same reply.
    """

    def __init__(self, roles: Mapping[str, Role], scripts: Mapping[str, Script], seed: int) -> None:
        self.model = "scripted"
        self._roles, self._scripts, self._seed = roles, scripts, seed

    def call(self, role: str, payload: Json, schema: Mapping[str, Any], key: str) -> Reply:
        """The script's reply."""
        template = _template(self._roles, role).digest
        chance = draws("scripted", self._seed, role, canonical(payload))
        content = self._scripts[role](payload, chance)
        return Reply(content, self.model, template, 0, 0, 0.0)


def request_name(role: str, payload: Json, model: str, template: str) -> str:
    """Names a request by all that its reply may depend on."""
    return digest([role, payload, model, template])


class ReplayPort:
    """Replies that were given before, by what was asked; PortError for what never was."""

    def __init__(self, roles: Mapping[str, Role], model: str, replies: Mapping[str, Reply]) -> None:
        self.model = model
        self._roles, self._replies = roles, replies

    @classmethod
    def of(cls, journal: Journal, roles: Mapping[str, Role]) -> "ReplayPort":
        """From the calls of a journal, which must be of one model."""
        found = {}
        models = set()
        for line in journal.of("call"):
            content = journal.get(line.result["content"])
            reply = Reply(**{**line.result, "content": content})
            payload = journal.get(line.asked["payload"])
            models.add(reply.model)
            found[request_name(line.asked["role"], payload, reply.model, reply.template)] = reply
        if len(models) != 1:
            raise ValueError(f"models {sorted(models)}; allowed: the calls of one model")
        return cls(roles, models.pop(), found)

    def call(self, role: str, payload: Json, schema: Mapping[str, Any], key: str) -> Reply:
        """The stored reply."""
        template = _template(self._roles, role).digest
        name = request_name(role, payload, self.model, template)
        if name not in self._replies:
            raise PortError(f"{role} {key!r} was never asked of {self.model!r} in these words")
        return self._replies[name]


class TinyPort:
    """A model that jaxrl trained, as an actor: payload {"prompt": text}, reply {"text": text}.

    The generator and the tokenizer are the pool's (jaxrl.pool.contract), and come from outside, so
    nothing here knows jax. The same key draws the same text from the same weights.
    """

    def __init__(
        self,
        roles: Mapping[str, Role],
        generator: Generator,
        tokenizer: Tokenizer,
        *,
        model: str,
        temperature: float,
        max_new_tokens: int,
    ) -> None:
        self.model = model
        self._roles, self._generator, self._tokenizer = roles, generator, tokenizer
        self._temperature, self._max_new_tokens = temperature, max_new_tokens

    def call(self, role: str, payload: Json, schema: Mapping[str, Any], key: str) -> Reply:
        """One sample. ValueError for a role that does not act."""
        asked = _template(self._roles, role)
        if asked.kind != "act":
            raise ValueError(f"role {role!r} is to {asked.kind}; a tiny model can only act")
        prompt = self._tokenizer.prompt(payload["prompt"])
        request = Request(
            prompt=prompt,
            group=FIRST_GROUP + int(digest(key)[:7], 16),
            sample=0,
            temperature=self._temperature,
            max_new_tokens=self._max_new_tokens,
            stop_ids=self._tokenizer.stop_ids,
        )
        (completion,) = self._generator.generate([request])
        text = self._tokenizer.decode(completion.tokens.tolist())
        counts = (len(prompt), len(completion.tokens))
        return Reply({"text": text}, self.model, asked.digest, *counts, 0.0)


class ActorPort:
    """A model acts; scripts stand in for those who propose and judge, which a tiny model cannot.

    Each reply names who gave it.
    """

    def __init__(self, roles: Mapping[str, Role], actor: LLMPort, others: LLMPort) -> None:
        self.model = actor.model
        self._roles, self._actor, self._others = roles, actor, others

    def call(self, role: str, payload: Json, schema: Mapping[str, Any], key: str) -> Reply:
        """Of whoever the role belongs to."""
        acts = _template(self._roles, role).kind == "act"
        return (self._actor if acts else self._others).call(role, payload, schema, key)


@dataclasses.dataclass(frozen=True)
class Spending:
    """What calls may cost together, and what a million tokens cost, in one currency."""

    cap: float
    per_million_in: float
    per_million_out: float

    def __post_init__(self) -> None:
        for field, value in vars(self).items():
            if not value >= 0:
                raise ValueError(f"port.spending.{field}={value!r}; allowed: >= 0")

    def cost(self, tokens_in: int, tokens_out: int) -> float:
        """Of one call."""
        return (tokens_in * self.per_million_in + tokens_out * self.per_million_out) / 1e6


class HttpPort:
    """An OpenAI-compatible endpoint.

    The payload goes as JSON in the user's message, apart from the instruction, so that what a skill
    or a tool wrote stands among data. A call that could pass the cap (a token for each byte asked,
    ``max_tokens`` answered) is refused before it is made; what malformed replies cost counts.
    Busy and broken servers (408, 409, 429, 5xx, no connection) and replies that do not fit the
    schema are asked again, ``attempts`` times in all, after ``backoff_s`` that doubles, or what
    Retry-After says. ``spent``: what the run has paid before.
    """

    def __init__(
        self,
        roles: Mapping[str, Role],
        *,
        url: str,  # up to /v1
        model: str,
        api_key: str,
        spending: Spending,
        max_tokens: int,
        temperature: float,
        attempts: int,
        backoff_s: float,
        timeout_s: float,
        spent: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.model, self.spent = model, spent
        self._roles, self._url, self._spending = roles, url.rstrip("/"), spending
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._max_tokens, self._temperature = max_tokens, temperature
        self._attempts, self._backoff_s, self._timeout_s = attempts, backoff_s, timeout_s
        self._sleep = sleep

    def call(self, role: str, payload: Json, schema: Mapping[str, Any], key: str) -> Reply:
        """Ask until there is a reply that fits; SpendingCap, or PortError with the last reason."""
        asked, before = _template(self._roles, role), self.spent
        body = canonical(self._words(asked, payload, schema, key)).encode()
        try:
            content, used = self._answered(role, body, schema, key)
        except PortError as error:
            error.cost = self.spent - before
            raise
        return Reply(content, self.model, asked.digest, *used, self.spent - before)

    def _answered(
        self, role: str, body: bytes, schema: Mapping[str, Any], key: str
    ) -> tuple[Json, tuple[int, int]]:
        reason, wait = "", 0.0
        for attempt in range(self._attempts):
            self._afford(body)
            if attempt:
                self._sleep(wait or self._backoff_s * 2 ** (attempt - 1))
            try:
                content, used = self._ask(body)
                check_reply(role, content, schema)
            except _Refused:
                raise
            except _Again as error:
                reason, wait = str(error), error.wait_s
            except PortError as error:
                reason, wait = str(error), 0.0
            else:
                return content, used
        raise PortError(f"{role} {key!r}: no reply in {self._attempts} attempts: {reason}")

    def _words(self, asked: Role, payload: Json, schema: Mapping[str, Any], key: str) -> Json:
        """The request."""
        shape = {"name": "reply", "schema": schema}
        return {
            "model": self.model,
            "messages": [
                {"role": "system", "content": asked.template},
                {"role": "user", "content": canonical(payload)},
            ],
            "max_tokens": self._max_tokens,
            "temperature": self._temperature,
            "response_format": {"type": "json_schema", "json_schema": shape},
        }

    def _content(self, said: Json) -> Json:
        """The reply in an answer's text; ValueError or TypeError for none."""
        return json.loads(said, parse_float=_number)

    def _afford(self, body: bytes) -> None:
        most = self.spent + self._spending.cost(len(body), self._max_tokens)
        if most > self._spending.cap:
            raise SpendingCap(
                f"spent {self.spent:.6g}; the next call may bring it to {most:.6g}, above "
                f"port.spending.cap={self._spending.cap:g}"
            )

    def _ask(self, body: bytes) -> tuple[Json, tuple[int, int]]:
        request = urllib.request.Request(self._url + "/chat/completions", body, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                answer = json.loads(response.read())
        except urllib.error.HTTPError as error:
            said = error.read(500).decode("utf-8", "replace")
            if error.code in (408, 409, 429) or error.code >= 500:
                after = error.headers.get("Retry-After", "")
                wait = float(after) if after.isascii() and after.isdigit() else 0.0
                raise _Again(f"{error.code}: {said}", min(wait, LONGEST_WAIT_S)) from error
            raise _Refused(f"{self._url} refuses: {error.code}: {said}") from error
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            raise _Again(f"{type(error).__name__}: {error}", 0.0) from error
        used = _used(answer) or (len(body), self._max_tokens)  # nobody says: the most it may be
        self.spent += self._spending.cost(*used)
        try:
            return self._content(answer["choices"][0]["message"]["content"]), used
        except (KeyError, IndexError, ValueError, TypeError, RecursionError) as error:
            raise PortError(f"the reply is no JSON: {error!r}") from error


class ServedPort(HttpPort):
    """A model behind an OpenAI-compatible endpoint as an actor: payload {"prompt": text}, reply
    {"text": text}, as of ``TinyPort``.

    The prompt alone is sent, and the answer is what it says, so that a model can act which knows
    its task and no JSON: one that jaxrl's gateway serves, by the evaluation key of its pool. The
    seed follows from the key of the call: an endpoint that heeds it draws the same text again.
    """

    def _words(self, asked: Role, payload: Json, schema: Mapping[str, Any], key: str) -> Json:
        if asked.kind != "act":
            raise ValueError(f"a role is to {asked.kind}; a served model can only act")
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": payload["prompt"]}],
            "max_tokens": self._max_tokens,
            "temperature": self._temperature,
            "seed": int(digest(key)[:7], 16),
        }

    def _content(self, said: Json) -> Json:
        if not isinstance(said, str | None):
            raise TypeError(f"content of {type(said)}; allowed: a text")
        return {"text": said or ""}


def _used(answer: Json) -> tuple[int, int] | None:
    """Tokens in and out, if an answer tells them."""
    try:
        used = answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]
    except (KeyError, TypeError, IndexError):
        return None
    return used if all(type(count) is int and count >= 0 for count in used) else None


def _number(text: str) -> float:
    """1.0 is an integer to a schema, and has to be one to who counts by it."""
    value = float(text)
    return int(value) if value.is_integer() else value


class _Again(Exception):
    """Worth another try, after so many seconds; 0: as usual."""

    def __init__(self, reason: str, wait_s: float) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class _Refused(PortError):
    """Asking again is of no use."""
