"""What a gateway does for many samples at once, and for workers that wait for some."""

import concurrent.futures
import json
import math
import time
from typing import Any

import httpx2
import pytest

from jaxrl.pool import order
from jaxrl.pool.compact import compact, parsed
from jaxrl.pool.ledger import Sealed
from jaxrl.pool.ledger_sqlite import SqliteLedger
from jaxrl.pool.rollout import Failure, StopReason, Version
from tests.pool.scripted import FIRST, Scripted, answer_of
from tests.pool.serving import KEY, gateway


@pytest.fixture
def place(tmp_path):
    with gateway(tmp_path, Scripted(answer_of)) as found:
        yield found


def test_a_worker_waits_for_samples_and_one_that_is_gone_gets_none(place):
    headers = {"authorization": f"Bearer {KEY}"}
    asked = {"owner": "test", "most": 8, "wait_s": 20}
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.post(f"{place.url}/work/lease", json=asked, headers=headers, timeout=0.3)
    place.open()
    time.sleep(0.2)
    assert place.ledger.counts()["slots_pending"] == 1  # not lent to nobody
    assert len(place.work("lease", asked).json()["leases"]) == 1
    with concurrent.futures.ThreadPoolExecutor() as threads:
        waiting = threads.submit(place.work, "lease", asked)
        time.sleep(0.1)
        assert not waiting.done()
        place.open()
        assert len(waiting.result(10).json()["leases"]) == 1
    for wrong in (-1, 61, math.nan):
        told = httpx2.post(
            f"{place.url}/work/lease",
            content=json.dumps({**asked, "wait_s": wrong}),
            headers=headers,
        )
        assert told.status_code == 400 and "wait_s=" in told.json()["error"]["message"]


def test_who_waits_hears_of_news_and_looks_seldom_besides(place, monkeypatch):
    monkeypatch.setattr(order, "RARE_S", 30.0)
    assert place.work("news", {}).status_code == 200
    with concurrent.futures.ThreadPoolExecutor() as threads:
        waiting = threads.submit(place.work, "lease", {"owner": "a", "most": 8, "wait_s": 20})
        time.sleep(0.2)
        place.open()
        time.sleep(0.3)
        assert not waiting.done()
        place.work("news", {})
        assert len(waiting.result(2).json()["leases"]) == 1


def test_a_batch_names_each_attempt_once(place):
    token = place.lease()
    told = place.work("generate", {"tokens": [token, token]})
    assert told.status_code == 400 and "there twice" in told.json()["error"]["message"]


def test_an_outcome_that_fits_nothing_is_refused_by_itself(place):
    """The numbers of a batch are looked at together; what is wrong is said of whom it is."""
    place.open(samples=3)
    leases = place.work("lease", {"owner": "a", "most": 8}).json()["leases"]
    tokens = [lease["token"] for lease in leases]
    place.work("generate", {"tokens": tokens})
    rewards = (1.0, math.nan, 0.0)
    seals = [{"token": t, "reward": r} for t, r in zip(tokens, rewards, strict=True)]
    seals[2]["components"] = {"score": math.inf}
    told = httpx2.post(
        f"{place.url}/work/seal",
        content=json.dumps({"attempts": seals}),
        headers={"authorization": f"Bearer {KEY}"},
    )
    good, *bad = told.json()["results"]
    assert good == {} and [one["status"] for one in bad] == [400, 400]
    assert "reward=nan" in bad[0]["error"]
    assert [one.sample for one in place.ledger.members(0)] == [0]


def test_who_looks_for_work_in_vain_changes_nothing_and_reads_no_final_slot(tmp_path):
    """A run keeps all its slots: what is asked all the time must not become slower with them."""
    with gateway(tmp_path, Scripted(answer_of)) as place:
        ledger: Any = place.ledger
        assert isinstance(ledger, SqliteLedger)
        place.open(samples=2)
        sealed = Sealed("s", 0, 1, "d", FIRST, FIRST, 1.0, Failure.NONE, StopReason.STOP, True, 1)
        for lease in ledger.lease_many("w", 60, 2):
            ledger.seal(lease.token, sealed)
        asked: list[str] = []
        before = ledger._writer.total_changes
        ledger._reader.set_trace_callback(asked.append)
        assert ledger.lease_many("w", 60, 2) == [] and ledger.expire() == 0
        ledger.counts()
        ledger._reader.set_trace_callback(None)
        plans = [
            row["detail"]
            for query in asked
            for row in ledger._reader.execute(f"EXPLAIN QUERY PLAN {query}")
        ]
        assert ledger._writer.total_changes == before
    assert len(asked) >= 4
    whole = [plan for plan in plans if plan.startswith(("SCAN slots", "SCAN s"))]
    assert all("pending_slots" in plan or "lent_slots" in plan for plan in whole)


@pytest.mark.parametrize(
    "value",
    [
        {"b": 0.1, "a": [1e-7, -0.0, 5e-324, 1.7976931348623157e308]},
        {"whole": 2**70, "text": "\ud800", "none": None},
        {"text": "null", "sign": "\N{SNOWMAN}", "reason": StopReason.STOP},
    ],
)
def test_compact_json_comes_back_bit_for_bit(value):
    told = compact(value)
    assert b"\n" not in told and json.loads(told) == value
    assert list(json.loads(told)) == sorted(value)


@pytest.mark.parametrize("reward", [None, 0.5])
def test_compact_json_has_the_fields_of_dataclasses_and_no_nan(reward):
    version = Version(1, 2, "d")
    told = json.loads(compact({"version": version, "reward": reward}))
    assert told == {"reward": reward, "version": {"epoch": 1, "step": 2, "digest": "d"}}
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError):
            compact({"version": version, "reward": [reward, bad]})
    with pytest.raises(TypeError):
        compact({"reward": {1j}})


@pytest.mark.parametrize(
    "text",
    [
        b'{"b": [0.1, -0, -0.0, 1e5, 5e-324, 1.7976931348623157e308, 0.30000000000000004]}',
        b"[9223372036854775807, 18446744073709551616, -9223372036854775809, 123456789012345678901]",
        b'{"a": 1, "a": 2, "surrogate": "\\ud800", "text": "\xe2\x98\x83"}',
        b"[1e400, NaN, -Infinity]",
        b'{"proof": "0-1-12345678901234567890a-99999999999999999999", "n": 12345678901234567890}',
        b'{"proof": "a12345678901234567890", "n":-99999999999999999999}',
        b'["a12345678901234567890b12345678901234567890", 0.12345678901234567890, 1]',
        b"12345678901234567890",
        b"\xef\xbb\xbf[1]",
        b" null ",
    ],
)
def test_parsed_json_is_what_json_reads(text):
    assert repr(parsed(text)) == repr(json.loads(text))


def test_digits_within_a_proof_are_no_number(monkeypatch):
    """Of 500 tokens some have 19 digits in a row: json, which is slow, is not asked for that."""
    monkeypatch.setattr(json, "loads", None)
    assert parsed(b'{"tokens": ["0-1-0-a1234567890123456789012b"]}')["tokens"]
    with pytest.raises(TypeError):
        parsed(b'{"tokens": [1234567890123456789012]}')


@pytest.mark.parametrize("text", [b"", b"{", b"[1,]", b"'a'", b"01", b'"\xff"', b"1 2"])
def test_what_is_no_json_is_refused_in_the_words_of_json(text):
    with pytest.raises(ValueError) as theirs:
        json.loads(text)
    with pytest.raises(ValueError) as ours:
        parsed(text)
    assert str(ours.value) == str(theirs.value)
