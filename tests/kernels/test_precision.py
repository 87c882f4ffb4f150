"""Numbers worked by hand for kernels/precision.py."""

import jax
import jax.numpy as jnp
import pytest

from jaxrl.kernels.precision import widen


@pytest.mark.parametrize(
    ("given", "computed"),
    [
        (jnp.bfloat16, jnp.float32),
        (jnp.float16, jnp.float32),
        (jnp.float32, jnp.float32),
        (jnp.float64, jnp.float64),
        (jnp.int32, jnp.float32),
        (jnp.bool, jnp.float32),
    ],
)
def test_what_kernels_compute_in(given, computed):
    with jax.enable_x64(True):
        assert widen(jnp.zeros(3, given)).dtype == computed
