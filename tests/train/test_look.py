"""What a run shows: a real TensorBoard, looked at by a real Chromium where there is one."""

import dataclasses
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.pool.contract import Group
from jaxrl.train import show, spread
from jaxrl.train.metrics import Logger, samples_table
from jaxrl.train.watch import StopConfig
from tests.pool.samples import sample


def counts(x, counted):
    return np.asarray(spread.counts(jnp.asarray(x), jnp.asarray(counted)))


# -- without a browser


def test_counts_add_up_and_lie_where_the_numbers_do():
    x = np.array([-2000.0, -1.0, 0.0, 3e-5, 0.5, 0.5, 9.0, 5e6, 7.0], np.float32)
    counted = np.array([1, 1, 1, 1, 1, 1, 1, 1, 0], bool)
    bins = counts(x, counted)
    assert bins.sum() == 8 and bins[0] == 1 and bins[-1] == 1  # beyond either end
    limits = spread.limits(bins)
    for value in (-1.0, 0.5, 9.0):
        place = int(np.searchsorted(limits, np.float32(value)))
        assert bins[place] == (x[:8] == np.float32(value)).sum(), value
    halves = [counts(x[i::2], counted[i::2]) for i in (0, 1)]
    assert np.array_equal(np.add(*halves), bins)
    assert bins[np.searchsorted(limits, 0.0)] == 2  # 0 and what is next to it share one


def test_an_entropy_that_collapsed_or_a_kl_that_grew_is_out_of_bounds():
    stop = StopConfig(entropy_below=0.1, kl_above=2.0, kl="loss/anchor_kl_mean", takes=3)
    fine = {"optim/updates": 1, "loss/entropy_mean": 0.2, "loss/anchor_kl_mean": 1.9}
    assert stop.beyond(fine) == ""
    low = stop.beyond(fine | {"loss/entropy_mean": 0.05})
    assert low == "loss/entropy_mean is 0.05, train.stop.entropy_below=0.1"
    high = stop.beyond(fine | {"loss/anchor_kl_mean": 2.5})
    assert high == "loss/anchor_kl_mean is 2.5, train.stop.kl_above=2"
    assert stop.beyond({"optim/updates": 0, "loss/entropy_mean": 0.0}) == ""
    with pytest.raises(ValueError, match="train.stop.kl_above asks for .*allowed: loss/entropy_me"):
        stop.beyond({"optim/updates": 1, "loss/entropy_mean": 0.2})
    with pytest.raises(ValueError, match="train.stop.kl=''"):
        StopConfig(entropy_below=0.0, kl_above=2.0, kl="", takes=3)


def test_tokens_carry_the_advantage_of_their_row():
    one = sample(text="<b>")
    rows = {
        "tokens": np.array([[5, 6, 7, 2], [5, 6, 7, 2], [1, 1, 1, 1]]),
        "acted": np.array([[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1]], bool),
        "advantage": np.array([[9, 9, 0.5, 0.5], [9, 9, -0.25, 0], [0, 0, 0, 0]], np.float32),
    }
    groups = [Group(7, "h", (one, one, dataclasses.replace(one, tokens=one.tokens + 1)))]
    found = show.acted(groups, rows, lambda ids: f"<{ids[0]}>", 3)
    assert found == [[("<7>", 0.5), ("<2>", 0.5)], [("<7>", -0.25), ("<2>", 0.0)], None]
    assert found[0] and found[1]
    assert show.marked(found[0]) == [("🟩+0.5 ", "<7><2>")]
    assert show.marked(found[1]) == [("🟥-0.25 ", "<7>"), ("⬜+0 ", "<2>")]
    told = [{"prompt": "<p>", "response": "<b>", "reward": r} for r in (1.0, 0.0, None)]
    page = show.page("step 3", told, found)
    assert "&lt;7&gt;" in page and "<7>" not in page and "<b>" not in page and "<p>" in page
    assert "rgba(0,160,0,1.00)" in page and "rgba(220,0,0,0.50)" in page


def test_an_expert_that_gets_all_routes_is_dark_and_an_idle_one_light():
    picture = show.loads_picture(np.array([[4.0, 4.0], [8.0, 0.0]]))
    assert picture.dtype == np.uint8 and picture.shape == (24, 24, 3)
    even, all_routes, none = picture[0, 0].sum(), picture[12, 0].sum(), picture[12, 12].sum()
    assert all_routes < even < none and (picture[0, 0] == picture[0, 12]).all()


# -- with one


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of a sweep, as their loggers write them."""
    root = tmp_path_factory.mktemp("sweep")
    for seed in (0, 1):
        logger = Logger(root / f"beta=0.1,seed={seed}-aa", start_step=0)
        logger.hparams({"algorithm.beta": 0.1, "seed": seed, "config": "configs/gvpo.py"}, k=4)
        for step in range(3):
            curves = {"reward/mean": 0.25 * step, "eval/avg_at_4": 0.1, "eval/greedy": 0.1 + seed}
            curves |= {"loss/entropy_mean": 1.0, "optim/grad_norm": 1.0, "throughput/mfu": 0.4}
            logger.scalars(step, curves | {"response/length_mean": 12.0, "loss/total": 0.1})
            bins = counts(np.linspace(-2, 2, 99), np.ones(99, bool))
            logger.counted(step, "credit/advantage", bins)
            logger.image(step, "router/load", show.loads_picture(np.ones((2, 4))))
            row = {"prompt": "2+2=", "response": "4", "reward": 1.0, "correct": True}
            told = [row | {"stop_reason": "stop"}]
            logger.text(step, "samples/rollouts", samples_table(told, [[("🟩+0.5 ", "4")]]))
        logger.close()
    return root


def reached(port, path, seconds=60):
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
                return answer.read().decode()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.3)


@pytest.fixture(scope="module")
def board(runs):
    """A TensorBoard over the sweep's folder, when it has read all of it: its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = ["-m", "tensorboard.main", "--logdir", str(runs), "--port", str(port)]
    process = subprocess.Popen(
        [sys.executable, *words, "--bind_all", "--load_fast=false"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 90
        while reached(port, "data/plugin/scalars/tags").count("eval/greedy") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        yield port
    finally:
        process.terminate()
        process.wait(20)


def browser():
    """Chromium of the system, or the one that playwright has fetched; skips, with why, if none."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next((p for p in map(shutil.which, ("chromium", "chromium-browser")) if p), None)
    return driver, {"executable_path": found} if found else {}


SEEN = {
    # The table of HParams: both runs, what they were set to, and where they came.
    "hparams": ("seed=0-aa/tb", "seed=1-aa/tb", "algorithm.beta", "eval/greedy", "1.1000"),
    "custom_scalars": ("1. Is it learning?", "2. Is it still itself?", "held-out accuracy"),
    "text": ("🟩+0.5",),
    "images": ("router/load",),
    "histograms": ("advantage",),
}


@pytest.mark.slow
def test_the_first_screen_and_the_hparams_page(board):
    driver, where = browser()
    with driver.sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(args=["--no-sandbox"], **where)
        except driver.Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")
        page = chromium.new_page(viewport={"width": 1600, "height": 1200})
        page.set_default_timeout(60_000)
        for tab, texts in SEEN.items():
            page.goto(f"http://127.0.0.1:{board}/#{tab}")
            for text in texts:
                page.get_by_text(text).locator("visible=true").first.wait_for()
            page.goto("about:blank")
        chromium.close()
