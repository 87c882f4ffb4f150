"""A run's programs, built by the trainer's own code for a slice that is not there, and compiled.

The step is the one that ``train/loop.py`` builds for the phase and the sampler the one that
``train/rounds.py`` builds, given shapes in place of arrays.
"""

import dataclasses
import re
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxrl.forecast.chips import GIB, Slice, devices_of
from jaxrl.mesh import batch_sharding
from jaxrl.pool.rollout import ROUTES
from jaxrl.train import collate, loop, rounds
from jaxrl.train.collate import TOKEN_FACT
from jaxrl.train.loop import Models
from jaxrl.train.settings import Phase
from jaxrl.train.step import Step


class DoesNotFitError(RuntimeError):
    """The compiler found no room in HBM: ``needed`` and ``available`` GiB (0: it did not say)."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        sizes = re.search(r"([\d.]+)([MG]) of ([\d.]+)([MG]) hbm", message)
        sizes = sizes or re.search(
            r"\(([\d.]+)([MG])\) exceeds available HBM \(([\d.]+)([MG])\)", message
        )
        scale = {"M": 2.0**20 / GIB, "G": 1.0}
        self.needed, self.available = (
            (float(sizes.group(i)) * scale[sizes.group(i + 1)] if sizes else 0.0) for i in (1, 3)
        )


@dataclasses.dataclass(frozen=True)
class Built:
    """A phase's programs before they are compiled."""

    phase: Phase
    where: Slice
    models: Models
    step: Step


@dataclasses.dataclass(frozen=True)
class Program:
    """What came out of the compiler for one of them."""

    text: str
    seconds: float  # of compilation, wall clock
    processor_seconds: float
    arguments: float  # bytes a device, as are the others
    outputs: float
    donated: float
    temporaries: float
    code: float
    peak: float
    once_flops: float  # by XLA's own cost analysis, which counts a loop's body once


def build(phases: list[Phase], phase: Phase, where: Slice) -> Built:
    """The programs of one phase of a run on a slice. Raises ValueError naming the fields that do
    not fit."""
    models = rounds.build_models(phases, devices_of(where))
    _, step = loop.prepare(models, phase)
    return Built(phase, where, models, step)


def facts_of(step: Step, phase: Phase, rows: int, tokens: int, lying: NamedSharding) -> dict:
    """Shapes of the facts that an algorithm needs: one number a rollout, or a token where the
    name says so. ValueError for experts' routes of a dense model."""
    found = {}
    for name in step.needs:
        shape, dtype = ((rows, tokens) if name.startswith(TOKEN_FACT) else (rows,)), jnp.float32
        if name == ROUTES:
            each = len(phase.model.sparse_layers), phase.model.experts.per_token
            shape, dtype = (rows, tokens, *each), jnp.int32
        found[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=lying)
    return found


def lowered_step(built: Built) -> tuple[Any, int, int]:
    """The step on a full take in the longest bucket, and the rows and tokens of that."""
    phase, mesh = built.phase, built.models.mesh
    rows = phase.train.groups * phase.pool.rollouts_per_group
    tokens, lying = max(phase.train.token_buckets), batch_sharding(mesh)
    views = loop.views_of(phase, built.step.algorithm)
    batch = collate.form(
        rows,
        tokens,
        minibatches=phase.train.minibatches,
        facts=facts_of(built.step, phase, rows, tokens, lying),
        views={name: max(phase.train.view_token_buckets) for name in views},
        where=lying,
    )
    state = rounds.form(phase, built.models)
    with jax.set_mesh(mesh):  # kernels read the chip from the mesh in force
        return built.step.jitted(state).lower(state, batch), rows, tokens


def lowered_sampler(built: Built) -> Mapping[str, Any]:
    """Prefill and decode of the longest prompt bucket."""
    with jax.set_mesh(built.models.mesh):
        return built.models.sampler.lowered(max(built.phase.sampler.prompt_buckets))


def compile_program(lowered: Any) -> Program:
    """Compile. Raises DoesNotFitError where HBM does not hold it."""
    began, worked = time.monotonic(), time.process_time()
    try:
        done = lowered.compile()
    except Exception as error:  # the compiler's own type differs from release to release
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise DoesNotFitError(str(error)) from error
    seconds, processor = time.monotonic() - began, time.process_time() - worked
    memory, cost = done.memory_analysis(), done.cost_analysis() or {}
    return Program(
        text=str(done.as_text()),
        seconds=seconds,
        processor_seconds=processor,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        donated=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        peak=memory.peak_memory_in_bytes,
        once_flops=dict(cost).get("flops", 0.0),
    )
