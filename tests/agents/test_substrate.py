"""The journal, the shelf, the gates, and the door: what they keep and what they refuse."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.agents import base
from jaxrl.agents import artefacts, drive, gates, report
from jaxrl.agents.artefacts import Artefact, ArtefactRefused, Shelf
from jaxrl.agents.journal import (
    Journal,
    JournalError,
    canonical,
    digest,
    draws,
    read,
    write_whole,
)
from jaxrl.agents.run import Episode, Leak, Run
from jaxrl.agents.worlds import HELD_OUT
from tests.agents import cases, tiny

ROOT = Path(__file__).parents[2]


def test_a_step_happens_once(tmp_path):
    made = []

    def produce():
        made.append(1)
        return {"n": len(made)}

    for _ in range(2):
        journal = Journal(tmp_path)
        assert journal.once("call", "a", {"x": 1}, produce) == {"n": 1}
        assert journal.live
        journal.close()
    assert made == [1] and len(read(tmp_path / "journal.jsonl")) == 1


def test_what_happens_inside_a_step_is_behind_it(tmp_path):
    """An actor's call inside an outcome is not made again, nor waited for."""
    for _ in range(2):
        journal = Journal(tmp_path)
        inner = lambda j=journal: j.once("call", "actor", 1, lambda: "hello")  # noqa: E731
        assert journal.once("outcome", "act", None, inner) == "hello"
        assert journal.live
        journal.close()
    assert [line.kind for line in read(tmp_path / "journal.jsonl")] == ["call", "outcome"]


def test_the_same_step_twice_or_changed_is_refused(tmp_path):
    journal = Journal(tmp_path)
    journal.once("call", "a", 1)
    with pytest.raises(JournalError, match="happens twice"):
        journal.once("call", "a", 1)
    with pytest.raises(JournalError, match="another process"):
        Journal(tmp_path)
    journal.close()
    again = Journal(tmp_path)
    with pytest.raises(JournalError, match="another config, seed or code"):
        again.once("call", "a", 2)
    again.close()
    closed = Journal(tmp_path, closed=True)
    with pytest.raises(JournalError, match="'b' is not in the journal"):
        closed.once("call", "b", 1)
    closed.close()
    with pytest.raises(JournalError, match="does not exist"):
        Journal(tmp_path / "nowhere", closed=True)


def test_a_torn_line_and_a_damaged_object_are_found(tmp_path):
    journal = Journal(tmp_path)
    name = journal.put({"a": 1})
    journal.once("call", "a", name)
    journal.close()
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(b'{"seq": 1, "ti')
    journal = Journal(tmp_path)
    journal.once("call", "a", name)
    journal.once("call", "b", 1)
    assert [line.key for line in read(tmp_path / "journal.jsonl")] == ["a", "b"]
    assert journal.get(name) == {"a": 1}
    (tmp_path / "objects" / name[:2] / name).write_text('{"a":2}')
    with pytest.raises(JournalError, match="is damaged"):
        journal.get(name)
    (tmp_path / "objects" / name[:2] / name).unlink()
    with pytest.raises(JournalError, match="is missing"):
        journal.get(name)
    journal.close()
    with pytest.raises(ValueError):
        journal.put(float("nan"))


