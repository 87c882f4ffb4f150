"""Checkpoints on a real disk: whole or absent, verified, refused by name, safe on a full disk."""

import collections
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.train.checkpoint import SCHEMA_VERSION, CheckpointError, Checkpoints, differences

Adam = collections.namedtuple("Adam", "count mu nu")

HOST = {"phase": "gvpo", "pool": {"cursor": 3, "held": [1, 2]}, "config": {"model": {"width": 4}}}


def state_of(seed: int, width: int = 4):
    key = jax.random.key(seed)
    params = {"blocks/query/kernel": jax.random.normal(key, (8, width))}
    return {
        "step": jnp.int32(seed),
        "key": jax.random.key_data(key),
        "params": params,
        "frozen": {"router": jnp.full((3,), 1 / 3, jnp.bfloat16)},
        "opt_state": (Adam(jnp.int32(seed), params, params), ()),
        "nothing": jnp.zeros((0, 2)),
    }


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True)


@pytest.fixture
def checkpoints(tmp_path):
    made = Checkpoints(tmp_path / "checkpoints", keep=3)
    yield made
    made.close()


def data_files(root: Path) -> list[Path]:
    """Files that hold array bytes, the largest first."""
    files = [path for path in root.glob("state/**/*") if path.is_file()]
    return sorted(files, key=lambda path: -path.stat().st_size)


def test_comes_back_bit_for_bit(checkpoints):
    checkpoints.save(7, state_of(7), HOST)
    read = checkpoints.latest(lambda _: state_of(0))
    assert (read.step, read.fallbacks, read.host) == (7, 0, HOST)
    assert_same(read.state, state_of(7))


def test_template_may_be_shapes_only(checkpoints):
    checkpoints.save(7, state_of(7), HOST)
    assert_same(
        checkpoints.latest(lambda _: jax.eval_shape(lambda: state_of(0))).state, state_of(7)
    )


def test_none_where_nothing_was_saved(checkpoints):
    assert checkpoints.latest(lambda _: state_of(0)) is None
    checkpoints.directory.mkdir(parents=True)
    assert checkpoints.latest(lambda _: state_of(0)) is None


def test_newest_ones_stay(checkpoints):
    for step in range(2, 12, 2):
        checkpoints.save(step, state_of(step), HOST)
    assert checkpoints.steps() == [6, 8, 10]
    assert sorted(path.name for path in checkpoints.directory.iterdir()) == ["10", "6", "8"]
    assert checkpoints.latest(lambda _: state_of(0)).step == 10


def test_restores_onto_another_mesh(checkpoints):
    devices = np.array(jax.devices())
    columns = NamedSharding(Mesh(devices[:4], ("fsdp",)), PartitionSpec(None, "fsdp"))
    rows = NamedSharding(Mesh(devices[:8], ("data",)), PartitionSpec("data", None))
    kernel = jax.random.normal(jax.random.key(0), (8, 4))
    checkpoints.save(1, {"kernel": jax.device_put(kernel, columns)}, HOST)
    for sharding in (rows, columns, jax.sharding.SingleDeviceSharding(devices[5])):
        template = {"kernel": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)}
        read = checkpoints.latest(lambda _, it=template: it).state["kernel"]
        assert read.sharding == sharding
        np.testing.assert_array_equal(np.asarray(read), np.asarray(kernel))


