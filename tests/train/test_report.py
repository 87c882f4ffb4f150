"""The final table, the picture and the summary, from files as a run leaves them."""

import dataclasses
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from jaxrl.train import report
from jaxrl.train.accounts import Account
from jaxrl.train.metrics import Logger, read_lines
from jaxrl.train.report import HeldOut, Outcome

BEFORE = HeldOut(4, 512, 1.0, 0.312, 0.6, 0.4, (0.29, 0.334), "bootstrap over prompts, 95 %")
AFTER = HeldOut(4, 512, 1.0, 0.625, 0.7, 0.35, (0.60, 0.643), "bootstrap over prompts, 95 %")
ACCOUNTS = {
    "sft": Account(60, 240, 60, 1_000, 0, 2.0, 0.5, 3.0),
    "gvpo": Account(60, 1_920, 120, 20_501, 7_999, 2.0, 2.0, 4.0),
}
OUTCOME = Outcome(BEFORE, AFTER, 120, ACCOUNTS, {"step": 2, "decode": 1}, 3)


@pytest.fixture
def workdir(tmp_path):
    """Curves of a run with 60 steps of sft and 60 of gvpo."""
    logger = Logger(tmp_path, start_step=0)
    for step in range(120):
        logger.scalars(step, {"reward/mean": step / 120, "optim/grad_norm": 1 / (1 + step)})
        logger.scalars(step, {"response/length_mean": 4.0, "response/length_max": 8})
        if step >= 60:
            logger.scalars(step, {"loss/residual_max": 0.1, "unknown/thing": 1.0})
    for step in (0, 60, 120):
        logger.scalars(step, {"eval/avg_at_4": step / 200, "eval/greedy": step / 150})
    logger.close()
    return tmp_path


def test_summary_has_the_keys_of_the_contract(workdir, capsys):
    returned = report.finish(workdir, OUTCOME, {"sft": 0, "gvpo": 60})
    written = json.loads((workdir / "summary.json").read_text())
    assert written == json.loads(json.dumps(returned))
    assert set(written) == {
        "schema_version", "held_out", "steps", "tokens_per_s", "generation_tokens_per_s",
        "peak_rss_bytes", "compilations", "seed", "commit", "machine", "phases",
    }  # fmt: skip
    before, after = written["held_out"]["before"], written["held_out"]["after"]
    assert set(before) == set(after) == {
        "avg_at_4", "pass_at_4", "greedy", "k", "temperature", "prompts", "interval", "method",
    }  # fmt: skip
    assert (before["avg_at_4"], after["avg_at_4"]) == (0.312, 0.625)
    assert (before["pass_at_4"], after["greedy"]) == (0.6, 0.35)
    assert (written["steps"], written["seed"], written["compilations"]) == (
        120, 3, {"step": 2, "decode": 1},
    )  # fmt: skip
    assert [cost["phase"] for cost in written["phases"]] == ["sft", "gvpo"]
    assert (written["phases"][1]["rollouts"], written["tokens_per_s"]) == (1_920, 10_250.5)
    assert not [path for path in workdir.rglob("*.tmp")]
    assert report.table(written, workdir) in capsys.readouterr().out


def test_questions_of_the_train_split_are_counted_apart(workdir):
    seen = (dataclasses.replace(BEFORE, greedy=0.5), dataclasses.replace(AFTER, greedy=0.875))
    summary = dataclasses.replace(OUTCOME, seen=seen).to_json()
    assert summary["held_out"] == OUTCOME.to_json()["held_out"]
    assert summary["seen"]["after"]["greedy"] == 0.875 and "seen" not in OUTCOME.to_json()
    lines = [line for line in report.table(summary, workdir).splitlines() if "train split" in line]
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines] == [
        ["avg@4, train split", "31.2 %", "62.5 %", "+31.3 points"],
        ["greedy, train split", "50.0 %", "87.5 %", "+37.5 points"],
    ]


def test_table_is_markdown_that_lines_up(workdir):
    summary = OUTCOME.to_json()
    text = report.table(summary, workdir)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    accuracy = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows[:5]]
    assert accuracy == [
        ["held-out accuracy", "before", "after", "change"],
        ["-------------------", "-------:", "-------:", "-------------:"],
        ["avg@4", "31.2 %", "62.5 %", "+31.3 points"],
        ["pass@4", "60.0 %", "70.0 %", "+10.0 points"],
        ["greedy", "40.0 %", "35.0 %", "-5.0 points"],
    ]
    assert [row.split("|")[1].strip() for row in rows[-2:]] == ["sft", "gvpo"]
    costs = [cell.strip() for cell in rows[-1].split("|")[2:-1]]
    assert costs == ["1,920", "120", "20,501", "2.0", "2.0"]
    for block in (rows[:5], rows[5:-4], rows[-4:]):
        assert len({len(row) for row in block}) == 1
    assert "decode 1, step 2 |" in text and "10,250 |" in text and "4,000 |" in text
    assert "60.0 % to 64.3 % (bootstrap over prompts, 95 %)" in text
    assert f"tensorboard --logdir {workdir}/tb" in text
    assert max(len(line) for line in rows) < 100


