"""Numbers worked by hand for kernels/calibration.py. C1 ... C7: Cal-OPD's own checks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.calibration import calibrated_advantage, reweighted_advantage
from jaxrl.kernels.divergences import sampled_jsd_advantage
from jaxrl.kernels.surrogates import policy_gradient


def one(*numbers):
    return [jnp.full((1, 1), x, jnp.float32) for x in numbers]


def drawn(seed=0, shape=(6, 9)):
    """Log-probs of the policy, and of the teacher plain, told right, told wrong."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(-rng.exponential(size=shape), jnp.float32) for _ in range(4)]


@pytest.mark.parametrize(
    ("logp", "width", "right"),
    [
        # d+ = .5, d- = -.2: the interval is [-1 - .2 width, -1 + .5 width]
        (-2.0, 1.0, 0.8),  # low = -1.2
        (-0.8, 1.0, 0.0),  # inside
        (-0.1, 1.0, -0.4),  # high = -.5
        (-2.5, 5.0, 0.5),  # low = -2
        (-1.9, 5.0, 0.0),
        (-2.5, 0.0, 1.5),  # OPD
    ],
)
def test_by_hand(logp, width, right):
    got = calibrated_advantage(*one(logp, -1.0, -0.5, -1.2), width=width)
    np.testing.assert_allclose(got, [[right]], rtol=1e-5)


def test_both_probes_on_one_side():
    # d+ = -.3, d- = -.1: [-1.3, -1]; nothing above the teacher is tolerated
    for logp, right in ((-0.9, -0.1), (-1.2, 0.0), (-1.5, 0.2)):
        got = calibrated_advantage(*one(logp, -1.0, -1.3, -1.1), width=1.0)
        np.testing.assert_allclose(got, [[right]], rtol=1e-5)


def test_c1_without_width_it_is_opd_bit_for_bit():
    logp, teacher_logp, right_logp, wrong_logp = drawn()
    opd = sampled_jsd_advantage(logp, teacher_logp, alpha=1.0)
    assert np.abs(opd).min() > 1e-5
    got = calibrated_advantage(logp, teacher_logp, right_logp, wrong_logp, width=0.0)
    np.testing.assert_array_equal(got, opd)


def test_c2_inside_the_interval_nothing_pulls():
    for logp in (-1.15, -1.0, -0.6):
        advantage = calibrated_advantage(*one(logp, -1.0, -0.5, -1.2), width=1.0)
        np.testing.assert_array_equal(advantage, 0.0)
        slope = jax.grad(lambda x, a=advantage: policy_gradient(x, a)[0].sum())(*one(logp))
        np.testing.assert_array_equal(slope, 0.0)


def test_c2_rounding_between_two_kernels_is_no_discrepancy():
    for gap, right in ((9e-6, 0.0), (2e-5, -2e-5)):  # probes that say nothing: no width at all
        got = calibrated_advantage(*one(-1.0 + gap, -1.0, -1.0, -1.0), width=5.0)
        np.testing.assert_allclose(got, [[right]], atol=2e-7)


def test_c3_a_wider_interval_never_asks_for_more():
    sizes = [np.abs(calibrated_advantage(*drawn(), width=w)) for w in (0.0, 0.3, 1.0, 5.0, 80.0)]
    for narrow, wide in zip(sizes, sizes[1:], strict=False):
        assert (wide <= narrow).all()
    assert 0 < sizes[-1].sum() < sizes[0].sum() / 3


def test_c4_the_sign_is_opds_or_none():
    logp, teacher_logp, *_ = arrays = drawn()
    sign = np.sign(calibrated_advantage(*arrays, width=1.0))
    assert set(np.unique(sign)) == {-1, 0, 1}
    np.testing.assert_array_equal(sign, np.where(sign == 0, 0, np.sign(teacher_logp - logp)))


def test_c5_which_probe_is_which_does_not_matter():
    logp, teacher_logp, right_logp, wrong_logp = drawn()
    a = calibrated_advantage(logp, teacher_logp, right_logp, wrong_logp, width=2.0)
    b = calibrated_advantage(logp, teacher_logp, wrong_logp, right_logp, width=2.0)
    np.testing.assert_array_equal(a, b)


def test_c6_probes_that_change_nothing_leave_opd():
    logp, teacher_logp, *_ = drawn()
    got = calibrated_advantage(logp, teacher_logp, teacher_logp, teacher_logp, width=5.0)
    np.testing.assert_array_equal(got, teacher_logp - logp)


def test_c7_no_gradient_flows_into_it():
    slopes = jax.grad(lambda x: calibrated_advantage(*x, width=1.0).sum())(drawn())
    for slope in slopes:
        np.testing.assert_array_equal(slope, 0)


@pytest.mark.parametrize(
    ("advantage", "gap", "right"),
    [
        # factor .4 + .6 clip(exp(sign(A) gap), .8, 1.2)
        (2.0, 0.0, 2.0),
        (2.0, 0.1, 2 * (0.4 + 0.6 * np.exp(0.1))),
        (2.0, 3.0, 2 * (0.4 + 0.6 * 1.2)),
        (2.0, -3.0, 2 * (0.4 + 0.6 * 0.8)),
        (-2.0, 3.0, -2 * (0.4 + 0.6 * 0.8)),  # the teacher likes what the verifier does not
        (-2.0, -1e4, -2 * (0.4 + 0.6 * 1.2)),
        (0.0, 3.0, 0.0),
    ],
)
def test_reweighting_by_hand(advantage, gap, right):
    logp, teacher_logp, given = one(-1.0, -1.0 + gap, advantage)
    got = reweighted_advantage(logp, teacher_logp, given, share=0.6, band=0.2)
    np.testing.assert_allclose(got, [[right]], rtol=1e-5)


def test_reweighting_keeps_the_sign():
    logp, teacher_logp, *_ = drawn()
    advantage = jnp.asarray(np.random.default_rng(1).normal(size=logp.shape))
    for share, band in ((0.5, 0.2), (1.0, 0.99)):
        got = reweighted_advantage(logp, teacher_logp, advantage, share=share, band=band)
        np.testing.assert_array_equal(np.sign(got), np.sign(advantage))
    for share, band in ((0.0, 0.5), (1.0, 0.0)):  # no share, or no room
        got = reweighted_advantage(logp, teacher_logp, advantage, share=share, band=band)
        np.testing.assert_allclose(got, advantage, rtol=1e-6)
