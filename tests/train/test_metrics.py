"""Curves as TensorBoard itself reads them back, the JSON lines beside them, the progress line."""

import html
import io
import json
import os
import re
import subprocess
import sys
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator as PageAccumulator,
)
from tensorboard.plugin_util import markdown_to_safe_html  # its own renderer
from tensorboard.plugins.custom_scalar import layout_pb2

from jaxrl.train.metrics import (
    HEALTH,
    Logger,
    Progress,
    duration,
    escape,
    read_lines,
    samples_table,
)


def read(workdir) -> EventAccumulator:
    sizes = {"scalars": 0, "tensors": 0, "histograms": 0}  # 0: keep all
    return EventAccumulator(str(workdir / "tb"), size_guidance=sizes).Reload()


def curve(workdir, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(workdir).Scalars(name)]


def lines(workdir, name: str) -> list[tuple[int, float]]:
    records = read_lines(workdir / "metrics.jsonl")
    return [(record["step"], record[name]) for record in records if name in record]


def test_scalars_of_any_kind_come_back(tmp_path):
    logger = Logger(tmp_path, start_step=0)
    logger.scalars(0, {"reward/mean": 0.5, "optim/updates": 2})
    logger.scalars(1, {"reward/mean": jnp.float32(0.75), "optim/updates": np.int64(3)})
    logger.scalars(1, {"eval/avg_at_4": np.ones((1,))})
    logger.close()
    logger.close()
    assert curve(tmp_path, "reward/mean") == lines(tmp_path, "reward/mean") == [(0, 0.5), (1, 0.75)]
    assert curve(tmp_path, "optim/updates") == lines(tmp_path, "optim/updates") == [(0, 2), (1, 3)]
    assert curve(tmp_path, "eval/avg_at_4") == [(1, 1.0)]


def test_flush_puts_everything_on_disk(tmp_path):
    logger = Logger(tmp_path, start_step=0)
    logger.scalars(0, {"reward/mean": 0.5})
    logger.flush()
    assert curve(tmp_path, "reward/mean") == lines(tmp_path, "reward/mean") == [(0, 0.5)]
    logger.close()


def test_written_every_second_without_being_asked(tmp_path, monkeypatch):
    logger = Logger(tmp_path, start_step=0)
    logger.scalars(0, {"reward/mean": 0.5})
    assert lines(tmp_path, "reward/mean") == []
    clock = time.monotonic
    monkeypatch.setattr("time.monotonic", lambda: clock() + 1.5)
    logger.scalars(1, {"reward/mean": 0.75})
    assert lines(tmp_path, "reward/mean") == curve(tmp_path, "reward/mean") == [(0, 0.5), (1, 0.75)]
    logger.close()


def test_what_is_not_finite_is_dropped_and_counted(tmp_path):
    logger = Logger(tmp_path, start_step=0)
    # 1e39 is finite here and infinite in TensorBoard's float32.
    values = {"a/nan": np.nan, "a/inf": -np.inf, "a/large": 1e39, "a/max": 3e38, "a/bf16": 0.5}
    logger.scalars(4, values)
    logger.scalars(5, {"a/max": 1.0})
    assert logger.nonfinite == 3
    logger.close()
    tags = read(tmp_path).Tags()["scalars"]
    assert sorted(tags) == ["a/bf16", "a/max", "log/nonfinite"]
    assert curve(tmp_path, "log/nonfinite") == lines(tmp_path, "log/nonfinite") == [(4, 3.0)]
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text


@pytest.mark.parametrize("name", ["loss", "/loss", "loss/", "a b/c", "a//b", ""])
def test_names_have_an_area(tmp_path, name):
    logger = Logger(tmp_path, start_step=0)
    with pytest.raises(ValueError, match="allowed: area/quantity"):
        logger.scalars(0, {name: 1.0})
    with pytest.raises(ValueError, match="allowed: area/quantity"):
        logger.text(0, name, "text")
    with pytest.raises(ValueError, match="allowed: area/quantity"):
        logger.histograms(0, {name: np.ones(3)})
    logger.close()


def test_an_array_is_no_scalar(tmp_path):
    logger = Logger(tmp_path, start_step=0)
    with pytest.raises(ValueError, match=r"'a/b' has shape \(2,\); allowed: one number"):
        logger.scalars(0, {"a/b": np.ones(2)})
    logger.close()