def test_half_written_directories_are_ignored(checkpoints):
    checkpoints.save(1, state_of(1), HOST)
    checkpoints.save(2, state_of(2), HOST)
    (checkpoints.directory / "2" / "manifest.json").unlink()  # killed before the commit
    (checkpoints.directory / "3.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    read = checkpoints.latest(lambda _: state_of(0))
    assert (read.step, read.fallbacks) == (1, 0)
    checkpoints.save(2, state_of(5), HOST)  # over the remains
    assert_same(checkpoints.latest(lambda _: state_of(0)).state, state_of(5))


def test_a_step_saved_again_replaces_the_first(checkpoints):
    checkpoints.save(1, state_of(1), HOST)
    checkpoints.save(1, state_of(2), HOST | {"phase": "next"})
    checkpoints.save(1, state_of(3), HOST | {"phase": "third"})
    read = checkpoints.latest(lambda _: state_of(0))
    assert read.host["phase"] == "third"
    assert_same(read.state, state_of(3))
    assert [path.name for path in checkpoints.directory.iterdir()] == ["1.2"]


def truncate(root: Path) -> str:
    path = data_files(root)[0]
    path.write_bytes(path.read_bytes()[:-1])
    return path.name


def flip(root: Path) -> str:
    path = data_files(root)[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path.name


def remove(root: Path) -> str:
    data_files(root)[0].unlink()
    return "missing"


def flip_host(root: Path) -> str:
    (path,) = [path for path in root.glob("host/*") if b"gvpo" in path.read_bytes()]
    path.write_bytes(path.read_bytes().replace(b"gvpo", b"gvpq"))
    return f"host/{path.name}"


def flip_manifest(root: Path) -> str:
    path = root / "manifest.json"
    text = path.read_text().replace("float32[8,4]", "float32[8,5]")
    path.write_text(text)
    return "manifest.json"


def empty_manifest(root: Path) -> str:
    (root / "manifest.json").write_text("")
    return "manifest.json"


@pytest.mark.parametrize(
    "damage", [truncate, flip, remove, flip_host, flip_manifest, empty_manifest]
)
def test_a_corrupt_newest_falls_back_and_is_named(checkpoints, damage):
    for step in (1, 2, 3):
        checkpoints.save(step, state_of(step), HOST)
    named = damage(Path(checkpoints.directory) / "3")
    with pytest.warns(RuntimeWarning, match=rf"checkpoints/3 is corrupt .*{named}"):
        read = checkpoints.latest(lambda _: state_of(0))
    assert (read.step, read.fallbacks) == (2, 1)
    assert_same(read.state, state_of(2))
    # The lineage goes on from 2 and saves 3 again: the corrupt one is replaced, not counted again.
    checkpoints.save(3, state_of(9), HOST)
    read = checkpoints.latest(lambda _: state_of(0))
    assert (read.step, read.fallbacks) == (3, 0)
    assert_same(read.state, state_of(9))


def test_an_abandoned_lineage_does_not_outlive_the_new_one(checkpoints):
    for step in (4, 6, 8):
        checkpoints.save(step, state_of(step), HOST)
    flip(Path(checkpoints.directory) / "8")
    with pytest.warns(RuntimeWarning, match="checkpoints/8"):
        assert checkpoints.latest(lambda _: state_of(0)).step == 6
    checkpoints.save(7, state_of(7), HOST)
    assert checkpoints.steps() == [4, 6, 7]


def test_all_corrupt_is_an_error_not_a_restart(checkpoints):
    for step in (1, 2):
        checkpoints.save(step, state_of(step), HOST)
        flip(Path(checkpoints.directory) / str(step))
    with (
        pytest.warns(RuntimeWarning, match="corrupt"),
        pytest.raises(CheckpointError, match="all 2 checkpoints in .* are corrupt"),
    ):
        checkpoints.latest(lambda _: state_of(0))


def test_other_arrays_are_refused_by_name(checkpoints):
    checkpoints.save(1, state_of(1), HOST)
    template = state_of(0, width=2)
    del template["frozen"]
    template["added"] = jnp.zeros(3)
    with pytest.raises(ValueError, match="checkpoint incompatible") as caught:
        checkpoints.latest(lambda _: template)
    text = str(caught.value)
    assert "params.blocks.query.kernel: saved 'float32[8,4]', wanted 'float32[8,2]'" in text
    assert "added: not in the checkpoint" in text
    assert "frozen.router: only in the checkpoint" in text


def test_another_dtype_is_refused(checkpoints):
    checkpoints.save(1, {"x": jnp.zeros(3, jnp.bfloat16)}, HOST)
    with pytest.raises(ValueError, match=r"incompatible.* x: saved 'bfloat16\[3\]', wanted 'float"):
        checkpoints.latest(lambda _: {"x": jnp.zeros(3)})


def test_another_config_is_refused_by_field(checkpoints):
    checkpoints.save(1, state_of(1), HOST)
    assert (
        checkpoints.latest(lambda _: state_of(0), expect={"config": {"model": {"width": 4}}}).step
        == 1
    )
    with pytest.raises(ValueError, match="incompatible.*config.model.width: saved 4, wanted 8"):
        checkpoints.latest(lambda _: state_of(0), expect={"config": {"model": {"width": 8}}})
    with pytest.raises(ValueError, match="incompatible.*config_digest: not in the checkpoint"):
        checkpoints.latest(lambda _: state_of(0), expect={"config_digest": "ab"})


def test_an_incompatible_newest_is_not_passed_over(checkpoints):
    checkpoints.save(1, state_of(1), HOST)
    checkpoints.save(2, state_of(2), HOST | {"config": {"model": {"width": 8}}})
    with pytest.raises(ValueError, match="checkpoint incompatible: .*checkpoints/2: config.model"):
        checkpoints.latest(lambda _: state_of(0), expect={"config": HOST["config"]})


def test_a_newer_schema_is_refused(checkpoints, monkeypatch):
    monkeypatch.setattr("jaxrl.train.checkpoint.SCHEMA_VERSION", SCHEMA_VERSION + 1)
    checkpoints.save(1, state_of(1), HOST)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="incompatible.*schema_version: saved 2, known up to 1"):
        checkpoints.latest(lambda _: state_of(0))


def test_differences_names_fields():
    saved = {"a": 1, "b": {"c": [1, 2], "old": 0}}
    assert differences(saved, {"a": 1, "b": {"c": [1, 2], "old": 0}}, "") == []
    assert differences(saved, {"b": {"c": [1], "new": 1}, "a": 2}, "") == [
        "b.c: saved [1, 2], wanted [1]",
        "b.new: not in the checkpoint",
        "b.old: only in the checkpoint",
        "a: saved 1, wanted 2",
    ]


@pytest.mark.parametrize(
    ("state", "host", "message"),
    [
        ({"x": 3.0}, {}, "'x' is a float; allowed: jax arrays"),
        ({"a/b": jnp.zeros(1), "a.b": jnp.zeros(1)}, {}, "two arrays called 'a.b'"),
        ({"x": jnp.zeros(1)}, {"pool": {1, 2}}, "set is not JSON serializable"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_writing(checkpoints, state, host, message):
    with pytest.raises((ValueError, TypeError), match=message):
        checkpoints.save(1, state, host)
    assert not checkpoints.directory.exists()


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="checkpoint.keep=0; allowed: >= 1"):
        Checkpoints(tmp_path, keep=0)


FULL_DISK = """
import resource, signal, sys
import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
from jaxrl.train.checkpoint import CheckpointError, Checkpoints

directory, limit = sys.argv[1], int(sys.argv[2])
state = {"x": jax.random.normal(jax.random.key(0), (512, 512)), "step": jnp.int32(1)}
checkpoints = Checkpoints(directory, keep=3)
checkpoints.save(1, state, {"phase": "a"})
if limit:  # bytes that one file may have
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    for step in (2, 3):
        checkpoints.save(step, state, {"phase": "a"})
except CheckpointError as error:
    print("CheckpointError:", error)
else:
    sys.exit("no error at a full disk")
read = Checkpoints(directory, keep=3).latest(lambda _: state)
assert (read.state["x"] == state["x"]).all()
print("steps", checkpoints.steps(), "read", read.step, "fallbacks", read.fallbacks)
"""


def run_full_disk(directory: Path, limit: int) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(directory), str(limit)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture
def small_disk(tmp_path):
    """Room for one checkpoint of 1 MiB and most of a second; needs root."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1800k", "tmpfs", str(mount)]
    if shutil.which("mount") is None or os.geteuid() != 0 or subprocess.run(command).returncode:
        pytest.skip("no tmpfs can be mounted here; the limit on file sizes stands in for it")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_full_disk_on_a_small_file_system(small_disk):
    out = run_full_disk(small_disk / "checkpoints", 0)
    print("full disk by: tmpfs of 1800 KiB\n" + out)
    assert "step 2 could not be written to" in out
    assert str(small_disk / "checkpoints" / "2") in out
    assert "No space left on device" in out
    assert "the checkpoint at step 1 is intact" in out
    assert "steps [1] read 1 fallbacks 0" in out
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["1"]


def test_full_disk_by_a_limit_on_file_sizes(tmp_path):
    out = run_full_disk(tmp_path / "checkpoints", 300_000)
    print("full disk by: RLIMIT_FSIZE of 300000 bytes\n" + out)
    assert "step 2 could not be written to" in out
    assert "File too large" in out
    assert "the checkpoint at step 1 is intact" in out
    assert "steps [1] read 1 fallbacks 0" in out
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]


KILLED = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
from jaxrl.train.checkpoint import Checkpoints

checkpoints = Checkpoints(sys.argv[1], keep=2)
step = 0
while True:
    step += 1
    checkpoints.save(step, {"x": jnp.full((64, 64), step, jnp.float32)}, {"at": step})
    print(step, flush=True)
"""


def test_sigkill_at_any_moment_leaves_the_last_complete_one(tmp_path):
    for delay in (0.011, 0.043):
        directory = tmp_path / f"killed-{delay}"
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(directory)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        time.sleep(delay)
        process.kill()
        reported = 3 + len(process.stdout.read().split())
        process.wait()
        checkpoints = Checkpoints(directory, keep=2)
        read = checkpoints.latest(lambda _: {"x": jnp.zeros((64, 64))})
        assert read is not None and read.fallbacks == 0
        assert read.step in (reported, reported + 1)  # committed, perhaps not yet reported
        assert read.host == {"at": read.step}
        assert (read.state["x"] == read.step).all()
        checkpoints.close()


TWO_PROCESSES = """
import sys, warnings
from pathlib import Path
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
me, port, directory = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, me, initialization_timeout=60)
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import jaxrl.train.checkpoint as module

rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))

def state(value):
    whole = np.full((8, 3), value, np.float32)
    return {"x": jax.make_array_from_callback(whole.shape, rows, lambda part: whole[part])}

checkpoints = module.Checkpoints(directory, keep=2)
for step in (1, 2):
    checkpoints.save(step, state(step), {"at": step})
if me == 0:  # a bit of the newest turns; then process 0 alone cannot write
    files = [path for path in (directory / "2" / "state").rglob("*") if path.is_file()]
    path = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    def refuse(*_):
        raise OSError(28, "No space left on device")
    module._write_manifest = refuse
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    read = checkpoints.latest(lambda _: state(0))
parts = [np.asarray(shard.data) for shard in read.state["x"].addressable_shards]
assert len(parts) == 2 and all((part == 1).all() for part in parts)
try:
    checkpoints.save(3, state(3), {"at": 3})
except module.CheckpointError as error:
    print("read", read.step, "fallbacks", read.fallbacks, "then", error)
"""


def test_two_processes_agree(tmp_path):
    """One decides what is sound; one that cannot write stops both, and neither waits for ever."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(me), str(port), str(tmp_path / "c")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for me in (0, 1)
    ]
    try:
        outs = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outs
    for (out, _), reason in zip(outs, ("No space left", "another process failed"), strict=True):
        assert "read 1 fallbacks 1 then step 3 could not be written" in out and reason in out
    assert not (tmp_path / "c" / "3").exists()


def test_speed_of_a_million_parameters(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    key = jax.random.key(0)
    params = {f"layer{i}": jax.random.normal(key, (72, 1000)) for i in range(14)}
    state = {"params": params, "mu": params, "nu": params, "step": jnp.int32(0)}
    checkpoints.save(0, state, HOST)
    took = []
    for step in (1, 2, 3):
        began = time.monotonic()
        checkpoints.save(step, state, HOST)
        took.append(time.monotonic() - began)
    began = time.monotonic()
    checkpoints.latest(lambda _: state)
    print(
        f"save {min(took):.3f} s, verify and restore {time.monotonic() - began:.3f} s, "
        f"{checkpoints.bytes / 1e6:.1f} MB"
    )
    assert min(took) < 1.5  # 0.17 s on two idle cores
    assert json.dumps(checkpoints.steps()) == "[2, 3]"
    checkpoints.close()


def test_a_full_disk_is_named_wherever_storage_says_it(checkpoints, monkeypatch):
    """A library that cuts out of a long line what the system said leaves its number."""
    line = f"OUT_OF_RANGE: {'x' * 300} File too large {'y' * 300} [os_error_code='27']"

    def full(*_):
        raise ValueError(line)

    monkeypatch.setattr(checkpoints, "_write", full)
    with pytest.raises(CheckpointError, match=r"step 1 .*y .*27'\] \(File too large"):
        checkpoints.save(1, state_of(1), HOST)
