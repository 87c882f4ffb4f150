"""Where a phase's models come from, what is kept of them, and that a restart changes nothing."""

import dataclasses
import importlib
import sys
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath
from ml_collections import ConfigDict

import jaxrl.algorithms
from jaxrl.model.versions import check_weights, read_weights, write_weights
from jaxrl.train import loop, roles, rounds, settings
from jaxrl.train.checkpoint import Checkpoints
from jaxrl.train.state import scorer
from tests.train.test_step import assert_same

# An algorithm like any other, that reads every model there is and teaches three of them.
EVERYONE = """
import dataclasses
from jaxrl.algorithms import sft

@dataclasses.dataclass(frozen=True)
class Lesson(sft.Algorithm):
    scorers: tuple

@dataclasses.dataclass(frozen=True)
class Algorithm(sft.Algorithm):
    scorers = tuple((who, "plain") for who in ("student", "reference", "self", "teacher"))
    lessons = tuple(
        (who, Lesson(((who, view),)))
        for who, view in (("teacher", "plain"), ("value", "plain"), ("novelty", "response_only"))
    )
"""


@pytest.fixture(scope="module")
def everyone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("algorithms")
    (folder / "everyone.py").write_text(EVERYONE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxrl.algorithms, "__path__", [*jaxrl.algorithms.__path__, str(folder)])
        yield
    sys.modules.pop("jaxrl.algorithms.everyone", None)


def config(**phases: dict[str, Any]) -> Any:
    """Supervised phases of one step each, over eight devices; fields that differ by phase."""
    made = importlib.import_module("configs.base").get_config("tiny")
    made.algorithm = ConfigDict({"name": "sft"})
    made.mesh.update(data=4, fsdp=2)
    made.train.steps = 1
    made.phases = ConfigDict({"order": tuple(phases), **phases})
    return made


def teacher(weights: str, **model: Any) -> dict[str, Any]:
    views = {"response_only": "{response}"}
    scorers = {"teacher": {"weights": weights, "model": model}, "views": views}
    fields = {"algorithm": {"name": "everyone"}, "scorers": scorers}
    return fields | {"train": {"view_token_buckets": (16,)}}


@pytest.fixture(scope="module")
def run(everyone, tmp_path_factory):
    """Phases that start in every way, their parts, and a place to keep what is theirs."""
    root = epath.Path(tmp_path_factory.mktemp("run"))
    made = config(
        first={},
        on={},
        anew={"train": {"start": "fresh"}},
        back={"train": {"start": "first"}},
        elsewhere={"train": {"start": str(root / "elsewhere")}},
        taught=teacher("first"),
    )
    phases = {phase.name: phase for phase in settings.phases(made)}
    return phases, rounds.assemble([*phases.values()], root), root


def student(state: Any) -> dict[str, np.ndarray]:
    return jax.device_get(state.roles["student"].all)


@pytest.fixture(scope="module")
def first(run):
    """The first phase's student, kept."""
    phases, parts, root = run
    state = rounds.begin(phases["first"], parts, root, None)
    rounds.keep_weights(phases["first"], [*phases.values()], root, state)
    return state


def moved(state: Any) -> dict[str, jax.Array]:
    return {name: x + 1 for name, x in state.roles["student"].all.items()}


def test_a_phase_goes_on_starts_anew_or_starts_where_another_ended(run, first):
    phases, parts, root = run
    previous = moved(first)
    begun = {}
    write_weights(root / "elsewhere", previous, epoch=3, step=1)
    for name in ("on", "anew", "back", "elsewhere"):
        state = rounds.begin(phases[name], parts, root, previous)
        assert int(state.step) == phases[name].first_step
        begun[name] = student(state)
    assert_same(begun["on"], jax.device_get(previous))
    assert_same(begun["back"], student(first))
    assert_same(begun["elsewhere"], jax.device_get(previous))
    again = rounds.begin(phases["anew"], parts, root, None)
    assert_same(begun["anew"], student(again))  # whatever came before
    for other in (student(first), jax.device_get(previous)):
        same = [name for name, x in begun["anew"].items() if np.array_equal(x, other[name])]
        assert all(name.endswith("scale") for name in same)  # norms start at 1


