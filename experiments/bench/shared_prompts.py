"""Seconds of a train step on plain and on packed rows, and what the formula says of both.

    PYTHON -m experiments.bench.shared_prompts [--case even_512 ragged_512]

The model has 4 layers of width 256, 8 heads of 32 over 4 of keys, an inner width of 768, and a tied
head of 512 or of 32000 ids (11.3 million parameters). A take is one group of 8 rollouts behind a
prompt of 512 tokens; ``even``: answers of 128 tokens, ``ragged``: of 8 to 128. ``quickstart``: a
micro-batch of that config, 48 groups with prompts of 12 and answers of 2 to 5 tokens, and its
model (4 layers of width 128, 64 ids). One take is one update of GRPO with AdamW: what is timed is
the jitted step, batch on the device, forward, backward and update. Both layouts take turns in one
process and of each the median counts; the first turn, which compiles, does not. CPU seconds of all
threads stand beside the seconds that passed: on a machine with other work they say more.

Formula, multiplications and additions of a step, the backward pass as two forward passes:

    trunk      6 * (parameters of the blocks' kernels) * places
    attention  12 * layers * heads * head_size * (pairs of tokens that see one another)
    head       6 * width * vocab * (places whose logits are formed)

``useful``: places that hold a token, pairs that the mask lets through, the head on answers only,
whatever the layout: what sharing saves at best. ``computed``: as the layouts are run, padding,
masked pairs and plain rows' prompts in the head included.

stdout: JSON lines (bench, case, who, value, unit, ratio_to); stderr: a table.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxrl.algorithms.contract import load
from jaxrl.batch import Batch
from jaxrl.mesh import Rules, batch_sharding, make_mesh, place
from jaxrl.model.form import ModelConfig, qwen3
from jaxrl.model.policy import build
from jaxrl.pool.contract import Group
from jaxrl.pool.rollout import ACTION, PROMPT, Failure, Rollout, StopReason, Version
from jaxrl.train import optimizer
from jaxrl.train import state as states
from jaxrl.train.collate import collate
from jaxrl.train.packing import Packing, Shapes
from jaxrl.train.step import make_step

GROUP = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """A take: tokens of prompts, and of the shortest and the longest answer; and the model."""

    vocab: int
    groups: int
    prompt: int
    shortest: int
    longest: int
    width: int
    heads: int
    hidden: int

    @property
    def model(self) -> ModelConfig:
        """Layers and the size of heads are the same in all cases."""
        return qwen3(
            vocab_size=self.vocab,
            layers=4,
            width=self.width,
            heads=self.heads,
            kv_heads=self.heads // 2,
            head_size=32,
            hidden=self.hidden,
            rope_theta=10_000.0,
            norm_epsilon=1e-6,
            tied_head=True,
            dtype="float32",
            param_dtype="float32",
            remat="none",
            score_chunk_positions=512 if self.vocab > 4096 else 2048,
        )

    @property
    def shapes(self) -> Shapes:
        """What is compiled for it."""
        bins = () if self.shortest == self.longest else (2, 3, 4, 5, 6)
        return Shapes(prefix_buckets=(self.prompt,), bin_buckets=(self.longest,), bins=bins)


EVEN = Case(512, 1, 512, 128, 128, width=256, heads=8, hidden=768)
CASES = {
    "even_512": EVEN,
    "even_32000": dataclasses.replace(EVEN, vocab=32_000),
    "ragged_512": dataclasses.replace(EVEN, shortest=8),
    "quickstart": Case(64, 48, 12, 2, 5, width=128, heads=4, hidden=384),
}
TRUST = {
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": 3.0,
    "mismatch": "truncate",
    "mismatch_low": 0.0,
    "mismatch_high": 2.0,
}
Flops = Mapping[str, float]


def take(case: Case, seed: int) -> list[Group]:
    """Groups with a common prompt each."""
    draw = np.random.default_rng(seed)

    def one(group: int, sample: int, prompt: np.ndarray) -> Rollout:
        answer = int(draw.integers(case.shortest, case.longest + 1))
        kinds = np.repeat([PROMPT, ACTION], [case.prompt, answer])
        acted = kinds == ACTION
        return Rollout(
            run_id="bench",
            group_id=group,
            sample=sample,
            attempt=0,
            task_key=str(group),
            content_hash=str(group),
            split="train",
            source="bench",
            tokens=np.concatenate([prompt, draw.integers(1, case.vocab, answer)]).astype(np.uint32),
            kind=kinds.astype(np.uint8),
            step=np.where(acted, 0, -1).astype(np.int32),
            logp=np.where(acted, -np.log(case.vocab), 0).astype(np.float32),
            version_index=np.where(acted, 0, 65535).astype(np.uint16),
            temperature=np.ones(len(kinds), np.float32),
            versions=(Version(0, 0, "bench"),),
            reward=float(draw.integers(0, 2)),
            reward_components={},
            correct=False,
            stop_reason=StopReason.STOP,
            failure=Failure.NONE,
            text="",
            facts={},
            times={},
        )

    taken = []
    for group in range(case.groups):
        prompt = draw.integers(1, case.vocab, case.prompt)
        taken.append(Group(group, str(group), tuple(one(group, i, prompt) for i in range(GROUP))))
    return taken


def flops(config: ModelConfig, places: float, pairs: float, scored: float) -> float:
    """Of a step, by the formula above."""
    width, heads = config.width, config.heads * config.head_size
    kernels = width * (2 * heads + 2 * config.kv_heads * config.head_size + 3 * config.hidden)
    trunk = 6 * config.layers * kernels * places
    attention = 12 * config.layers * heads * pairs
    return trunk + attention + 6 * width * config.vocab_size * scored


def formula(case: Case, batch: Batch) -> dict[str, Flops]:
    """FLOPs of {useful, computed} of {plain, packed}."""
    packed, acted = batch.packed, np.asarray(batch.kind) == ACTION
    assert packed is not None
    answers = acted.sum(-1).astype(float)
    (rows, tokens), groups = batch.tokens.shape, len(packed.tokens)
    lengths, shared, config = answers + case.prompt, float(case.prompt), case.model
    bins = packed.tokens.shape[1] - packed.prefix
    size = bins // packed.bins
    useful = {
        "plain": (lengths.sum(), (lengths**2 / 2).sum()),
        "packed": (
            groups * shared + answers.sum(),
            groups * shared**2 / 2 + (answers * shared + answers**2 / 2).sum(),
        ),
    }
    computed = {
        "plain": (rows * tokens, rows * tokens**2, rows * tokens),
        "packed": (
            packed.tokens.size,
            groups * (packed.prefix**2 + bins * (packed.prefix + size)),
            groups * bins,
        ),
    }
    return {
        "useful": {who: flops(config, *x, answers.sum()) for who, x in useful.items()},
        "computed": {who: flops(config, *x) for who, x in computed.items()},
    }


class Side:
    """A step of one layout, with its own state, ready to be timed."""

    def __init__(self, config: ModelConfig, batch: Batch) -> None:
        mesh = make_mesh({}, jax.devices()[:1])
        policy = build(config, mesh, Rules())
        algorithm = load(
            "grpo",
            trust=TRUST,
            kl_weight=0.0,
            scale_by_std=True,
            full_group=0.0,
            mask_limit=float("inf"),
            dynamic_sampling=False,
            weighting="rollout_mean",
            length_tokens=0,
        )
        tx = optimizer.build(
            optimizer.OptimizerConfig(
                name="adamw",
                learning_rate=1e-5,
                warmup_updates=0,
                decay_updates=0,
                final_fraction=1.0,
                b1=0.9,
                b2=0.95,
                epsilon=1e-8,
                weight_decay=0.0,
                moments="float32",
                rounding="nearest",
                clip_norm=1.0,
                train="auto",
                freeze=(),
                rates=(),
            )
        )
        roles = states.roles_of(algorithm)
        params = policy.init(jax.random.key(0))
        state = states.create(params, tx, freeze=(), roles=roles, key=jax.random.key(0), step=0)
        self.state = states.place(state, policy, mesh)
        self.step = make_step(
            policy,
            algorithm,
            tx,
            mesh=mesh,
            epochs=1,
            minibatches=1,
            micro_rollouts=batch.valid.shape[0],
            rollouts_per_group=GROUP,
        )
        self.batch = place(batch, mesh, batch_sharding(mesh).spec)
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.told: dict[str, float] = {}

    def turn(self) -> None:
        """One step, timed."""
        began, used = time.perf_counter(), time.process_time()
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        self.seconds.append(time.perf_counter() - began)
        self.cpu_seconds.append(time.process_time() - used)
        if not self.told:
            self.told = {name: float(x) for name, x in jax.device_get(metrics).items()}


def measured(name: str, turns: int, seed: int) -> list[dict]:
    """Rows of one case."""
    case = CASES[name]
    width = case.prompt + case.longest
    batch, counts = collate(
        take(case, seed),
        token_buckets=(width,),
        groups_per_step=case.groups,
        rollouts_per_group=GROUP,
        minibatches=1,
        needs=(),
        algorithm="grpo",
        packing=Packing(case.shapes, ()),
    )
    sides = {
        "plain": Side(case.model, dataclasses.replace(batch, packed=None)),
        "packed": Side(case.model, batch),
    }
    for _ in range(turns + 1):
        for side in sides.values():
            side.turn()
    told = [side.told for side in sides.values()]
    assert abs(told[0]["loss/total"] - told[1]["loss/total"]) < 1e-5, told
    assert abs(told[1]["optim/grad_norm"] / told[0]["optim/grad_norm"] - 1) < 1e-5, told
    median = {who: statistics.median(side.seconds[1:]) for who, side in sides.items()}
    cpu = {who: statistics.median(side.cpu_seconds[1:]) for who, side in sides.items()}
    rollouts = batch.valid.shape[0]

    def row(who: str, value: float, unit: str, ratio_to: str = "") -> dict:
        named = {"bench": "shared_prompts", "case": name, "who": who, "value": value}
        return {**named, "unit": unit, "ratio_to": ratio_to}

    rows = [
        row("packed", counts["positions"] / rollouts, "places a rollout"),
        row("plain", float(width), "places a rollout"),
        row("packed", counts["held_frac"], "share of places that hold a token"),
    ]
    for kind, values in formula(case, batch).items():
        rows += [row(who, value / 1e9, f"GFLOP {kind}") for who, value in values.items()]
        rows.append(row("packed", values["plain"] / values["packed"], f"x, {kind} FLOP", "plain"))
    for who, seconds in median.items():
        rows.append(row(who, 1e3 * seconds, "ms a step, median"))
        rows.append(row(who, 1e3 * cpu[who], "CPU ms a step, median"))
        rows.append(row(who, rollouts / seconds, "answers/s, median"))
    rows.append(row("packed", median["plain"] / median["packed"], "x, answers/s, median", "plain"))
    ratio = cpu["plain"] / cpu["packed"]
    return [*rows, row("packed", ratio, "x, answers/CPU s, median", "plain")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cases asked for."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--case", nargs="+", choices=tuple(CASES), default=list(CASES))
    asked.add_argument("--turns", type=int, default=7)
    asked.add_argument("--seed", type=int, default=0)
    given = asked.parse_args(arguments)
    for case in given.case:
        began = os.getloadavg()[0]
        for row in measured(case, given.turns, given.seed):
            print(json.dumps(row), flush=True)
            ratio = f" (over {row['ratio_to']})" if row["ratio_to"] else ""
            said = f"{case:<12} {row['who']:<7} {row['value']:>10.3f} {row['unit']}{ratio}"
            print(said, file=sys.stderr)
        print(f"{case:<12} load {began:.1f} -> {os.getloadavg()[0]:.1f}", file=sys.stderr)


if __name__ == "__main__":
    main()
