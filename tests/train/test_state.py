"""What a state holds, that it owns it, and where it lives."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxrl.algorithms.contract import load
from jaxrl.model import transformer
from jaxrl.train import state as states
from jaxrl.train.optimizer import build
from tests.model.tiny import logp, rows, seeded
from tests.train.test_optimizer import but
from tests.train.toy import Bigram, mesh_of, state_of


def created(**changes):
    arguments = {"freeze": (), "roles": {"student"}, "key": jax.random.key(3), "step": 5}
    params = changes.pop("params", None) or Bigram().init(jax.random.key(0))
    return params, states.create(params, optax.adam(0.1), **(arguments | changes))


def test_what_is_in_it():
    params, state = created(freeze=("^scale$",), roles={"student", "reference"})
    assert state.step == 5 and state.step.dtype == jnp.int32
    np.testing.assert_array_equal(state.key, jax.random.key_data(jax.random.key(3)))
    student = state.roles["student"]
    assert set(student.params) == {"embed", "head"} and set(student.frozen) == {"scale"}
    assert set(student.all) == set(params)
    reference = state.roles["reference"]
    assert set(reference.params) == {"embed", "head"} and reference.shared == ("scale",)
    assert set(states.models_of(state.roles)["reference"]) == set(params)
    with pytest.raises(ValueError, match="1 parameters are the student's"):
        _ = reference.all
    names = {str(path) for path, _ in jax.tree_util.tree_leaves_with_path(student.opt_state)}
    assert any("embed" in name for name in names)
    assert not any("scale" in name for name in names)  # no moments for what is frozen


def test_the_state_owns_its_arrays():
    params, state = created(roles={"student", "reference"})
    leaves = jax.tree.leaves(state)
    for leaf in leaves:
        leaf.delete()  # as donation does
    assert all(bool((x == x).all()) for x in params.values())
    _, state = created(roles={"student", "reference"})
    jax.tree.map(lambda x: x.delete(), state.roles["student"])
    assert all(bool((x == x).all()) for x in state.roles["reference"].params.values())


def test_moments_are_float32_whatever_the_parameters_are():
    params = {name: x.astype(jnp.bfloat16) for name, x in Bigram().init(jax.random.key(0)).items()}
    tx = build(but(name="adamw"))
    key = jax.random.key(0)
    state = states.create(params, tx, freeze=(), roles={"student"}, key=key, step=0)
    student = state.roles["student"]
    assert student.params["embed"].dtype == jnp.bfloat16
    for name in ("mu", "nu"):
        assert optax.tree.get(student.opt_state, name)["embed"].dtype == jnp.float32


def test_a_reference_in_half_the_bytes_scores_the_same_bits():
    policy, params = seeded(dtype="bfloat16")
    read_in = transformer.read_in(policy.config)
    _, state = created(roles={"student", "reference"}, params=params, read_in=read_in)
    held = states.models_of(state.roles)
    narrow = {name for name, x in held["reference"].items() if x.dtype == jnp.bfloat16}
    assert narrow == {n for n in params if n.split("/")[-1] in ("embedding", "kernel")}
    batch = rows(jax.random.randint(jax.random.key(5), (2, 7), 0, policy.config.vocab_size))
    student, reference = (logp(policy, held[who], batch) for who in ("student", "reference"))
    np.testing.assert_array_equal(student, reference)


def test_a_role_that_nothing_builds():
    with pytest.raises(ValueError, match="'teacher'.*allowed: student, reference"):
        created(roles={"student", "teacher"})


def test_only_what_the_student_leaves_frozen_is_shared():
    params = Bigram().init(jax.random.key(0))
    others = {"self": states.scorer(params, shared=("scale",))}
    _, state = created(freeze=("scale",), roles={"student", "self"}, others=others)
    assert len(jax.tree.leaves(state.roles["self"])) == 2
    with pytest.raises(ValueError, match=r"self shares \['scale'\] with the student; allowed"):
        created(roles={"student", "self"}, others=others)
    with pytest.raises(ValueError, match="scale would be trained and shared"):
        states.scorer(params, tx=optax.sgd(0.1), shared=("scale",))


def test_roles_of():
    assert states.roles_of(load("sft")) == {"student"}
    fields = {"beta": 0.1, "unit_grad": False, "coupling": "written", "keep_truncated": False}
    fields |= {"strata": False}
    assert states.roles_of(load("gvpo", anchor="start", **fields)) == {"student"}
    assert states.roles_of(load("gvpo", anchor="frozen", **fields)) == {"student", "reference"}


def part(x):
    return x.sharding.spec


def test_parameters_and_moments_lie_together():
    mesh = mesh_of(fsdp=2, tensor=2)
    state = state_of(load("sft"), optax.adam(0.1), mesh=mesh, freeze=("^head$",))
    student = state.roles["student"]
    wanted = PartitionSpec("tensor", "fsdp")
    assert part(student.params["embed"]) == wanted
    assert part(optax.tree.get(student.opt_state, "mu")["embed"]) == wanted
    assert part(student.frozen["head"]) == PartitionSpec("fsdp", "tensor")
    assert part(state.step) == PartitionSpec()
    shapes = jax.eval_shape(lambda: state)  # a template needs no arrays
    assert jax.tree.leaves(states.shardings(shapes, Bigram(), mesh))[0].mesh == mesh
