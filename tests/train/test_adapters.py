"""Adapters in a run: what is trained, the base that several roles share, where they start."""

import dataclasses
import importlib
import json
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath

from jaxrl.algorithms import sft
from jaxrl.export import export, export_adapters
from jaxrl.model import adapters, pretrained
from jaxrl.model.adapters import is_adapter
from jaxrl.model.form import AdapterConfig
from jaxrl.model.versions import TENSORS, write_weights
from jaxrl.train import roles, rounds, settings
from jaxrl.train import state as states
from jaxrl.train.checkpoint import Checkpoints
from jaxrl.train.optimizer import freezing, split
from jaxrl.train.state import scorer
from jaxrl.train.workdir import Workdir
from tests.model.tiny import lively, policy_on
from tests.train.test_optimizer import but
from tests.train.test_roles import ADAM, RATE, SGD, Drawn, Graded, step
from tests.train.test_step import assert_close, assert_same
from tests.train.toy import Bigram, batch_of, mesh_of, random_groups, state_of, step_of

NAMES = ("embedding", "blocks/mlp/up/kernel", "blocks/mlp/up/adapter_in", "output/kernel")
NAMES += ("blocks/mlp/up/adapter_out",)


def trained(names: Any = NAMES, **changes: Any) -> set[str]:
    config = but(**changes)
    return set(split(dict.fromkeys(names, 0), freezing(config, names))[0])


def test_what_is_trained():
    factors = {name for name in NAMES if is_adapter(name)}
    assert trained() == trained(train="adapters") == factors | {"output/kernel"}
    assert trained(train="base") == set(NAMES) - factors
    assert trained(train="all") == set(NAMES)
    assert trained(train="all", freeze=("embed",)) == set(NAMES) - {"embedding"}
    assert trained(freeze=("embed", "adapter_in")) == {NAMES[-1], "output/kernel"}
    plain = set(NAMES) - factors
    assert trained(plain) == trained(plain, train="base") == plain


@pytest.mark.parametrize(
    ("names", "changes", "words"),
    [
        (("a",), {"train": "adapters"}, "optimizer.train='adapters'; allowed: 'auto', 'base', 'al"),
        (NAMES[:3], {"freeze": ("mlp",)}, "freezes every parameter that optimizer.train='auto'"),
        (NAMES[:2], {"freeze": (".",)}, "freezes every parameter"),
        (NAMES, {"freeze": ("heat",)}, "optimizer.freeze: 'heat' matches no parameter"),
        (NAMES, {"train": "some"}, "optimizer.train='some'; allowed: one of auto, adapters"),
    ],
)
def test_what_cannot_be_trained_is_named(names, changes, words):
    with pytest.raises(ValueError, match=words):
        trained(names, **changes)


FREEZE = ("^embed$", "^scale$")  # the base of the toy; its head is what an adapter would be
DRAWN = Drawn(lesson=True)  # a student among teacher, average and reference; the teacher learns


def start(shared: bool) -> states.TrainState:
    """Four roles over one base, held once or by each of them."""
    params, other = (Bigram().init(jax.random.key(seed)) for seed in (0, 5))
    base = {name: params[name] for name in ("embed", "scale")}
    taught = {"head": other["head"]} if shared else {**base, "head": other["head"]}
    common = tuple(base) if shared else ()
    others = {
        "self": scorer(params, ema_rate=RATE, shared=common),
        "teacher": scorer(taught, tx=ADAM, freeze=FREEZE, shared=common),
    }
    state = state_of(DRAWN, SGD, params=params, freeze=FREEZE, others=others)
    if shared:
        return state
    roles = {**state.roles, "reference": scorer(params)}
    return states.place(dataclasses.replace(state, roles=roles), Bigram(), mesh_of(data=1))


def takes(count: int) -> list[Any]:
    draws = [random_groups(seed, 4, 2) for seed in range(count)]
    return [batch_of(draw, step_groups=4, size=2, minibatches=2) for draw in draws]