def test_curves_show_what_is_there_and_nothing_else(workdir):
    figure = report.curves(read_lines(workdir / "metrics.jsonl"), {"sft": 0, "gvpo": 60})
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert list(panels) == [
        "held-out accuracy", "reward", "response length (tokens)", "GVPO residual", "gradient norm",
    ]  # fmt: skip

    def drawn(title):
        lines = panels[title].get_lines()
        named = {str(line.get_label()): line for line in lines}
        return {name: np.array(x.get_xydata()) for name, x in named.items() if "/" in name}

    assert set(drawn("response length (tokens)")) == {"response/length_max", "response/length_mean"}
    reward = drawn("reward")["reward/mean"]
    np.testing.assert_allclose(reward, [(step, step / 120) for step in range(120)])
    held_out = drawn("held-out accuracy")["eval/avg_at_4"]
    np.testing.assert_allclose(held_out, [(0, 0), (60, 0.3), (120, 0.6)])
    for axes in panels.values():
        assert [text.get_text().strip() for text in axes.texts] == ["sft", "gvpo"]
        borders = [x for x in axes.get_lines() if "/" not in str(x.get_label())]
        assert [np.array(x.get_xdata()).tolist() for x in borders] == [[0, 0], [60, 60]]


def test_curves_of_one_panel_and_of_none(tmp_path):
    figure = report.curves([{"step": 0, "time": 1.0, "reward/mean": 1.0}], {})
    assert [axes.get_title() for axes in figure.axes] == ["reward"]
    with pytest.raises(ValueError, match="1 records hold nothing to draw"):
        report.curves([{"step": 0, "time": 1.0, "unknown/thing": 1.0}], {})


def test_picture_is_a_png_with_ink(workdir):
    path = Path(report.write_curves(workdir, {"sft": 0, "gvpo": 60}))
    assert path == workdir / "plots" / "curves.png"
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = matplotlib.image.imread(path)
    height, width = pixels.shape[:2]
    assert 1200 < width < 1800 and 500 < height < 900  # 3 columns, 2 rows
    dark = (pixels[..., :3].mean(-1) < 0.9).mean()
    assert 0.01 < dark < 0.5


def test_what_is_written_before_step_0(tmp_path):
    report.write_start(tmp_path / "run", {"seed": 3, "train": {"token_buckets": (48, 64)}})
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config == {"seed": 3, "train": {"token_buckets": [48, 64]}}
    versions = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert versions["python"] == platform.python_version()
    import jax

    assert versions["packages"]["jax"] == jax.__version__
    assert versions["machine"]["backend"] == "cpu" and versions["machine"]["devices"] == 8
    assert versions["machine"]["cores"] == os.cpu_count()
    assert platform.node() not in json.dumps(versions["machine"])


def git(root: Path, *words: str) -> str:
    named = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    return subprocess.run(
        ["git", "-C", str(root), *named, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_commit_of_a_checkout(tmp_path):
    root = tmp_path / "checkout"
    (root / "jaxrl").mkdir(parents=True)
    assert report.commit(root) == "unknown"
    git(root, "init", "-q")
    (root / "jaxrl" / "a.py").write_text("1\n")
    git(root, "add", "jaxrl")
    git(root, "commit", "-q", "-m", "first")
    head = git(root, "rev-parse", "HEAD")
    assert len(head) == 40 and report.commit(root) == head
    (root / "runs").mkdir()
    (root / "runs" / "summary.json").write_text("{}")  # a workdir in the checkout is no change
    assert report.commit(root) == head
    (root / "jaxrl" / "b.py").write_text("2\n")
    assert report.commit(root) == head + "+dirty"
    # Installed below another project's checkout: not that project's commit.
    assert report.commit(root / "jaxrl") == "unknown"


def test_commit_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert report.commit() == "unknown"


def test_peak_rss_is_bytes_of_this_process():
    code = "import numpy, jaxrl.train.report as r; a = r.peak_rss_bytes(); \
            x = numpy.ones(50_000_000); print(a, r.peak_rss_bytes())"
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    low, high = (int(x) for x in out.split())
    assert 50e6 < low < 3e9
    assert 300e6 < high - low < 420e6  # 400 MB more, some of it where imports have been
