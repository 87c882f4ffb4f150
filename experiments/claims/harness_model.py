"""Harness Evolution's world with a model that jaxrl trained as the actor, and tuned by ``sft``.

The questions are those of jaxrl/agents/cross_world.py, without loops: «q05» has an answer that goes
by its kind, «h05» one that stands on the second page («h05p3»: 3). The model writes characters; a
strict call is «(3)», a malformed one «3». A harness that repairs shows it what it wrote and a «!».

The base learns from demonstrations of all this, half of the calls malformed and half of the kinds
unknown. Tuning goes by records (jaxrl.agents.cross.record) that jaxrl.pool.recorded reads, and
jaxrl's own step under the algorithm ``sft``. The model acts behind jaxrl's gateway, a process with
the engine in it (``python -m jaxrl.gateway``), and is asked over HTTP in OpenAI's chat, a request
an answer, sampled at temperature 1. Who proposes edits stays scripted: such a model cannot write a
harness.
"""

import dataclasses
import functools
import itertools
import json
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from jaxrl.agents import cross_world, worlds
from jaxrl.agents.artefacts import Artefact
from jaxrl.agents.cross import ROLES, record
from jaxrl.agents.cross_world import VALUES
from jaxrl.agents.journal import Json, digest, draws
from jaxrl.agents.port import Reply, ScriptedPort, ServedPort, Spending
from jaxrl.algorithms import contract
from jaxrl.mesh import Rules, make_mesh
from jaxrl.model.form import ModelConfig, qwen3
from jaxrl.model.policy import Policy, build
from jaxrl.model.versions import write_weights
from jaxrl.pool.announced import CURRENT, announce
from jaxrl.pool.characters import CharacterTokenizer
from jaxrl.pool.contract import PoolError
from jaxrl.pool.recorded import RecordedPool
from jaxrl.pool.rollout import Version
from jaxrl.pool.services import EVALUATION_KEY, Services, pool_key
from jaxrl.tasks.contract import Task
from jaxrl.train import state as states
from jaxrl.train.collate import collate
from jaxrl.train.optimizer import scale_by_rate
from jaxrl.train.step import Step, make_step

ALPHABET = "qhp!()0123456789"
TOKENIZER = CharacterTokenizer(ALPHABET, 1)
LONGEST, SAID, ROWS = 16, 6, 64  # tokens of a record and of a reply; rows of a step
SLOTS = 4  # of the engine: episodes ask one by one
PATIENCE_S = 300.0  # for the gateway to start, and for its engine to take weights
BASE = (300, 3e-3)  # takes and rate
TUNED = (50, 1e-3)
_STRICT = re.compile(r"\((\d)\)")


def form() -> ModelConfig:
    """A decoder of two layers."""
    return qwen3(
        vocab_size=TOKENIZER.vocab_size,
        layers=2,
        width=32,
        heads=2,
        kv_heads=1,
        head_size=16,
        hidden=64,
        rope_theta=100.0,
        norm_epsilon=1e-6,
        tied_head=True,
        dtype="float32",
        param_dtype="float32",
        remat="none",
        score_chunk_positions=4096,
    )


@functools.cache
def policy() -> Policy:
    """The decoder on one device."""
    return build(form(), make_mesh({}, jax.devices()[:1]), Rules())


@functools.cache
def step_of(rate: float) -> Step:
    """jaxrl's step under supervised fine-tuning."""
    where = policy().mesh
    assert where is not None
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.99), scale_by_rate(lambda _: rate)
    )
    cuts: Any = {"epochs": 1, "minibatches": 1, "micro_rollouts": ROWS, "rollouts_per_group": 1}
    return make_step(policy(), contract.load("sft"), tx, mesh=where, **cuts)


