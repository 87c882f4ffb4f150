"""Conversations of jaxrl/tasks/turns.py, played under gold history and under the agent's own.

A scripted policy is told by three numbers: how often its texts and its calls are right, and how
many of its wrong calls name a pair that exists, so that nothing tells of them (the others are
answered ERR, and may be tried again). The two ends: with ``steps`` = 1, or calls that are always
right, own history and gold history are the same. With ``actor = "model"`` the role ``actor`` is
asked for every decision, from the text of its history alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.agents import worlds
from jaxrl.agents.artefacts import Artefact
from jaxrl.agents.journal import Json, digest
from jaxrl.agents.layers import exact, rouge_l
from jaxrl.agents.port import Script
from jaxrl.tasks.turns import NAMES, TOOL, Conversation, Decision, Source, called

FRACTION = 0.1  # of the conversations that are held out
REASONABLE = 0.6  # a text as near as this to the gold one is, to the scripted judge
Asked = Callable[[str, Decision], str]  # history, gold decision (for scripted ones) -> what is said


@dataclasses.dataclass(eq=False)
class World:
    """Fields are those of configs/agents/better_turns.py."""

    steps: int  # look-ups of a conversation
    policies: Sequence[Sequence[Any]]  # (name, right texts, right calls, silent wrong calls)
    actor: str  # scripted | model
    retries: int  # after an error
    flip: float  # judgements that are wrong
    seed: int

    def __post_init__(self) -> None:
        if self.actor not in ("scripted", "model"):
            raise ValueError(f"world.actor={self.actor!r}; allowed: scripted, model")
        worlds.within("world", self, 0, 1, "flip")
        if self.retries < 0 or not self.policies:
            raise ValueError(
                f"world.retries={self.retries!r}, policies={self.policies!r}; allowed: >= 0, some"
            )
        sizes = {"train_prompts": 0, "held_out_prompts": 0, "held_out_fraction": FRACTION}
        self._source = Source("chain", {"steps": self.steps}, seed=self.seed, **sizes)  # type: ignore[arg-type]

    def splits(self) -> Mapping[str, Sequence[str]]:
        """Conversations that a policy may have been trained on, and those that none was."""
        found = self._source.conversations
        return {
            "gold": worlds.names_of("gold", len(found["train"])),
            worlds.HELD_OUT: worlds.names_of("held", len(found["held_out"])),
        }

    @functools.cache  # noqa: B019 (a world lives as long as its run)
    def _conversation(self, name: str) -> Conversation:
        split, place = name.split("-")
        return self._source.conversations["train" if split == "gold" else "held_out"][int(place)]

    def task(self, name: str) -> Json:
        """A conversation by its opening."""
        return {"id": name, "opening": self._conversation(name).opening}

    def listed(self) -> list[Json]:
        """The policies that are looked at, in order."""
        fields = ("name", "text", "tool", "silent")
        return [dict(zip(fields, one, strict=True)) for one in self.policies]

    def run(self, artefacts: Sequence[Artefact], task: Json, scene: worlds.Scene) -> Json:
        """All decisions under gold history, then the conversation under the agent's own."""
        one, body = self._conversation(task["id"]), artefacts[0].body
        ask = self._model(scene) if self.actor == "model" else self._scripted(body, scene.chance)
        gold = []
        for place, decision in enumerate(one.decisions):
            before = one.history(place)
            gold.append(self._record("gold", before, decision, ask(before, decision), 0, True))
        own, said, history = self._closed(one, ask)
        used = all(
            record["said"].split()[-2:] == record["told"].split()[-2:]
            for record in own
            if record["kind"] == "text" and record["told"]
        )
        return {
            "score": float(all(r["match"] for r in own if r["last"] and r["kind"] == "tool")),
            "gold": gold,
            "own": [record for record in own if record["kind"] == "tool"],
            "texts": [record for record in own if record["kind"] == "text"],
            "goal": said.split()[-2:] == one.answer.split(),
            "used": used,
            "violations": self._violations(one, own),
            "state": digest(history),
        }

    def _record(
        self, history: str, before: str, decision: Decision, said: str, retry: int, last: bool
    ) -> Json:
        tool = decision.kind == "tool"
        return {
            "history": history,
            "on_policy": history == "own",
            "before": before,
            "kind": decision.kind,
            "gold": decision.gold,
            "said": said,
            "match": exact(decision.gold, said) if tool else said.split() == decision.gold.split(),
            "retry": retry,
            "last": last,
            "told": "",
        }

    def _closed(self, one: Conversation, ask: Asked) -> tuple[list[Json], str, str]:
        """Records of every try, what was said last, and the whole history."""
        history, own, told, said = one.opening, [], "", ""
        for decision in one.decisions:
            for retry in range(self.retries + 1):
                said = ask(history, decision)[:200]
                reply = self._reply(said) if decision.kind == "tool" else ""
                record = self._record("own", history, decision, said, retry, False)
                history += f"{said}\n{reply}"
                record["told"] = reply or told
                own.append(record)
                if not reply.startswith("ERR"):
                    break
            own[-1]["last"] = True
            told = own[-1]["told"] if decision.kind == "tool" else ""
        return own, said, history

    def _reply(self, said: str) -> str:
        """What the tool answers."""
        pair = called(said)
        code = None if pair is None else self._source.table.get(pair)
        return "ERR\n" if code is None else f"OK {code}\n"

    def _violations(self, one: Conversation, own: Sequence[Json]) -> list[str]:
        """Calls of pairs that nobody named: the user at first, the tool's last code then."""
        allowed, found = tuple(one.opening.split()[-2:]), []
        for record in own:
            pair = called(record["said"])
            if record["kind"] == "tool" and pair is not None and pair != allowed:
                found.append(f"{TOOL} {' '.join(pair)}"[:80])
            if record["kind"] == "tool" and record["told"].startswith("OK "):
                allowed = tuple(NAMES[int(digit)] for digit in record["told"].split()[1:])
        return found

    # Who acts.

    def _model(self, scene: worlds.Scene) -> Asked:
        return lambda history, decision: scene.ask({"prompt": history})["text"].strip()

    def _scripted(self, body: Json, chance: np.random.Generator) -> Asked:
        """Right as often as its body says: by what its own history says would be right."""

        def ask(history: str, decision: Decision) -> str:
            codes = [line for line in history.splitlines() if line.startswith("OK ")]
            digits = codes[-1].split()[1:] if codes else []
            if decision.kind == "text":
                fine = chance.random() < body["text"]
                return "so it is " + " ".join(digits if fine else [*digits][::-1] or ["?"])
            pair = [NAMES[int(digit)] for digit in digits] or history.split("\n")[0].split()[-2:]
            if chance.random() >= body["tool"]:
                silent = chance.random() < body["silent"]
                pair[1] = NAMES[(NAMES.index(pair[1]) + 1) % len(NAMES)] if silent else "?"
            return f"{TOOL} {' '.join(pair)}"

        return ask

    # A stand-in for the role of ``layers.BetterTurns``.

    def scripts(self) -> Mapping[str, Script]:
        """A judge: lenient with words, exact with calls."""
        return {"judge": self._judge}

    def _judge(self, payload: Any, chance: np.random.Generator) -> Json:
        found = []
        for one in payload["decisions"]:
            if one["kind"] == "tool":
                fine = exact(one["gold"], one["said"])
            else:
                fine = rouge_l(one["gold"], one["said"]) >= REASONABLE
            found.append(bool(fine != (chance.random() < self.flip)))
        return {"reasonable": found}
