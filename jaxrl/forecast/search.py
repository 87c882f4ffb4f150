"""Meshes, micro-batches and remat policies tried for a slice; the best that fits is proposed.

Candidates are ranked by a rough forecast, for which nothing is compiled:

    time    max(executed FLOPs / peak,  parameters gathered in every pass / ports, and what
            ``tensor`` sums of each layer's states)
    memory  parameters, moments, gradients and references, split over fsdp, tensor and expert, and
            of each kept position what the remat policy keeps

Those whose forecast of memory is above the chip's come last. Then the first few are compiled, and
the one with the shortest predicted step among those that fit is the answer; of equal ones that in
which least must be hidden.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from ml_collections import ConfigDict

from jaxrl.forecast import work
from jaxrl.forecast.chips import GIB, Slice, read_slice
from jaxrl.model import flops, transformer
from jaxrl.model.form import ModelConfig
from jaxrl.train import settings
from jaxrl.train.settings import Phase

COMPILED = 4  # candidates that are compiled
POLICIES = ("full", "attention", "projections", "inner")

Compile = Callable[[ConfigDict, str, str, str], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One setting, and what is roughly expected of it."""

    fsdp: int
    tensor: int
    expert: int
    micro_rollouts: int
    remat: str
    seconds: float
    gib: float


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def kept(model: ModelConfig, remat: str) -> float:
    """Bytes that a layer keeps of a position in bfloat16, its input included, before a split."""
    attended = model.heads * model.value_width
    projected = (model.heads + 2 * model.kv_heads) * model.head_size
    names = {
        "full": 0,
        "attention": attended,
        "projections": attended + projected,
        "inner": attended + projected + 2 * model.hidden * (not model.experts.count),
    }
    return 2.0 * (model.width + names[remat])


def expect(
    model: ModelConfig,
    where: Slice,
    sizes: tuple[int, int, int],
    rows: int,
    micro: int,
    tokens: int,
    remat: str,
) -> tuple[float, float]:
    """Seconds and GiB, roughly; see the file."""  # fmt: skip
    fsdp, tensor, expert = sizes
    count = sum(math.prod(x.shape) for x in transformer.shapes(model).values())
    positions, chip = rows * tokens, where.chip
    again, attended = work.computed_again(dataclasses.replace(model, remat=remat), work.SPLASH)
    one = flops.forward(model, tokens)
    total = positions * (one.trunk * (4 + again) + one.attention * (4 + attended) + one.head * 5)
    compute = total / where.devices / chip.flops
    passes = 4 * rows // micro
    gathered = 2.0 * count / tensor / expert * (fsdp - 1) / max(fsdp, 1) * passes
    own = positions / (fsdp * expert)
    summed = 8 * 2 * own * model.width * 2 * model.layers * (tensor - 1) / tensor
    linked = (gathered + summed) / (2 * chip.link_bytes)
    state = (16 + 4) * count / (fsdp * tensor * expert)
    alive = micro * tokens / (fsdp * expert)
    layers = alive * kept(model, remat) * model.layers / (1 if remat == "full" else tensor)
    logits = 2 * 4 * model.score_chunk_positions * model.vocab_size / tensor
    return max(compute, linked), (state + layers + logits) / GIB


def candidates(phase: Phase, where: Slice) -> Iterator[Candidate]:
    """All that divide what they split."""
    model, plan = phase.model, phase.train
    rows = plan.groups * phase.pool.rollouts_per_group
    update, tokens = rows // plan.minibatches, max(plan.token_buckets)
    for tensor in _divisors(math.gcd(model.kv_heads, where.devices)):
        if model.vocab_size % tensor or model.hidden % tensor:
            continue
        left = where.devices // tensor
        for expert in (
            _divisors(math.gcd(model.experts.count, left)) if model.experts.count else [1]
        ):
            fsdp = left // expert
            if model.width % fsdp or update % left:
                continue
            for micro in (n for n in _divisors(update) if n % left == 0):
                if micro % phase.pool.rollouts_per_group:
                    continue
                for remat in POLICIES:
                    sizes = (fsdp, tensor, expert)
                    told = expect(model, where, sizes, rows, micro, tokens, remat)
                    yield Candidate(*sizes, micro, remat, *told)


def ranked(phase: Phase, where: Slice) -> list[Candidate]:
    """The most promising first. ValueError where nothing divides."""
    found = sorted(
        candidates(phase, where), key=lambda x: (x.gib > where.chip.hbm_gib, x.seconds, x.gib)
    )
    if not found:
        rows = phase.train.groups * phase.pool.rollouts_per_group
        raise ValueError(
            f"slice={where.name!r}: no mesh of {where.devices} devices splits train.groups * "
            f"pool.rollouts_per_group={rows} rollouts, model.width={phase.model.width} and "
            f"model.kv_heads={phase.model.kv_heads}; allowed: more train.groups, or fewer devices"
        )
    return found


def apply(config: ConfigDict, one: Candidate) -> ConfigDict:
    """The config with a candidate's settings, in all phases' common sections."""
    changed: Any = config.copy_and_resolve_references()
    changed.mesh.update(data=1, fsdp=one.fsdp, tensor=one.tensor, expert=one.expert, context=1)
    changed.model.remat = one.remat
    changed.train.micro_rollouts = one.micro_rollouts
    return changed


def best(
    config: ConfigDict, slice_name: str, phase_name: str, name: str, compile_one: Compile
) -> dict[str, Any]:
    """The record of the best candidate that fits, with ``search``: what was tried, and what of it
    was compiled. If none fits, the record of the smallest."""
    where = read_slice(slice_name)
    phases = settings.phases(config)
    named = {phase.name: phase for phase in phases}
    if phase_name and phase_name not in named:
        raise ValueError(f"phase={phase_name!r}; allowed: {', '.join(named)}")
    order = ranked(named[phase_name] if phase_name else phases[-1], where)
    tried, records = [], []
    for one in order[:COMPILED]:
        record = compile_one(apply(config, one), name, slice_name, phase_name)
        told = record["step"].get("seconds", {})
        seconds, added = (told.get(name, math.inf) for name in ("predicted", "nothing_hides"))
        fits = record["step"]["hbm_gib"]["fits"]
        tried.append(
            dataclasses.asdict(one) | {"predicted_s": seconds if fits else None, "fits": fits}
        )
        records.append((not fits, seconds, added, len(records), record))
    chosen = min(records)[-1]
    return chosen | {"search": {"candidates": len(order), "compiled": tried}}
