"""Records on disk: what is written comes back; what was damaged does not, and says where."""

import json
import struct

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.pool import spool
from jaxrl.pool.rollout import COLUMNS, Rollout
from jaxrl.pool.spool import RecordError, Writer, index, read, read_at, walk
from tests.pool.samples import rollouts, same, sample

PREAMBLE = 12  # bytes before the first record


def write(path, records) -> None:
    with Writer(path) as writer:
        for record in records:
            writer.append(record)


@settings(max_examples=60, deadline=None)
@given(records=st.lists(rollouts(), max_size=3))
def test_what_is_written_comes_back(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("spool") / "a.rollouts"
    write(path, records)
    back = list(read(path))
    assert len(back) == len(records)
    assert all(same(one, two) for one, two in zip(records, back, strict=True))


def test_the_format_is_what_the_docstring_says(tmp_path):
    """Read by hand, without the module."""
    path = tmp_path / "a.rollouts"
    write(path, [sample()])
    data = path.read_bytes()
    assert data[:8] == b"JAXRLREC" and struct.unpack("<I", data[8:12]) == (2,)
    magic, length, check = struct.unpack("<4sQI", data[12:28])
    assert magic == b"ROLL" and check == google_crc32c.value(struct.pack("<Q", length))
    assert len(data) == 28 + length
    blocks, at = [], 28
    while at < len(data):
        size, check = struct.unpack("<II", data[at : at + 8])
        blocks.append(data[at + 8 : at + 8 + size])
        assert google_crc32c.value(blocks[-1]) == check
        at += 8 + size
    header = json.loads(blocks[0])
    assert header["schema_version"] == 2 and header["group_id"] == 7
    assert header["idempotency_key"] == sample().idempotency_key
    assert header["columns"] == [[name, np.dtype(dtype).str] for name, dtype in COLUMNS.items()]
    assert np.frombuffer(blocks[1], "<u4").tolist() == [5, 6, 7, 2]
    assert np.frombuffer(blocks[4], "<f4").tolist() == [0, 0, -0.5, -0.125]


@settings(max_examples=80, deadline=None)
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_never_yields_a_record(tmp_path_factory, place, bit):
    path = tmp_path_factory.mktemp("spool") / "a.rollouts"
    records = [sample(sample=n) for n in range(3)]
    write(path, records)
    data = bytearray(path.read_bytes())
    place = PREAMBLE + place % (len(data) - PREAMBLE)
    data[place] ^= 1 << bit
    path.write_bytes(data)
    found = [item for _, item in walk(path)]
    whole = [item for item in found if isinstance(item, Rollout)]
    assert len(whole) < 3 and len(found) > len(whole)
    assert all(any(same(one, two) for two in records) for one in whole)
    with pytest.raises(RecordError, match=r"a\.rollouts at byte \d+"):
        list(read(path))


def test_a_broken_block_costs_one_record_and_names_its_place(tmp_path):
    path = tmp_path / "a.rollouts"
    write(path, [sample(sample=n) for n in range(3)])
    offsets = [offset for offset, _ in walk(path)]
    data = bytearray(path.read_bytes())
    data[offsets[2] - 1] ^= 1  # the last byte of the second record's last block
    path.write_bytes(data)
    with pytest.raises(RecordError, match=f"a.rollouts at byte {offsets[1]}: crc32c of block 6"):
        list(read(path))
    with pytest.raises(RecordError, match=f"at byte {offsets[1]}"):
        index(path)
    entries, damages = index(path, quarantine=tmp_path / "quarantine")
    assert [entry.sample for entry in entries] == [0, 2]
    assert [(damage.offset, damage.path) for damage in damages] == [(offsets[1], path)]
    kept = (tmp_path / "quarantine" / f"a-{offsets[1]}.bytes").read_bytes()
    assert kept == bytes(data[offsets[1] : offsets[2]])
    assert "crc32c" in (tmp_path / "quarantine" / f"a-{offsets[1]}.txt").read_text()


@pytest.mark.parametrize("cut", [1, 10, 300])
def test_a_truncated_file_keeps_what_came_before(tmp_path, cut):
    path = tmp_path / "a.rollouts"
    write(path, [sample(sample=n) for n in range(2)])
    last = [offset for offset, _ in walk(path)][-1]
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(RecordError, match=f"at byte {last}: the file ends inside of a record"):
        list(read(path))
    entries, damages = index(path, quarantine=tmp_path / "quarantine")
    assert [entry.sample for entry in entries] == [0] and len(damages) == 1


def test_a_newer_file_is_refused_even_with_a_quarantine(tmp_path):
    path = tmp_path / "a.rollouts"
    write(path, [sample()])
    data = bytearray(path.read_bytes())
    data[8] = 3
    path.write_bytes(data)
    message = "a.rollouts at byte 0: schema_version=3 is newer than this jaxrl reads"
    with pytest.raises(RecordError, match=message):
        list(read(path))
    with pytest.raises(RecordError, match=message):
        index(path, quarantine=tmp_path / "quarantine")


@pytest.mark.parametrize("data", [b"", b"JAXRL", b"something else entirely"])
def test_another_kind_of_file_is_refused(tmp_path, data):
    path = tmp_path / "a.rollouts"
    path.write_bytes(data)
    with pytest.raises(RecordError, match="at byte 0: this is no file of rollouts"):
        list(read(path))


def test_nothing_can_be_read_half(tmp_path):
    path = tmp_path / "a.rollouts"
    writer = Writer(path)
    writer.append(sample())
    assert not path.exists()
    writer.close()
    assert len(list(read(path))) == 1
    with pytest.raises(RuntimeError), Writer(path) as writer:
        writer.append(sample(sample=9))
        raise RuntimeError("the process dies")
    assert [rollout.sample for rollout in read(path)] == [1]
    assert [file.name for file in tmp_path.iterdir()] == ["a.rollouts"]


def test_what_does_not_fit_is_not_written(tmp_path):
    with Writer(tmp_path / "a.rollouts") as writer:
        writer.append(sample())
        with pytest.raises(ValueError, match="logp"):
            writer.append(sample(logp=np.zeros(3, np.float32)))
        with pytest.raises(ValueError, match=r"column facts/grid is float64\[2, 0\]"):
            writer.append(sample(facts={"grid": np.zeros((2, 0))}))
    assert len(list(read(tmp_path / "a.rollouts"))) == 1


def test_a_fact_keeps_its_axes(tmp_path):
    routes = np.arange(12, dtype=np.int16).reshape(2, 3, 2)
    write(tmp_path / "a.rollouts", [sample(facts={"token_routes": routes})])
    found = list(read(tmp_path / "a.rollouts"))
    np.testing.assert_array_equal(found[0].facts["token_routes"], routes)


def test_a_record_replaced_after_indexing_is_refused(tmp_path):
    path = tmp_path / "a.rollouts"
    write(path, [sample()])
    (entry,), _ = index(path)
    assert same(read_at(entry), sample())
    write(path, [sample(reward=0.25)])
    with pytest.raises(RecordError, match="replaced after it was indexed"):
        read_at(entry)


def test_a_directory_without_records_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file of rollouts \(\*\.rollouts\)"):
        index(tmp_path)
    with pytest.raises(FileNotFoundError):
        index(tmp_path / "absent.rollouts")


def test_files_are_indexed_in_the_order_of_their_names(tmp_path):
    for name in ("b", "a", "c"):
        write(tmp_path / f"{name}{spool.SUFFIX}", [sample(run_id=name)])
    (tmp_path / "half.rollouts.tmp").write_bytes(b"left behind")
    assert [entry.run_id for entry in index(tmp_path)[0]] == ["a", "b", "c"]
