"""One run of a system: everything that it does to the world goes through here and is journaled.

    traces = run.act("round-0", episodes)            decide, execute, outcome
    reply = run.call("reflector", payload, key)      a language model
    pin = run.offer("sort-tables", text, body, ...)  a candidate
    run.try_in(pin, "paired_sign", evidence, {..})  in or out, with the rate of chance beside it
    run.learn("utilities", because, credited, U=...) numbers change, after their outcome is known
    run.measure(round, {"held_out/score": 0.4})      curves

Lines of the journal: start, decide, outcome, call, unanswered, offer, refuse, status, gate, learn,
measure, end.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.agents import gates
from jaxrl.agents.artefacts import Artefact, ArtefactRefused, Pin, Shelf, Status, check, label
from jaxrl.agents.journal import Journal, Json, canonical, digest, draws, pack, write_whole
from jaxrl.agents.port import LLMPort, PortError, Role, check_reply, fault
from jaxrl.agents.worlds import HELD_OUT, Scene, World

_ESCAPE = re.compile(r"\\(u[0-9a-f]{4}|.)")  # in JSON: a line's end, a quote, ...


class Leak(RuntimeError):
    """A held-out id was on its way to where decisions are made."""


@dataclasses.dataclass(frozen=True)
class Episode:
    """One task under exactly these versions. ``moment``: what it shares with other arms; ``sample``
    tells repeats apart; ``how``: what else the world is told of the arm. Arms with equal
    ``snapshot`` start from the same state of the world."""

    task: str
    artefacts: tuple[Pin, ...]
    moment: str
    arm: str = ""
    sample: int = 0
    how: Json = None

    @property
    def snapshot(self) -> str:
        """Digest of all that arms share."""
        return digest([self.task, self.moment, self.sample])


class Run:
    """The journal, the port, the shelf, the numbers and the gates of one run.

    ``null_draws``: exchanges of labels by which each decision's chance is measured; 0: none.
    """

    def __init__(
        self,
        journal: Journal,
        world: World,
        port: LLMPort | None,
        roles: Mapping[str, Role],
        *,
        seed: int,
        null_draws: int,
    ) -> None:
        self.journal, self.seed = journal, seed
        self.world: Any = world  # a system knows more of its world than the protocol says
        self.shelf = Shelf()
        self.state: dict[str, np.ndarray] = {}
        self.records: dict[str, Json] = {}  # whatever else a system keeps: file name -> JSON
        self._port, self._roles, self._null_draws = port, roles, null_draws
        self._gates: dict[str, Json] = {}
        self._outcome_seq: dict[str, int] = {}  # key of act -> line in which its outcome stands
        self.splits = {name: tuple(ids) for name, ids in world.splits().items()}
        ids = "|".join(re.escape(name.lower()) for name in self.splits[HELD_OUT]) or "(?!)"
        self._held_out = re.compile(f"(?:{ids})(?![a-z0-9])")
        self._written: dict[str, bytes] = {}
        self._refused = 0

    def start(self, config: Json) -> None:
        """The first line: of what this run is. JournalError if the journal is of another one."""
        lists = {name: digest(list(ids)) for name, ids in sorted(self.splits.items())}
        roles = {name: role.digest for name, role in sorted(self._roles.items())}
        self.records["splits.json"] = lists
        asked = {"config": config, "splits": lists, "roles": roles, "seed": self.seed}
        self.journal.once("start", "", asked)

    def draws(self, *parts: object) -> np.random.Generator:
        """Random numbers of this run that belong to a name."""
        return draws("run", self.seed, *parts)

    def untainted(self, value: Json, where: str) -> None:
        """Leak if a held-out id stands anywhere in a value: in a text or a key, in any case, beside
        whatever is no Latin letter or digit."""
        text = _ESCAPE.sub(" ", json.dumps(value, ensure_ascii=False)).lower()
        found = {
            one[0]
            for one in self._held_out.finditer(text)
            if not re.match("[a-z0-9]", text[one.start() - 1])  # a text begins with a quote
        }
        if found:
            raise Leak(f"{where}: held-out ids {sorted(found)[:3]}")

    def call(self, role: str, payload: Json, key: str) -> Json:
        """Ask a role; the reply is in the journal before it is returned.

        Leak if a held-out id is on its way to a role that proposes or judges; TypeError if the
        role's payload has a type and this is none of it; PortError if no reply fits the schema.
        """
        asked = self._roles[role]
        if asked.payload is not None:
            if type(payload) is not asked.payload:
                raise TypeError(f"role {role!r} takes {asked.payload}, not {type(payload)}")
            payload = dataclasses.asdict(payload)
        if asked.kind != "act":
            self.untainted(payload, f"{role} {key!r}")

        def produce() -> Json:
            assert self._port is not None, "a replay calls nobody"
            try:
                reply = self._port.call(role, payload, asked.schema, key)
            except PortError as error:
                if error.cost:  # counts against the cap at the next start too
                    paid = {"role": role, "cost": error.cost}
                    self.journal.once("unanswered", f"{key}/{len(self.journal.lines)}", paid)
                raise
            check_reply(role, reply.content, asked.schema)
            return {**vars(reply), "content": self.journal.put(reply.content)}

        line = {"role": role, "payload": self.journal.put(payload), "role_digest": asked.digest}
        return self.journal.get(self.journal.once("call", key, line, produce)["content"])

    def act(self, key: str, episodes: Sequence[Episode]) -> list[Json]:
        """Run episodes and give their traces. What is in each one's context is written down before
        it runs; each has random numbers of its own, by (key, its place, its arm)."""
        plan = [
            {**vars(one), "artefacts": [list(pin) for pin in one.artefacts]} for one in episodes
        ]
        decided = {"episodes": self.journal.put(plan), "count": len(plan)}
        self.journal.once("decide", key, decided)

        def produce() -> Json:
            traces = [self._episode(key, place, one) for place, one in enumerate(episodes)]
            return {"traces": self.journal.put(traces)}

        line = self.journal.line("outcome", key, decided, produce)
        self._outcome_seq[key] = line.seq
        return self.journal.get(line.result["traces"])

    def _episode(self, key: str, place: int, one: Episode) -> Json:
        context = [self.shelf.get(pin) for pin in one.artefacts]
        asked = itertools.count()

        def ask(payload: Json) -> Json:
            return self.call("actor", payload, f"{key}/{place}/{next(asked)}")

        scene = Scene(one.moment, draws("episode", self.seed, key, place), ask, one.how)
        return self.world.run(context, self.world.task(one.task), scene)

    def offer(
        self,
        name: str,
        text: str,
        body: Json,
        *,
        operator: str,
        round: int,
        parents: Sequence[Pin] = (),
        trigger: str = "",
        provenance: Sequence[str] = (),
    ) -> Pin | None:
        """A candidate version of an artefact; None, and counted, if it may not be written down."""
        words = [name, text, body, trigger, operator, list(provenance)]
        self.untainted(words, f"artefact {name[:80]!r}")
        version = self.shelf.next_version(name)
        parts = (tuple(parents), trigger, tuple(provenance))
        artefact = Artefact(name, version, text, body, operator, *parts, round)
        try:
            check(artefact)
            schema = self.world.BODY if hasattr(self.world, "BODY") else {}
            if odd := fault(canonical(body), canonical(schema)):
                raise ArtefactRefused(f"{name}: body {odd}")
            self.shelf.add(artefact)
        except ArtefactRefused as error:
            self.refuse(str(error), operator=operator, round=round)
            return None
        about = {"operator": operator, "sha": artefact.digest, "round": round}
        about["parents"] = [label(pin) for pin in parents]
        self.journal.once("offer", artefact.label, about)
        return artefact.pin

    def refuse(self, reason: str, *, operator: str, round: int) -> None:
        """Write down that something was never tried, and why."""
        about = {"reason": reason, "operator": operator, "round": round}
        self.journal.once("refuse", str(self._refused), about)
        self._refused += 1

    def mark(self, pin: Pin, status: Status, why: str) -> None:
        """Move a version on (see ``Shelf.mark``)."""
        self.shelf.mark(pin, status)
        key = f"{label(pin)}/{status}"
        self.journal.once("status", key, {"artefact": list(pin), "status": status, "why": why})

    def gate(
        self, name: str, gate: str, evidence: Json, parameters: Json, *, operator: str = ""
    ) -> gates.Decision:
        """Decide on a candidate by name and write down what was decided on, with how often chance
        would have decided so. Leak for held-out evidence."""
        self.untainted(evidence, f"gate of {name}")
        decision = gates.decide(gate, evidence, parameters)
        null = gates.null_rate(gate, evidence, parameters, self._null_draws)
        record = {
            "candidate": name,
            "operator": operator,
            "gate": gate,
            "parameters": parameters,
            **dataclasses.asdict(decision),
            "null": {"rate": null, "draws": self._null_draws},
        }
        whole = {**record, "evidence": evidence}
        self.journal.once("gate", name, {**record, "evidence": self.journal.put(evidence)})
        self._gates[name] = whole
        return decision

    def try_in(self, pin: Pin, gate: str, evidence: Json, parameters: Json) -> gates.Decision:
        """A gate whose word is followed: the candidate becomes active or rejected."""
        operator = self.shelf.get(pin).operator
        decision = self.gate(label(pin), gate, evidence, parameters, operator=operator)
        self.mark(pin, "active" if decision.accepted else "rejected", decision.reason)
        return decision

    def learn(
        self,
        key: str,
        because: Sequence[str],
        credited: Sequence[tuple[str, int, Pin]],
        **arrays: np.ndarray,
    ) -> None:
        """Set numbers of the state. ``because``: keys of the acts whose outcomes they follow from;
        ``credited``: (key of an act, place of an episode in it, what of its context was credited).
        ValueError if an outcome is not known yet."""
        unknown = [name for name in because if name not in self._outcome_seq]
        if unknown:
            raise ValueError(f"learn {key!r}: no outcome yet of {unknown}")
        self.state |= {name: np.asarray(x) for name, x in arrays.items()}
        asked = {
            "because": {name: self._outcome_seq[name] for name in because},
            "credited": [[act, place, list(pin)] for act, place, pin in credited],
            "state": {name: digest(_plain(x)) for name, x in arrays.items()},
        }
        self.journal.once("learn", key, asked)

    def measure(self, round: int, numbers: Mapping[str, float]) -> None:
        """Points of curves, named area/quantity."""
        values = {name: float(x) for name, x in sorted(numbers.items())}
        self.journal.once("measure", str(round), values)

    def files(self) -> dict[str, bytes]:
        """All that a run leaves beside its journal and its objects: path -> bytes."""
        found: dict[str, Any] = dict(self.records)
        for pin in self.shelf.pins():
            found |= self.shelf.files(pin)
        for name, version in self.shelf.active().items():
            sha = self.shelf.get((name, version)).digest
            found[f"refs/{name}.json"] = {"id": name, "version": version, "sha": sha}
        found |= {f"gates/{name}.json": record for name, record in self._gates.items()}
        written = {
            path: (x if isinstance(x, str) else canonical(x) + "\n").encode()
            for path, x in found.items()
        }
        return written | {"state.npz": pack(self.state)}

    def settle(self) -> None:
        """Bring the folder up to what is known, once the program is where the journal ends; before
        that the folder is ahead of it."""
        root = self.journal.root
        if root is None or not self.journal.live:
            return
        files = self.files()
        for path, data in files.items():
            if self._written.get(path) != data:
                write_whole(_inside(root, path), data)
                self._written[path] = data
        for stale in (root / "refs").glob("*.json"):  # of what was pruned
            if f"refs/{stale.name}" not in files:
                stale.unlink()


def _inside(root: Path, path: str) -> Path:
    """ArtefactRefused for a path that leads out of the run's folder."""
    whole = (root / path).resolve()
    if not whole.is_relative_to(root.resolve()):
        raise ArtefactRefused(f"{path!r} leads out of {root}")
    return whole


def _plain(x: np.ndarray) -> Json:
    """An array as what its digest is made of; bits, so that NaN has one too."""
    array = np.ascontiguousarray(x)
    return [str(array.dtype), list(array.shape), array.tobytes().hex()]
