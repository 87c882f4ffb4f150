"""A decoding step goes through what is filled of a cache, and that changes nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.mesh import Rules, over_rows
from jaxrl.model import decoding
from jaxrl.model.filled import SaidMask
from jaxrl.model.layers import attend
from tests.model.tiny import seeded

PLACES = 300
ALONE = functools.partial(over_rows, mesh=None, rules=Rules())


def test_a_longer_stretch_of_nothing_changes_no_bit():
    """so that a sample does not depend on how far its neighbours have come"""
    draw = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(draw.normal(size=(3, heads, places, 32)), jnp.float32)
        for heads, places in ((8, 1), (4, PLACES), (4, PLACES))
    )
    place = jnp.array([5, 77, 120])
    sink = jnp.linspace(-1.0, 2.0, 8)

    @jax.jit
    def over(furthest, query, key, value):
        mask = SaidMask(place, (furthest, furthest), 100, ALONE)
        return mask.attend(query, key, value, scale=0.2, sink=sink)

    found = [over(jnp.int32(furthest), query, key, value) for furthest in (120, 200, 299)]
    for one in found[1:]:
        np.testing.assert_array_equal(one, found[0])
    back = place[:, None, None] - jnp.arange(PLACES)
    whole = attend(query, key, value, (back >= 0) & (back < 100), scale=0.2, sink=sink)
    np.testing.assert_allclose(found[0], whole, rtol=1e-5, atol=1e-6)


def test_a_step_sees_what_active_slots_have_said():
    """Against a prefill of the same tokens, in a cache far longer than they are; a slot that is
    not active may be anywhere."""
    policy, params = seeded()
    tokens = jnp.asarray(np.random.default_rng(1).integers(1, 20, (3, 140)), jnp.int32)
    length = jnp.array([140, 9, 131])
    cache = decoding.empty_cache(policy, 3, PLACES)
    step = jax.jit(decoding.decoder(policy, params))
    _, before, _ = decoding.prefill(policy, params, tokens, length - 1)
    put = lambda old, new: old.at[:, :, :140].set(new)  # noqa: E731
    cache = jax.tree.map(put, cache, before)
    last = tokens[jnp.arange(3), length - 1]
    logits, _, _ = step(last, length - 1, np.array([True, True, True]), cache)
    wanted, _, _ = decoding.prefill(policy, params, tokens, length)
    np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4)
    alone, _, _ = step(last, length - 1, np.array([False, True, False]), cache)
    np.testing.assert_allclose(alone[1], wanted[1], rtol=1e-4, atol=1e-4)
    assert np.abs(alone[0] - wanted[0]).max() > 1e-3  # beyond what was gone through
