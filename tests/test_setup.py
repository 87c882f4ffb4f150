"""What conftest.py and pyproject.toml promise to every test is in force."""

import warnings

import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from absl import flags

from jaxrl.kernels.groups import group_center


def test_there_are_eight_devices():
    assert [device.platform for device in jax.devices()] == ["cpu"] * 8


def test_flags_are_parsed():
    assert flags.FLAGS.is_parsed()


def test_warnings_of_our_modules_are_errors():
    with pytest.raises(UserWarning, match="ours"):
        warnings.warn_explicit("ours", UserWarning, "groups.py", 1, module="jaxrl.kernels.groups")
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn_explicit("theirs", UserWarning, "core.py", 1, module="numpy.core")
    assert [str(warning.message) for warning in seen] == ["theirs"]


def test_shapes_of_kernels_are_checked():
    reward, group = jnp.array([1.0, 3.0, 9.0]), jnp.array([0, 0, 1])
    assert group_center(reward, group, jnp.full(3, True)).tolist() == [-1.0, 1.0, 0.0]
    with pytest.raises(jaxtyping.TypeCheckError, match="group"):
        group_center(reward, group[:2], jnp.full(3, True))
