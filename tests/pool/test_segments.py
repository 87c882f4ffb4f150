"""Journals of what is under way, and files of what was sealed together."""

import pytest

from jaxrl.pool import segments
from jaxrl.pool.segments import Spool
from jaxrl.pool.spool import RecordError, encode
from tests.pool.samples import same, sample


def journals(spool: Spool) -> list[str]:
    return sorted(path.name.split("-")[0] for path in (spool.root / "open").glob("*.calls"))


def test_calls_outlive_their_process_and_go_with_the_last_attempt(tmp_path):
    first = Spool(tmp_path)
    first.append(0, [(["a"], b"{1}"), (["ab"], b"{2}")])
    first.append(0, [(["a"], b"{3}")])
    again = Spool(tmp_path)  # the process was killed: another one goes on
    again.append(0, [(["a"], b"{4}")])
    assert sorted(again.calls("a")) == [b"{1}", b"{3}", b"{4}"] and again.calls("ab") == [b"{2}"]
    assert again.calls("b") == []
    again.discard(["a"])
    assert again.calls("a") == [b"{1}", b"{3}"]  # the other process's
    first.discard(["a"])
    assert journals(first) == ["0"]  # ab is in it
    first.discard(["ab", "never there"])
    assert journals(first) == []


def test_a_call_that_was_cut_off_is_left_out(tmp_path):
    spool = Spool(tmp_path)
    spool.append(0, [(["a"], b"{1}"), (["a"], b"{2}")])
    (path,) = (tmp_path / "open").iterdir()
    path.write_bytes(path.read_bytes()[:-2])
    assert Spool(tmp_path).calls("a") == [b"{1}"]


def test_a_new_epoch_forgets_the_calls_of_older_ones_alone(tmp_path):
    spool = Spool(tmp_path)
    for epoch in (0, 1, 2):
        spool.append(epoch, [([f"of-{epoch}"], b"{}")])
    assert spool.forget(2) == 2 and journals(spool) == ["2"]
    assert spool.calls("of-2") == [b"{}"]


def test_a_long_journal_is_written_anew_without_what_was_discarded(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "LONG", 4000)
    spool = Spool(tmp_path)
    spool.append(0, [(["kept"], b"{first}")])
    for number in range(100):
        spool.append(0, [([f"k{number}"], b"x" * 100)])
        spool.discard([f"k{number}"])
    assert spool.calls("kept") == [b"{first}"] and spool.bytes() < 5000


@pytest.mark.parametrize("bad", [(["a b"], b"{}"), ([""], b"{}"), ([], b"{}"), (["a"], b"1\n2")])
def test_what_would_break_a_journal_is_refused(tmp_path, bad):
    spool = Spool(tmp_path)
    with pytest.raises(ValueError, match="allowed"):
        spool.append(0, [(["good"], b"{}"), bad])
    assert spool.calls("good") == []


def test_attempts_that_are_sealed_together_are_damaged_alone(tmp_path):
    spool = Spool(tmp_path)
    attempts = [[sample(sample=n), sample(sample=n, reward=0.5)] for n in range(3)]
    placed = spool.seal((7, 0, 0), [b"".join(map(encode, branches)) for branches in attempts])
    assert len({one.segment for one in placed}) == 1
    path = tmp_path / placed[0].segment
    data = bytearray(path.read_bytes())
    data[placed[1].offset + placed[1].bytes // 2] ^= 1
    path.write_bytes(data)
    for at in (0, 2):
        found = spool.fetch(placed[at])
        assert all(same(*pair) for pair in zip(found, attempts[at], strict=True))
    with pytest.raises(RecordError, match=f"at byte {placed[1].offset}: sha256"):
        spool.fetch(placed[1])
    (kept,) = (tmp_path / "quarantine").glob("*.bytes")
    assert len(kept.read_bytes()) == placed[1].bytes
    assert spool.gc([placed[0].segment]) == len(data)
    with pytest.raises(RecordError, match="No such file"):
        spool.fetch(placed[0])


def test_no_seal_replaces_another(tmp_path):
    spool = Spool(tmp_path)
    one, two = (spool.seal((7, 0, 0), [encode(sample(reward=r))])[0] for r in (0.0, 1.0))
    assert [spool.fetch(at)[0].reward for at in (one, two)] == [0.0, 1.0]
