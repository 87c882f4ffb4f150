"""The README's table of speed is what the kept lines say, and says where there are none."""

import json

from experiments.bench import page


def test_the_table_is_the_kept_lines():
    kept = json.loads(page.RESULTS.read_text())
    between = page.README.read_text().split(page.MARKS[0])[1].split(page.MARKS[1])[0]
    assert between.strip() == page.table(kept).strip()
    assert {"date", "commit", "seeds", "versions", "note", "rows"} == set(kept)


def test_a_bar_takes_its_last_line_or_says_that_there_is_none():
    bar = page.BARS[0]
    names = {"bench": bar.bench, "case": bar.case, "who": bar.who}
    row = {**names, "unit": bar.unit, "ratio_to": bar.to, "value": 1.0}
    other = {**row, "ratio_to": "somebody"}
    assert bar.found([row, {**row, "value": 1.625}, other]) == "1.625"
    assert bar.found([other]) == bar.found([{**row, "value": None}]) == "unmeasured"
