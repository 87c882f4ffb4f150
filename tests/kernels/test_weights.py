"""Numbers worked by hand for kernels/weights.py."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.kernels.weights import (
    fixed_length,
    prompt_mean,
    prompt_sum_mean,
    rollout_mean,
    rollout_sum_mean,
    row_tokens,
    token_mean,
)


def ints(*x):
    return jnp.asarray(x, jnp.int32)


def bools(*rows):
    return jnp.asarray(rows, bool)


ONE_UPDATE = ints(0, 0)
TWO_ROLLOUTS = ints(0, 1)


def reduced(loss, weight):
    return float((jnp.asarray(loss, jnp.float32) * weight).sum())


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1000])
def test_tokens_of_rows_as_long_as_no_whole_number_of_bytes(tokens):
    mask = np.random.default_rng(tokens).random((3, tokens)) < [[0.5], [1.1], [0]]
    np.testing.assert_array_equal(row_tokens(jnp.asarray(mask)), mask.sum(-1))


def test_case_10_an_empty_row_and_an_empty_batch():
    loss = [[1, 3], [5, 7]]
    first = bools([1, 1], [0, 0])
    # (1 + 3) / 2 both ways: the empty row is in no denominator
    assert reduced(loss, rollout_mean(TWO_ROLLOUTS, ONE_UPDATE, first)) == 2.0
    assert reduced(loss, token_mean(ONE_UPDATE, first)) == 2.0
    none = bools([0, 0], [0, 0])
    for weight in (
        token_mean(ONE_UPDATE, none),
        rollout_mean(TWO_ROLLOUTS, ONE_UPDATE, none),
        rollout_sum_mean(TWO_ROLLOUTS, ONE_UPDATE, none),
        fixed_length(TWO_ROLLOUTS, ONE_UPDATE, none, length=2),
        prompt_mean(TWO_ROLLOUTS, ONE_UPDATE, none),
    ):
        np.testing.assert_array_equal(weight, 0)
    np.testing.assert_array_equal(
        prompt_sum_mean(ints(0, 0), ONE_UPDATE, jnp.zeros(2, bool), least=2), 0
    )


def test_case_13_a_float_where_the_mask_belongs_is_refused():
    advantage = jnp.asarray([[1.0, -1.0]])
    # right: A = [1, -1] under mask [1, 1]: (-1 + 1) / 2 = 0
    assert reduced(-advantage, token_mean(ints(0), bools([1, 1]))) == 0.0
    with pytest.raises(Exception, match="mask"):
        token_mean(ints(0), advantage)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dummies", [0, 2, 5])
def test_case_14_dummy_rows_change_no_mean(dummies):
    loss = [[1, 1], [3, 3]] + [[9, 9]] * dummies
    mask = bools([1, 1], [1, 1], *[[0, 0]] * dummies)
    rows = jnp.arange(2 + dummies)
    weight = rollout_mean(rows, jnp.zeros_like(rows), mask)
    assert reduced(loss, weight) == 2.0  # (1 + 3) / 2, never / 4


def test_case_19_token_mean_does_not_depend_on_the_split():
    # X: one token with loss 1; Y: three tokens with loss 0. 1 / (1 + 3)
    mask = bools([1, 0, 0], [1, 1, 1])
    weight = token_mean(ONE_UPDATE, mask)
    loss = jnp.asarray([[1.0, 0, 0], [0, 0, 0]])
    whole = reduced(loss, weight)
    split = reduced(loss[:1], weight[:1]) + reduced(loss[1:], weight[1:])
    assert whole == split == 0.25


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_case_20_duplicating_the_batch_changes_nothing(copies):
    # objective 1 everywhere, B = 2, T = 2: -(4 * copies) / (4 * copies)
    rows = jnp.arange(2 * copies)
    one_update = jnp.zeros_like(rows)
    mask = jnp.ones((2 * copies, 2), bool)
    for weight in (
        token_mean(one_update, mask),
        rollout_mean(rows, one_update, mask),
        prompt_mean(rows, one_update, mask),
        fixed_length(rows, one_update, mask, length=2),
    ):
        assert reduced(-jnp.ones_like(weight), weight) == pytest.approx(-1.0, rel=1e-6)


@pytest.mark.parametrize("width", [8, 16])
def test_case_21_length_bias(width):
    # A = -1, ratio 1, lengths 2 and 8: |gradient| of a token is its weight
    mask = jnp.arange(width) < jnp.asarray([[2], [8]])

    def of(weight):
        return weight[0, 0], weight[1, 0]

    # 1 / (2 rollouts * 2 tokens), 1 / (2 * 8)
    assert of(rollout_mean(TWO_ROLLOUTS, ONE_UPDATE, mask)) == (0.25, 0.0625)
    # 1 / (2 rollouts * 8), whatever the width that the batch is padded to
    assert of(fixed_length(TWO_ROLLOUTS, ONE_UPDATE, mask, length=8)) == (0.0625, 0.0625)
    np.testing.assert_allclose(of(token_mean(ONE_UPDATE, mask)), [0.1, 0.1], rtol=1e-6)  # 1 / 10


def test_denominators_are_counted_inside_each_update():
    # updates 4 and 9 hold one row each, of 1 and 3 tokens
    mask = bools([1, 0, 0], [1, 1, 1])
    updates = ints(9, 4)
    np.testing.assert_allclose(token_mean(updates, mask), [[1, 0, 0], [1 / 3] * 3], rtol=1e-6)
    np.testing.assert_array_equal(rollout_sum_mean(TWO_ROLLOUTS, updates, mask), mask)


def test_rows_of_one_rollout_count_as_one():
    # rollout 7 has two branches of 1 and 3 tokens, rollout 2 one of 2 tokens
    mask = bools([1, 0, 0], [1, 1, 1], [1, 1, 0])
    rollout, update = ints(7, 7, 2), ints(0, 0, 0)
    # 1 / (4 tokens * 2 rollouts), 1 / (2 * 2)
    expected = [[0.125, 0, 0], [0.125] * 3, [0.25, 0.25, 0]]
    np.testing.assert_allclose(rollout_mean(rollout, update, mask), expected, rtol=1e-6)
    np.testing.assert_allclose(
        rollout_sum_mean(rollout, update, mask), jnp.where(mask, 0.5, 0), rtol=1e-6
    )


def test_prompt_mean_weighs_prompts_alike():
    # prompt 0: rows of 1 and 3 tokens; prompt 1: one row of 2. 1 / (2 prompts * 4), 1 / (2 * 2)
    mask = bools([1, 0, 0], [1, 1, 1], [1, 1, 0])
    weight = prompt_mean(ints(0, 0, 1), ints(0, 0, 0), mask)
    np.testing.assert_allclose(weight[:, 0], [0.125, 0.125, 0.25], rtol=1e-6)


def test_prompt_sum_mean_leaves_prompts_out_that_are_too_small():
    group = ints(5, 5, 8, 8, 8, 3, 2, 2)
    update = ints(0, 0, 0, 0, 0, 0, 1, 1)
    mask = jnp.asarray([1, 1, 1, 0, 1, 1, 1, 0], bool)
    # update 0: prompts 5 and 8 count, 3 has one rollout: 1 / 2. update 1: prompt 2 has one valid: 0
    expected = [0.5, 0.5, 0.5, 0, 0.5, 0, 0, 0]
    np.testing.assert_array_equal(prompt_sum_mean(group, update, mask, least=2), expected)