def test_no_link_is_followed_out_of_a_run(tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    (tmp_path / "SKILL.md.tmp").symlink_to(mine)
    write_whole(tmp_path / "SKILL.md", b"a skill")
    assert mine.read_text() == "mine" and (tmp_path / "SKILL.md").read_text() == "a skill"
    run = fresh(Journal(tmp_path / "run"))
    (tmp_path / "run" / "skills").symlink_to(tmp_path / "elsewhere")
    run.offer("x", "a skill", {}, operator="mint", round=0)
    with pytest.raises(ArtefactRefused, match="leads out of"):
        run.settle()
    assert not (tmp_path / "elsewhere").exists()
    run.journal.close()


def test_draws_belong_to_their_name():
    assert draws("a", 1).random() == draws("a", 1).random() != draws("a", 2).random()


# The shelf.


def version(name: str, number: int, text: str = "") -> Artefact:
    return Artefact(name, number, text, {}, "mint", (), "", (), 0)


def test_at_most_one_version_is_active_and_nothing_comes_back():
    shelf = Shelf()
    for number in (1, 2, 3):
        shelf.add(version("a", number))
    shelf.mark(("a", 1), "active")
    shelf.mark(("a", 3), "rejected")
    assert shelf.active() == {"a": 1}
    shelf.mark(("a", 2), "active")
    assert shelf.active() == {"a": 2} and shelf.status(("a", 1)) == "superseded"
    for pin in (("a", 1), ("a", 3)):
        with pytest.raises(ValueError, match="cannot become active"):
            shelf.mark(pin, "active")
    shelf.mark(("a", 2), "pruned")
    assert not shelf.active() and shelf.next_version("a") == 4
    with pytest.raises(KeyError, match="a-v0009"):
        shelf.get(("a", 9))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("../../etc/passwd", "", "id="),
        ("/etc/x", "", "id="),
        ("a/b", "", "id="),
        ("..", "", "id="),
        ("A", "", "id="),
        ("", "", "id="),
        ("a" * 65, "", "id="),
        ("a\n", "", "id="),
        ("a", "x" * 10_000_000, "10000000 bytes; allowed: at most 65536"),
        ("a", "\x1b[2J", "control signs"),
        ("a", "a\x00b", "control signs"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_what_may_not_be_written_is_refused(name, text, words, tmp_path):
    with pytest.raises(ArtefactRefused, match=words):
        Shelf().add(version(name, 1, text))
    run = fresh(Journal(tmp_path / "run"))
    assert run.offer(name, text, {}, operator="mint", round=0) is None
    run.settle()
    (refused,) = run.journal.of("refuse")
    assert refused.asked["operator"] == "mint" and not run.shelf.pins()
    assert not (tmp_path / "run" / "skills").exists() and len(list(tmp_path.iterdir())) == 1
    run.journal.close()
    for odd, told in (
        ({"body": "x" * 70_000}, "body of"),
        ({"trigger": "x" * 70_000}, "trigger and provenance of"),
        ({"provenance": ("x" * 70_000,)}, "trigger and provenance of"),
        ({"trigger": "\x1b[2J"}, "trigger with control signs"),
    ):
        with pytest.raises(ArtefactRefused, match=told):
            Shelf().add(dataclasses.replace(version("a", 1), **odd))


def body_of(name: str, world: Any) -> Any:
    """A body that the world's scripted actor can read."""
    if name == "designer_rsi":
        return world.documented()[0]["body"]
    return world.library()[0]["body"] if name == "arena_memory" else world.right


@pytest.mark.parametrize("name", ["designer_rsi", "arena_memory", "skill_graph"])
def test_a_body_that_no_actor_can_read_is_refused(name):
    """It would end the run, and end it again at each start: the reply is in the journal."""
    settings = cases.settings(name)
    made = drive.parts(name, settings)
    run = drive.begin(name, settings, Journal(None), made)
    good = body_of(name, made[1])
    for number, field in enumerate(good):
        for odd in ({k: x for k, x in good.items() if k != field}, {**good, field: [{}]}):
            assert run.offer(f"bad-{number}", "", odd, operator="x", round=0) is None
    refused = [line.asked["reason"] for line in run.journal.of("refuse")]
    assert len(refused) == 2 * len(good) and all("body $" in reason for reason in refused)
    assert run.offer("good", "", good, operator="x", round=0) == ("good", 1)


# The run.


def fresh(journal: Journal | None = None) -> Run:
    settings = cases.settings(tiny.NAME)
    made = drive.parts(tiny.NAME, settings)
    return drive.begin(tiny.NAME, settings, journal or Journal(None), made)


def test_a_held_out_id_is_stopped_on_its_way():
    run = fresh()
    leaked = run.splits[HELD_OUT][3]
    hidden = (
        "{}",
        "as in {}, see",
        "({}.",
        "a/{}.json",
        "first line\n{}",
        "\t{}",
        "\u201c{}\u201d",
    )
    hidden += ("feedback-{}-v0001", "_{}_", "\u00e9{}\u00e9", '\\"{}\\n', "\x00{}")
    for frame in hidden:
        for text in (frame.format(leaked), [{frame.format(leaked.upper()): 1}]):
            with pytest.raises(Leak, match=leaked):
                run.call("guesser", {"now": 0.0, "note": text}, "k")
    run.untainted({"note": f"{leaked}7, x{leaked}"}, "no id")
    with pytest.raises(Leak, match=leaked):
        run.gate("x", "strict_improvement", {"old": [0], "new": [1], "tasks": [leaked]}, {})
    with pytest.raises(Leak, match=leaked):
        run.offer("x", f"the answer of {leaked} is 4", {}, operator="mint", round=0)
    with pytest.raises(Leak, match=leaked):
        run.offer("x", "", {}, operator="mint", round=0, provenance=[f"round-0/{leaked}"])


def test_no_update_before_its_outcome():
    run = fresh()
    with pytest.raises(ValueError, match="no outcome yet of"):
        run.learn("x", ["later"], [], n=np.zeros(1))
    run.act("later", [Episode(run.splits["train"][0], (), "m")])
    run.learn("x", ["later"], [], n=np.zeros(1))


def test_arms_share_a_snapshot_and_not_their_luck():
    one = Episode("train-00000", (), "m", "old")
    two = dataclasses.replace(one, arm="new", artefacts=(("a", 1),))
    assert one.snapshot == two.snapshot != dataclasses.replace(one, moment="n").snapshot
    run = fresh()
    first, second = run.act("both", [one, dataclasses.replace(one, arm="new")])
    assert first != second


# The gates.


def test_the_paired_gate_by_hand():
    def decide(*prompts: list[int], won: int = 1) -> bool:
        evidence = {"prompts": [{"contexts": row} for row in prompts]}
        return gates.decide("paired_sign", evidence, {"min_won": won}).accepted

    assert decide([1, 1, -1]) and decide([1, 1, 0], [0, 0, 0])
    assert not decide([1, 1, -1], [-1, -1, 0]) and not decide([0, 0, 0]) and not decide([1, 0, 0])
    assert not decide([1, 1, 1], won=2) and decide([1, 1, 1], [1, 1, 1], won=2)


def test_the_other_gates_by_hand():
    def accepted(gate, evidence, parameters):
        return gates.decide(gate, evidence, parameters).accepted

    assert accepted("strict_improvement", {"old": [0, 1], "new": [1, 1]}, {})
    assert not accepted("strict_improvement", {"old": [0, 1], "new": [1, 0]}, {})
    pair = {"old": [0.5, 0.5], "new": [0.6, 0.5]}
    assert accepted("calibrated_mean", pair, {"noise": 0.04})
    assert not accepted("calibrated_mean", pair, {"noise": 0.06})
    table = {"order": ["p", "q", "c"], "scores": {"p": [1, 0], "q": [0, 0], "c": [0, 1]}}
    assert accepted("survival", {**table, "candidate": "c"}, {"keep": 2})
    assert not accepted("survival", {**table, "candidate": "c"}, {"keep": 1})  # ties: the parent
    date = {"predicted": [0, 1, 2], "realised": [0, 1, 3]}
    trust = {"min_dates": 10, "level": 0.05}
    assert accepted("predictive_t", {"dates": [date] * 10, "gain": 0.1}, trust)
    assert not accepted("predictive_t", {"dates": [date] * 9, "gain": 0.1}, trust)
    assert not accepted("predictive_t", {"dates": [date] * 10, "gain": -0.1}, trust)
    with pytest.raises(ValueError, match="gate='coin'; allowed: ungated"):
        accepted("coin", {}, {})


@pytest.mark.parametrize(
    ("prompts", "win", "rate"),
    [(3, 0.5, 0.124), (5, 0.5, 0.031), (8, 0.5, 0.004)]
    + [(3, 0.25, 0.277), (5, 0.25, 0.276), (8, 0.25, 0.207)],
)
def test_how_often_the_paired_gate_ships_a_no_op(prompts, win, rate):
    """Measured, and by closed form: no prompt lost, less none won either."""
    at_least_two = 3 * win**2 * (1 - win) + win**3
    exact = (1 - at_least_two) ** prompts - (1 - 2 * at_least_two) ** prompts
    assert exact == pytest.approx(rate, abs=0.003)  # the rates were once simulated
    sample = gates.judged_contexts(prompts, 3, win, win)
    found = gates.acceptance("paired_sign", sample, {"min_won": 1}, count=4000, seed=0)
    assert abs(found.mean - exact) < 4 * max((exact * (1 - exact) / 4000) ** 0.5, 1e-3)


def test_the_rate_beside_a_decision_is_that_of_exchanged_labels():
    evidence = {"prompts": [{"contexts": [1, 1, 1]}] * 3}
    rate = gates.null_rate("paired_sign", evidence, {"min_won": 1}, 4000)
    assert rate == pytest.approx(0.125, abs=0.02)  # all three prompts are won by coins
    pair = {"old": [0.0] * 20, "new": [1.0] * 20}
    rate = gates.null_rate("strict_improvement", pair, {}, 4000)
    assert rate == pytest.approx(0.412, abs=0.03)  # 1/2 less half of C(20, 10) / 2^20
    same = {"old": [0.5] * 9, "new": [0.5] * 9}
    assert gates.null_rate("strict_improvement", same, {}, 50) == 0
    assert gates.null_rate("strict_improvement", same, {}, 0) is None
    chance = draws("dates")
    dates = [dict(zip(("predicted", "realised"), chance.normal(size=(2, 4)).tolist(), strict=True))]
    dates = {"dates": dates * 12, "gain": 1.0}
    rate = gates.null_rate("predictive_t", dates, {"min_dates": 10, "level": 0.05}, 1000)
    assert rate == pytest.approx(0.05, abs=0.03)
    scores = {name: chance.random(8).tolist() for name in "abcd"}
    members = {"order": list("abcd"), "scores": scores, "candidate": "d"}
    assert gates.null_rate("survival", members, {"keep": 1}, 1000) == pytest.approx(0.25, abs=0.06)


# The door.


def door(workdir: Path, *more: str) -> list[str]:
    config = workdir.parent / "tiny.py"
    config.write_text(
        "from configs.agents import base\nfrom tests.agents import tiny\n\n\n"
        "def get_config(variant=''):\n"
        "    config = base.get_config('tiny')\n    config.update(tiny.CONFIG)\n    return config\n"
    )
    words = ["--system", tiny.NAME, "--config", str(config), "--workdir", str(workdir)]
    return [sys.executable, "-m", "jaxrl.agents", *words, *more]


def start(words: list[str]) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_killed_process_goes_on_where_it_was(tmp_path):
    words = door(tmp_path / "w", "--config.rounds=20")
    journal = tmp_path / "w" / "evo" / f"{tiny.NAME.replace(':', '-')}-s0" / "journal.jsonl"
    with start(words) as process:
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if journal.exists() and journal.read_bytes().count(b"\n") > 50:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.002)
    assert process.returncode == -signal.SIGKILL
    killed = read(journal)
    with start(words) as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    lines = read(journal)
    assert lines[: len(killed)] == killed and lines[-1].kind == "end"
    config = dataclasses.replace(cases.settings(tiny.NAME), rounds=20)
    whole = drive.run(tiny.NAME, config, None)
    assert [line.asked for line in lines] == [line.asked for line in whole.journal.lines]
    text = (tmp_path / "w" / "report.md").read_text()
    assert "accepted if all were no better" in text and "held&#95;out/score" not in text
    assert "held_out/score" in text


def test_the_door_names_what_is_wrong(tmp_path):
    for more, words in (
        (["--config.system.tasks=0", "--system", "nobody"], "system='nobody'; allowed:"),
        (["--config.rounds=0"], "rounds=0; allowed: >= 1"),
        (["--config.seed=7"], "holds another run"),
    ):
        if "--config.seed=7" in more:
            (tmp_path / "w" / "evo" / "another-s0").mkdir(parents=True)
        with start(door(tmp_path / "w", *more)) as process:
            _, errors = process.communicate(timeout=120)
        assert process.returncode == 1 and words in errors, errors
        assert not list((tmp_path / "w").glob("evo/tests*"))


def test_a_field_too_many_or_too_few_is_named():
    config = base.get_config("tiny").to_dict()
    with pytest.raises(TypeError, match="unknown: \\['extra'\\]"):
        drive.settings({**config, "extra": 1})
    with pytest.raises(TypeError, match="missing: \\['seed'\\]"):
        drive.settings({name: value for name, value in config.items() if name != "seed"})
    world = {**cases.settings(tiny.NAME).world, "source": "jaxrl.nowhere"}
    with pytest.raises(ValueError, match="'jaxrl.nowhere:World'"):
        drive.parts(tiny.NAME, dataclasses.replace(cases.settings(tiny.NAME), world=world))
    with pytest.raises(ValueError, match="port.kind='oracle'"):
        drive.settings({**config, "port": {**config["port"], "kind": "oracle"}})


def test_the_report_shows_untrusted_text_as_text():
    hostile = "<script>|`x`\n\u202e\u200b\ud800\x1b[2J" + "y" * 1000
    shown = report._cell(hostile)
    assert "<" not in shown.replace("&#", "") and "|" not in shown and "\n" not in shown
    assert shown.isprintable() and shown.endswith("y…")
    run = fresh()
    run.refuse(hostile, operator=hostile, round=0)
    run.measure(0, {"a_b/<b>|c": 1.0})
    text = report.markdown(run.journal)
    assert text.encode() and "<" not in text and "| a_b/&#60;b&#62;&#124;c |" in text
    assert len(shown) < 300 and artefacts.label(("a", 3)) == "a-v0003"
    assert digest([1]) == digest(json.loads(canonical([1])))
