"""Several processes are one run: real ones, under jax.distributed, on this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jaxrl.train import hosts

ROOT = Path(__file__).parents[2]

# sft, then gvpo: recorded rows, then rows that all processes generate. SGD, for Adam turns the last
# bits of a gradient into half a learning rate.
CONFIG = "configs.gvpo:tiny"
SMALL = (
    "optimizer.name='sgd'",
    "optimizer.learning_rate=0.1",
    "phases.sft.optimizer.learning_rate=0.1",
    "phases.sft.train.steps=1",
    "train.steps=3",
    "eval.prompts=2",
    "log.samples=16",
    "log.samples_every_steps=1",
)


def free_port():
    """One whose next is free too, as far as one can tell."""
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def start(folder, processes, *overrides, config=CONFIG, run="run", **environment):
    """Processes of a run in folder/run; their records are in folder."""
    names, port = ",".join(["localhost"] * processes), str(free_port())
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.train.hosts_worker"]
    started = []
    for process in range(processes):
        words = [str(folder / f"{run}.{process}.npz"), names, str(process), port]
        words += [str(folder / run), config, f"mesh.data={processes}", *overrides]
        with (folder / f"{run}.{process}.log").open("a") as log:
            started.append(
                subprocess.Popen(
                    [*command, *words],
                    cwd=ROOT,
                    env=os.environ | environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return started


def finish(folder, processes, codes=(0,), run="run", timeout=600):
    """Wait for all; their records."""
    deadline = time.monotonic() + timeout
    found = [process.wait(max(deadline - time.monotonic(), 1)) for process in processes]
    told = "\n".join(path.read_text()[-3000:] for path in folder.glob(f"{run}.*.log"))
    assert set(found) <= set(codes), f"{found}\n{told}"
    return [dict(np.load(folder / f"{run}.{i}.npz")) for i in range(len(processes))]


def parameters(record):
    return {name: x for name, x in record.items() if name.startswith("p/")}


def responses(folder, run="run"):
    """What was sampled, and for which groups, by step."""
    return {
        path.name: [
            (row["group"], row["sample"], row["response"])
            for row in map(json.loads, path.read_text().splitlines())
        ]
        for path in sorted((folder / run / "samples").glob("*.jsonl"))
    }


def ids(folder, run="run"):
    lines = (folder / run / "journal.jsonl").read_text().splitlines()
    return [(x["step"], [group for group, _ in x["groups"]]) for x in map(json.loads, lines)]


def close(a, b):
    assert a.keys() == b.keys() and a
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run in one process, which was told to stop on its way and went on."""
    folder = tmp_path_factory.mktemp("alone")
    finish(folder, start(folder, 1, *SMALL, STOP_AT="2/0"), codes=(75,))
    assert len(ids(folder)) == 2 + 1  # the step under way is finished
    return folder, finish(folder, start(folder, 1, *SMALL))[0]


@pytest.mark.slow
def test_two_processes_train_as_one_and_stop_and_go_on(alone, tmp_path):
    folder, one = alone
    stopped = start(tmp_path, 2, *SMALL, STOP_AT="2/1")  # one of them is told to stop
    finish(tmp_path, stopped, codes=(75,))
    steps = [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()]
    assert len([s for s in steps if (tmp_path / "run/checkpoints" / s / "manifest.json").exists()])
    newest = max(map(int, steps))
    assert newest == len(ids(tmp_path)) < 4
    subprocess.run(["cp", "-r", tmp_path / "run", tmp_path / "other"], check=True)

    two = finish(tmp_path, start(tmp_path, 2, *SMALL))
    for name, x in parameters(two[0]).items():
        assert x.tobytes() == two[1][name].tobytes(), name  # bit for bit on both
    close(parameters(two[0]), parameters(one))
    assert ids(tmp_path) == ids(folder)
    assert responses(tmp_path) == responses(folder)

    # Each process had its half of the rows, and the groups were with the first alone.
    groups, rows, _ = zip(*two[1]["rows"].tolist(), strict=True)
    assert set(groups) == {0} and set(rows) == {8}
    assert [sum(r) for r in zip(rows, [r for _, r, _ in two[0]["rows"]], strict=True)] == [
        rows for _, rows, _ in one["rows"].tolist()
    ][-len(rows) :]

    other = finish(tmp_path, start(tmp_path, 1, *SMALL, run="other"), run="other")
    assert ids(tmp_path, "other") == ids(folder)
    close(parameters(other[0]), parameters(one))


@pytest.mark.slow
def test_four_processes_bear_an_empty_share_and_a_reward_that_is_no_number(tmp_path):
    overrides = ("pool.demonstrations=5", "pool.epochs=1", "train.steps=1", "eval.prompts=2")
    started = start(tmp_path, 4, *overrides, *SMALL[:2], config="configs.sft:tiny", SPOIL="1")
    four = finish(tmp_path, started)
    valid = [record["rows"][0].tolist()[2] for record in four]
    assert valid == [3, 1, 0, 0]  # rows 0 to 4 are filled, and row 1's reward is not finite
    for name, x in parameters(four[0]).items():
        assert all(x.tobytes() == record[name].tobytes() for record in four[1:]), name
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    numbers = next(line for line in lines if "loss/total" in line)
    assert numbers["batch/nonfinite_reward"] == 1 and numbers["optim/updates"] == 1


@pytest.mark.slow
def test_the_others_end_when_one_is_killed(tmp_path):
    started = start(tmp_path, 2, *SMALL, DIE_AT="1/1")
    assert started[1].wait(200) == -signal.SIGKILL
    assert started[0].wait(60) not in (0, 75)  # lost_s=10, and what it takes to notice


def test_hosts_that_do_not_come_are_named():
    port, said = free_port(), {}

    def come(process):
        try:
            hosts.call_roll(["localhost", "a", "b", "c"], process, port=port, join_s=2)
        except TimeoutError as error:
            said[process] = str(error)

    began = time.monotonic()
    threads = [threading.Thread(target=come, args=(process,)) for process in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert said[0] == "2 of 4 did not join in 2 s: process 1 (a), process 3 (c)"
    assert said[2] == "did not join in time: process 1 (a), process 3 (c)"
    assert time.monotonic() - began < 8


def test_a_first_host_that_does_not_answer_is_named():
    port = free_port()
    with pytest.raises(TimeoutError, match=rf"process 0 \(localhost:{port}\) did not answer proc"):
        hosts.call_roll(["localhost", "a"], 1, port=port, join_s=1)


def test_a_process_that_is_no_host_is_refused():
    with pytest.raises(ValueError, match="--process=2; allowed: 0 to 1"):
        hosts.join(["a", "b"], 2, port=1, join_s=1, lost_s=1)
