"""What the compiler said of a run's programs, as one record and as a page of text."""

import importlib.metadata
import math
import platform
import re
from collections.abc import Mapping
from typing import Any

from jaxrl.forecast import program, times, work
from jaxrl.forecast.chips import GIB, Slice
from jaxrl.forecast.compiled import Built, DoesNotFitError, Program
from jaxrl.forecast.times import Times
from jaxrl.forecast.work import Work
from jaxrl.mesh import ways
from jaxrl.model import attention, tokamax_kernels
from jaxrl.model.form import DTYPES, REMAT
from jaxrl.train import optimizer, roles
from jaxrl.train.loop import routing_of
from jaxrl.train.state import STUDENT, roles_of

SCHEMA_VERSION = 1
# A prediction that differs from the compiler's cycles by more is pointed at.
GAP = 1.5
ASSUMPTIONS = (
    "the time to compute is that of the larger of the formula's and the compiler's FLOPs",
    "every row is as long as the longest bucket; padding counts as work",
    "the step takes the longest of its three counted times: the other two hide behind it",
    "matrix products reach the chip's published bfloat16 peak, HBM and links their bandwidth",
    "host work, checkpoints, publishing and rollouts are not part of the step",
    "useful FLOPs: observers and other scorers forward, learners forward and backward",
    "the compiler's cycles leave out collectives and the inside of Pallas kernels",
)


def versions() -> dict[str, str]:
    """Of what compiled."""
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}
    return {"python": platform.python_version(), **found}


def work_of(built: Built, tokens: int) -> tuple[Work, frozenset[str]]:
    """FLOPs of a take by formula, and which forms attention has."""
    phase, step, policy = built.phase, built.step, built.models.policy
    algorithm = step.algorithm
    who = {name for name in roles_of(algorithm) if name != "novelty"}
    forms = {name: policy.config_of(name) for name in who}
    learners = {STUDENT: phase.optimizer} | {
        name: phase.scorers.optimizer(name) for name in roles.learners(phase, algorithm)
    }
    trained = {}
    for name, settings in learners.items():
        if name in forms:
            shapes = policy.form_of(name).shapes
            trained[name] = optimizer.split(shapes, optimizer.freezing(settings, shapes))[0]
    longest = max(phase.train.view_token_buckets or (0,))
    lengths = {view: longest for view in phase.scorers.views} | {"plain": tokens}
    chosen = {
        view: attention.chosen(policy.config, length, policy.mesh, policy.rules)
        for view, length in lengths.items()
    }
    kernel = work.TOKAMAX if policy.config.kernels == "tokamax" else work.SPLASH
    attentions = {view: kernel if fused else work.DENSE for view, fused in chosen.items()}
    done = work.work(
        algorithm,
        step.plan(phase.train.groups * phase.pool.rollouts_per_group, packed=False),
        forms,
        lengths,
        trained,
        attentions,
        observes_student=routing_of(phase) is not None,
    )
    return done, frozenset(attentions.values())


def hidden(built: Built, one: Program, done: Work, forms: frozenset[str], tokens: int) -> float:
    """FLOPs of a take inside of kernels, where the compiler counts none: of attention, if it is by
    a kernel, and of experts' products, by tokamax's kernels or by XLA's own one for ``ragged_dot``,
    which makes no gradients of weights (these it multiplies densely, and counts). Tiles reach over
    the ends of experts' runs: all that may do are counted, for an even load.
    """
    attended = done.executed.attention if forms != {work.DENSE} else 0.0
    policy = built.models.policy
    experts = policy.config.experts
    plan = built.step.plan(
        built.phase.train.groups * built.phase.pool.rollouts_per_group, packed=False
    )
    by_tokamax = experts.count and policy.config.kernels == "tokamax"
    tiling = re.search(r'ragged_dot_tiling="(\d+),', one.text)
    if not by_tokamax and not tiling:
        return attended
    tile = tokamax_kernels.ROWS if by_tokamax or tiling is None else int(tiling.group(1))
    own = experts.count // ways(policy.mesh, policy.rules["expert"])
    rows = plan.micro * tokens * experts.per_token / ways(policy.mesh, policy.rules["rows"])
    multiplied = done.experts + (done.experts_own if by_tokamax else 0.0)
    return attended + multiplied * (rows + tile * (own - 1)) / rows


