"""Artefacts that evolve: versions of texts, of which at most one is active.

An artefact is untrusted: a model wrote it. Its name is a plain word, its text is of bounded size,
it is written under its own folder and nowhere else, and nothing in it is ever executed here. A
rejected version and one that a later version has replaced can never be retrieved again.

On disk: ``skills/<id>/v0007/`` with ``SKILL.md``, ``body.json`` (the same as data), ``meta.json``.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxrl.agents.journal import Json, canonical, digest

Status = Literal["candidate", "active", "superseded", "pruned", "rejected"]
Pin = tuple[str, int]  # an artefact's id and version: what was in a context

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
MOST_BYTES = 64 * 1024  # of a text, of a body, and of all that is told of them


class ArtefactRefused(ValueError):
    """It may not be written down at all, whatever it would be worth."""


@dataclasses.dataclass(frozen=True)
class Artefact:
    """One version. ``body`` is what a scripted actor reads, ``text`` what a model reads."""

    id: str
    version: int
    text: str
    body: Json
    operator: str  # doc, mint, revise, rewrite, merge, mutate_other, cross_graph, ...
    parents: tuple[Pin, ...]
    trigger: str  # when to use it
    provenance: tuple[str, ...]  # ids of the episodes it was made from
    created_round: int

    @property
    def pin(self) -> Pin:
        """Names this version."""
        return (self.id, self.version)

    @property
    def label(self) -> str:
        """``id-v0007``, as file names have it."""
        return label(self.pin)

    @property
    def digest(self) -> str:
        """Of all that is in it."""
        return digest(dataclasses.asdict(self))


def label(pin: Pin) -> str:
    """``id-v0007``."""
    return f"{pin[0]}-v{pin[1]:04d}"


def check(one: Artefact) -> None:
    """ArtefactRefused naming what is wrong: a name that is no plain word, too much text, signs that
    end a file or a terminal's line."""
    name = one.id
    if not NAME.fullmatch(name):
        raise ArtefactRefused(f"id={name[:80]!r}; allowed: {NAME.pattern}")
    for what, size in (
        ("text", len(one.text.encode("utf-8", "surrogatepass"))),
        ("body", len(canonical(one.body))),
        ("trigger and provenance", len(canonical([one.trigger, one.operator, one.provenance]))),
    ):
        if size > MOST_BYTES:
            raise ArtefactRefused(f"{name}: {what} of {size} bytes; allowed: at most {MOST_BYTES}")
    for what, text in (("text", one.text), ("trigger", one.trigger)):
        odd = {sign for sign in text if sign not in "\n\t" and not sign.isprintable()}
        if odd:
            raise ArtefactRefused(f"{name}: {what} with control signs {sorted(odd)[:5]!r}")


class Shelf:
    """All versions of all artefacts, with what became of each."""

    def __init__(self) -> None:
        self._versions: dict[str, list[Artefact]] = {}
        self._status: dict[Pin, Status] = {}
        self._active: dict[str, int] = {}

    def next_version(self, name: str) -> int:
        """Versions are counted from 1, rejected ones too."""
        return len(self._versions.get(name, ())) + 1

    def add(self, artefact: Artefact) -> None:
        """A candidate. ArtefactRefused for what may not be written."""
        check(artefact)
        self._versions.setdefault(artefact.id, []).append(artefact)
        self._status[artefact.pin] = "candidate"

    def get(self, pin: Pin) -> Artefact:
        """Whatever its status. KeyError for one that does not exist."""
        versions = self._versions.get(pin[0], [])
        if not 1 <= pin[1] <= len(versions):
            raise KeyError(f"no artefact {label(pin)}")
        return versions[pin[1] - 1]

    def status(self, pin: Pin) -> Status:
        """What became of it."""
        return self._status[pin]

    def mark(self, pin: Pin, status: Status) -> None:
        """Move a version on: candidates become active or rejected, active ones superseded or
        pruned. ValueError for any other move: nothing comes back."""
        was = self._status[pin]
        moves: Mapping[str, Sequence[str]] = {
            "candidate": ("active", "rejected"),
            "active": ("superseded", "pruned"),
        }
        if status not in moves.get(was, ()):
            raise ValueError(f"{label(pin)} is {was} and cannot become {status}")
        if status == "active":
            old = self._active.get(pin[0])
            if old is not None:
                self._status[pin[0], old] = "superseded"
            self._active[pin[0]] = pin[1]
        elif was == "active":
            del self._active[pin[0]]
        self._status[pin] = status

    def active(self) -> dict[str, int]:
        """Active version by id: all that may be retrieved."""
        return dict(sorted(self._active.items()))

    def pins(self) -> list[Pin]:
        """Every version, by id and number."""
        return sorted(self._status)

    def files(self, pin: Pin) -> dict[str, Any]:
        """What is written of it: path below the run's folder -> text or JSON."""
        one = self.get(pin)
        folder = f"skills/{one.id}/v{one.version:04d}"
        meta = dataclasses.asdict(one) | {"status": self.status(pin), "characters": len(one.text)}
        del meta["text"], meta["body"]
        return {
            f"{folder}/SKILL.md": one.text,
            f"{folder}/body.json": one.body,
            f"{folder}/meta.json": meta,
        }