def test_what_a_later_phase_names_is_kept_and_replaced_when_it_is_made_again(run, first):
    phases, parts, root = run
    order = [*phases.values()]
    assert (root / "phases" / "first").exists()
    rounds.keep_weights(phases["on"], order, root, first)
    assert not (root / "phases" / "on").exists()  # nobody asks for it
    other = dataclasses.replace(first, roles={"student": scorer(moved(first))})
    rounds.keep_weights(phases["first"], order, root, other)  # as after a kill before the next
    held, _ = read_weights(root / "phases" / "first")
    assert_same(jax.device_get(held), student(other))
    rounds.keep_weights(phases["first"], order, root, first)
    state = rounds.begin(phases["taught"], parts, root, moved(first))
    assert_same(jax.device_get(state.roles["teacher"].all), student(first))


def test_models_beside_the_student_begin_as_they_are_said_to(run, first):
    phases, parts, root = run
    state = rounds.begin(phases["taught"], parts, root, moved(first))
    mine = student(state)
    for who in ("reference", "self"):
        assert_same(jax.device_get(state.roles[who].all), mine)
    assert state.roles["self"].ema_rate == 0.99 and state.roles["self"].opt_state == ()
    value = jax.device_get(state.roles["value"].all)
    assert not value.pop("output/kernel").any()
    assert_same(value, {name: mine[name] for name in value})
    novelty = state.roles["novelty"]
    assert all(name.startswith("target/") for name in novelty.frozen) and novelty.opt_state
    leaves = [role for role in state.roles.values() for role in jax.tree.leaves(role.all)]
    places = [shard.data.unsafe_buffer_pointer() for x in leaves for shard in x.addressable_shards]
    assert len(set(places)) == len(places)  # nothing is donated twice


def test_the_form_of_a_phase_is_that_of_its_beginning(run, first):
    phases, parts, root = run
    for phase in phases.values():
        stated, state = (
            rounds.form(phase, parts),
            rounds.begin(phase, parts, root, first.roles["student"].all),
        )
        assert jax.tree.structure(stated) == jax.tree.structure(state)
        for wanted, x in zip(jax.tree.leaves(stated), jax.tree.leaves(state), strict=True):
            assert (wanted.shape, wanted.dtype) == (x.shape, x.dtype)
            assert wanted.sharding.is_equivalent_to(x.sharding, x.ndim)


def test_a_restart_finds_every_model_as_it_was(run, first, tmp_path):
    """Killed between two phases, and inside of one: the same state bit for bit."""
    phases, parts, root = run
    order = [*phases.values()]
    taught = rounds.begin(phases["taught"], parts, root, moved(first))
    host = {"identity": rounds.identity(order, parts.tokenizer)}
    checkpoints = Checkpoints(tmp_path, keep=2)
    at = phases["first"].last_step
    ended = dataclasses.replace(first, step=first.step + 1)
    checkpoints.save(at, ended, host)
    restored = rounds.resume(order, parts, checkpoints)
    assert restored is not None and restored.step == at
    assert_same(jax.device_get(restored.state), jax.device_get(ended))
    # what the killed process had kept is written again, and the next phase begins alike
    rounds.keep_weights(phases["first"], order, root, restored.state)
    for name in ("on", "back", "taught"):
        one, other = (
            rounds.begin(phases[name], parts, root, x.roles["student"].all)
            for x in (ended, restored.state)
        )
        assert_same(jax.device_get(one), jax.device_get(other))
    checkpoints.save(phases["taught"].last_step, taught, host)
    restored = rounds.resume(order, parts, checkpoints)
    checkpoints.close()
    assert restored is not None
    assert jax.tree.structure(restored.state) == jax.tree.structure(taught)
    assert_same(jax.device_get(restored.state), jax.device_get(taught))