def hbm(one: Program, where: Slice) -> dict[str, float | bool]:
    """GiB of a device."""
    peak = one.peak / GIB
    return {
        "arguments": one.arguments / GIB,
        "temporaries": one.temporaries / GIB,
        "code": one.code / GIB,
        "peak": peak,
        "chip": where.chip.hbm_gib,
        "fits": peak <= where.chip.hbm_gib,
    }


def described(one: Program, where: Slice) -> tuple[dict[str, Any], program.Counted]:
    """What is told of any program, and its counts."""
    counted = program.count(one.text)
    top = sorted(counted.operations.items(), key=lambda pair: -pair[1])[:10]
    record = {
        "hbm_gib": hbm(one, where),
        "compile_s": one.seconds,
        "compile_processor_s": one.processor_seconds,
        "collectives": {
            kind: {"count": total["count"], "gib": total["bytes"] / GIB}
            for kind, total in sorted(counted.by_kind().items())
        },
        "hbm_moved_gib": counted.hbm_bytes / GIB,
        "compiler_cycles_s": counted.cycles / where.chip.clock_hz,
        "kernel_calls": counted.kernels,
        "loops_of_unknown_length": counted.unknown_trips,
        "operations_s": {name: cycles / where.chip.clock_hz for name, cycles in top},
    }
    return record, counted


def losses(done: Work, devices: int, where: Slice, spent: Times) -> dict[str, float]:
    """Seconds that the predicted step takes beyond its useful FLOPs at the peak, by cause."""
    rate = devices * where.chip.flops
    useful, executed = done.useful, done.executed
    return {
        "trunk computed again (model.remat)": (executed.trunk - useful.trunk) / rate,
        "logits computed again, chunk by chunk": (executed.head - useful.head) / rate,
        "attention computed again or beyond the causal half": (
            executed.attention - useful.attention
        )
        / rate,
        "computed by the compiler beyond the formula": spent.compute - executed.all / rate,
        f"waiting for {spent.bound}": spent.longest - spent.compute,
    }


def of_step(built: Built, one: Program, tokens: int) -> dict[str, Any]:
    """The train step's part of the record."""
    where, devices = built.where, built.models.mesh.size
    record, counted = described(one, where)
    done, forms = work_of(built, tokens)
    inside = hidden(built, one, done, forms, tokens)
    place = times.places(list(built.models.mesh.devices.flat))
    compiled_flops = counted.flops * devices + inside
    spent = times.times(max(done.executed.all, compiled_flops) / devices, counted, where, place)
    lost = losses(done, devices, where, spent)
    largest = max(lost, key=lambda name: lost[name])
    cycles = record["compiler_cycles_s"]
    ideal = done.useful.all / devices / where.chip.flops
    record |= {
        "flops": {
            "useful": done.useful.all,
            "executed": done.executed.all,
            "compiler": counted.flops * devices,
            "of_kernels": inside,
            "compiler_loop_bodies_once": one.once_flops * devices,
        },
        "seconds": {
            "compute": spent.compute,
            "hbm": spent.hbm,
            "interconnect": spent.interconnect,
            "predicted": spent.longest,
            "nothing_hides": spent.together,
            "compiler_cycles": cycles,
            "useful_at_peak": ideal,
        },
        "bound": spent.bound,
        "mfu": {"predicted": ideal / spent.longest, "nothing_hides": ideal / spent.together},
        "losses_s": lost,
        "largest_loss": f"{largest}: {lost[largest]:.3f} s of {spent.longest:.3f} s",
        "cycles_gap": gap(cycles, spent, counted.kernels),
    }
    return record


