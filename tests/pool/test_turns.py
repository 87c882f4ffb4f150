"""Attempts without an agent stand in columns: what comes of them is what came of each by itself."""

import dataclasses
from typing import Any

import pytest

from jaxrl.pool.engines import Sampled
from jaxrl.pool.rollout import Failure, StopReason, Version
from jaxrl.pool.segments import Spool
from jaxrl.pool.spool import RecordError, index, read, read_at
from jaxrl.pool.turns import fit
from tests.pool.samples import same
from tests.pool.scripted import FIRST, Scripted, answer_of
from tests.pool.serving import gateway


@pytest.fixture
def place(tmp_path):
    with gateway(tmp_path, Scripted(answer_of)) as found:
        yield found


def leased(place, *numbers: int) -> list[str]:
    """Tokens of new groups of one sample, in the order of the groups."""
    for number in numbers:
        place.open(f"{number}+1=")
    leases = place.work("lease", {"owner": "a", "most": 99}).json()["leases"]
    return [one["token"] for one in sorted(leases, key=lambda one: one["group"])]


def sealed(place, *told: dict[str, Any]) -> None:
    assert place.work("seal", {"attempts": told}).json() == {"results": [{}] * len(told)}


def test_a_row_is_the_rollout_that_its_attempt_alone_would_be(place):
    """Each verdict twice: plain, and with a stop reason, which sends it the other way."""
    tokens = leased(place, 3, 3, 9, 9, 99, 99)
    place.work("generate", {"tokens": tokens})
    verdicts: list[dict[str, Any]] = [
        {"reward": 1.0, "correct": True, "components": {"score": 0.5}, "facts": {"a": [1]}},
        {"reward": 0.0},
        {"failure": "judge"},
    ]
    told = [{"token": t, **verdicts[n // 2]} for n, t in enumerate(tokens)]
    sealed(place, *told[::2])
    sealed(place, *[one | {"stop_reason": "stop"} for one in told[1::2]])
    rows = [place.ledger.members(group)[0].sealed.row for group in range(6)]
    assert rows == [0, -1, 1, -1, 2, -1]
    rollouts = [place.sealed(group)[0] for group in range(6)]
    for row, alone in zip(rollouts[::2], rollouts[1::2], strict=True):
        alike = {"group_id": row.group_id, "times": row.times}
        alike["facts"] = alone.facts | {"generate_s": row.facts["generate_s"]}
        assert row.times.keys() == alone.times.keys() and row.facts["generate_s"] > 0
        assert same(row, dataclasses.replace(alone, **alike))
    assert [one.text for one in rollouts[::2]] == ["4", "10", "100"]
    assert rollouts[4].failure is Failure.JUDGE and rollouts[4].versions == (FIRST,)


def test_a_damaged_record_of_many_is_set_aside_with_all_of_it(place):
    """Written together, damaged together; what lies beside it in other files is whole."""
    tokens = leased(place, 1, 2, 3)
    place.work("generate", {"tokens": tokens})
    sealed(place, *[{"token": token, "reward": 1.0} for token in tokens[:2]])
    sealed(place, {"token": tokens[2], "reward": 1.0})
    first, second, other = (place.ledger.members(group)[0].sealed for group in range(3))
    assert first[:4] == second[:4] and (first.row, second.row) == (0, 1)
    path = place.spool.root / first.segment
    entries, _ = index(path)
    assert [(one.group_id, one.row) for one in entries] == [(0, 0), (1, 1)]
    assert [read_at(one).text for one in entries] == [one.text for one in read(path)] == ["2", "3"]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    spool = Spool(place.spool.root)
    for one in (first, second):
        with pytest.raises(RecordError, match="sha256"):
            spool.fetch(one)
    assert spool.fetch(other)[0].text == "4"
    (kept,) = (place.spool.root / "quarantine").glob("*.bytes")
    assert len(kept.read_bytes()) == first.bytes
    assert len(index(path, quarantine=path.parent / "aside")[1]) == 1


def test_a_gateway_that_is_started_again_knows_what_was_said(tmp_path):
    generator = Scripted(answer_of)
    with gateway(tmp_path, generator) as place:
        tokens = leased(place, 3, 4)
        answers = place.work("generate", {"tokens": tokens}).json()
    with gateway(tmp_path, generator) as place:
        again = place.work("generate", {"tokens": tokens[::-1], "again": True}).json()
        assert again["answers"] == answers["answers"][::-1] and len(generator.requests) == 2
        sealed(place, *[{"token": token, "reward": 1.0} for token in tokens])
        assert [place.sealed(group)[0].text for group in range(2)] == ["4", "5"]


def test_an_attempt_that_asks_again_goes_on_from_its_row(place):
    (token,) = leased(place, 3)
    place.work("generate", {"tokens": [token]})
    assert place.work("state", {"token": token}).json() == {"calls": 1, "text": "4", "full": False}
    assert place.post(f"/{token}/v1/completions", {"prompt": "8+1="}).json()["choices"]
    assert place.seal(token) == {}
    trained, other = place.sealed(0)
    assert (trained.text, other.text) == ("9", "4")


GOOD: dict[str, Any] = dict(
    tokens=[5, 2],
    logp=[-0.5, 0.0],
    version_index=[0, 0],
    versions=[FIRST],
    stop_reason=StopReason.STOP,
)


@pytest.mark.parametrize(
    "bad",
    [
        {"tokens": [], "logp": [], "version_index": []},
        {"tokens": [5]},
        {"tokens": [5, 6, 2], "logp": [-0.5] * 3, "version_index": [0] * 3},
        {"logp": [-0.5]},
        {"logp": [-0.5, float("nan")]},
        {"logp": [-0.5, 0.1]},
        {"version_index": [0, 1]},
        {"version_index": [0]},
        {"versions": []},
        {"versions": [Version(0, 1, "later")]},
        {"versions": [FIRST, Version(0, 1, "later")]},
        {"trainable": False},
    ],
)
def test_what_is_to_be_said_of_one_alone_stands_in_no_turn(bad):
    good = Sampled(**GOOD)
    assert fit([good, good], (0, 0), 2) and not fit([good, good], (0, 1), 2)
    assert not fit([good, Sampled(**(GOOD | bad))], (0, 0), 2)
    assert not fit([Sampled(**(GOOD | bad)), good], (0, 0), 2)
