r"""Compile a run for a TPU slice on a machine that has none, and tell what it will cost.

    python -m jaxrl.aot --config configs/gvpo.py:qwen3_8b --slice v5p:4x4x4
        [--mesh configs/meshes.py:v5p_4x4x4] [--phase NAME] [--out FILE.json] [--search]

The train step (on plain rows, whatever ``train.packing`` says) and the sampler's two programs are
those of the run; the compiler is the one of the slice (pip install -e '.[aot]'). Without --mesh the
config's mesh is taken, or, if that is one device, all devices along ``fsdp`` as far as rows and
width divide, the rest along ``tensor``.
Prints a page, and writes the numbers with --out. Exit code 2 if the step does not fit.
"""

import functools
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

_CONFIG = config_flags.DEFINE_config_file("config", None, "configs/NAME.py[:variant]")
_MESH = config_flags.DEFINE_config_file("mesh", None, "configs/meshes.py:NAME")
_SLICE = flags.DEFINE_string("slice", None, "chip and shape: v5e:2x2, v5p:4x4x8, v6e:8x8*2")
_PHASE = flags.DEFINE_string("phase", "", "of the config; the last one if not given")
_OUT = flags.DEFINE_string("out", "", "where the record is written, as JSON")
_SAMPLER = flags.DEFINE_bool("sampler", True, "compile the sampler's programs too")
_SEARCH = flags.DEFINE_bool("search", False, "try meshes, micro-batches and remat policies")
_TEXT = flags.DEFINE_string("keep_text", "", "a folder for the compiled programs' texts")


def default_mesh(config: ConfigDict, devices: int) -> dict[str, int]:
    """As many devices along ``fsdp`` as divide both the micro-batch's rollouts and the model's
    width, the rest along ``tensor``. Raises ValueError where the model's heads do not divide.
    """
    sections: Any = config
    rollouts = sections.train.groups * sections.pool.rollouts_per_group
    rows = min(sections.train.micro_rollouts, rollouts // sections.train.minibatches)
    fsdp = math.gcd(math.gcd(rows, sections.model.width), devices)
    tensor = devices // fsdp
    if sections.model.kv_heads % tensor:
        raise ValueError(
            f"no mesh of {devices} devices is at hand: train.micro_rollouts={rows} rows and "
            f"model.width={sections.model.width} leave {tensor} for mesh.tensor, which does not "
            f"divide model.kv_heads={sections.model.kv_heads}; allowed: --mesh, --config.mesh.*, "
            "or more train.groups and train.micro_rollouts"
        )
    return {"data": 1, "fsdp": fsdp, "tensor": tensor, "expert": 1, "context": 1}


def meshed(config: ConfigDict, mesh: ConfigDict | None, devices: int) -> ConfigDict:
    """The config with its mesh replaced by the one that is asked for, or that is at hand."""
    sections: Any = config
    if mesh is not None:
        sections.mesh.update(mesh)
    elif math.prod(sections.mesh.values()) == 1 and devices > 1:
        sections.mesh.update(default_mesh(config, devices))
    return config


def report(
    config: ConfigDict, name: str, slice_name: str, phase_name: str, *, sampler: bool
) -> dict[str, Any]:
    """Compile the step, and the sampler's programs if asked, and tell. Raises ValueError naming the
    field, its value and what is allowed."""
    from jaxrl.forecast import chips, compiled
    from jaxrl.forecast import report as told
    from jaxrl.train import settings

    where = chips.read_slice(slice_name)
    phases = settings.phases(config)
    named = {phase.name: phase for phase in phases}
    if phase_name and phase_name not in named:
        raise ValueError(f"phase={phase_name!r}; allowed: {', '.join(named)}")
    phase = named[phase_name] if phase_name else phases[-1]
    built = compiled.build(phases, phase, where)
    lowered, rows, tokens = compiled.lowered_step(built)
    record: dict[str, Any] = {
        "schema_version": told.SCHEMA_VERSION,
        "config": name,
        "phase": phase.name,
        "slice": where.name,
        "mesh": {axis: size for axis, size in phase.mesh.items() if size > 1},
        "remat": phase.model.remat,
        "micro_rollouts": phase.train.micro_rollouts,
        "take": {"rows": rows, "tokens": tokens},
        "versions": told.versions(),
        "assumptions": list(told.ASSUMPTIONS),
        "cache_gib": told.cache_gib(built),
        "weights": told.weights(built),
    }
    try:
        program = compiled.compile_program(lowered)
    except compiled.DoesNotFitError as error:
        return record | {"step": told.too_large(built, error)}
    _keep("step", program.text)
    record["step"] = told.of_step(built, program, tokens)
    record["sampler"] = {}
    for part, one in compiled.lowered_sampler(built).items() if sampler else ():
        try:
            program = compiled.compile_program(one)
        except compiled.DoesNotFitError as error:
            record["sampler"][part] = told.too_large(built, error)
            continue
        _keep(part, program.text)
        record["sampler"][part] = told.described(program, where)[0]
    record["colocated"] = told.colocated(built, record["step"], record["sampler"])
    return record


def _keep(name: str, text: str) -> None:
    if _TEXT.value:
        folder = Path(_TEXT.value)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.hlo").write_text(text)


def main(argv: list[str]) -> None:
    """Compile, print, write. What is refused ends with one message and exit code 1."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    os.environ["JAX_PLATFORMS"] = "cpu"  # read when jax starts: no TPU is looked for

    from jaxrl.forecast import chips, search
    from jaxrl.forecast import report as told

    name = _named("config")
    try:
        asked = str(_SLICE.value)
        devices = chips.read_slice(asked).devices
        if _SEARCH.value:
            compiling = functools.partial(report, sampler=False)
            record = search.best(_CONFIG.value, asked, _PHASE.value, name, compiling)
        else:
            config = meshed(_CONFIG.value, _MESH.value, devices)
            record = report(config, name, asked, _PHASE.value, sampler=_SAMPLER.value)
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        sys.exit(f"jaxrl.aot: {type(error).__name__}: {error}")
    print(told.text(record))
    if _OUT.value:
        out = Path(_OUT.value)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(0 if record["step"]["hbm_gib"]["fits"] else 2)


def _named(flag: str) -> str:
    """How the config was asked for: its file and variant."""
    asked = [x for x in sys.argv[1:] if x.startswith((f"--{flag}", f"-{flag}"))]
    whole = next((x for x in asked if x.split("=")[0].lstrip("-") == flag), "")
    if "=" in whole:
        return whole.split("=", 1)[1]
    return sys.argv[sys.argv.index(whole) + 1] if whole else ""


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "slice"])
    app.run(main)