def gap(cycles: float, spent: Times, kernels: float) -> str:
    """Why the compiler's cycles and the prediction differ, if they do by much."""
    ratio = cycles / spent.longest if spent.longest else math.inf
    if 1 / GAP <= ratio <= GAP:
        return f"{ratio:.2f} x: within {GAP}"
    if ratio < 1:
        why = "they leave out collectives" + (" and the inside of kernels" if kernels else "")
    else:
        why = (
            "they add up operations one after another, each at its own slowest unit, and small or "
            "elementwise ones are far from the peak that the prediction takes"
        )
    return f"{ratio:.2f} x: {why}"


def cache_gib(built: Built) -> float:
    """Keys and values of the sampler's prompts and slots in the longest bucket, on each device:

    (rows x prompt + slots x new) x sum over layers of kv_heads (head_size + value_size) x bytes
    / ways
    """
    policy = built.models.policy
    config = policy.config
    heads = sum(config.kind(layer).kv_heads for layer in range(config.layers))
    each = heads * (config.head_size + config.value_width) * DTYPES[config.dtype](0).nbytes
    places = built.models.sampler.cached_places(max(built.phase.sampler.prompt_buckets))
    split = ways(policy.mesh, policy.rules["rows"]) * ways(policy.mesh, policy.rules["kv_heads"])
    return places * each / split / GIB


def weights(built: Built) -> dict[str, float]:
    """Seconds to bring the student's published weights out of the slice: as they are written now,
    by one host; and if every host wrote its share. What reads them takes as long again.
    """
    shapes = built.models.policy.shapes.values()
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in shapes)
    chip = built.where.chip
    devices = built.models.mesh.size
    return {
        "gib": size / GIB,
        "one_host_s": size / (chip.network_bytes * min(chip.hosts_devices, devices)),
        "all_hosts_s": size / (chip.network_bytes * devices),
    }


def colocated(built: Built, step: Mapping[str, Any], sampler: Mapping[str, Any]) -> dict[str, Any]:
    """Trainer and sampler on the same devices: each one's peak beside what the other leaves there
    (the trainer's state; the sampler's own weights and cache). The sampler's peak is its compiled
    programs' if they were compiled, else its weights and cache."""
    mesh, chip = built.models.mesh, built.where.chip
    split = mesh.size // mesh.shape["data"]
    stay = weights(built)["gib"] / split + cache_gib(built)
    peaks = [one["hbm_gib"]["peak"] for one in sampler.values() if "peak" in one["hbm_gib"]]
    found = {
        "sampler_gib": stay,
        "training_gib": step["hbm_gib"]["peak"] + stay,
        "sampling_gib": max([stay, *peaks]) + step["hbm_gib"]["arguments"],
    }
    worst = max(found.values())
    return {**found, "chip_gib": chip.hbm_gib, "fits": worst <= chip.hbm_gib}


def advice(built: Built) -> list[str]:
    """What makes a step smaller, in the order in which it costs least."""
    phase, plan = (
        built.phase,
        built.step.plan(
            built.phase.train.groups * built.phase.pool.rollouts_per_group, packed=False
        ),
    )
    least = math.lcm(plan.ways, plan.rollouts_per_group if plan.coupled else 1)
    found = []
    if plan.micro > least:
        found.append(f"train.micro_rollouts={plan.micro}: down to {least}")
    kept = [name for name in REMAT if name not in ("none", "dots")]
    if phase.model.remat != "full":
        found.append(f"model.remat={phase.model.remat!r}: 'full' (of {', '.join(kept)})")
    if not phase.model.score_remat:
        found.append("model.score_remat=False: True")
    if phase.model.score_chunk_positions > 256:
        found.append(f"model.score_chunk_positions={phase.model.score_chunk_positions}: 256")
    sizes = dict(built.models.mesh.shape)
    if sizes["data"] > 1:
        found.append(f"mesh.data={sizes['data']}: 1, and mesh.fsdp={sizes['data'] * sizes['fsdp']}")
    found.append(
        f"more devices than {built.models.mesh.size} along mesh.fsdp or mesh.tensor, which split "
        "parameters and moments"
    )
    return found


