"""What holds of every system: replay, resume, no leak, no ghost, pure gates, credit, order."""

import dataclasses
import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing import event_file_loader

from jaxrl.agents import contract, drive, gates, report
from jaxrl.agents.journal import Journal, Json, canonical, read
from jaxrl.agents.run import Run
from jaxrl.agents.worlds import HELD_OUT
from tests.agents import cases, tiny

ROOT = Path(__file__).parents[2]
_KEPT = tempfile.TemporaryDirectory(prefix="jaxrl-tests-agents-")
every = pytest.mark.parametrize("name", cases.NAMES)


@pytest.fixture(autouse=True)
def _no_power_cuts(monkeypatch):
    """A killed process leaves what it wrote to the system, which need not reach the disk."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


class Killed(BaseException):
    """Not an Exception: nothing may catch it, as nothing catches a kill."""


@functools.cache
def finished(name: str) -> Run:
    return drive.run(name, cases.settings(name), Path(_KEPT.name) / name.replace(":", "-"))


def folder(run: Run) -> Path:
    assert run.journal.root is not None
    return run.journal.root


def contents(root: Path) -> dict[str, bytes]:
    """All that follows from the journal."""
    files = [path for path in root.rglob("*") if path.is_file()]
    kept = [path for path in files if path.name != "journal.jsonl" and "objects" not in path.parts]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in kept}


def steps(root: Path) -> list[tuple[str, str, str]]:
    """The journal without its clock."""
    lines = read(root / "journal.jsonl")
    return [(line.kind, line.key, canonical([line.asked, line.result])) for line in lines]


@every
def test_a_replay_from_empty_is_the_same_bit_for_bit(name, tmp_path):
    root = folder(finished(name))
    drive.replay(name, cases.settings(name), root, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(root)
    assert {"state.npz", "splits.json"} <= set(contents(root))


def kill_after(monkeypatch, lines: int, torn: bool) -> None:
    """The process dies when so many lines are on disk, half of one more if ``torn``."""
    append = Journal._append

    def dying(self, *words):
        if len(self.lines) == lines:
            if torn:
                self._file.write(b'{"seq": ')
                self._file.flush()
            raise Killed
        return append(self, *words)

    monkeypatch.setattr(Journal, "_append", dying)


def places(name: str) -> list[int]:
    """Lines to die at: all of a short journal, else as many, spread evenly."""
    total, most = len(finished(name).journal.lines), 12
    return sorted({round(i * (total - 1) / (most - 1)) for i in range(most)})


@every
def test_killed_at_any_line_it_ends_in_the_same_state(name, tmp_path, monkeypatch):
    root, settings = folder(finished(name)), cases.settings(name)
    for place in places(name):
        target = tmp_path / str(place)
        with monkeypatch.context() as dying:
            kill_after(dying, place, torn=place % 2 == 1)
            with pytest.raises(Killed):
                drive.run(name, settings, target)
        drive.run(name, settings, target)
        assert contents(target) == contents(root), place
        assert steps(target) == steps(root), place
        shutil.rmtree(target)


@every
def test_no_held_out_id_reaches_who_proposes_or_judges(name):
    run = finished(name)
    roles, held_out = contract.load(name, cases.settings(name).system).roles, run.splits[HELD_OUT]
    seen = 0
    for line in run.journal.of("call"):
        payload = run.journal.get(line.asked["payload"])
        if roles[line.asked["role"]].kind != "act":
            seen += 1
            assert not [one for one in held_out if one in canonical(payload)]
    assert seen or not any(role.kind != "act" for role in roles.values())
    for record in gate_records(run).values():
        assert not [one for one in held_out if one in canonical(record["evidence"])]


def gate_records(run: Run) -> dict[str, Json]:
    paths = (folder(run) / "gates").glob("*.json")
    return {path.stem: json.loads(path.read_text()) for path in paths}


def episodes(run: Run) -> dict[str, tuple[int, list[Json]]]:
    """Key of an act -> line that decided it, and its episodes."""
    return {
        line.key: (line.seq, run.journal.get(line.asked["episodes"]))
        for line in run.journal.of("decide")
    }


@every
def test_what_was_rejected_or_replaced_never_comes_back(name):
    """A version that an episode has in context was a candidate or active at that moment."""
    run, gone, active = finished(name), set(), {}
    planned = {seq: plan for seq, plan in episodes(run).values()}
    tried = 0
    for line in run.journal.lines:
        if line.kind == "status":
            pin, status = tuple(line.asked["artefact"]), line.asked["status"]
            if status == "active":
                gone |= {active[pin[0]]} if pin[0] in active else set()
                active[pin[0]] = pin
            else:
                gone.add(pin)
        for episode in planned.get(line.seq, ()):
            pins = {tuple(pin) for pin in episode["artefacts"]}
            assert not pins & gone, (line.seq, pins & gone)
            tried += len(pins)
    assert tried
    assert not set(run.shelf.active().items()) & gone
    refs = {path.stem for path in (folder(run) / "refs").glob("*.json")}
    assert refs == set(run.shelf.active())


@every
def test_gates_decide_the_same_again_from_their_files(name):
    records = gate_records(finished(name))
    assert len(records) == len(list(finished(name).journal.of("gate")))
    for record in records.values():
        decision = gates.decide(record["gate"], record["evidence"], record["parameters"])
        assert decision.accepted == record["accepted"] and decision.reason == record["reason"]
        count = record["null"]["draws"]
        again = gates.null_rate(record["gate"], record["evidence"], record["parameters"], count)
        assert again == record["null"]["rate"]


@every
def test_credit_goes_to_what_was_in_context(name):
    run = finished(name)
    for line in run.journal.of("learn"):
        for act, place, pin in line.asked["credited"]:
            assert pin in episodes(run)[act][1][place]["artefacts"]


@every
def test_decide_then_execute_then_outcome_then_update(name):
    run = finished(name)
    lines = run.journal.lines
    assert [line.time for line in lines] == sorted(line.time for line in lines)
    outcomes = {line.key: line for line in run.journal.of("outcome")}
    decided = {line.key: line for line in run.journal.of("decide")}
    assert outcomes.keys() == decided.keys()
    assert all(decided[key].seq < outcomes[key].seq for key in outcomes)
    for line in run.journal.of("learn"):
        assert line.asked["because"]
        for key, seq in line.asked["because"].items():
            assert outcomes[key].seq == seq < line.seq and outcomes[key].time <= line.time


def curves(workdir: Path) -> set[tuple[str, int]]:
    """(tag, step) of each point that TensorBoard shows."""
    (events,) = (workdir / "tb").glob("events.*")
    loaded = event_file_loader.EventFileLoader(str(events)).Load()
    return {(value.tag, event.step) for event in loaded for value in event.summary.value}


@every
def test_it_reports_every_decision(name, tmp_path):
    run = finished(name)
    lines = report.write(run.journal, tmp_path).read_text().splitlines()
    for record in gate_records(run).values():
        name, rate = record["candidate"].replace("_", "&#95;"), f"{record['null']['rate']:.3f}"
        verdict = "accepted" if record["accepted"] else "refused"
        assert [x for x in lines if f"| {name} |" in x and verdict in x and x.endswith(rate + " |")]
    wanted = {(tag, int(line.key)) for line in run.journal.of("measure") for tag in line.asked}
    assert curves(tmp_path) == wanted and wanted


@pytest.mark.parametrize("name", contract.SYSTEMS)
def test_its_command_leaves_the_report_and_the_curves_of_its_run(name, tmp_path):
    words = ["--system", name, "--config", f"configs/agents/{name}.py:tiny"]
    command = [sys.executable, "-m", "jaxrl.agents", *words, "--workdir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seed = cases.settings(name).seed
    assert steps(tmp_path / "evo" / f"{name}-s{seed}") == steps(folder(finished(name)))
    again = report.write(finished(name).journal, tmp_path / "again")
    told = [
        re.sub("last line \\w+", "", path.read_text()) for path in (tmp_path / "report.md", again)
    ]
    assert told[0] == told[1]  # but for the clock, which the chain of hashes holds
    assert curves(tmp_path) == curves(tmp_path / "again") != set()


@pytest.mark.parametrize("name", contract.SYSTEMS)
def test_it_has_its_config_its_test_and_its_row(name):
    doc = (ROOT / f"configs/agents/{name}.py").read_text()
    command = f"python -m jaxrl.agents --system {name} --config configs/agents/{name}.py --workdir"
    assert command in doc
    module = contract.SYSTEMS[name].split(":")[0].split(".")[-1]
    assert (ROOT / f"tests/agents/test_{module}.py").exists()
    assert list((ROOT / "experiments/claims").glob(f"agents_{name}*.py"))
    readme = (ROOT / "README.md").read_text()
    assert re.search(rf"^\|.*`agents/{module}\.py`.*`configs/agents/{name}\.py`", readme, re.M)


# What must fail, does.


@pytest.mark.parametrize("name", contract.SYSTEMS)
def test_a_number_that_cannot_be_is_named(name):
    settings = cases.settings(name)
    for part in ("system", "world"):
        fields = vars(settings)[part]
        numbers = {f: x for f, x in fields.items() if type(x) in (int, float)}
        for field, value in numbers.items():
            below = [] if field.endswith("_bias") else [-1]
            for odd in [*below, *([math.nan] if type(value) is float else [])]:
                changed = dataclasses.replace(settings, **{part: {**fields, field: odd}})
                with pytest.raises(ValueError, match=f"\\b{field}\\b.*{odd}"):
                    drive.parts(name, changed)


def broken(change: Callable[[Json], None], tmp_path: Path, place: int) -> Path:
    """A finished journal with one line changed."""
    root = tmp_path / "broken"
    shutil.copytree(folder(finished(tiny.NAME)), root)
    lines = (root / "journal.jsonl").read_text().splitlines()
    line = json.loads(lines[place])
    change(line)
    lines[place] = canonical(line)
    (root / "journal.jsonl").write_text("\n".join(lines) + "\n")
    return root


def test_a_replay_writes_over_nothing(tmp_path):
    root = folder(finished(tiny.NAME))
    (tmp_path / "journal.jsonl").write_text("another's")
    with pytest.raises(ValueError, match="is not empty"):
        drive.replay(tiny.NAME, cases.settings(tiny.NAME), root, tmp_path)
    assert (tmp_path / "journal.jsonl").read_text() == "another's"


def test_a_changed_line_breaks_the_chain(tmp_path):
    root = broken(lambda line: line.update(time=0.0), tmp_path, 3)
    with pytest.raises(Exception, match="line 4 does not follow"):
        read(root / "journal.jsonl")


def test_another_seed_is_another_run(tmp_path):
    root = broken(lambda line: None, tmp_path, 0)
    other = dataclasses.replace(cases.settings(tiny.NAME), seed=1)
    with pytest.raises(Exception, match="another config, seed or code"):
        drive.run(tiny.NAME, other, root)
