"""Runs side by side: arms, seeds, pairs, and numbers worked by hand."""

import csv
import json

import pytest

from jaxrl import compare


def run(folder, accuracy, *, beta, seed, finished=True, before=0.25):
    """A run's folder as far as it is compared."""
    folder.mkdir(parents=True)
    config = {"seed": seed, "algorithm": {"name": "gvpo", "beta": beta}, "log": {"samples": seed}}
    (folder / "config.json").write_text(json.dumps(config))
    lines = [{"step": step, "reward/mean": accuracy * step} for step in range(3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        held = [{"k": 4, "avg_at_4": x, "pass_at_4": x, "greedy": x} for x in (before, accuracy)]
        summary = {"held_out": dict(zip(("before", "after"), held, strict=True))}
        (folder / "summary.json").write_text(json.dumps(summary))
    return str(folder)


@pytest.fixture
def sweep(tmp_path):
    for seed, (first, second) in enumerate([(0.2, 0.3), (0.4, 0.6)]):
        run(tmp_path / f"a{seed}", first, beta=0.1, seed=seed)
        run(tmp_path / f"b{seed}", second, beta=0.2, seed=seed)
    run(tmp_path / "b2", 0.0, beta=0.2, seed=2, finished=False)
    return tmp_path


def compared(root, **changes):
    asked = {"metrics": "reward/mean", "baseline": "", "level": 0.95, **changes}
    return compare.compare([str(root)], str(root / "out"), **asked)


def test_means_intervals_and_pairs(sweep):
    text = compared(sweep)
    # of .2 and .4: .3 +- 12.7062 * .1414 / sqrt(2); of the differences .1 and .2: .15 +- .6353
    assert "| beta=0.1 | 0 1 | 30.0 [-97.1, 157.1] |" in text
    assert "+15.0 [-48.5, 78.5] |" in text
    assert "Not finished, left out: 1" in text
    with (sweep / "out" / "compare.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 and {row["arm"] for row in rows} == {"beta=0.1", "beta=0.2"}
    gain = next(r for r in rows if r["arm"] == "beta=0.2" and r["result"] == "gain in avg@4")
    assert float(gain["mean"]) == pytest.approx(0.2)
    assert float(gain["difference"]) == pytest.approx(0.15)
    assert (sweep / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert (sweep / "out" / "compare.md").read_text() == text + "\n"


def test_other_seeds_are_not_paired(sweep):
    run(sweep / "a3", 0.3, beta=0.1, seed=3)
    row = next(line for line in compared(sweep).splitlines() if line.startswith("| beta=0.2"))
    assert row.endswith("|  |")
    table = compare.rows(compare.arms(compare.read([str(sweep)])[0]), "beta=0.2", 0.9)
    assert table[0]["seeds"] == "0 1 3" and table[0]["difference"] is None


def test_the_picture_shows_the_mean(sweep):
    found = compare.arms(compare.read([str(sweep)])[0])
    axes = compare.picture(found, "reward/mean", 0.95).axes[0]
    first = next(line for line in axes.lines if line.get_label() == "beta=0.1")
    assert list(first.get_ydata()) == pytest.approx([0, 0.3, 0.6])  # pyright: ignore


def test_what_cannot_be_compared_is_refused(sweep, tmp_path_factory):
    with pytest.raises(ValueError, match="'beta=9' is no arm; allowed: beta=0.1; beta=0.2"):
        compared(sweep, baseline="beta=9")
    with pytest.raises(ValueError, match="--metrics='rewards' matches no curve"):
        compared(sweep, metrics="rewards")
    with pytest.raises(ValueError, match="holds no run"):
        compare.read([str(tmp_path_factory.mktemp("empty"))])
    twice = run(tmp_path_factory.mktemp("more") / "a0", 0.2, beta=0.1, seed=0)
    with pytest.raises(ValueError, match="arm 'beta=0.1' has a seed twice"):
        compare.arms(compare.read([str(sweep), twice])[0])


def test_a_run_that_cannot_be_read_is_named(sweep):
    summary = sweep / "a1" / "summary.json"
    whole = summary.read_text()
    for text, message in {
        whole.replace("0.4", "NaN"): "a1: .*nan.*; allowed: finite numbers",
        whole[:20]: "a1 cannot be read: JSONDecodeError",
        "{}": "a1 cannot be read: KeyError: 'held_out'",
        whole.replace("_at_4", "_at_8").replace('"k": 4', '"k": 8'): "a0 has avg@4.*a1 has avg@8",
    }.items():
        summary.write_text(text)
        with pytest.raises(ValueError, match=message):
            compare.read([str(sweep)])


def test_a_curve_has_a_gap_where_a_number_is_none(sweep):
    with (sweep / "a1" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/mean": NaN}\n')
    axes = compare.picture(compare.arms(compare.read([str(sweep)])[0]), "reward/mean", 0.95).axes[0]
    first = next(line for line in axes.lines if line.get_label() == "beta=0.1")
    assert list(first.get_xdata()) == [0, 1, 2]  # pyright: ignore
