"""Rewards that come token by token: what follows a token, and how a value learns to expect it.

Counted tokens of a row follow one another, whatever stands between them (a tool's output is no
step); each row is an episode that ends with its last counted token.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl.kernels.groups import group_max, group_sum
from jaxrl.kernels.precision import widen
from jaxrl.kernels.surrogates import Diagnostics
from jaxrl.kernels.weights import row_tokens

CACHED_ROWS = 16


def _backwards(step, later, mask, *x):
    """What ``step(later, token) -> (later, found)`` finds at the counted tokens, from each row's
    last to its first; 0 elsewhere.

    One token of all rows at a time: a scan in log(tokens) passes over memory takes five times as
    long. On CPU of so many rows as its cache holds while they are turned to tokens by rows and
    back, which takes a third of the time. What is masked must be left out by ``step``, since
    masking it here would be another pass.
    """

    def all_rows(later, mask, *x):
        _, found = jax.lax.scan(step, later, tuple(part.T for part in (*x, mask)), reverse=True)
        return jnp.where(mask, found.T, 0)

    def by_blocks(*given):
        blocks = jax.tree.map(lambda a: a.reshape(-1, CACHED_ROWS, *a.shape[1:]), given)
        return jax.lax.map(lambda block: all_rows(*block), blocks).reshape(mask.shape)

    if mask.shape[0] <= CACHED_ROWS or mask.shape[0] % CACHED_ROWS:
        return all_rows(later, mask, *x)
    return jax.lax.platform_dependent(later, mask, *x, cpu=by_blocks, default=all_rows)


def _nothing(x: Float[Array, "row token"]) -> Float[Array, " row"]:
    """What is known after a row's last token."""
    return jnp.zeros(x.shape[0], jnp.promote_types(x.dtype, jnp.float32))


def return_to_go(
    reward: Float[Array, "row token"],
    mask: Bool[Array, "row token"],
    *,
    discount: float,
) -> Float[Array, "row token"]:
    """G_t = r_t + discount G_{t+1} over the row's counted tokens; 0 elsewhere. 0 <= discount <= 1.

    With discount 1 and the reward at the last counted token, every counted token has it whole.
    """

    def step(later, token):
        reward, counts = token
        later = jnp.where(counts, widen(reward) + discount * later, later)
        return later, later

    return _backwards(step, _nothing(reward), mask, reward)


def gae(
    reward: Float[Array, "row token"],
    value: Float[Array, "row token"],
    mask: Bool[Array, "row token"],
    *,
    discount: float,
    trace: float,
) -> Float[Array, "row token"]:
    """A_t = d_t + discount trace A_{t+1}, d_t = r_t + discount V_{t+1} - V_t; 0 at masked tokens.

    V_t is the value of the state before token t, t + 1 the row's next counted token, and the value
    after the last one is 0. trace (lambda) 1: the return less V_t; 0: d_t. A_t + V_t is what the
    value is to learn. Source: generalized advantage estimation, arXiv 1506.02438, equation 16.
    """

    def step(later, token):
        (value_after, after), (reward, value, counts) = later, token
        value = widen(value)
        advantage = widen(reward) + discount * (value_after + trace * after) - value
        later = jnp.where(counts, value, value_after), jnp.where(counts, advantage, after)
        return later, later[1]

    return _backwards(step, (_nothing(value), _nothing(value)), mask, reward, value)


def whiten(
    x: Float[Array, "row token"],
    label: Int[Array, " row"],
    mask: Bool[Array, "row token"],
) -> Float[Array, "row token"]:
    """(x - mean) / std over the counted tokens of the rows with one label, std over n - 1.

    Tokens count alike, so long rows count more. 0 at masked tokens, where std < 1e-8 and where one
    token is counted. Source: REINFORCE++, arXiv 2501.03262, global normalisation (label: one for
    the whole batch). Departs from public code: no epsilon is added to the variance.
    """
    x, of_row = jnp.where(mask, widen(x), 0), row_tokens(mask)
    counted = of_row > 0
    tokens = group_sum(of_row, label, counted)

    def mean_of(x, share):
        return (group_sum(x.sum(-1), label, counted) / jnp.maximum(share, 1))[:, None]

    # Largest value first, as in groups.group_center: equal values are whitened to exactly 0.
    top = jnp.where(mask, x, -jnp.inf).max(-1)
    x = jnp.where(mask, x - group_max(top, label, counted)[:, None], 0)
    x = jnp.where(mask, x - mean_of(x, tokens), 0)
    variance = mean_of(x * x, tokens - 1)
    varies = variance >= 1e-16
    return jnp.where(mask & varies, x / jnp.sqrt(jnp.where(varies, variance, 1)), 0)


def clipped_value(
    value: Float[Array, "row token"],
    old_value: Float[Array, "row token"],
    target: Float[Array, "row token"],
    *,
    clip: float,
) -> tuple[Float[Array, "row token"], Diagnostics]:
    """max((V - G)^2, (V' - G)^2) / 2 with V' = V held within old +- clip; clip > 0, inf: no bound.

    Gradient V - G by the value, 0 where the bound was chosen (``value_clipped``: 1 there); none by
    old value and target. Source: PPO's value loss as in OpenAI Baselines, ppo2.
    """
    old, goal = (jax.lax.stop_gradient(widen(x)) for x in (old_value, target))
    value = widen(value)
    near = jnp.clip(jax.lax.stop_gradient(value), old - clip, old + clip)
    plain, bounded = (value - goal) ** 2 / 2, (near - goal) ** 2 / 2
    clipped = bounded > plain
    error = jax.lax.stop_gradient(value) - goal
    return jnp.where(clipped, bounded, plain), {
        "value": jax.lax.stop_gradient(value),
        "value_error": error,
        "value_clipped": clipped.astype(value.dtype),
    }