def too_large(built: Built, error: DoesNotFitError) -> dict[str, Any]:
    """The part of the record of a program that HBM does not hold."""
    over = error.needed - error.available
    return {
        "hbm_gib": {
            "needed": error.needed,
            "available": error.available,
            "over": over,
            "chip": built.where.chip.hbm_gib,
            "fits": False,
        },
        "change": advice(built),
        "compiler": str(error).split("\n")[0][:400],
    }


def text(record: Mapping[str, Any]) -> str:
    """A page for people."""
    step = record["step"]
    lines = [
        f"{record['config']} ({record['phase']}) on {record['slice']}: mesh {record['mesh']}, "
        f"{record['take']['rows']} rows of {record['take']['tokens']} tokens",
    ]
    if "seconds" not in step:
        sizes = step["hbm_gib"]
        lines += [
            f"DOES NOT FIT: {sizes['needed']:.2f} GiB a device of {sizes['available']:.2f}, "
            f"{sizes['over']:.2f} too many. Change one of:"
        ]
        return "\n".join(lines + [f"  {one}" for one in step["change"]])
    sizes, spent, flops = step["hbm_gib"], step["seconds"], step["flops"]
    lines += [
        f"HBM a device: peak {sizes['peak']:.2f} GiB of {sizes['chip']:.0f} (arguments "
        f"{sizes['arguments']:.2f}, temporaries {sizes['temporaries']:.2f})",
        f"compiled in {step['compile_s']:.0f} s ({step['compile_processor_s']:.0f} s of processor)",
        f"FLOPs of a take: useful {flops['useful']:.3e}, executed {flops['executed']:.3e}, by the "
        f"compiler {flops['compiler']:.3e} (+ {flops['of_kernels']:.3e} inside kernels)",
        "collectives a device: "
        + (
            ", ".join(
                f"{kind} {one['count']:.0f} x, {one['gib']:.2f} GiB"
                for kind, one in step["collectives"].items()
            )
            or "none"
        ),
        f"seconds: compute {spent['compute']:.3f}, hbm {spent['hbm']:.3f}, interconnect "
        f"{spent['interconnect']:.3f}; the compiler's cycles {spent['compiler_cycles']:.3f} "
        f"({step['cycles_gap']})",
        f"predicted step {spent['predicted']:.3f} s, bound by {step['bound']}; MFU "
        f"{100 * step['mfu']['predicted']:.1f} % (if nothing hides "
        f"{100 * step['mfu']['nothing_hides']:.1f} %)",
        f"largest loss: {step['largest_loss']}",
    ]
    for name, one in record.get("sampler", {}).items():
        if isinstance(one, Mapping) and "fits" in one.get("hbm_gib", {}):
            held = one["hbm_gib"]
            told = f"{held.get('peak', held.get('needed', 0)):.2f} GiB of {held['chip']:.0f}"
            lines.append(f"sampler, {name}: {told}{'' if held['fits'] else ' DOES NOT FIT'}")
    lines.append(f"sampler's keys and values: {record['cache_gib']:.2f} GiB a device")
    if both := record.get("colocated"):
        lines.append(
            f"trainer and sampler together: {both['training_gib']:.2f} GiB while training, "
            f"{both['sampling_gib']:.2f} while sampling: {'fits' if both['fits'] else 'NO ROOM'}"
        )
    moved = record["weights"]
    lines.append(
        f"weights to the pool: {moved['gib']:.1f} GiB, {moved['one_host_s']:.0f} s from one host, "
        f"{moved['all_hosts_s']:.1f} s from all"
    )
    return "\n".join(lines)
