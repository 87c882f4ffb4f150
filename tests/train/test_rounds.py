"""Rounds of explorer, filter and student: who starts from whom, and what is handed on."""

import importlib
import types
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath

from configs import exp_dis
from jaxrl.pool.contract import PoolEnd
from jaxrl.pool.recorded import Writer
from jaxrl.train import rounds, settings
from tests.pool.test_filtering import right
from tests.train.test_step import assert_same


def config(weights=(0.75, 0.5)) -> Any:
    """The method's tiny config with two rounds, over the tests' eight devices."""
    made = importlib.import_module("configs.exp_dis").get_config("tiny")
    made.mesh.update(data=4, fsdp=2)
    phases = {"sft": made.phases.sft.to_dict()}
    for number in range(len(weights)):
        phases |= exp_dis.one_round(number, weights, (1, 1), [*phases][-1], made)
    made.phases = {"order": tuple(phases), **phases}
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Phases by name, their parts, and a place for what is theirs."""
    root = epath.Path(tmp_path_factory.mktemp("run"))
    phases = {phase.name: phase for phase in settings.phases(config())}
    return phases, rounds.assemble([*phases.values()], root), root


@pytest.fixture(scope="module")
def student(run):
    """The student after the warm start, and (as it happens) after the first round."""
    phases, parts, root = run
    state = rounds.begin(phases["sft"], parts, root, None)
    for name in ("sft", "student_1"):
        rounds.keep_weights(phases[name], [*phases.values()], root, state)
    return state


def test_e4_a_round_starts_from_the_last_student_and_never_from_an_explorer(run, student):
    phases, parts, root = run
    explorer = {name: x + 1 for name, x in student.roles["student"].all.items()}
    for name in ("explorer_2", "distil_2"):  # the phase before ended with other weights
        state = rounds.begin(phases[name], parts, root, explorer)
        assert_same(
            jax.device_get(state.roles["student"].all),
            jax.device_get(student.roles["student"].all),
        )
    assert set(state.roles) == {"student"}  # nothing of the networks that judged the explorer
    practised = rounds.begin(phases["student_2"], parts, root, explorer)
    assert_same(jax.device_get(practised.roles["student"].all), jax.device_get(explorer))
    starts = {name: phase.train.start for name, phase in phases.items()}
    assert {starts[f"{role}_1"] for role in ("explorer", "distil")} == {"sft"}
    assert (starts["student_1"], starts["student_2"]) == ("", "")


def test_each_explorer_has_networks_of_its_own(run, student):
    phases, parts, root = run
    found = [
        jax.device_get(
            rounds.begin(phases[f"explorer_{n}"], parts, root, None).roles["novelty"].all
        )
        for n in (1, 2)
    ]
    kernels = [name for name in found[0] if name.endswith("kernel")]
    assert kernels and not any(np.array_equal(found[0][n], found[1][n]) for n in kernels)


def test_rounds_share_no_prompt_but_explorer_and_student_do(run):
    phases, _, _ = run
    shards = {name: (phase.pool.shard, phase.pool.shards) for name, phase in phases.items()}
    assert shards["explorer_1"] == shards["student_1"] == (0, 2)
    assert shards["explorer_2"] == shards["student_2"] == (1, 2)


def test_steps_are_split_evenly_with_the_rest_first():
    assert exp_dis.shares(200, 3) == [67, 67, 66]
    assert exp_dis.shares(2, 4) == [1, 1, 0, 0]
    full = settings.phases(exp_dis.get_config(""))
    for role, total in (("explorer", 200), ("student", 100)):
        assert sum(p.train.steps for p in full if p.name.startswith(role)) == total


@pytest.fixture
def books(run, tmp_path) -> Any:
    notes: list[str] = []
    progress = types.SimpleNamespace(note=notes.append)
    root = epath.Path(tmp_path)
    workdir = types.SimpleNamespace(root=root)
    return types.SimpleNamespace(workdir=workdir, identity={}, progress=progress, notes=notes)


def explored(run, books, rollouts) -> None:
    """Records as the first explorer's pool would name and lay them."""
    phases, parts, _ = run
    run_id = rounds.open_pool(phases["explorer_1"], parts, books)._run_id  # type: ignore[attr-defined]
    folder = books.workdir.root / "pool" / "explorer_1"
    with Writer(folder / "step-3.rollouts") as writer:
        for number, changes in enumerate(rollouts):
            writer.append(right(**{"run_id": run_id, "group_id": number} | changes))


def test_the_student_copies_what_the_explorer_left(run, books):
    phases, parts, _ = run
    explored(
        run,
        books,
        [
            {"problem": "a", "length": 3},
            {"problem": "a", "length": 2},
            {"problem": "b", "length": 1, "correct": False},
            {"problem": "c", "length": 1, "run_id": "of another run"},
            {"problem": "d", "length": 2},
        ],
    )
    pool = rounds.open_pool(phases["distil_1"], parts, books)
    groups = [group for step in range(4) for group in pool.take(1, step)[0]]
    copied = [(group.rollouts[0].content_hash, len(group.rollouts[0].tokens)) for group in groups]
    assert sorted(copied) == [("a", 3), ("a", 3), ("d", 3), ("d", 3)]  # two passes; a prompt token
    with pytest.raises(PoolEnd):
        pool.take(1, 4)
    assert "distil_1 reads explorer_1: read 4" in books.notes[-1]
    assert books.notes[-1].endswith("kept 2")


def test_without_a_survivor_the_student_copies_nothing(run, books):
    phases, parts, _ = run
    explored(run, books, [{"correct": False}])
    pool = rounds.open_pool(phases["distil_1"], parts, books)
    with pytest.raises(PoolEnd, match="nothing of explorer_1 survived"):
        pool.take(1, 0)
    pool.restore(pool.state())
    with pytest.raises(ValueError, match="pool='local'"):
        pool.restore({"pool": "local"})


@pytest.mark.parametrize(
    ("section", "field", "value", "words"),
    [
        ("distil_1", "path", "explorer_2", "pool.path='explorer_2'; allowed: '', sft, explorer_1"),
        ("distil_1", "path", "sft", "allowed: pool.kind='recorded', and a phase with"),
        ("student_1", "path", "explorer_1", "with pool.kind='local'; allowed"),
        ("explorer_1", "record", False, r"pool.record=True \(is: 'local', False\)"),
        ("distil_1", "local_dir", "/else/where", "pool.local_dir differs"),
        ("explorer_1", "shard", 2, "pool.shard=2; allowed: 0 to 1"),
        ("distil_1", "survivors", 0, "pool.survivors=0"),
        ("distil_1", "loop_repeats", 1, "pool.loop_repeats=1"),
    ],
)
def test_what_a_phase_cannot_read_is_named(section, field, value, words):
    made = config()
    made.phases[section].pool[field] = value
    with pytest.raises(ValueError, match=words):
        settings.phases(made)
