"""A config that cannot work is refused before anything is trained, in one message that says why."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from etils import epath

from jaxrl.train import loop, rounds, settings
from jaxrl.train.workdir import Workdir

ROOT = Path(__file__).parents[1]


def tiny(**changes: Any) -> Any:
    """gvpo:tiny on the tests' eight devices, with dotted fields set."""
    config = importlib.import_module("configs.gvpo").get_config("tiny")
    config.mesh.data = jax.device_count()
    config.phases.sft.train.groups = config.phases.sft.train.micro_rollouts = 8
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    return config


REFUSED = {
    "bins over an axis of tokens": (
        {"mesh.context": 2, "train.packing.rows": "packed"},
        "train.packing.rows='packed' with mesh.context=2; allowed: 'plain'",
    ),
    "unknown algorithm": ({"algorithm.name": "grpoo"}, "algorithm.name='grpoo'.*allowed:.*grpo"),
    "bad beta": ({"algorithm.beta": 0.0}, r"algorithm\.beta=0.0; allowed: 0 < beta"),
    "greedy training": ({"sampler.temperature": 0.0}, "sampler.temperature=0.0; allowed: > 0"),
    "mesh and devices": ({"mesh.data": 3}, "mesh.data=3.*product is 3, but 8 devices"),
    "mesh and heads": (
        {"mesh.data": 1, "mesh.tensor": 8},
        "model.heads=2 must be a multiple of mesh.tensor = 8",
    ),
    "mesh and width": (
        {"mesh.data": 1, "mesh.fsdp": 8, "model.width": 36},
        "model.width=36 must be a multiple of mesh.fsdp = 8",
    ),
    "rows and mesh": ({"train.micro_rollouts": 4}, r"train.micro_rollouts=4; allowed.*mesh.data"),
    "minibatches": ({"train.minibatches": 3}, r"train.minibatches=3 .*allowed: divisors"),
    "cut groups": (
        {"train.micro_rollouts": 8, "pool.rollouts_per_group": 16},
        "train.micro_rollouts=8: this algorithm couples the rollouts of a group",
    ),
    "short rows": ({"train.token_buckets": (16,)}, r"train.token_buckets=\(16,\).*36 tokens"),
    "frozen pattern": ({"optimizer.freeze": ("router",)}, "'router' matches no parameter"),
    "all frozen": ({"optimizer.freeze": (".",)}, "freezes every parameter"),
    "small vocabulary": ({"model.vocab_size": 8}, "model.vocab_size=8; allowed: >= "),
    "unknown family": ({"task.family": "chain_sums"}, "did you mean chain_sum"),
    "task parameter": ({"task.parameters": {"terms": 3}}, "task.parameters.terms is unknown"),
    "too few questions": (
        {
            "task.parameters": {"min_terms": 2, "max_terms": 2, "max_digits": 1},
            "task.train_prompts": 1000,  # there are 200
        },
        "is too small: .* draws gave 1.. of task.train_prompts=1000",
    ),
    "pool kind": (
        {"pool.kind": "cloud"},
        "pool.kind='cloud' is unknown; allowed: local, recorded, remote",
    ),
    "shared section": ({"phases.sft.seed": 3}, "phases.sft.seed.*the same in all phases"),
    "unknown override": ({"phases.sft.train.stepz": 3}, "phases.sft.train.stepz is unknown"),
    "phases": ({"phases.order": ("gvpo",)}, r"phases.order=\('gvpo',\); allowed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_before_anything_is_trained(case, tmp_path):
    changes, message = REFUSED[case]
    config = tiny()
    for name, value in changes.items():
        *sections, field = name.split(".")
        section = config
        for part in sections:
            section = section[part]
        with section.ignore_type():
            section[field] = value
    with pytest.raises(ValueError, match=message):
        rounds.run(config, str(tmp_path))
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "weights").exists()


def test_a_missing_parameter_is_named(tmp_path):
    config = tiny()
    del config.algorithm.beta
    with pytest.raises(TypeError, match=r"'gvpo' takes .* missing: \['beta'\]"):
        rounds.run(config, str(tmp_path))


SECTIONS = ["model", "task", "pool", "sampler", "train", "optimizer", "eval", "checkpoint", "log"]


@pytest.mark.parametrize("section", SECTIONS)
def test_an_unused_field_is_an_error(section):
    config = tiny()
    config[section].dreams = 1
    with pytest.raises(TypeError, match="dreams"):
        settings.phases(config)


@pytest.mark.parametrize("section", ["algorithm", "mesh"])
def test_an_unused_field_of_an_open_section_is_an_error_too(section, tmp_path):
    config = tiny()
    config[section].dreams = 1
    with pytest.raises((TypeError, ValueError), match="dreams"):
        rounds.run(config, str(tmp_path))


def test_an_unused_section_is_an_error():
    config = tiny()
    config.sampling = {"temperature": 0.3}
    with pytest.raises(ValueError, match=r"config\.sampling is unknown; allowed: .*sampler"):
        settings.phases(config)


@pytest.mark.parametrize("field", ["top_p", "top_k", "min_p"])
def test_case_3_samplers_that_truncate_are_refused_for_training(field):
    config = tiny()
    config.sampler[field] = 0.8
    with pytest.raises(TypeError, match=field):
        settings.phases(config)


def test_phases_follow_each_other():
    sft, gvpo = settings.phases(tiny())
    assert (sft.first_step, sft.last_step) == (0, 2) and (gvpo.first_step, gvpo.last_step) == (2, 4)
    assert sft.pool.rollouts_per_group == 1 and gvpo.pool.rollouts_per_group == 4
    assert sft.algorithm == {"name": "sft"} and gvpo.algorithm["name"] == "gvpo"


@pytest.mark.slow
def test_launch_says_it_in_one_line(tmp_path):
    words = "-m jaxrl.launch --config configs/gvpo.py:tiny --config.task.family=sums --workdir"
    run = subprocess.run(
        [sys.executable, *words.split(), str(tmp_path / "run")],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert "jaxrl.launch: ValueError: task.family='sums' is unknown" in run.stderr


@pytest.mark.slow
def test_case_36_a_pool_that_does_not_answer_ends_the_process(tmp_path):
    words = "-m jaxrl.launch --config configs/gvpo.py:tiny --config.pool.watchdog_s=0.001 --workdir"
    run = subprocess.run(
        [sys.executable, *words.split(), str(tmp_path / "run")],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 1 and "Traceback" not in run.stderr
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("jaxrl.launch: PoolError: ") and "pool.watchdog_s" in last
    assert (tmp_path / "run" / "checkpoints" / "2").exists()  # what was trained before is kept


def test_case_33_narrow_masters_at_a_low_rate_are_warned_of(tmp_path):
    config = tiny()
    config.model.param_dtype = "bfloat16"
    config.optimizer.learning_rate = 1e-6
    phases = settings.phases(config)
    parts = rounds.assemble(phases, epath.Path(tmp_path))
    with pytest.warns(UserWarning, match="learning_rate=1e-06 is below half a unit"):
        loop.prepare(parts, phases[-1])


def test_a_workdir_has_one_process(tmp_path):
    with Workdir(epath.Path(tmp_path)).locked():
        with pytest.raises(RuntimeError, match="another process is running in"):
            rounds.run(tiny(), str(tmp_path))
    assert not (tmp_path / "config.json").exists()