def test_a_directory_that_does_not_fit_is_named_before_anything_is_trained(run, first, tmp_path):
    phases, parts, root = run
    start = phases["elsewhere"]
    for path, words in ((tmp_path / "none", "manifest.json is missing"), (tmp_path / "odd", "fit")):
        if path.name == "odd":
            less = {n: x for n, x in first.roles["student"].all.items() if n != "norm/scale"}
            write_weights(path, less, epoch=0, step=0)
            with pytest.raises(ValueError, match="missing norm/scale of the model"):
                check_weights(path, parts.policy.shapes)
        train = dataclasses.replace(start.train, start=str(path))
        with pytest.raises(ValueError, match=f"phases.elsewhere: train.start: .*{words}"):
            rounds.check_stored(dataclasses.replace(start, train=train), parts, root)
        taught = phases["taught"]
        other = dataclasses.replace(taught.scorers.teacher, weights=str(path))
        scorers = dataclasses.replace(taught.scorers, teacher=other)
        with pytest.raises(ValueError, match=f"phases.taught: scorers.teacher.weights: .*{words}"):
            rounds.check_stored(dataclasses.replace(taught, scorers=scorers), parts, root)
    for phase in phases.values():
        if phase.name != "elsewhere":
            rounds.check_stored(phase, parts, root)  # of phases nothing is there yet


def test_a_teacher_that_is_read_is_named(run):
    phases, parts, _ = run
    taught = phases["taught"]
    nobody = dataclasses.replace(taught.scorers.teacher, weights="")
    scorers = dataclasses.replace(taught.scorers, teacher=nobody)
    with pytest.raises(ValueError, match="phases.taught: scorers.teacher.weights=''.*'everyone' r"):
        rounds.form(dataclasses.replace(taught, scorers=scorers), parts)
    assert not rounds.needs_teacher(phases["first"])


def test_a_run_has_one_form_of_teacher(everyone):
    forms = {"a": teacher("x/y", width=16, heads=1), "b": teacher("x/y", width=16, heads=1)}
    found = roles.forms(settings.phases(config(**forms)))
    assert set(found) == {"teacher", "value"} and found["teacher"].width == 16
    assert (found["value"].outputs, found["value"].width) == (1, 32)
    with pytest.raises(ValueError, match=r"phases.b.scorers.teacher.model differs from an earlier"):
        roles.forms(settings.phases(config(**forms | {"b": teacher("x/y", width=24, heads=1)})))
    same = roles.forms(settings.phases(config(a=teacher("x/y"))))
    assert set(same) == {"value"}  # a teacher of the student's form is no form of its own


def test_views_are_asked_of_the_config(run):
    phases, parts, _ = run
    taught = phases["taught"]
    algorithm = importlib.import_module("jaxrl.algorithms.contract").load("everyone")
    assert loop.views_of(taught, algorithm) == {"response_only": "{response}"}
    nothing = dataclasses.replace(taught.scorers, views={"other": "{response}"})
    narrow = dataclasses.replace(taught.train, view_token_buckets=())
    deaf = dataclasses.replace(
        taught.scorers, views={"response_only": "{prompt}{feedback}{response}"}
    )
    for changes, words in (
        ({"scorers": nothing}, r"'everyone' reads the views \['response_only'\].*\['other'\]"),
        ({"train": narrow}, r"train.view_token_buckets that hold them \(there are: \(\)\)"),
        ({"scorers": deaf}, r"views \['response_only'\] show feedback.*max_feedback_tokens=0"),
    ):
        with pytest.raises(ValueError, match=f"phases.taught: .*{words}"):
            loop.views_of(dataclasses.replace(taught, **changes), algorithm)


def test_an_average_is_held_in_float32_whatever_the_student_is(run, first):
    phases, parts, _ = run
    narrow = {name: x.astype("bfloat16") for name, x in first.roles["student"].all.items()}
    made = roles.build(phases["taught"], parts.policy, narrow, narrow, jax.random.key(0))
    assert {x.dtype for x in made["self"].params.values()} == {np.dtype("float32")}
    assert_same(
        jax.device_get(made["self"].params),
        {name: np.asarray(x, "f4") for name, x in narrow.items()},
    )