def test_resume_purges_and_leaves_no_step_twice(tmp_path):
    logger = Logger(tmp_path, start_step=0)
    for step in range(7):
        logger.scalars(step, {"reward/mean": step})
        logger.text(step, "samples/train", f"first {step}")
        logger.histograms(step, {"credit/advantage": np.arange(step + 2.0)})
    logger.close()  # within one second of the next: the file names must differ
    resumed = Logger(tmp_path, start_step=3)
    for step in range(3, 5):
        resumed.scalars(step, {"reward/mean": 10 + step})
        resumed.text(step, "samples/train", f"second {step}")
        resumed.histograms(step, {"credit/advantage": np.arange(step + 2.0)})
    resumed.close()
    expected = [(0, 0), (1, 1), (2, 2), (3, 13), (4, 14)]
    assert curve(tmp_path, "reward/mean") == lines(tmp_path, "reward/mean") == expected
    # The page keeps text as tensors and purges them; EventAccumulator does not.
    page = PageAccumulator(str(tmp_path / "tb"), tensor_size_guidance={"text": 0}).Reload()
    texts = page.Tensors("samples/train/text_summary")
    assert [event.tensor_proto.string_val[0].decode() for event in texts] == [
        "first 0", "first 1", "first 2", "second 3", "second 4",
    ]  # fmt: skip
    assert [event.step for event in read(tmp_path).Histograms("credit/advantage")] == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert len(list((tmp_path / "tb").iterdir())) == 2


def test_many_resumes_stay_in_order(tmp_path):
    for start in range(12):  # the twelfth file must not sort before the second
        logger = Logger(tmp_path, start_step=start)
        logger.scalars(start, {"reward/mean": start})
        logger.scalars(start + 1, {"reward/mean": -1})  # lost by a kill
        logger.close()
    expected = [(step, step) for step in range(12)] + [(12, -1)]
    assert curve(tmp_path, "reward/mean") == lines(tmp_path, "reward/mean") == expected


def test_a_line_or_record_torn_by_a_kill_is_left_out(tmp_path):
    logger = Logger(tmp_path, start_step=0)
    for step in range(4):
        logger.scalars(step, {"reward/mean": step})
    logger.close()
    events = next((tmp_path / "tb").iterdir())
    for path in (events, tmp_path / "metrics.jsonl"):
        path.write_bytes(path.read_bytes()[:-5])
    resumed = Logger(tmp_path, start_step=3)
    resumed.scalars(3, {"reward/mean": 13})
    resumed.close()
    expected = [(0, 0), (1, 1), (2, 2), (3, 13)]
    assert curve(tmp_path, "reward/mean") == lines(tmp_path, "reward/mean") == expected


def test_histograms_hold_what_is_finite(tmp_path):
    logger = Logger(tmp_path, start_step=0)
    values = np.array([[0.0, 1.0, np.nan], [2.0, 5.0, np.inf]], np.float32)
    logger.histograms(2, {"credit/advantage": values, "response/length": np.array([3, 3, 3])})
    logger.histograms(3, {"credit/advantage": np.full(2, np.nan), "loss/ratio": np.zeros(0)})
    logger.close()
    events = read(tmp_path)
    assert sorted(events.Tags()["histograms"]) == ["credit/advantage", "response/length"]
    (event,) = events.Histograms("credit/advantage")
    found = event.histogram_value
    assert (event.step, found.min, found.max, found.num, found.sum) == (2, 0.0, 5.0, 4, 8.0)
    assert sum(found.bucket) == 4
    (event,) = events.Histograms("response/length")
    assert (event.histogram_value.num, event.histogram_value.sum) == (3, 9)
    assert curve(tmp_path, "log/nonfinite") == [(2, 2), (3, 2)]
    assert logger.nonfinite == 4


ROWS = [
    {
        "prompt": "3 + 4 - 1 =",
        "response": "6",
        "reward": 1.0,
        "correct": True,
        "stop_reason": "stop",
    },
    {
        "prompt": "a | b\n*bold* _it_ `x` <script>alert(1)</script> & [l](http://x) \\| #h ~s~",
        "response": "1. -6 > 5 \r\n| x |",
        "reward": -0.3333333,
        "correct": False,
        "stop_reason": "length",
    },
    {"prompt": "", "response": "", "reward": 0.0, "correct": None, "stop_reason": "parse-error"},
]


