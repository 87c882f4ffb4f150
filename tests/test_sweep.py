"""A sweep is plain Python: what it lists, what it refuses, and that it survives a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxrl import compare, experiment, runner
from jaxrl.experiment import Run
from jaxrl.sweep import crossed, drawn, grid, log_uniform, uniform, zipped

ROOT = Path(__file__).parents[1]
RATES = "experiments/quickstart_rates.py"


def test_lists_of_overrides():
    assert grid({"a": (1, 2), "b": (3,)}) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
    assert zipped({"a": (1, 2), "b": (3, 4)}) == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]
    with pytest.raises(ValueError, match=r"\{'a': 1, 'b': 2\} values"):
        zipped({"a": (1,), "b": (1, 2)})
    assert crossed([{"a": 1, "b": 1}], [{"b": 2}, {"b": 3}]) == [{"a": 1, "b": 2}, {"a": 1, "b": 3}]


def test_random_overrides_repeat_and_grow():
    space = {"a": uniform(1, 2), "b": log_uniform(1e-5, 1e-2), "c": ("x", "y")}
    few, more = drawn(space, 3, seed=1), drawn(space, 5, seed=1)
    assert more[:3] == few and drawn(space, 3, seed=2) != few
    assert all(1 <= run["a"] <= 2 and 1e-5 <= run["b"] <= 1e-2 for run in more)
    with pytest.raises(ValueError, match="allowed: 0 < low <= high"):
        log_uniform(0, 1)


def written(tmp_path, text):
    path = tmp_path / "exp.py"
    path.write_text(text)
    return str(path)


REFUSED = {
    "misspelt": ("algorithm.betta", 1.0, "algorithm.betta is unknown.*did you mean beta"),
    "misspelt section": ("algoritm.beta", 1.0, "algoritm is unknown.*did you mean algorithm"),
    "misspelt in a phase": ("phases.gvpo.train.stepz", 1, "phases.gvpo.train.stepz is unknown"),
    "no such phase": ("phases.dpo.train.steps", 1, "phases.dpo|phases.order"),
    "bad value": ("sampler.temperature", 0.0, "sampler.temperature=0.0; allowed: > 0"),
    "another type": ("train.steps", "many", "train.steps='many'"),
    "no section": ("seed.x", 1, "seed.x: seed is no section, but 0"),
    "bad value of a method": ("algorithm.beta", -1.0, "phases.gvpo: algorithm.beta=-1.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_list_refuses(case, tmp_path):
    field, value, message = REFUSED[case]
    text = f"BASE = 'configs/gvpo.py:tiny'\ndef sweep():\n    return [{{{field!r}: {value!r}}}]\n"
    asked = runner.Asked(written(tmp_path, text), "", tiny=False, jobs=1)
    with pytest.raises(ValueError, match=rf"run 0 \({field.split('.')[-1]}=.*{message}"):
        runner.tell(asked)


GIVEN = {
    "raise KeyError('boom')": r"sweep\(\): KeyError: 'boom' \(exp.py:3\)",
    "return None": r"sweep\(\): TypeError: 'NoneType' object is not iterable",
    "return []": r"sweep\(\) gives no run; allowed: 1 to",
    "return ({'seed': i} for i in itertools.count())": r"sweep\(\) gives more than 10000 runs",
    "return [": "SyntaxError",
}


@pytest.mark.parametrize("body", GIVEN)
def test_a_file_that_does_not_work_is_named(body, tmp_path):
    text = f"import itertools; BASE = 'configs/gvpo.py'\ndef sweep():\n    {body}\n"
    with pytest.raises(ValueError, match=f"exp.py: {GIVEN[body]}"):
        experiment.load(written(tmp_path, text))


def test_open_fields_are_set():
    overrides = {
        "phases.gvpo.optimizer.freeze": ("embed",),
        "scorers.teacher.optimizer.learning_rate": 0.1,
        "algorithm": {"name": "rloo"},
    }
    config: Any = experiment.config_of(Run("configs/gvpo.py:tiny", overrides, ""))
    assert config.phases.gvpo.optimizer.freeze == ("embed",)
    assert config.algorithm.to_dict() == {"name": "rloo"}


def test_the_same_run_twice_is_refused(tmp_path):
    text = "BASE = 'configs/gvpo.py'\ndef sweep():\n    return [{'seed': 1}, {}, {'seed': 1}]\n"
    with pytest.raises(ValueError, match=r"runs \[0, 2\] are the same"):
        experiment.load(written(tmp_path, text))


def test_a_run_keeps_its_folder_when_the_sweep_grows(tmp_path):
    text = "BASE = 'configs/gvpo.py'\ndef sweep():\n    return [{'seed': s} for s in (%s)]\n"
    few = [run.name for run in experiment.load(written(tmp_path, text % "1, 2")).runs]
    more = [run.name for run in experiment.load(written(tmp_path, text % "0, 1, 2")).runs]
    assert more[1:] == few


def test_a_finished_run_of_another_config_is_refused(tmp_path):
    held = {"seed": 1, "a": {"b": 2}, "log": {"samples": 1}}
    (tmp_path / "config.json").write_text(json.dumps(held))
    assert experiment.state(tmp_path) == "begun"
    (tmp_path / "summary.json").write_text("{}")
    assert experiment.state(tmp_path, held | {"log": {"samples": 9}}) == "finished"
    with pytest.raises(ValueError, match="another config: a.b was 2, is 3"):
        experiment.state(tmp_path, held | {"a": {"b": 3}})


def test_a_goal_that_no_summary_has_is_named():
    assert runner.goal_of({"a": {"b": 2}}, "a.b") == 2
    with pytest.raises(ValueError, match=r"'c' is not in summary.json; allowed: \['b'\]"):
        runner.goal_of({"a": {"b": 2}}, "a.c")


def launch(*words):
    command = [sys.executable, "-m", "jaxrl.launch", "--experiment", RATES, "--tiny", *words]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.mark.slow
def test_a_sweep_survives_a_kill_and_is_compared(tmp_path):
    sweep = ("--all", "--jobs", "2", "--workdir", str(tmp_path))
    process = launch(*sweep)
    deadline = time.monotonic() + 1200
    while not (
        len(list(tmp_path.glob("*/summary.json")))
        and list(tmp_path.glob("*/checkpoints/2"))
        and len(list(tmp_path.glob("*/checkpoints"))) > 1
    ):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/summary.json")}
    assert 0 < len(finished) < 8

    process, begun = launch(*sweep), time.time()
    while not any(p.stat().st_mtime > begun for p in tmp_path.glob("*/journal.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()  # goes on to the runs under way, which save what they have
    said = process.communicate(timeout=1200)[0].decode()
    assert process.returncode == runner.PREEMPTED, said
    assert "ended with 75" in said and said.count(": finished before") == len(finished)
    assert len(list(tmp_path.glob("*/summary.json"))) < 8

    process = launch(*sweep)
    said = process.communicate(timeout=1200)[0].decode()
    assert process.returncode == 0, said
    assert 1 <= said.count(": at step") + said.count(": begun") <= 2  # those that were killed
    assert len(list(tmp_path.glob("*/summary.json"))) == 8
    assert all(path.stat().st_mtime_ns == when for path, when in finished.items())
    for run in tmp_path.glob("*-*"):
        assert {"config.json", "versions.json", "run.json", "log.txt"} <= {
            path.name for path in run.iterdir()
        }
    text = compare.compare(
        [str(tmp_path)], str(tmp_path), metrics="reward/mean", baseline="", level=0.95
    )
    assert text.count("| 0 1 |") == 4 and (tmp_path / "compare.png").stat().st_size > 10_000


SEARCH = """
BASE = "configs/sft.py:tiny"
GOAL = "held_out.after.truncated"

def search(trial):
    rate = trial.suggest_float("optimizer.learning_rate", 1e-4, 1e-2, log=True)
    return {"optimizer.learning_rate": rate, "eval.prompts": 2}
"""


@pytest.mark.slow
def test_a_search_goes_on_where_it_was(tmp_path, capfd):
    pytest.importorskip("optuna", reason="the extra `search` is not installed")
    asked = runner.Asked(written(tmp_path, SEARCH), str(tmp_path / "runs"), tiny=True, jobs=1)
    with pytest.raises(ValueError, match=r"'truncated' is not in summary.json; allowed: .*greedy"):
        runner.run_search(asked, 1)
    written(tmp_path, SEARCH.replace("truncated", "greedy"))
    assert runner.run_search(asked, 1) == 0  # the trial of before is asked for again
    said = capfd.readouterr().out
    assert ": finished before" in said and "best: " in said
    assert len(list((tmp_path / "runs").glob("*/summary.json"))) == 1
