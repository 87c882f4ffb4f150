"""The splash kernel, run without a TPU by its interpreter, against the dense form."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.mesh import Rules, make_mesh
from jaxrl.model import attention
from tests.model.tiny import CONFIG, policy_on

FORM: dict[str, Any] = {"head_size": 128, "heads": 4, "kv_heads": 2, "layers": 1}
TOKENS = 256


def rows():
    # Two rows of two segments and padding; the second row is one segment and padding.
    segment = np.ones((2, TOKENS), np.int32)
    segment[0, 100:180], segment[0, 180:] = 2, 0
    segment[1, 200:] = 0
    position = np.arange(TOKENS)[None] - np.where(segment == 2, 100, 0)
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, TOKENS), np.int32)
    return tokens, np.where(segment > 0, position, 0).astype(np.int32), segment


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "local"),
    [
        ({"fsdp": 2, "tensor": 2}, {}),
        ({"fsdp": 2, "tensor": 2}, {"local_layers": (1,), "window": 40}),
        ({"fsdp": 2, "context": 2}, {}),
    ],
    ids=["all", "local", "context"],
)
def test_the_kernel_gives_what_the_dense_form_gives(mesh, local):
    tokens, position, segment = rows()
    weight = jnp.asarray(segment > 0)[..., None]

    def value(policy, params):
        return (policy.hidden(params, tokens, position, segment) ** 2 * weight).mean()

    found = []
    for form in ("dense", "splash"):
        policy = policy_on(mesh, attention=form, **FORM, **local)
        params = policy.init(jax.random.key(0))
        found.append(jax.jit(jax.value_and_grad(lambda p: value(policy, p)))(params))  # noqa: B023
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), *found)


def test_auto_takes_the_kernel_on_tpu_only_and_where_it_fits():
    mesh = make_mesh({}, jax.devices()[:1])
    config = policy_on(**FORM).config
    assert attention.chosen(config, TOKENS, mesh, Rules()) is None  # a CPU
    assert attention.fits(config, TOKENS)
    assert not attention.fits(config, TOKENS + 1)
    assert not attention.fits(CONFIG, TOKENS)  # heads of 8
    assert not attention.fits(policy_on(**FORM, sinks="all").config, TOKENS)
    mixed = {**FORM, "layers": 2, "local_layers": (1, 0), "window": 8}
    assert not attention.fits(policy_on(**mixed).config, TOKENS)


def test_asking_for_a_kernel_that_does_not_fit_names_the_fields():
    mesh = make_mesh({}, jax.devices()[:1])
    with pytest.raises(ValueError, match=r"model.attention='splash'.*100 tokens.*allowed: 'dense'"):
        attention.chosen(policy_on(**FORM, attention="splash").config, 100, mesh, Rules())