@pytest.fixture(scope="module")
def walked():
    """The compiled step, and the state after two takes of four updates."""
    one = step(lesson=True, epochs=2, minibatches=2)
    state = start(shared=True)
    for batch in takes(2):
        state, _ = one(state, batch)
    return one, jax.device_get(state)


def test_four_roles_over_one_base_are_four_models(walked):
    """The same numbers as from roles that have each a base of their own."""
    one, last = walked
    state = start(shared=False)
    own = sum(len(role.all) for role in state.roles.values())
    assert (own, sum(len({**r.params, **r.frozen}) for r in last.roles.values())) == (12, 6)
    again = step(lesson=True, epochs=2, minibatches=2)
    for batch in takes(2):
        state, _ = again(state, batch)
    wanted = states.models_of(jax.device_get(state).roles)
    found = states.models_of(last.roles)
    for who, params in found.items():
        assert_close(params, wanted[who], 1e-6)
        for name in ("embed", "scale"):
            np.testing.assert_array_equal(params[name], start(True).roles["student"].frozen[name])
    assert len({found[who]["head"].tobytes() for who in found}) == 4  # nobody is another
    assert one.trace_count == 1


def test_a_checkpoint_holds_the_base_once_and_a_run_goes_on_from_it(walked, tmp_path):
    one, last = walked
    first, second = takes(2)
    state, _ = one(start(shared=True), first)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state, {})
    manifest = json.loads((tmp_path / "1" / "manifest.json").read_text())
    held = [name for name in manifest["body"]["arrays"] if name.endswith("embed")]
    assert held == ["roles.student.frozen.embed"]
    where = states.shardings(state, Bigram(), mesh_of(data=1))
    form = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, where
    )
    restored = checkpoints.latest(lambda step: form)
    checkpoints.close()
    assert restored is not None
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)
    state, _ = one(restored.state, second)
    assert_same(jax.device_get(state), last)


@dataclasses.dataclass(frozen=True)
class Taught(sft.Algorithm):
    """A student, and a teacher that learns beside it."""

    lessons = (("teacher", Graded()),)


def test_only_the_factors_of_a_decoder_move():
    """Student and teacher over one base in half precision, on four devices."""
    sizes = {"fsdp": 2, "tensor": 2}
    form = AdapterConfig(rank=2, alpha=4.0, pattern="attention|mlp", dtype="float32")
    policy = policy_on(sizes, adapter=form, layers=1, param_dtype="bfloat16")
    params = jax.device_get(lively(policy.init(jax.random.key(0))))
    base = [name for name in params if not is_adapter(name)]
    low = {name: 0.1 + 0.5 * x for name, x in params.items() if name not in base}
    freeze, fields = freezing(but(), params), {"mesh": mesh_of(**sizes), "policy": policy}
    others = {"teacher": scorer(low, tx=ADAM, freeze=freeze, shared=base)}
    state = state_of(Taught(), SGD, params=params, freeze=freeze, others=others, **fields)
    first, txs = jax.device_get(state), {"teacher": ADAM}
    one = step_of(Taught(), SGD, micro=4, size=2, minibatches=2, lesson_txs=txs, **fields)
    state, metrics = one(state, takes(1)[0])
    assert metrics["optim/updates"] == metrics["teacher/optim/updates"] == 2
    last = jax.device_get(state)
    frozen = last.roles["student"].frozen
    assert_same(frozen, {name: params[name] for name in base})
    assert all(x.dtype == "bfloat16" for x in frozen.values())
    for who, role in last.roles.items():
        assert set(role.params) == set(low)
        for name, x in role.params.items():
            assert x.dtype == "float32" and (x != first.roles[who].params[name]).any(), name


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Co-RA's phases as :tiny, their parts, a place, and the base with two sets of adapters."""
    root = epath.Path(tmp_path_factory.mktemp("run"))
    made: Any = importlib.import_module("configs.co_residual").get_config("tiny")
    made.mesh.update(data=4, fsdp=2)
    made.train.micro_rollouts = 16
    phases = {phase.name: phase for phase in settings.phases(made)}
    parts = rounds.assemble([*phases.values()], root)
    student = jax.device_get(parts.policy.init(jax.random.key(0)))
    taught = {n: x + 0.1 if is_adapter(n) else x for n, x in student.items()}
    for name, params in (("sft", student), ("teacher", taught)):
        write_weights(root / "phases" / name, params, epoch=0, step=0)
    return phases, parts, root, student, taught


