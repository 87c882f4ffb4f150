"""The main job as four processes by one command: trainer, gateway with its engine, two workers."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from jaxrl import trajectories
from tests.pool.atif_schema import check

ROOT = Path(__file__).parents[1]
LOCAL = ["--config", "configs/quickstart.py:tiny"]
REMOTE = [*LOCAL, "--config.pool.kind=remote"]


def started(words: list[str], workdir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "jaxrl.launch", *words, "--workdir", str(workdir)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def consumed(workdir: Path) -> list[list]:
    """What each step of the run was trained on, by content."""
    lines = (workdir / "journal.jsonl").read_text().splitlines()
    return [json.loads(line)["groups"] for line in lines]


def serves(folder: Path) -> int:
    """The process id of a gateway that has weights; 0 of none."""
    try:
        told = json.loads((folder / "gateway.json").read_text())
        with urllib.request.urlopen(told["url"] + "/health", timeout=1):
            return told["pid"]
    except (OSError, ValueError):
        return 0


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """The run with everything in one process."""
    workdir = tmp_path_factory.mktemp("embedded")
    run = started(LOCAL, workdir)
    told = run.communicate()[0]
    assert run.returncode == 0, told[-4000:]
    return workdir


def exported(workdir: Path, to: Path) -> dict[str, list]:
    """The steps of each group-sample of the reinforcement, out of a run's export: a gateway that is
    killed may leave a sample to a second attempt, and a journal of the first."""
    counts = trajectories.export(str(workdir), str(to)).counts
    assert counts["written"] == len(list(to.rglob("*.json")))
    assert set(+counts) <= {"written", "unsealed"}
    found = {path.name: json.loads(path.read_text()) for path in to.glob("run=gvpo-*/*.json")}
    for document in found.values():
        check(document)
        assert document["steps"][0]["message"].startswith("State the final answer")
    return {name.rpartition("-")[0]: document["steps"] for name, document in found.items()}


def same(workdir: Path, embedded: Path) -> bool:
    """Whether two runs trained on the same groups, sample by sample, to the same accuracy."""
    held_out = [
        json.loads((w / "summary.json").read_text())["held_out"] for w in (workdir, embedded)
    ]
    return consumed(workdir) == consumed(embedded) and held_out[0] == held_out[1]


@pytest.mark.slow
def test_four_processes_train_what_one_does_though_the_gateway_is_killed(tmp_path, embedded):
    """Nothing is lost with a gateway, and nothing is sampled otherwise by its successor."""
    run, folder = started(REMOTE, tmp_path), tmp_path / "pool"
    while not (killed := serves(folder)):
        assert run.poll() is None, run.communicate()[0][-4000:]
        time.sleep(0.02)
    os.kill(killed, signal.SIGKILL)
    told = run.communicate()[0]
    assert run.returncode == 0, told[-4000:]
    assert same(tmp_path, embedded)

    again = json.loads((folder / "gateway.json").read_text())["pid"]
    assert again != killed and not alive(again)  # started again, and ended with the run
    logs = {"gateway-0.log", "worker-0.log", "worker-1.log"}
    assert {path.name for path in (folder / "logs").iterdir()} == logs
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    takes = [line for line in lines if "pool/gateway_s" in line]
    assert len(takes) == 2 and all(line["pool/staleness_max"] == 0 for line in takes)

    # Both leave the same rollouts, texts and numbers, to people and other tools.
    told = [
        exported(workdir, tmp_path / f"{workdir.name}-atif") for workdir in (embedded, tmp_path)
    ]
    assert len(told[0]) == 32 and told[0] == told[1]


@pytest.mark.slow
def test_an_engine_and_a_worker_that_are_started_by_hand_serve_the_same(tmp_path, embedded):
    """The engine behind HTTP, in a process of its own; the worker knows a URL and a key."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    engine = f"--config.pool.engine=serve:http://127.0.0.1:{port}"
    run, folder = (
        started([*REMOTE, engine, "--config.pool.launcher=none"], tmp_path),
        tmp_path / "pool",
    )
    helpers = []
    try:
        while not (folder / "gateway.json").exists():
            assert run.poll() is None, run.communicate()[0][-4000:]
            time.sleep(0.05)
        key = {"JAXRL_POOL_KEY": (folder / "key").read_text(), "JAX_PLATFORMS": "cpu"}
        url = json.loads((folder / "gateway.json").read_text())["url"]
        for words in (
            ["jaxrl.serve", f"--pool={folder}", f"--port={port}"],
            ["jaxrl.worker", f"--gateway={url}"],
        ):
            command = [sys.executable, "-m", *words]
            helpers.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | key))
        told = run.communicate()[0]
        assert run.returncode == 0, told[-4000:]
    finally:
        for helper in helpers:
            helper.kill()
            helper.wait()
        run.kill()
    assert same(tmp_path, embedded)
