"""A run that is cut off anywhere and started again ends where an unbroken one does, bit for bit."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

ROOT = Path(__file__).parents[2]
STEPS = 8  # 3 supervised, 5 of GVPO
WORDS = [
    *("-m", "jaxrl.launch", "--config", "configs/gvpo.py:tiny"),
    "--config.task.train_prompts=10",  # 4 a step: epochs end inside of steps
    "--config.phases.sft.train.groups=8",
    "--config.phases.sft.train.micro_rollouts=8",
    "--config.phases.sft.train.steps=3",
    "--config.train.steps=5",
    "--config.checkpoint.keep=20",
    "--config.checkpoint.keep_weights=20",
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    # Compiled once, not once a start: what is tested is what comes after.
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def start(workdir, environment):
    return subprocess.Popen(
        [sys.executable, *WORDS, "--workdir", str(workdir)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(workdir, environment):
    run = start(workdir, environment)
    text, _ = run.communicate(timeout=300)
    assert run.returncode == 0, text[-3000:]
    return text


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, environment):
    workdir = tmp_path_factory.mktemp("unbroken") / "run"
    finish(workdir, environment)
    return workdir


OWN = ("epoch", "accounts", "began")


def ending(workdir):
    """Everything that the last checkpoint holds, but for the count of restarts and the clock."""
    newest = workdir / "checkpoints" / str(STEPS)
    items = ocp.args.Composite(state=ocp.args.PyTreeRestore(), host=ocp.args.JsonRestore())
    handler = ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(), host=ocp.JsonCheckpointHandler()
    )
    read = ocp.Checkpointer(handler).restore(newest, args=items)
    host = {name: value for name, value in read.host.items() if name not in OWN}
    return {name: np.asarray(x) for name, x in read.state.items()}, host


def assert_same_ending(workdir, unbroken):
    (state, host), (expected, expected_host) = ending(workdir), ending(unbroken)
    assert set(state) == set(expected) and any("mu" in name for name in state)
    for name, x in expected.items():
        assert x.tobytes() == state[name].tobytes(), name  # params, moments, counts, key
    assert host == expected_host  # what was consumed, where the pool stands
    for file in ("journal.jsonl", f"eval/{STEPS}.json", "eval/3.json"):
        mine, theirs = (folder / file for folder in (workdir, unbroken))
        lines = [[json.loads(line) for line in _records(path)] for path in (mine, theirs)]
        for record in [record for records in lines for record in records]:
            record.pop("version", None)  # it names the count of restarts
        assert lines[0] == lines[1], file
    steps = [json.loads(line)["step"] for line in _records(workdir / "metrics.jsonl")]
    assert sorted(set(steps)) == list(range(STEPS + 1))


def _records(path):
    text = path.read_text()
    return text.splitlines() if path.suffix == ".jsonl" else [text]


def begun_again(unbroken, workdir, k):
    """What a run leaves that was cut off with its newest checkpoint at step k."""
    shutil.copytree(unbroken, workdir)
    (workdir / "summary.json").unlink()
    for checkpoint in (workdir / "checkpoints").iterdir():
        if int(checkpoint.name) > k:
            shutil.rmtree(checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("k", range(1, STEPS))
def test_case_34_run_8_equals_run_k_then_run_the_rest(k, unbroken, tmp_path, environment):
    workdir = tmp_path / "run"
    begun_again(unbroken, workdir, k)
    text = finish(workdir, environment)
    assert f"continuing at step {k}" in text
    assert_same_ending(workdir, unbroken)
    assert json.loads((workdir / "summary.json").read_text())["steps"] == STEPS


@pytest.mark.slow
def test_killed_at_random_moments_it_continues(unbroken, tmp_path, environment):
    workdir, draw = tmp_path / "run", random.Random(0)
    killed = 0
    for kill in range(4):
        run = start(workdir, environment)
        journal = workdir / "journal.jsonl"
        until = time.monotonic() + 120
        # At least one step further than last time, then at any moment of what follows.
        while time.monotonic() < until and run.poll() is None:
            if journal.exists() and len(journal.read_text().splitlines()) > kill + 1:
                break
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.5))
        run.send_signal(signal.SIGKILL)
        run.communicate()
        killed += run.returncode == -signal.SIGKILL
    assert killed >= 3  # the last one may have come to its end first
    finish(workdir, environment)
    assert_same_ending(workdir, unbroken)


@pytest.mark.slow
def test_a_corrupt_newest_checkpoint_costs_a_step_and_is_counted(unbroken, tmp_path, environment):
    workdir = tmp_path / "run"
    begun_again(unbroken, workdir, 5)
    files = [path for path in (workdir / "checkpoints/5/state").rglob("*") if path.is_file()]
    path = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    text = finish(workdir, environment)
    assert "checkpoints/5 is corrupt" in text and path.name in text
    assert "continuing at step 4" in text
    assert_same_ending(workdir, unbroken)
    lines = [json.loads(line) for line in _records(workdir / "metrics.jsonl")]
    assert [x["checkpoint/fallbacks"] for x in lines if "checkpoint/fallbacks" in x] == [1]


LITTLE_ROOM = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, 70_000))  # bytes that one file may have
sys.argv = ["jaxrl.launch", *sys.argv[1:]]
runpy.run_module("jaxrl.launch", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "words"),
    [
        (
            1,
            r"CheckpointError: .*step 2 could not be written .*File too large.*step 1 is intact",
        ),
        (4, r"OSError: .*File too large"),  # the weights are published first
    ],
)
def test_a_full_disk_is_said_in_one_line_and_costs_no_step(
    k, words, unbroken, tmp_path, environment
):
    workdir = tmp_path / "run"
    begun_again(unbroken, workdir, k)
    full = subprocess.run(
        [sys.executable, "-c", LITTLE_ROOM, *WORDS[2:], "--workdir", str(workdir)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert full.returncode == 1
    # Not the last line: the checkpoint library's threads may still be saying theirs.
    assert re.search("jaxrl.launch: " + words, full.stderr), full.stderr[-2000:]
    assert f"continuing at step {k}" in finish(workdir, environment)
    assert_same_ending(workdir, unbroken)


@pytest.mark.slow
def test_a_finished_run_is_told_again_and_may_be_made_longer(unbroken, tmp_path, environment):
    workdir = tmp_path / "run"
    shutil.copytree(unbroken, workdir)
    assert f"continuing at step {STEPS}" in finish(workdir, environment)
    assert_same_ending(workdir, unbroken)


@pytest.mark.slow
def test_another_config_is_refused_by_name(unbroken, tmp_path, environment):
    workdir = tmp_path / "run"
    shutil.copytree(unbroken, workdir)
    words = [*WORDS, "--config.algorithm.beta=0.5", "--workdir", str(workdir)]
    run = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert "checkpoint incompatible" in last
    assert "identity.gvpo.algorithm.beta: saved 0.1, wanted 0.5" in last