def test_samples_read_as_they_were(tmp_path):
    logger = Logger(tmp_path, start_step=0)
    logger.text(3, "samples/train", samples_table(ROWS))
    logger.close()
    (event,) = read(tmp_path).Tensors("samples/train/text_summary")
    markdown = event.tensor_proto.string_val[0].decode()
    shown = markdown_to_safe_html(markdown)
    assert "<script" not in shown and "<em>" not in shown and "<a " not in shown
    table = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in shown.split("<tr>")[1:]]
    texts = [[html.unescape(cell.replace("<br>", "\n")) for cell in row] for row in table]
    assert texts[0] == ["prompt", "response", "reward", "correct", "stop"]
    assert texts[1] == ["3 + 4 - 1 =", "6", "1", "yes", "stop"]
    prompt, response = ROWS[1]["prompt"], ROWS[1]["response"].replace("\r\n", "\n")
    assert texts[2][:2] == [prompt, response]
    assert texts[2][2:] == ["-0.333", "no", "length"]
    assert texts[3] == ["", "", "0", "", "parse-error"]


def test_escape_keeps_plain_text_plain():
    assert escape("What is 3 plus 4?") == "What is 3 plus 4?"
    assert escape("7|8") == "7&#124;8"
    assert escape("half \ud83d") == "half ?"  # what a tokenizer may cut, UTF-8 cannot hold
    assert escape("a\nb\r\nc") == "a<br>b<br>c"


def test_layout_shows_names_that_the_step_writes(tmp_path):
    Logger(tmp_path, start_step=0).close()
    (event,) = read(tmp_path).Tensors("custom_scalars__config__")
    messages: Any = layout_pb2  # its classes are made at import
    layout = messages.Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == list(HEALTH)
    patterns = [tag for c in layout.category for chart in c.chart for tag in chart.multiline.tag]
    for name in ("eval/avg_at_4", "reward/mean", "response/length_mean", "optim/grad_norm"):
        assert any(re.match(pattern, name) for pattern in patterns), name


def test_only_process_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    logger = Logger(tmp_path, start_step=0)
    logger.scalars(0, {"reward/mean": 1.0})
    logger.text(0, "samples/train", "x")
    logger.histograms(0, {"credit/advantage": np.ones(3)})
    logger.close()
    assert list(tmp_path.iterdir()) == []


FULL_DISK = """
import resource, signal, sys
from jaxrl.train.metrics import Logger

logger = Logger(sys.argv[1], start_step=0)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
for step in range(1000):
    logger.scalars(step, {"reward/mean": step})
"""


def test_a_full_disk_is_an_error_with_a_path_and_no_hang(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert ran.returncode != 0
    messages = [line for line in ran.stderr.splitlines() if line.startswith("OSError")]
    said = [line for line in messages if "curves could not be written: File too large" in line]
    assert said and str(tmp_path) in said[0]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_line():
    stream = io.StringIO()
    progress = Progress(10, stream)
    line = progress.update(
        1, {"loss": 1.5}, tokens=100, seconds=12.0, compile_seconds=10.0, label="sft"
    )
    assert line == "sft step 1/10  loss 1.5  50 tokens/s  0s elapsed  ETA 18s"  # 9 steps of 2 s
    line = progress.update(2, {"loss": 1.25}, tokens=100, seconds=1.0, label="sft")
    assert "ETA 15s" in line  # 8 steps of 0.9 x 2 + 0.1 x 1 s
    line = progress.update(3, {"reward": 0.5}, tokens=10, seconds=10.0, label="gvpo")
    assert line == "gvpo step 3/10  reward 0.5  1 tokens/s  0s elapsed  ETA 1m10s"
    assert len(stream.getvalue().splitlines()) == 3 and "\r" not in stream.getvalue()


def test_progress_in_place_on_a_terminal():
    stream = Terminal()
    progress = Progress(2, stream)
    first = progress.update(1, {"reward": 0.123}, tokens=1000, seconds=1.0)
    second = progress.update(2, {"reward": 1.0}, tokens=1000, seconds=1.0)
    progress.note("saved")
    progress.close()
    shown = stream.getvalue()
    assert shown == f"\r{first}\r{second.ljust(len(first))}\nsaved\n"


def test_duration():
    assert [duration(x) for x in (0, 59.4, 59.6, 3599.7, 86400)] == [
        "0s", "59s", "1m00s", "1h00m", "24h00m",
    ]  # fmt: skip


def test_metrics_lines_are_json(tmp_path):
    logger = Logger(tmp_path, start_step=0)
    logger.scalars(0, {"reward/mean": 0.5})
    logger.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert set(record) == {"step", "time", "reward/mean"} and record["time"] > 1.6e9
