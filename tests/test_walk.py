"""One walk through the seven rooms: a pool's rollouts change the weights, and for the better."""

import importlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl.model.versions import read_weights
from jaxrl.train import rounds

# A task that first weights solve now and then: the response begins with a one.
SOURCE = """
from jaxrl.tasks import reasoning
from jaxrl.tasks.contract import Verdict

class Source(reasoning.Source):
    def verify(self, task, response):
        right = response.startswith("1")
        return Verdict(score=float(right), correct=right, components={})
"""


@pytest.fixture(params=["gvpo", "grpo"])
def walk(request, tmp_path, monkeypatch) -> Any:
    (tmp_path / "ones.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = importlib.import_module(f"configs.{request.param}").get_config("tiny")
    if request.param == "gvpo":
        config.algorithm.keep_truncated = True  # first weights seldom stop by themselves
    config.mesh.data = jax.device_count()
    config.task.source = "ones"
    config.phases = {"order": ("main",), "main": {}}
    config.optimizer.update(freeze=("mlp/",), learning_rate=1e-2, warmup_updates=0)
    config.pool.rollouts_per_group = 8
    config.train.update(steps=20, groups=8, micro_rollouts=32)
    config.sampler.slots = 64
    config.checkpoint.update(every_steps=20, keep_weights=30)
    return config, tmp_path / "run"


def weights(run: Path, step: int) -> dict[str, np.ndarray]:
    params, _ = read_weights(run / "weights" / f"v=0-{step}")
    return {name: np.asarray(x) for name, x in params.items()}


@pytest.mark.slow
def test_it_learns_without_a_retrace_and_leaves_the_frozen_alone(walk):
    config, run = walk
    summary = rounds.run(config, str(run))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    assert len(rewards) == 20
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.3
    before, after = summary["held_out"]["before"], summary["held_out"]["after"]
    assert after["avg_at_2"] > before["avg_at_2"] + 0.3
    assert set(summary["compilations"].values()) == {1}
    first, last = weights(run, 0), weights(run, 20)
    frozen = {name for name in first if "mlp/" in name}
    assert len(frozen) == 3
    for name in first:
        assert (first[name].tobytes() == last[name].tobytes()) == (name in frozen), name
