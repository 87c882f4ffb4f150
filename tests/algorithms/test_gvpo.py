"""GVPO against its oracle, in both forms. G1 ... G11: GVPO's own checks, see tests/kernels too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algorithms.gvpo import Algorithm
from tests.algorithms.batches import (
    ROWS,
    SLOTS,
    batch_of,
    cut,
    differences,
    logps,
    narrow,
    ragged,
    update,
)
from tests.papers import gvpo as paper

PLAIN = {
    "beta": 0.3,
    "anchor": "frozen",
    "coupling": "written",
    "unit_grad": False,
    "keep_truncated": False,
    "strata": False,
}
FORMS = pytest.mark.parametrize("coupling", ["written", "weights"])
ANCHORS = pytest.mark.parametrize("anchor", ["start", "frozen"])


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def make(**change):
    return Algorithm(**{**PLAIN, **change})


def observed_by(algorithm, logp, start_logp, ref_logp):
    """What step.py hands to the algorithm: read at the take's start, or anew before the update."""
    now = {"student": logp, "reference/plain": ref_logp}
    start = {"student": start_logp, "reference/plain": ref_logp}
    names = {who if who == "student" else f"{who}/{view}" for who, view in algorithm.observers}
    if algorithm.refresh == "take":
        return {name: start[name] for name in names}
    return {name: now[name] for name in names} | {f"start/{name}": start[name] for name in names}


def one_update(batch, *, micro=None, **change):
    """Loss and slope of one update, its log-probs away from the start's."""
    algorithm = make(**change)
    logp, start_logp, ref_logp = (logps(batch, seed) for seed in (1, 2, 3))
    observed = observed_by(algorithm, logp, start_logp, ref_logp)
    value, slope, diagnostics = update(
        algorithm, batch, logp, observed, micro=micro or batch.valid.shape[0]
    )
    anchor = ref_logp if algorithm.anchor == "frozen" else start_logp
    return value, slope, diagnostics, (logp.tolist(), anchor.tolist())


def of_update(batch, number):
    """The rollouts of one update, for the oracle."""
    return np.asarray(batch.valid & ~batch.truncated & (batch.minibatch == number)).tolist()


@ANCHORS
@FORMS
def test_it_equals_the_oracle(coupling, anchor):
    batch = ragged()
    value, slope, _, (logp, anchor_logp) = one_update(batch, coupling=coupling, anchor=anchor)
    acted = (batch.kind == 2).tolist()
    total, total_slope = 0.0, np.zeros(slope.shape)
    for number in (0, 1):
        arguments = (
            logp,
            anchor_logp,
            batch.reward.tolist(),
            batch.group.tolist(),
            of_update(batch, number),
            acted,
            0.3,
        )
        total += paper.loss(*arguments)
        total_slope += paper.gradient(*arguments)
    np.testing.assert_allclose(slope, total_slope, rtol=1e-6, atol=1e-12)
    assert np.abs(total_slope).max() > 1e-3
    if coupling == "written":
        np.testing.assert_allclose(value, total, rtol=1e-6)


def stratified(batch):
    """Two policies in turn: prompt 40 has two rollouts and one, and is left out."""
    behaviour = [0, 0, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0]
    return dataclasses.replace(batch, facts={"behaviour": np.asarray(behaviour)})


@FORMS
def test_strata_equal_the_oracle(coupling):
    batch = stratified(ragged())
    value, slope, _, (logp, anchor_logp) = one_update(batch, coupling=coupling, strata=True)
    facts = (batch.reward.tolist(), batch.group.tolist(), batch.facts["behaviour"].tolist())

    def oracle(logp):
        return sum(
            paper.stratified_loss(
                logp, anchor_logp, *facts, of_update(batch, number), batch.acted.tolist(), 0.3
            )
            for number in (0, 1)
        )

    np.testing.assert_allclose(slope, differences(oracle, logp), rtol=1e-6, atol=1e-9)
    assert np.abs(slope).max() > 1e-3
    if coupling == "written":
        np.testing.assert_allclose(value, oracle(logp), rtol=1e-6)


