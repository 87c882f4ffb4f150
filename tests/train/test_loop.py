"""Whole runs, tiny, through trouble: each a counted, harmless step or one clear end."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl.pool.contract import PoolError
from jaxrl.train import rounds

# A task source like any other, with a verifier that has a bad day: from the given call on it does
# what MOOD says.
SOURCE = """
import math
from jaxrl.tasks import reasoning

MOOD, AFTER = "well", 0
CALLS = 0

class Source(reasoning.Source):
    def verify(self, task, response):
        global CALLS
        CALLS += 1
        if CALLS > AFTER and MOOD == "gone":
            raise SystemExit("the grader is gone")
        if CALLS > AFTER and MOOD == "nan":
            return reasoning.Verdict(score=math.nan, correct=False, components={})
        return super().verify(task, response)
"""


@pytest.fixture
def source(tmp_path, monkeypatch) -> Any:
    (tmp_path / "moody.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("moody")
    del sys.modules["moody"]


def config(name: str, steps: int) -> Any:
    """One phase of a method from the first weights on, over the tests' eight devices."""
    made = importlib.import_module(f"configs.{name}").get_config("tiny")
    made.mesh.data = jax.device_count()
    made.train.steps = steps
    made.phases = {"order": ("main",), "main": {}}
    made.checkpoint.every_steps = 100
    return made


def curves(workdir: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def weights(workdir: Path) -> set[str]:
    """Digests of the versions that are kept."""
    manifests = (workdir / "weights").glob("v=*/manifest.json")
    return {json.loads(path.read_text())["digest"] for path in manifests}


@pytest.mark.slow
def test_case_36_a_pool_that_breaks_costs_no_step_that_was_trained(source, tmp_path, capsys):
    made = config("grpo", 4)
    made.task.source = "moody"
    held_out = made.eval.prompts * (made.eval.samples + 1)
    source.MOOD, source.AFTER = "gone", held_out + 2 * 16 + 5  # in the third step
    with pytest.raises(PoolError, match="the grader is gone"):
        rounds.run(made, str(tmp_path / "run"))
    source.MOOD = "well"
    assert rounds.run(made, str(tmp_path / "run"))["steps"] == 4
    assert "continuing at step 2" in capsys.readouterr().out
    journal = (tmp_path / "run" / "journal.jsonl").read_text().splitlines()
    taken = [group for line in journal for group, _ in json.loads(line)["groups"]]
    assert taken == list(range(16))  # 4 groups a step, each once


@pytest.mark.slow
def test_a_verifier_without_an_answer_is_no_failure_of_the_policy(source, tmp_path):
    made = config("grpo", 2)
    made.task.source = "moody"
    source.MOOD, source.AFTER = "nan", made.eval.prompts * (made.eval.samples + 1)
    made.pool.max_refills = 0
    with pytest.raises(ValueError, match="the verifier failed on all of"):
        rounds.run(made, str(tmp_path / "run"))  # held-out accuracy cannot be measured at the end
    run = tmp_path / "run"
    assert curves(run, "pool/voided") == [4, 4] and curves(run, "pool/failed") == [16, 16]
    assert curves(run, "batch/empty") == [2, 2] and curves(run, "optim/skipped") == [2, 2]


@pytest.mark.slow
def test_a_take_without_a_group_is_a_skipped_step(tmp_path):
    made = config("dapo", 2)
    made.algorithm.dynamic_sampling = True  # first weights are never right: equal rewards, refused
    made.pool.max_refills = 1
    summary = rounds.run(made, str(tmp_path))
    assert summary["steps"] == 2
    assert curves(tmp_path, "pool/filtered") == [8, 8] and curves(tmp_path, "pool/short") == [4, 4]
    assert curves(tmp_path, "batch/empty") == [made.train.minibatches] * 2
    assert curves(tmp_path, "optim/frac_params_unchanged") == pytest.approx([1, 1])
    assert len(weights(tmp_path)) == 1  # two versions are kept, of the same bytes


@pytest.mark.slow
def test_the_log_prob_gap_stays_small_where_nothing_is_learned(tmp_path):
    made = config("grpo", 3)
    made.optimizer.learning_rate = 1e-30
    rounds.run(made, str(tmp_path))
    assert np.max(curves(tmp_path, "sampler/gap_max")) < 1e-4
    assert np.max(curves(tmp_path, "sampler/gap_mean")) < 1e-6


@pytest.mark.slow
def test_a_run_whose_data_ends_leaves_a_checkpoint(tmp_path):
    made = config("sft", 20)
    made.pool.epochs = 1  # 64 records, 16 a step
    assert rounds.run(made, str(tmp_path))["steps"] == 4
    assert (tmp_path / "checkpoints" / "4" / "manifest.json").exists()
    told = json.loads((tmp_path / "summary.json").read_text())
    assert told["tokens_per_s"] > 0 and told["generation_tokens_per_s"] == 0  # read, not sampled
    again = rounds.run(made, str(tmp_path))
    assert again["steps"] == 4 and again["tokens_per_s"] == told["tokens_per_s"]


@pytest.mark.slow
def test_accuracies_before_and_after_are_measured_alike(tmp_path):
    made = config("sft", 2)
    rounds.run(made, str(tmp_path))
    made.eval.samples, made.train.steps = 3, 3
    with pytest.raises(ValueError, match="eval.samples was 2, is 3"):
        rounds.run(made, str(tmp_path))


@pytest.mark.slow
def test_records_of_other_questions_with_failed_verifiers_are_shown(source, tmp_path):
    source.MOOD, source.AFTER, source.CALLS = "nan", 50, 0
    live = config("grpo", 2)
    live.task.source = "moody"
    with pytest.raises(ValueError, match="the verifier failed on all"):  # at the end
        rounds.run(live, str(tmp_path / "live"))
    made = config("grpo", 1)
    made.pool.update(kind="recorded", path=str(tmp_path / "live/pool/main"), publish_every_steps=0)
    made.train.update(groups=8, micro_rollouts=32)
    made.log.samples = 100
    made.task.train_prompts = 1
    made.eval.update(prompts=1, samples=1)  # has no interval
    rounds.run(made, str(tmp_path / "again"))
    shown = (tmp_path / "again/samples/0.jsonl").read_text()
    assert '"reward": null' in shown and "chain_sum/" in shown
