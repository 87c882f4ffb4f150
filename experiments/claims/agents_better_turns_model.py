"""Better Turns on a model that jaxrl trains: how far apart are the layers early, and late?

python -m experiments.claims.agents_better_turns_model --workdir /tmp/better_turns_model

A character model of 2 layers and 64 numbers learns gold decisions of jaxrl/tasks/turns.py by
supervised training (teacher forcing); its weights early and at the end are then looked at by the
five layers, on held-out conversations of three look-ups, greedily, through the port ``tiny``. The
judge of L2 is scripted: lenient with words, exact with calls. ``gap`` is L2 - L4.

Expect: early, text and turns look good while no conversation is solved; late, all layers rise.
Result: as expected. 5 seeds, 30 conversations each, means with 95 % t intervals; commit 9828991,
2026-11-30, 14 to 345 s a run on busy cores (training is in the early one). After 50 updates: L1
.833 [.788, .878], texts .982 right to the judge, L2 .594 [.532, .657], L3 .207 [.116, .297], L4 and
L5 0; gap .594. After 200: L1 .993, L2 .994, L3 .989 [.972, 1.006], L4 .893 [.724, 1.062], L5 .873
[.658, 1.089]; gap .101 [-.060, .263]. Three of the five still lose conversations that the layers
under gold history hardly show: the worst solves .70 with .967 of its calls right.
"""

import functools
import importlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from etils import epath

from experiments.claims import agent_runs
from experiments.claims.protocol import Claim, Outcome, main
from jaxrl.agents import drive
from jaxrl.agents.layers import LAYERS
from jaxrl.model import versions
from jaxrl.pool.contract import Generator, Tokenizer
from jaxrl.pool.rollout import Version
from jaxrl.train import rounds, settings
from jaxrl.train.workdir import Workdir

STEPS = {"early": 50, "late": 200}
MODULE = "experiments.claims.agents_better_turns_model"
KEPT = Path(tempfile.gettempdir()) / "jaxrl-agents-better-turns"  # weights, by seed


def config(seed: int, steps: int) -> Any:
    """Supervised training on gold decisions."""
    found: Any = importlib.import_module("configs.sft").get_config("")
    found.seed = seed
    found.model.update(layers=2, width=64, heads=2, kv_heads=2, head_size=32, hidden=128)
    found.task.source, found.task.family = "jaxrl.tasks.turns", "chain"
    found.task.parameters = {"steps": 3}
    found.task.update(train_prompts=6000, held_out_prompts=240)
    found.pool.update(tokenizer="characters", publish_every_steps=STEPS["early"])
    found.sampler.update(max_new_tokens=14, prompt_buckets=(96,), slots=4)
    found.optimizer.update(learning_rate=4e-3, b2=0.98, decay_updates=steps - 10)
    found.train.update(steps=steps, groups=16, micro_rollouts=16, token_buckets=(112,))
    found.eval.update(prompts=4, samples=1)
    found.checkpoint.update(every_steps=steps, keep_weights=100)
    return found


def trained(seed: int, steps: int) -> Path:
    """The workdir of a finished run."""
    root = KEPT / f"{seed}-{steps}"
    if not (root / "summary.json").exists():
        shutil.rmtree(root, ignore_errors=True)
        rounds.run(config(seed, steps), str(root))
    return root


def actor(path: str) -> tuple[Generator, Tokenizer]:
    """``config.port.generator``: the sampler of a run, with the weights of a step: ``DIR:STEP``."""
    folder, _, step = path.rpartition(":")
    run = Workdir(epath.Path(folder))
    held: Any = settings.read(json.loads((run.root / "config.json").read_text()))
    # Its own history grows with every call that is tried again.
    held.sampler.prompt_buckets, held.train.token_buckets = (96, 224), (240,)
    parts = rounds.assemble(settings.phases(held), run.root)
    epoch = next(epoch for epoch, found in run.published() if found == int(step))
    where = run.weights(epoch, int(step))
    digest = versions.read_manifest(where)["digest"]
    parts.sampler.load(Version(epoch, int(step), digest), str(where))
    return parts.sampler, parts.tokenizer


def run(quick: bool, arm: str, rate: float, seed: int) -> Outcome:
    """One model at one of its steps."""
    steps = {"early": 2, "late": 4} if quick else STEPS
    folder = trained(seed, steps["late"])
    system = {"conversations": 2, "held_out": 2 if quick else 30}
    world = {"actor": "model", "policies": ((arm, 0.0, 0.0, 0.0),)}
    port = {
        "kind": "tiny",
        "generator": f"{MODULE}:actor",
        "path": f"{folder}:{steps['late'] if quick else steps[arm]}",
        "model": f"{arm}-{seed}",
        "max_tokens": 14,
        "temperature": 0.0,
    }
    made = agent_runs.settings("better_turns", 0, False, system, world, rounds=1, port=port)
    done = drive.run("better_turns", made, None)
    (table,) = (done.records[name] for name in done.records if name.endswith("layers.json"))
    means = {name: table[name]["mean"] for name in (*LAYERS, "text", "tool", "within")}
    return {**means, "gap": means["L2"] - means["L4"]}


def claim(quick: bool) -> Claim:
    """Two arms: the same models, early and late."""
    return Claim(
        name="agents_better_turns_model",
        arms=tuple(STEPS),
        run=functools.partial(run, quick),
        rates=(0.0,),
        choose="L4",
        larger=True,
        shown=(*LAYERS, "text", "tool", "within", "gap"),
        drawn=("L1", "L3", "L4"),
        against="early",
        seeds=1 if quick else 5,
    )


if __name__ == "__main__":
    main(claim, __doc__)