def test_a_long_response_is_told_from_its_anchor_in_float32():
    """Case: l and l' of thousands of tokens, rounded before they are subtracted."""
    rng, length = np.random.default_rng(0), 4096
    batch = batch_of([length] * 4, [0.0] * 4, [4] * 4)
    anchor = -rng.exponential(0.6, batch.tokens.shape)
    logp = anchor + rng.normal(0, 0.003, anchor.shape)
    logp, anchor = logp.astype(np.float32), anchor.astype(np.float32)
    gap = (logp.astype(np.float64) - anchor)[:, 2 : 2 + length].sum(-1)
    algorithm = make(beta=1.0)
    with jax.enable_x64(False):
        taken, reading, observed = jax.tree.map(
            jnp.asarray,
            narrow(
                (batch, {"logp": logp, "entropy": logp}, {"reference/plain": anchor}), "float32"
            ),
        )
        told = algorithm.loss(reading, taken, observed, algorithm.credit(taken, observed))[1]
    np.testing.assert_allclose(told["implicit_reward"], gap - gap.mean(), atol=1e-6)


def test_strata_of_one_policy_are_the_plain_form_and_two_are_not():
    batch = batch_of([2, 1, 3, 2], [1.0, 0.0, 0.5, 0.2], [4, 4, 4, 4])
    plain = one_update(batch)[1]
    one, two = (
        one_update(dataclasses.replace(batch, facts={"behaviour": np.asarray(who)}), strata=True)[1]
        for who in ([7, 7, 7, 7], [7, 7, 9, 9])
    )
    np.testing.assert_allclose(one, plain, rtol=1e-6)
    assert np.abs(two - plain).max() > 1e-3
    assert make(strata=True).needs == ("behaviour",)
    assert make().needs == ()


@ANCHORS
def test_both_forms_have_the_same_gradient(anchor):
    batch = ragged()
    written = one_update(batch, coupling="written", anchor=anchor)[1]
    weights = one_update(batch, coupling="weights", anchor=anchor)[1]
    np.testing.assert_allclose(weights, written, rtol=1e-6, atol=1e-15)


def policy(params, batch):
    """[row token] log-prob of each token given the one before it."""
    before = jnp.pad(batch.tokens, ((0, 0), (1, 0)))[:, :-1]
    logp = jax.nn.log_softmax(params[before], axis=-1)
    return jnp.take_along_axis(logp, batch.tokens[..., None], axis=-1)[..., 0]


