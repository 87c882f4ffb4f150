"""Splash kernels, run without a TPU by their interpreter, against the dense form."""

import dataclasses
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.mesh import Rules, make_mesh
from jaxrl.model import attention
from tests.model.tiny import CONFIG, lively, policy_on

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


LOCAL: dict[str, Any] = {"local_layers": (1,), "window": 40}
TOKAMAX = pytest.mark.skipif(
    importlib.util.find_spec("tokamax") is None,
    reason="tokamax is not installed: pip install -c constraints.txt -e '.[tokamax]'",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "mesh", "form"),
    [
        pytest.param("splash", {"fsdp": 2, "tensor": 2}, {}, id="all"),
        pytest.param("splash", {"fsdp": 2, "tensor": 2}, LOCAL, id="local"),
        pytest.param("splash", {"fsdp": 2, "context": 2}, {}, id="context"),
        pytest.param("tokamax", {"fsdp": 2, "tensor": 2}, {}, id="tokamax", marks=TOKAMAX),
        pytest.param(
            "tokamax",
            {"fsdp": 2, "tensor": 2},
            {**LOCAL, "sinks": "local"},
            id="tokamax-local-sinks",
            marks=TOKAMAX,
        ),
        pytest.param(
            "tokamax",
            {"fsdp": 2, "context": 2},
            {"sinks": "all"},
            id="tokamax-context-sinks",
            marks=TOKAMAX,
        ),
    ],
)
def test_the_kernel_gives_what_the_dense_form_gives(kernels, mesh, form):
    tokens, position, segment = rows()
    weight = jnp.asarray(segment > 0)[..., None]

    def value(policy, params):
        return (policy.hidden(params, tokens, position, segment) ** 2 * weight).mean()

    found = []
    for asked in ("xla", kernels):
        policy = policy_on(mesh, kernels=asked, **FORM, **form)
        params = lively(policy.init(jax.random.key(0)))
        params = {name: x + 0.7 * name.endswith("sink") for name, x in params.items()}
        found.append(jax.jit(jax.value_and_grad(lambda p: value(policy, p)))(params))  # noqa: B023
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6), *found)


def test_auto_takes_the_kernel_on_tpu_only_and_where_it_fits():
    mesh = make_mesh({}, jax.devices()[:1])
    config = policy_on(**FORM).config
    assert attention.chosen(config, TOKENS, mesh, Rules()) is None  # a CPU
    mixed = policy_on(**{**FORM, "layers": 2, "local_layers": (1, 0), "window": 8}).config
    sinks = policy_on(**FORM, sinks="all").config
    for kernels in ("splash", "tokamax"):
        assert attention.fits(config, TOKENS, kernels)
        assert not attention.fits(config, TOKENS + 1, kernels)
        assert not attention.fits(CONFIG, TOKENS, kernels)  # heads of 8
        assert not attention.fits(mixed, TOKENS, kernels)
        assert attention.fits(sinks, TOKENS, kernels) == (kernels == "tokamax")


@pytest.mark.parametrize("kernels", ["splash", "tokamax"])
def test_asking_for_a_kernel_that_does_not_fit_names_the_fields(kernels):
    mesh = make_mesh({}, jax.devices()[:1])
    config = dataclasses.replace(policy_on(**FORM).config, kernels=kernels)
    named = rf"model.kernels='{kernels}' with rows of 100 tokens.*allowed: 'auto', 'xla'"
    with pytest.raises(ValueError, match=named):
        attention.chosen(config, 100, mesh, Rules())


def test_what_is_not_installed_is_said_before_anything_is_built(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"model.kernels='tokamax'.*not installed.*\[tokamax\]"):
        policy_on(**FORM, kernels="tokamax")