def with_teacher(phase: Any, **changes: Any) -> Any:
    teacher = dataclasses.replace(phase.scorers.teacher, **changes)
    return dataclasses.replace(phase, scorers=dataclasses.replace(phase.scorers, teacher=teacher))


def test_co_ra_is_two_sets_of_adapters_over_one_base(run):
    phases, parts, root, student, taught = run
    state = rounds.begin(phases["co_residual"], parts, root, None)
    models = jax.device_get(states.models_of(state.roles))
    assert_same(models["student"], student)
    assert_same(models["teacher"], taught)
    teacher = state.roles["teacher"]
    assert set(teacher.params) == {name for name in taught if is_adapter(name)}
    assert not teacher.frozen and teacher.opt_state
    leaves = jax.tree.leaves(state)
    places = [s.data.unsafe_buffer_pointer() for x in leaves for s in x.addressable_shards]
    assert len(set(places)) == len(places)  # nothing is donated twice
    stated = rounds.form(phases["co_residual"], parts)
    assert jax.tree.structure(stated) == jax.tree.structure(state)
    own = rounds.begin(with_teacher(phases["co_residual"], base="own"), parts, root, None)
    assert_same(jax.device_get(own.roles["teacher"].all), taught)
    assert set(own.roles["teacher"].params) == set(teacher.params)  # its own base is frozen too


def test_a_teacher_begins_as_the_student_or_from_adapters_alone(run, tmp_path):
    phases, parts, root, student, taught = run
    phase = phases["co_residual"]
    state = rounds.begin(with_teacher(phase, weights=""), parts, root, None)
    assert_same(jax.device_get(states.models_of(state.roles)["teacher"]), student)
    path = tmp_path / "alone"
    adapters.write_alone(path, taught, parts.policy.config, epoch=0, step=0)
    alone = with_teacher(phase, weights=str(path))
    rounds.check_stored(alone, parts, root)
    state = rounds.begin(alone, parts, root, None)
    assert_same(jax.device_get(states.models_of(state.roles)["teacher"]), taught)
    with pytest.raises(ValueError, match="scorers.teacher.weights: .*missing embedding"):
        rounds.check_stored(with_teacher(alone, base="own"), parts, root)
    laid = dataclasses.replace(phase.train, adapters=str(path))
    laid = dataclasses.replace(phase, train=laid)
    rounds.check_stored(laid, parts, root)
    state = rounds.begin(laid, parts, root, None)
    assert_same(jax.device_get(state.roles["student"].all), taught)


def test_a_runs_adapters_are_exported_alone_or_merged(run, tmp_path):
    _, parts, _, student, taught = run
    made: Any = importlib.import_module("configs.co_residual").get_config("tiny")
    (tmp_path / "config.json").write_text(json.dumps(made.to_dict()))
    write_weights(Workdir(epath.Path(tmp_path)).weights(0, 3), taught, epoch=0, step=3)
    export_adapters(str(tmp_path), str(tmp_path / "alone"))
    found = adapters.read_alone(tmp_path / "alone", student, parts.policy.config)
    assert_same(jax.device_get(found), {n: x for n, x in taught.items() if is_adapter(n)})
    whole = next((tmp_path / "weights").rglob(TENSORS)).stat().st_size
    assert (tmp_path / "alone" / TENSORS).stat().st_size < 0.4 * whole
    export(str(tmp_path), str(tmp_path / "merged"), tokenizer="", shard_bytes=10**9)
    plain = adapters.without(parts.policy.config)
    back = pretrained.import_checkpoint(tmp_path / "merged", plain, None, print)
    assert_same(jax.device_get(back), jax.device_get(adapters.merged(taught, parts.policy.config)))