def tune(params: Any, examples: Sequence[Json], takes: int, rate: float, seed: int) -> Any:
    """Parameters after so many takes on records of these examples."""
    step = step_of(rate)
    made: Any = {"roles": {states.STUDENT}, "others": {}}
    copy = jax.tree.map(lambda x: x.copy(), params)  # a step consumes its state
    state = states.create(copy, step.student.tx, freeze=(), key=jax.random.key(0), step=0, **made)
    state = states.place(state, policy(), step.mesh)
    with tempfile.TemporaryDirectory() as folder:
        record(examples, TOKENIZER, Path(folder), digest(list(examples)))
        pool = RecordedPool(folder, seed=seed, rollouts_per_group=1)
        for take in range(takes):
            groups, _ = pool.take(ROWS, take)
            batch, _ = collate(
                groups,
                token_buckets=(LONGEST,),
                groups_per_step=ROWS,
                rollouts_per_group=1,
                minibatches=1,
                needs=(),
                algorithm="sft",
            )
            state, _ = step(state, batch)
            pool.commit(take)
    return state.roles[states.STUDENT].all


class Source:
    """The alphabet, for the gateway's tokenizer: one text that holds all of it."""

    grouped = False
    needs: tuple[str, ...] = ()

    def __init__(self, family: str, parameters: Any) -> None:
        pass

    def tasks(self, split: str) -> list[Task]:
        """One, never asked."""
        return [Task("alphabet", "harness", "train", ALPHABET, "", "", {})]


def told(folder: Path, seed: int) -> dict[str, Any]:
    """What a gateway in ``folder`` must know, as a run tells it."""
    return {
        "run_id": "harness",
        "seed": seed,
        "folder": str(folder),
        "ledger": str(folder / "ledger.sqlite"),
        "ledger_run": "harness",
        "spool": str(folder / "spool"),
        "mesh": {},
        "model": dataclasses.asdict(form()),
        "task": {"source": __name__, "family": "", "parameters": {}, "reward": "verifier"},
        "pool": {
            "tokenizer": "characters",
            "chat": "off",
            "engine": "sampler",
            "harness": "",
            "chunk_tokens": 0,
            "rollouts_per_group": 1,
            "max_feedback_tokens": 0,
            "lease_s": 60.0,
            "watchdog_s": 60.0,
            "max_body_bytes": 2**16,
            "poll_s": 0.02,
            "admission": "fixed",
            "under_way": 0,
            "judge_calls": 0,
            "sandboxes": 0,
            "spool_bytes": 0,
            "usage_marks": (0.7, 0.8, 0.9),
            "quotas": (),
        },
        "sampler": {
            "temperature": 1.0,
            "max_new_tokens": SAID,
            "prompt_buckets": [LONGEST - SAID],
            "slots": SLOTS,
            "record_routes": False,
        },
    }


class Port:
    """Asks a gateway process for the role ``actor``, and a script for ``edit``.

    The gateway serves one set of weights at a time; before a payload names another one, that is
    published as a trainer does, and the engine's word waited for.
    """

    model = "jaxrl"

    def __init__(self, scripts: Mapping[str, Any], seed: int) -> None:
        self._scripted = ScriptedPort(ROLES, scripts, seed)
        self._weights: dict[str, Any] = {}
        self._serves, self._steps = "", itertools.count()
        self._kept = tempfile.TemporaryDirectory()
        self.folder = Path(self._kept.name)
        how: Any = {"gateway": "", "launcher": "none", "workers": 0, "patience_s": PATIENCE_S}
        self.services = Services(self.folder, told(self.folder, seed), **how)
        self._actor = ServedPort(
            ROLES,
            url=f"{self.services.url}/v1",
            model=self.model,
            api_key=pool_key(self.folder, EVALUATION_KEY),
            spending=Spending(cap=0.0, per_million_in=0.0, per_million_out=0.0),
            max_tokens=SAID,
            temperature=1.0,
            attempts=5,
            backoff_s=0.2,
            timeout_s=60.0,
        )

    def close(self) -> None:
        """End the gateway."""
        self.services.close()
        self._kept.cleanup()

    def add(self, name: str, params: Any) -> None:
        """Weights by name."""
        self._weights[name] = params

    def serve(self, name: str) -> None:
        """Have the gateway's engine take these weights. PoolError if it does not."""
        step = next(self._steps)
        path = self.folder / "weights" / str(step)
        version = Version(0, step, write_weights(path, self._weights[name], epoch=0, step=step))
        wanted = dataclasses.asdict(version)
        announce(self.folder / CURRENT, {**wanted, "path": str(path)})
        ack, until = self.folder / "acks" / "gateway.json", time.monotonic() + PATIENCE_S
        while not (ack.exists() and json.loads(ack.read_text()) == wanted):
            self.services.ensure()
            if time.monotonic() > until:
                raise PoolError(f"no engine has acknowledged {version} ({PATIENCE_S} s)")
            time.sleep(0.02)
        self._serves = name

    def call(self, role: str, payload: Json, schema: Mapping[str, Any], key: str) -> Reply:
        """See ``LLMPort``."""
        if role != "actor":
            return self._scripted.call(role, payload, schema, key)
        if payload["weights"] != self._serves:
            self.serve(payload["weights"])
        reply = self._actor.call(role, payload, schema, key)
        return dataclasses.replace(reply, model=self._serves)


