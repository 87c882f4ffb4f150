"""Every config builds, locks, is understood by the trainer and runs as :tiny; so do sweeps."""

import importlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from configs import base, models
from jaxrl import experiment
from jaxrl.algorithms import contract
from jaxrl.train import loop, settings

ROOT = Path(__file__).parents[1]
PARTS = ("base", "models", "meshes", "pod")  # of configs, not configs
NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.py") if path.stem not in PARTS)
SWEEPS = sorted(path.stem for path in (ROOT / "experiments").glob("*.py"))


def build(name: str, variant: str) -> Any:
    return importlib.import_module(f"configs.{name}").get_config(variant).lock()


def test_every_algorithm_has_a_config():
    assert set(contract.names()) <= set(NAMES)


@pytest.mark.parametrize(
    ("name", "variant"),
    [(name, "") for name in NAMES]
    + [(name, "tiny") for name in NAMES]
    + [(name, variant) for name in NAMES if name != "quickstart" for variant in models.NAMES],
)
def test_it_is_understood(name, variant):
    phases = settings.phases(build(name, variant))
    for phase in phases:
        contract.load(**phase.algorithm)
        longest = phase.sampler.prompt_buckets[-1] + phase.sampler.max_new_tokens
        assert longest <= phase.train.token_buckets[-1], "a rollout may not fit into its bucket"
        assert phase.train.groups % phase.train.minibatches == 0
        loop.packing_of(phase)
        update = phase.train.groups * phase.pool.rollouts_per_group // phase.train.minibatches
        micro = min(update, phase.train.micro_rollouts)
        assert update % micro == 0
        assert not phase.train.packing.on or micro % phase.pool.rollouts_per_group == 0
    if name in contract.names():
        assert phases[-1].algorithm["name"] == name


@pytest.mark.parametrize("name", NAMES)
def test_its_sections_are_those_of_base(name):
    # A method says what differs; a field that base.py does not explain may only be the algorithm's.
    config, explained = build(name, "").to_dict(), base.get_config("").to_dict()
    assert set(config) == set(explained)
    for section in set(config) - {"seed", "algorithm", "phases"}:
        assert set(config[section]) == set(explained[section]), section


@pytest.mark.parametrize("name", NAMES)
def test_it_opens_with_its_command_and_its_numbers(name):
    text = importlib.import_module(f"configs.{name}").__doc__ or ""
    command = rf"python -m jaxrl\.launch --config configs/{name}\.py --workdir \S+\n"
    assert re.search(command + r"Takes: .+   Reaches: .+", text)


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_that_does_not_exist_is_refused(name):
    with pytest.raises(ValueError, match="'huge'.*allowed.*tiny"):
        build(name, "huge")


def test_a_misspelt_field_is_refused():
    config = build("gvpo", "tiny")
    with pytest.raises(AttributeError, match='Did you mean "beta" instead of "betta"'):
        config.algorithm.betta = 0.1
    with pytest.raises(KeyError, match='Did you mean "optimizer"'):
        config.update({"optimiser": {}})


def launch(config: str, workdir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """As a user does: a process of its own, which sees one device and not the tests' eight."""
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "jaxrl.launch",
            "--config",
            config,
            "--workdir",
            str(workdir),
            *more,
        ],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )


def test_a_misspelt_flag_is_refused_by_launch(tmp_path):
    run = launch("configs/gvpo.py:tiny", tmp_path / "run", "--config.algorithm.betta=0.1")
    assert run.returncode != 0 and 'Did you mean "beta" instead of "betta"' in run.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_changes_fields_that_exist(name):
    file = ROOT / "experiments" / f"{name}.py"
    assert re.search(r"^Result: ", file.read_text(), re.MULTILINE)
    runs = experiment.load(str(file)).runs
    assert len(runs) > 1
    for run in runs:
        for phase in settings.phases(experiment.config_of(run)):
            contract.load(**phase.algorithm)


@pytest.fixture(scope="module")
def tiny_runs(request, tmp_path_factory):
    """The runs that were asked for, two at a time: each is one device's, most of it compilation."""
    asked = [
        i for i in request.session.items if i.originalname == "test_it_takes_its_steps_as_tiny"
    ]
    root = tmp_path_factory.mktemp("tiny")
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: (root / name, pool.submit(launch, f"configs/{name}.py:tiny", root / name))
            for name in (item.callspec.params["name"] for item in asked)
        }


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "quickstart"])  # test_readme's
def test_it_takes_its_steps_as_tiny(name, tiny_runs):
    folder, future = tiny_runs[name]
    run = future.result()
    assert run.returncode == 0, run.stderr[-4000:]
    summary = json.loads((folder / "summary.json").read_text())
    phase = settings.phases(build(name, "tiny"))[-1]
    assert summary["steps"] == phase.last_step
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    own = [line for line in lines if line["step"] >= phase.first_step]
    updates = [line["optim/updates"] for line in own if "optim/updates" in line]
    assert sum(updates) > 0, "its own phase changed nothing"
