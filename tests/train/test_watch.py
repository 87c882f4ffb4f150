"""What is kept, and when a run is stopped."""

import importlib
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from etils import epath

from jaxrl import measure
from jaxrl.model import flops
from jaxrl.train import goodput, rounds, settings
from jaxrl.train.accounts import Account
from jaxrl.train.checkpoint import Checkpoints
from jaxrl.train.watch import CheckpointConfig
from jaxrl.train.workdir import Workdir


def test_checkpoints_at_multiples_stay(tmp_path):
    kept = Checkpoints(tmp_path, keep=1, keep_every=2)
    for step in range(1, 6):
        kept.save(step, {"x": jnp.ones(2)}, {})
    kept.close()
    assert kept.steps() == [2, 4, 5]
    with pytest.raises(ValueError, match="keep_every_steps=3; allowed: 0, or a multiple of .*=2"):
        CheckpointConfig(every_steps=2, keep=1, keep_every_steps=3, keep_weights=1, keep_best=True)


def test_the_best_weights_stay_until_there_are_better_ones(tmp_path):
    workdir = Workdir(epath.Path(tmp_path))
    for step, accuracy in ((1, 0.5), (2, 0.75), (3, 0.75), (4, 0.25)):
        workdir.weights(0, step).mkdir(parents=True)
        workdir.note_best((0, step), accuracy)
        workdir.drop_weights(keep=1)
    assert workdir.published() == [(0, 2), (0, 4)]
    assert workdir.best() == {"epoch": 0, "step": 2, "avg_at_k": 0.75}
    assert measure.chosen(workdir, "best") == [(0, 2)]
    assert measure.chosen(workdir, "newest") == [(0, 4)]


def test_following_ends_with_the_run(tmp_path):
    workdir = Workdir(epath.Path(tmp_path))
    seen = measure.versions(workdir, "all", follow=True, poll_s=0.01)
    workdir.weights(0, 1).mkdir(parents=True)
    assert next(seen) == (0, 1)
    workdir.weights(0, 2).mkdir()
    (tmp_path / "summary.json").write_text("{}")
    assert list(seen) == [(0, 2)]


def test_the_slowest_host_is_named():
    told = goodput.stragglers({"generate": [1.0, 3.0, 2.0]})
    assert told["hosts/generate_slowest"] == 1 and told["hosts/generate_s_max"] == 3
    assert told["hosts/02/generate_s"] == 2
    many = goodput.stragglers({"generate": [1.0] * 99})
    assert set(many) == {f"hosts/generate_{x}" for x in ("s_max", "s_min", "slowest")}
    assert goodput.stragglers({}) == {}


def test_shares_of_the_peak_and_of_the_time():
    config: Any = importlib.import_module("configs.gvpo").get_config("tiny")
    config.log.device_flops = 1e9
    phase = settings.phases(config)[-1]
    numbers = {"batch/valid_rollouts": 4.0, "batch/tokens": 40.0}
    a_token = 3 * flops.forward(phase.model, 10).all  # forward once, backward twice
    told = goodput.throughput(phase, numbers, seconds=2.0)
    assert told["throughput/model_flops_per_s"] == pytest.approx(a_token * 40 / 2)
    devices = jax.device_count()
    assert told["throughput/mfu"] == pytest.approx(a_token * 40 / 2 / (1e9 * devices))
    assert goodput.throughput(phase, numbers | {"batch/tokens": 0.0}, 2.0) == {}
    accounts = {"sft": Account(running_s=10.0), "gvpo": Account(running_s=20.0)}
    share = goodput.goodput(accounts, time.time() - 60)["goodput/frac"]
    assert share == pytest.approx(0.5, rel=0.05)


@pytest.mark.slow
def test_a_phase_whose_entropy_collapsed_ends_early_and_stays_ended(tmp_path, capfd):
    config: Any = importlib.import_module("configs.gvpo").get_config("tiny")
    config.mesh.data = jax.device_count()
    config.phases.sft.train.steps = 1
    config.train.steps = 9
    config.train.stop.update(entropy_below=99.0, takes=2)  # that of 64 tokens is 4.2 at most
    config.phases.sft.train.stop = {"entropy_below": 0.0}
    summary = rounds.run(config, str(tmp_path))
    assert "gvpo is stopped after 3 steps: loss/entropy_mean is" in capfd.readouterr().out
    assert summary["steps"] == 3 and summary["phases"][1]["stopped"].endswith("2 takes in a row")
    (tmp_path / "summary.json").unlink()
    assert rounds.run(config, str(tmp_path))["steps"] == 3  # what stopped it is in the checkpoint
    assert json.loads((tmp_path / "best.json").read_text())["step"] in (1, 3)
