"""What a run writes beside checkpoints and curves, and what is left of it after a restart."""

import json

from etils import epath

from jaxrl.pool.contract import Manifest
from jaxrl.train.checkpoint import Checkpoints, Restored
from jaxrl.train.loop import Books
from jaxrl.train.metrics import Logger, Progress
from jaxrl.train.workdir import Workdir


def manifest(step):
    return Manifest(step=step, groups=((step, f"digest-{step}"),), counts={"filtered": 0})


def books(root):
    return Books(
        workdir=Workdir(root),
        checkpoints=Checkpoints(root / "checkpoints", keep=1),
        logger=Logger(root, start_step=0),
        progress=Progress(10),
        identity={},
        prompts={},
    )


def publish(workdir, *versions):
    for version in versions:
        workdir.weights(*version).mkdir(parents=True)


def test_the_oldest_weights_are_dropped(tmp_path):
    workdir = Workdir(epath.Path(tmp_path))
    publish(workdir, (0, 9), (0, 10), (1, 9), (1, 2))
    (tmp_path / "weights" / "v=1-10.tmp").mkdir()  # what a killed process left is no version
    workdir.drop_weights(2)
    assert workdir.published() == [(1, 2), (1, 9)]
    assert not (tmp_path / "weights" / "v=1-10.tmp").exists()


def test_a_restart_forgets_what_was_written_past_its_checkpoint(tmp_path):
    workdir = Workdir(epath.Path(tmp_path))
    for step in range(4):
        workdir.journal(manifest(step))
        workdir.write_eval(step, {"step": step})
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"step": 4, "gro')  # torn by a kill
    workdir.forget_after(2)
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]  # steps done before the third
    assert workdir.read_eval(2) == {"step": 2} and workdir.read_eval(3) is None


def test_a_version_never_means_two_sets_of_weights(tmp_path):
    root = epath.Path(tmp_path)
    first = books(root)
    first.open(None)
    assert first.epoch == 0
    publish(first.workdir, (0, 3), (1, 3), (1, 4))  # two attempts, killed before any checkpoint
    second = books(root)
    second.open(None)
    assert second.epoch == 2
    third = books(root)
    third.open(Restored({}, {"epoch": 7, "consumed": {"groups": 5}, "accounts": {}}, 3, 0))
    assert third.epoch == 8 and third.consumed == {"groups": 5}


def test_what_was_consumed_is_chained(tmp_path):
    one, two = books(epath.Path(tmp_path / "a")), books(epath.Path(tmp_path / "b"))
    for account, order in ((one, (0, 1)), (two, (1, 0))):
        for step in order:
            account.consume(manifest(step))
    assert one.consumed["groups"] == two.consumed["groups"] == 2
    assert one.consumed["digest"] != two.consumed["digest"]
