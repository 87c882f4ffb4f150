"""The README's commands do what it says, and .ci/run calls the same test command."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^```sh\n(.*?)```", README, re.MULTILINE | re.DOTALL)
SET_UP = "python3 -m jaxrl.preflight && python3 -m venv .venv && .venv/bin/pip install -q -c"


def test_two_commands_of_one_line_with_their_own_set_up():
    launch, test = COMMANDS
    for command in (launch, test):
        assert command.count("\n") == 1 and command.startswith(SET_UP)
    assert "-m jaxrl.launch --config configs/quickstart.py --workdir" in launch
    assert "'.[test]'" in test
    assert test.endswith(".venv/bin/python -m pytest -n 2 --dist loadfile\n")


def test_every_other_fence_is_no_command():
    assert set(re.findall(r"^```(\w*)", README, re.MULTILINE)) == {"sh", "text", ""}


def test_ci_runs_the_test_command_and_the_checks():
    script = (ROOT / ".ci" / "run").read_text()
    asked = re.search(r"^test_command=\$\(grep -m1 '(.+)' README.md\)$", script, re.MULTILINE)
    assert asked is not None
    found = next(line for line in README.splitlines() if asked[1] in line)
    assert found + "\n" == COMMANDS[1]
    assert '-c "${test_command//.venv/$environment}"' in script
    for check in ('ruff" check\n', 'ruff" format --check\n', 'pyright" '):
        assert check in script.split("test_command//")[1]


def test_the_tree_names_every_room():
    tree = re.search(r"^jaxrl/\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert tree is not None
    named = set(re.findall(r"^  ([\w.]+)/? ", tree[1], re.MULTILINE))
    there = {path.name for path in (ROOT / "jaxrl").iterdir() if not path.name.startswith("_")}
    assert named == there


def test_links_lead_somewhere():
    known = ("jaxrl", "configs", "tests", "experiments")
    for name in re.findall(r"`([\w./]+\.py)`", README):
        place = ROOT / name if name.split("/")[0] in known else ROOT / "jaxrl" / name
        assert place.exists(), name


@pytest.mark.slow
def test_the_main_job_runs_as_tiny(tmp_path):
    launch = COMMANDS[0].split("&&")[-1].strip()
    words = shlex.split(launch.replace("quickstart.py", "quickstart.py:tiny"))
    words[words.index("--workdir") + 1] = str(tmp_path)
    assert words[0] == ".venv/bin/python"
    run = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] >= 2
    assert {"before", "after"} <= set(summary["held_out"])
    assert list((tmp_path / "plots").glob("*.png"))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    measured = [line["step"] for line in lines if "eval/greedy" in line]
    assert measured == [2, summary["steps"]]  # before and after reinforcement
