import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxrl.mesh import (
    AXES,
    Rules,
    batch_sharding,
    make_mesh,
    place,
    require_divisible,
    spec,
    ways,
)


def test_a_mesh_has_all_axes_auto_and_covers_its_devices():
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {"data": 1, "fsdp": 2, "tensor": 2, "expert": 1, "context": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert make_mesh({"data": 8}).devices.size == 8
    assert make_mesh({}, jax.devices()[:1]).devices.size == 1


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"data": 3}, ["mesh.data=3", "product is 3", "8 devices"]),
        ({"fsdp": 0}, ["mesh.fsdp=0", "at least 1"]),
        ({"model": 2}, ["model", "allowed", "tensor"]),
    ],
)
def test_a_mesh_that_does_not_fit_says_why(sizes, words):
    with pytest.raises(ValueError) as error:
        make_mesh(sizes)
    assert all(word in str(error.value) for word in words), error.value


def test_specs_follow_the_rules():
    rules = Rules()
    assert spec(("vocab", "embed"), rules) == PartitionSpec("tensor", "fsdp")
    assert spec(("rows", None, None), rules) == PartitionSpec(
        ("data", "fsdp", "expert"), None, None
    )
    assert spec(("layers", "head"), rules) == PartitionSpec(None, None)


def test_one_mesh_axis_is_claimed_once():
    with pytest.raises(ValueError, match="fsdp.*more than once"):
        spec(("rows", "embed"), Rules())
    with pytest.raises(ValueError, match="rules.embed"):
        dataclasses.replace(Rules(), embed=("fsdp", "fsdp"))
    with pytest.raises(ValueError, match="rules.mlp.*allowed"):
        dataclasses.replace(Rules(), mlp=("model",))
    with pytest.raises(ValueError, match="'width' is unknown.*embed"):
        Rules()["width"]


def test_what_does_not_divide_is_named_with_its_nearest_allowed_values():
    mesh = make_mesh({"data": 2, "fsdp": 2}, jax.devices()[:4])
    assert ways(mesh, ("data", "fsdp")) == 4
    assert ways(None, ("data", "fsdp")) == 1
    require_divisible("rows", 8, mesh, ("data", "fsdp"))
    with pytest.raises(ValueError, match=r"rows=6 .*mesh.data \* mesh.fsdp = 4.*4 or 8"):
        require_divisible("rows", 6, mesh, ("data", "fsdp"))


def test_place_splits_rows_and_refuses_what_cannot_be_split():
    mesh = make_mesh({"data": 2, "fsdp": 2}, jax.devices()[:4])
    tree = {"a": np.arange(8.0), "b": np.zeros((4, 2))}
    placed = place(tree, mesh, spec(("rows",), Rules()))
    assert placed["a"].sharding.is_equivalent_to(batch_sharding(mesh), 1)
    assert placed["b"].addressable_shards[0].data.shape == (1, 2)
    np.testing.assert_array_equal(placed["a"], tree["a"])
    with pytest.raises(ValueError, match=r"\['a'\].shape\[0\]=6"):
        place({"a": np.arange(6.0)}, mesh, spec(("rows",), Rules()))
