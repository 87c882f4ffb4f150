"""Records of both pools as files of ATIF: whole files, all that could be read, all else counted."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from configs import quickstart
from jaxrl import trajectories
from jaxrl.pool import spool
from jaxrl.pool.rollout import ACTION, Failure
from jaxrl.pool.tokenizer import train_sentencepiece
from tests.pool.atif_schema import check, rebuilt
from tests.pool.samples import sample
from tests.pool.scripted import Scripted, Sums, answer_of, local_pool
from tests.pool.serving import ask, client_of, gateway

ROOT = Path(__file__).parents[1]


def exported(source: Path, to: Path, **asked) -> tuple[dict[str, int], list[str]]:
    """What became of what: counts above 0, and faults."""
    told = trajectories.export(str(source), str(to), **asked)
    return {name: count for name, count in told.counts.items() if count}, told.faults


def documents(folder: Path) -> dict[str, dict]:
    """All files by their paths, each checked; nothing half written is there."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        assert path.suffix == ".json", path
        found[str(path.relative_to(folder))] = json.loads(path.read_text())
        check(found[str(path.relative_to(folder))])
    return found


def recorded(path: Path, *records) -> Path:
    with spool.Writer(path) as writer:
        for one in records:
            writer.append(one)
    return path


def spoil(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.fixture
def three(tmp_path):
    """A file of three records."""
    return recorded(tmp_path / "in" / "a.rollouts", *(sample(sample=n) for n in range(3)))


def test_records_of_the_embedded_pool(tmp_path):
    pool = local_pool(Scripted(answer_of), Sums(4), record_dir=tmp_path / "records")
    pool.take(2, 1)
    pool.take(2, 2)
    assert exported(tmp_path / "records", tmp_path / "out") == (
        {"written": 8, "without_text": 8},
        [],
    )
    found = documents(tmp_path / "out")
    assert sorted(found) == [f"run=run/{g}-{s}-0.json" for g in range(4) for s in range(2)]
    read = [one for path in (tmp_path / "records").iterdir() for one in spool.read(path)]
    for one in read:
        document = found[f"run=run/{one.group_id}-{one.sample}-0.json"]
        (metrics,) = (step["metrics"] for step in document["steps"] if "metrics" in step)
        acted = one.kind == ACTION
        assert metrics["completion_token_ids"] == one.tokens[acted].tolist()
        logp = np.array(metrics["logprobs"], np.float32)
        assert logp.tobytes() == one.logp[acted].tobytes()
        assert rebuilt(document).digest == one.digest
        assert document["extra"]["reward"] == one.reward == 1.0


def test_segments_of_the_remote_pool_and_what_has_no_outcome(tmp_path):
    with gateway(tmp_path, Scripted(lambda request: "4")) as place:
        place.open("3+1=", samples=2)
        leases = place.work("lease", {"owner": "test", "most": 2}).json()["leases"]
        tokens = [lease["token"] for lease in leases]
        body = {"attempts": [{"token": token, "reward": 0.5} for token in tokens]}
        for token in tokens:
            place.post(f"/{token}/generate", {})
        place.work("seal", body)
        token = place.lease()
        ask(client_of(place, token), "a")
        ask(client_of(place, token), "other")
        place.seal(token)
        unjudged, failed, going = (place.lease() for _ in range(3))
        for token in (unjudged, failed, going):
            ask(client_of(place, token), "a")
        place.seal(unjudged, reward=None, failure="judge")
        place.work("fail", {"token": failed, "failure": "infra", "reason": "gone"})
        counts, faults = exported(tmp_path / "spool", tmp_path / "out")
    # A journal keeps what failed until all that is in it has ended.
    assert counts == {"written": 4, "without_text": 4, "unsealed": 2} and not faults
    found = documents(tmp_path / "out")
    names = ["0-0-0", "0-1-0", "1-0-0", "2-0-0"]
    assert list(found) == [f"run=run/{name}.json" for name in names]
    rewards = [one["extra"]["reward"] for one in found.values()]
    assert rewards == [0.5, 0.5, 1.0, None]
    assert len(found["run=run/1-0-0.json"]["subagent_trajectories"]) == 1


def test_a_damaged_record_is_named_and_the_rest_is_written(three, tmp_path):
    offsets = [offset for offset, _ in spool.walk(three)]
    spoil(three, offsets[1] + 60)
    recorded(three.parent / "c.rollouts", sample(group_id=8))
    (three.parent / "b.rollouts").write_bytes(b"something else")
    counts, faults = exported(three.parent, tmp_path / "out")
    assert counts == {"written": 3, "without_text": 3, "damaged": 1, "unreadable": 1}
    assert re.search(rf"damaged: .*a.rollouts at byte {offsets[1]}: crc32c", faults[0])
    assert re.search(r"unreadable: .*b.rollouts at byte 0", faults[1])
    assert list(documents(tmp_path / "out")) == [f"run=r/{n}-0.json" for n in ("7-0", "7-2", "8-1")]


def test_a_damaged_branch_costs_the_branch(tmp_path):
    facts = [{"branch": n, "branches": 3} for n in range(3)]
    path = recorded(tmp_path / "a.rollouts", *(sample(facts=one) for one in facts))
    spoil(path, [offset for offset, _ in spool.walk(path)][1] + 60)
    counts, _ = exported(path, tmp_path / "out")
    assert counts == {"written": 1, "without_text": 1, "damaged": 1}
    (document,) = documents(tmp_path / "out").values()
    assert document["notes"] == "2 of 3 branches could be read"
    names = [one["trajectory_id"] for one in (document, *document["subagent_trajectories"])]
    assert names == ["r/7-1-0/0", "r/7-1-0/2"]


def test_what_is_there_stays_and_what_was_stopped_goes_on(three, tmp_path):
    once, again = tmp_path / "once", tmp_path / "again"
    assert exported(three, once)[0] == {"written": 3, "without_text": 3}
    assert exported(three, again, most=1)[0] == {"written": 1, "without_text": 1}
    first = again / "run=r" / "7-0-0.json"
    first.write_text("mine")
    (again / "run=r" / "7-1-0.json.tmp").write_text('{"half')  # of a process that was killed
    assert exported(three, again)[0] == {"written": 2, "present": 1, "without_text": 2}
    assert first.read_text() == "mine"
    first.write_bytes((once / "run=r" / "7-0-0.json").read_bytes())
    assert documents(again) == documents(once)
    assert exported(three, again)[0] == {"present": 3}


def test_a_disk_that_refuses_leaves_nothing_half(three, tmp_path):
    """A folder stands where the second file would be written."""
    (tmp_path / "out" / "run=r" / "7-1-0.json.tmp").mkdir(parents=True)
    with pytest.raises(OSError):
        exported(three, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").rglob("*.json")] == ["7-0-0.json"]


def test_groups_repeats_and_nothing_are_counted(tmp_path):
    nothing = {
        name: np.zeros(0, sample().__dict__[name].dtype)
        for name in ("tokens", "kind", "step", "logp", "version_index", "temperature")
    }
    recorded(
        tmp_path / "in" / "a.rollouts",
        sample(),
        sample(group_id=8),
        sample(reward=0.25),
        sample(run_id="../x"),
        sample(sample=5, **nothing),
        sample(attempt=1, reward=None, failure=Failure.ENV),
    )
    counts, faults = exported(tmp_path / "in", tmp_path / "out", groups={7})
    assert counts == {
        **{"written": 3, "without_text": 3, "not_asked": 1},
        **{"repeated": 1, "empty": 1},
    }
    assert faults == ["empty: r/7-5-0 has no token"]
    found = documents(tmp_path / "out")
    assert list(found) == ["run=..%2Fx/7-1-0.json", "run=r/7-1-0.json", "run=r/7-1-1.json"]
    rewards = [one["extra"]["reward"] for one in found.values()]
    assert rewards == [0.5, 0.5, None]


def run_of(folder: Path, **pool) -> Path:
    """A workdir as a run of the quickstart's tiny variant leaves it, without records."""
    config = quickstart.get_config("tiny").to_dict()
    config["pool"] |= pool
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_run_says_where_its_records_are_and_who_reads_them(tmp_path):
    run = run_of(tmp_path / "run", harness="my.agent")
    with pytest.raises(ValueError, match="the tokenizer of the run cannot be read"):
        exported(run, tmp_path / "out")
    tokenizer = train_sentencepiece(["1+1=2", "3"], 20, run / "pool" / "tokenizer.model")
    with pytest.raises(ValueError, match=r"no rollouts .*pool.record"):
        exported(run, tmp_path / "out")
    ids = [*tokenizer.prompt("1+"), *tokenizer.encode("3"), tokenizer.eos_id]
    told = sample(run_id="gvpo-0123", tokens=np.array(ids, np.uint32), text="3")
    recorded(run / "pool" / "gvpo" / "step-00000001.rollouts", told)
    assert exported(run, tmp_path / "out")[0] == {"written": 1}
    (document,) = documents(tmp_path / "out").values()
    assert [step["message"] for step in document["steps"]] == ["1+", "3"]
    assert document["agent"] == {"name": "my.agent", "version": "unknown", "model_name": "v=0-3"}
    # The same records by their own place, read by the run.
    assert exported(run / "pool", tmp_path / "by", run=str(run))[0] == {"written": 1}
    assert documents(tmp_path / "by") == documents(tmp_path / "out")


def test_what_is_wrong_is_said(tmp_path, three):
    run = run_of(tmp_path / "run")
    with pytest.raises(ValueError, match="--run='x' beside --from="):
        exported(run, tmp_path / "out", run="x")
    with pytest.raises(ValueError, match="is no run: config.json is missing"):
        exported(three, tmp_path / "out", run=str(tmp_path))
    with pytest.raises(ValueError, match="no rollouts"):
        exported(tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(three, tmp_path):
    recorded(three.parent / "b.rollouts", sample(group_id=8), sample(group_id=9))
    spoil(three, [offset for offset, _ in spool.walk(three)][1] + 60)

    def asked(*words: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "jaxrl.trajectories",
            "--to",
            str(tmp_path / "out"),
            *words,
        ]
        env = os.environ | {"JAX_PLATFORMS": "cpu"}
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)

    told = asked("--from", str(three.parent), "--group", "7", "--group", "9")
    assert told.returncode == 0, told.stderr
    assert "written 3, present 0, damaged 1, without_text 3, not_asked 1" in told.stdout
    assert "damaged: " in told.stderr and "a.rollouts at byte" in told.stderr
    assert set(documents(tmp_path / "out")) == {f"run=r/{n}-0.json" for n in ("7-0", "7-2", "9-1")}
    told = asked("--from", str(tmp_path / "nowhere"))
    assert told.returncode == 1 and "jaxrl.trajectories: ValueError: " in told.stderr
    assert "Traceback" not in told.stderr