def walk(algorithm, batch, *, micro, epochs=2, rate=3.0):
    """Gradients of all updates of a take, by plain gradient descent on a table of logits."""
    params = jnp.asarray(np.random.default_rng(5).normal(size=(5, 5)))
    ref = policy(jnp.asarray(np.random.default_rng(6).normal(size=(5, 5))), batch)
    start = policy(params, batch)
    found = []
    for _ in range(epochs):
        for first in (0, ROWS // 2):
            part = cut(batch, first, first + ROWS // 2)
            at = slice(first, first + ROWS // 2)
            logp, back = jax.vjp(lambda p, part=part: policy(p, part), params)
            observed = observed_by(algorithm, logp, start[at], ref[at])
            _, slope, _ = update(algorithm, part, logp, observed, micro=micro)
            (gradient,) = back(slope)
            params = params - rate * gradient
            found.append(gradient)
    return np.asarray(found)


@pytest.mark.parametrize(("anchor", "micro"), [("start", 1), ("frozen", 2)])
def test_g10_both_forms_agree_over_updates_and_micro_batches(anchor, micro):
    batch = ragged()
    whole = walk(make(anchor=anchor), batch, micro=ROWS // 2)
    assert np.abs(whole[1] - whole[3]).max() > 1e-3  # the policy moves between the epochs
    groups = walk(make(anchor=anchor), batch, micro=SLOTS)
    np.testing.assert_allclose(groups, whole, rtol=1e-6, atol=1e-12)
    # as weights a micro-batch may cut a group
    weights = walk(make(anchor=anchor, coupling="weights"), batch, micro=micro)
    np.testing.assert_allclose(weights, whole, rtol=1e-6, atol=1e-12)


def test_only_the_written_form_needs_whole_groups_in_a_micro_batch():
    assert make(coupling="written").coupled
    assert not make(coupling="weights").coupled
    with pytest.raises(AssertionError):  # and it really does
        np.testing.assert_allclose(
            one_update(ragged(), micro=1)[1], one_update(ragged())[1], rtol=1e-2
        )


@FORMS
def test_at_the_anchor_it_is_beta_times_reinforce(coupling):
    batch = batch_of([2, 1, 3], [1.0, 0.0, 0.5], [4, 4, 4])
    algorithm, logp = make(coupling=coupling, anchor="start"), logps(batch, 1)
    observed = observed_by(algorithm, logp, logp, logp)
    _, slope, _ = update(algorithm, batch, logp, observed, micro=3)
    # -beta / (k - 1) (R - mean) = -.3 / 2 * [.5, -.5, 0]
    np.testing.assert_allclose(slope[:, 2], [-0.075, 0.075, 0], atol=1e-12)


@FORMS
def test_unit_grad_divides_by_beta(coupling):
    plain = one_update(ragged(), coupling=coupling)[1]
    unit = one_update(ragged(), coupling=coupling, unit_grad=True)[1]
    np.testing.assert_allclose(unit, plain / 0.3, rtol=1e-6)


@FORMS
def test_an_empty_response_is_legal_and_counts(coupling):
    batch = batch_of([0, 2, 3], [1.0, 0.0, 0.5], [4, 4, 4])
    value, slope, _, (logp, anchor_logp) = one_update(batch, coupling=coupling)
    arguments = (logp, anchor_logp, [1.0, 0.0, 0.5], [4] * 3, [1] * 3, batch.acted.tolist(), 0.3)
    np.testing.assert_allclose(slope, paper.gradient(*arguments), rtol=1e-6, atol=1e-12)
    if coupling == "written":  # the empty response's own residual is in the value
        np.testing.assert_allclose(value, paper.loss(*arguments), rtol=1e-6)


@FORMS
def test_truncated_rollouts_are_invalid_unless_kept(coupling):
    truncated = batch_of([2, 1, 3], [1.0, 0.0, 0.5], [4, 4, 4], truncated=[0, 0, 1])
    failed = batch_of([2, 1, 3], [1.0, 0.0, 0.5], [4, 4, 4], valid=[1, 1, 0])
    whole = batch_of([2, 1, 3], [1.0, 0.0, 0.5], [4, 4, 4])
    a = one_update(truncated, coupling=coupling)[1]
    np.testing.assert_allclose(a, one_update(failed, coupling=coupling)[1], rtol=1e-12)
    kept = one_update(truncated, coupling=coupling, keep_truncated=True)[1]
    np.testing.assert_allclose(kept, one_update(whole, coupling=coupling)[1], rtol=1e-12)
    assert np.abs(kept - a).max() > 1e-3


@FORMS
@pytest.mark.parametrize("valid", [[0, 0, 1, 1, 1], [1, 0, 1, 1, 1]])
def test_case_16_a_prompt_with_less_than_two_valid_rollouts_is_in_no_mean(coupling, valid):
    reward = [1.0, 0.0, 0.5, 0.2, 0.9]
    batch = batch_of([2, 1, 3, 2, 1], reward, [4, 4, 6, 6, 6], valid=valid)
    slope = one_update(batch, coupling=coupling)[1]
    np.testing.assert_array_equal(slope[:2], 0)
    two = batch_of([2, 1, 3, 2, 1], reward, [4, 4, 6, 6, 6])
    # with the first prompt in, the second has half the weight
    np.testing.assert_allclose(slope[2:], 2 * one_update(two, coupling=coupling)[1][2:], rtol=1e-6)


@FORMS
def test_case_10_a_batch_without_valid_rollouts_is_harmless(coupling):
    batch = batch_of([2, 1], [0.0, 0.0], [4, 4], valid=[0, 0])
    value, slope, diagnostics, _ = one_update(batch, coupling=coupling)
    assert value == 0
    np.testing.assert_array_equal(slope, 0)
    assert all(np.isfinite(x).all() for x in diagnostics.values())


@FORMS
def test_equal_rewards_are_trained(coupling):
    batch = batch_of([2, 1, 3], [1.0, 1.0, 1.0], [4, 4, 4])
    assert make(coupling=coupling).keep(np.ones(3), {})
    assert np.abs(one_update(batch, coupling=coupling)[1]).max() > 1e-3


@FORMS
def test_g11_behaviour_log_probs_do_not_enter(coupling):
    batch = ragged()
    other = dataclasses.replace(batch, sampler_logp=batch.sampler_logp - 3)
    a, b = (one_update(x, coupling=coupling) for x in (batch, other))
    assert a[0] == b[0]
    np.testing.assert_array_equal(a[1], b[1])


POSITIONS, CHOICES, PROMPTS, SAMPLES, BETA = 8, 4, 8, 8, 0.1


def distance_to_the_optimum(scale):
    """KL(policy, optimum) after descent on rollouts of the reference, which is never refreshed.

    A response is 8 independent choices among 4, its reward the mean of their scores: the optimum
    is known. ``scale`` multiplies the log-probs, 1 / 8 is the token-mean mistake.
    """
    rows = PROMPTS * SAMPLES
    rng = np.random.default_rng(0)
    ref = jax.nn.log_softmax(jnp.asarray(rng.normal(size=(POSITIONS, CHOICES))))
    score = jnp.asarray(rng.random((POSITIONS, CHOICES)))
    optimum = jax.nn.log_softmax(ref + score / POSITIONS / BETA)
    algorithm = make(beta=BETA)
    prompt = np.repeat(np.arange(PROMPTS), SAMPLES)
    frame = jax.tree.map(jnp.asarray, batch_of([POSITIONS] * rows, np.zeros(rows), prompt))

    def step(logits, key):
        chosen = jax.random.categorical(key, ref, shape=(rows, POSITIONS))
        at = jnp.arange(POSITIONS)
        batch = dataclasses.replace(frame, reward=score[at, chosen].sum(-1) / POSITIONS)

        def row(logp):  # two prompt tokens before, one of padding after
            return jnp.pad(logp[at, chosen] * scale, ((0, 0), (2, 1)))

        observed = {"reference/plain": row(ref)}
        credit = algorithm.credit(batch, observed)

        def loss(logits):
            logp = row(jax.nn.log_softmax(logits))
            reading = {"logp": logp, "entropy": jnp.zeros_like(logp)}
            return (algorithm.loss(reading, batch, observed, credit)[0] * credit.weight).sum()

        return logits - 20 * jax.grad(loss)(logits), None

    keys = jax.random.split(jax.random.key(0), 600)
    logp = jax.nn.log_softmax(jax.jit(lambda x: jax.lax.scan(step, x, keys)[0])(ref))
    return float((jnp.exp(logp) * (logp - optimum)).sum())


def test_g8_it_reaches_the_optimum_from_a_fixed_behaviour_policy():
    assert distance_to_the_optimum(1.0) < 1e-3


def test_g9_means_over_tokens_would_not():
    assert distance_to_the_optimum(1 / POSITIONS) > 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("beta", 0.0), ("beta", float("inf")), ("anchor", "old"), ("coupling", "both")],
)
def test_a_bad_field_is_named(field, value):
    with pytest.raises(ValueError, match=f"algorithm.{field}="):
        make(**{field: value})