@dataclasses.dataclass(eq=False)
class World(cross_world.World):
    """As its parent, but for who acts. ``port`` is set before the run, by whoever starts it."""

    def prompt(self, task: Json, harness: Json) -> str:
        """What the actor is shown."""
        if not task["hidden"]:
            return f"q{task['key']:02d}"
        page = f"p{task['second']}" if "page-2" in harness["pages"] else ""
        return f"h{task['key']:02d}{page}"

    def run(self, artefacts: Sequence[Artefact], task: Json, scene: worlds.Scene) -> Json:
        """One episode: a call, and a second one if the harness repairs."""
        harness, weights = self.seed_harness(), "base"
        for one in artefacts:
            body: Any = one.body
            if body["kind"] == "harness":
                harness = body
            else:
                weights = body["weights"]
        prompt = self.prompt(task, harness)
        right = task["second"] if task["hidden"] else int(self.right[task["key"]])
        spans = [{"kind": "harness", "text": prompt, "accepted": False}]
        shown, parsed, text = prompt, None, ""
        for _ in range(1 + harness["repair"]):
            text = scene.ask({"prompt": shown, "weights": weights})["text"]
            parsed = _STRICT.fullmatch(text)
            spans.append({"kind": "model", "text": text, "accepted": bool(parsed)})
            if parsed:
                break
            shown = f"{prompt}{text[:1]}!"
        digits = re.findall(r"\d", text)
        wrong = not digits or int(digits[0]) != right
        pages = ["page-1", "page-2"]
        return {
            "score": float(bool(parsed) and not wrong),
            "failure": "",
            "shown": [p for p in pages if p in harness["pages"]],
            "needed": pages if task["hidden"] else pages[:1],
            "parser_errors": sum(not s["accepted"] for s in spans[1:]),
            "refused": not parsed,
            "loop_hits": 0,
            "budget_out": False,
            "wrong": wrong,
            "observed": digest(prompt),
            "spans": spans,
        }

    def demonstrations(self, count: int) -> list[Json]:
        """What the base learns from: calls of both forms, answers of known kinds and of none, pages
        that are read, malformed calls that are mended."""
        chance, found = draws("demonstrations", self.seed), []
        known = draws("known", self.seed).permutation(self.kinds)[: round(self.knows * self.kinds)]
        for _ in range(count):
            key, guess = int(chance.integers(self.kinds)), int(chance.integers(VALUES))
            kind = chance.integers(3)
            if kind == 0:
                prompt, value = f"q{key:02d}", int(self.right[key]) if key in known else guess
            else:
                page = f"p{guess}" if kind == 1 else ""
                prompt, value = f"h{key:02d}{page}", guess
            said = f"({value})" if chance.random() < self.strict else f"{value}"
            if said[0] != "(" and chance.random() < 0.5:
                prompt, said = f"{prompt}{value}!", f"({value})"
            found.append({"prompt": prompt, "said": said})
        return found

    def prepare(self, seed: int) -> Port:
        """Train the base, and give the port that knows it."""
        first = policy().init(jax.random.key(seed))
        self.first = tune(first, self.demonstrations(4096), *BASE, seed)
        self.port = Port(self.scripts(), seed)
        self.port.add("base", self.first)
        return self.port

    def fine_tune(self, examples: Sequence[Json]) -> Json:
        """Weights tuned from the base on these examples, by name."""
        name = digest(list(examples))[:16]
        params = tune(self.first, examples, *TUNED, self.seed)
        self.port.add(name, params)
        return {"weights": name}