def test_a_base_that_is_not_the_students_is_refused(run, tmp_path):
    phases, parts, root, _, taught = run
    other = taught | {"norm/scale": taught["norm/scale"] + 1e-3}
    write_weights(tmp_path / "whole", other, epoch=0, step=0)
    adapters.write_alone(tmp_path / "alone", other, parts.policy.config, epoch=0, step=0)
    for name, words in (("whole", "differs from the student's in norm/scale"), ("alone", "digest")):
        phase = with_teacher(phases["co_residual"], weights=str(tmp_path / name))
        with pytest.raises(ValueError, match=f"co_residual: scorers.teacher.weights: .*{words}"):
            rounds.begin(phase, parts, root, None)
    moving = dataclasses.replace(phases["co_residual"].optimizer, train="all")
    phase = dataclasses.replace(phases["co_residual"], optimizer=moving)
    with pytest.raises(
        ValueError, match="base='student', but the student trains .*; allowed: 'own'"
    ):
        rounds.form(phase, parts)


def test_a_value_is_adapters_and_an_output_over_the_students_base(run):
    phases, parts, *_ = run
    made: Any = importlib.import_module("configs.ppo").get_config("tiny")
    made.model = importlib.import_module("configs.co_residual").get_config("tiny").model
    ppo = settings.phases(made)
    policy = dataclasses.replace(parts.policy, others=tuple(roles.forms(ppo).items()))
    state = rounds.form(ppo[-1], dataclasses.replace(parts, policy=policy))
    student, value = (state.roles[who] for who in ("student", "value"))
    assert set(value.params) == {*student.params, "output/kernel"} and not value.frozen
    assert set(value.shared) == set(student.frozen)
    assert set(states.models_of(state.roles)["value"]) == set(policy.form_of("value").shapes)


def test_weights_without_adapters_get_new_ones(run, tmp_path):
    phases, parts, root, student, _ = run
    plain = {name: x for name, x in student.items() if not is_adapter(name)}
    write_weights(tmp_path / "plain", plain, epoch=0, step=0)
    train = dataclasses.replace(phases["sft"].train, start=str(tmp_path / "plain"))
    phase = dataclasses.replace(phases["sft"], train=train)
    rounds.check_stored(phase, parts, root)
    found = jax.device_get(rounds.begin(phase, parts, root, None).roles["student"].all)
    assert_same({name: found[name] for name in plain}, plain)
    for name in found.keys() - plain.keys():
        assert bool(found[name].any()) == name.endswith("adapter_in")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("train.adapters", "sft", "train.adapters='sft'; allowed: '', or a directory"),
        (
            "scorers.teacher.base",
            "mine",
            "scorers.teacher.base='mine' is unknown; allowed: own",
        ),
        ("scorers.teacher.model", {"width": 16}, "model differs from model; .*base='student'"),
        ("scorers.teacher.model", {"adapter": {"rank": 1}}, "model differs from model"),
    ],
)
def test_fields_that_contradict_each_other_are_named(path, value, words):
    made: Any = importlib.import_module("configs.co_residual").get_config("tiny")
    if path.endswith("model") and "adapter" in value:
        value = {"adapter": made.model.adapter.to_dict() | value["adapter"]}
    section: Any = made.phases.co_residual
    *folders, field = path.split(".")
    for folder in folders:
        section = section[folder]
    section[field] = value
    with pytest.raises(ValueError, match=words):
        settings.phases(made)
