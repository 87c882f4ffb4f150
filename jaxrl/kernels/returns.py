"""Rewards that come token by token: what follows a token, and how a value learns to expect it.

Counted tokens of a row follow one another, whatever stands between them (a tool's output is no
step); each row is an episode that ends with its last counted token.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl.kernels.groups import group_scale
from jaxrl.kernels.precision import widen
from jaxrl.kernels.surrogates import Diagnostics


def _backwards(
    add: Float[Array, "row token"], keep: Float[Array, "row token"]
) -> Float[Array, "row token"]:
    """y_t = add_t + keep_t y_{t+1}, y = 0 after the row."""

    def join(later, sooner):
        return later[0] * sooner[0], sooner[1] + sooner[0] * later[1]

    return jax.lax.associative_scan(join, (keep, add), reverse=True, axis=1)[1]


def return_to_go(
    reward: Float[Array, "row token"],
    mask: Bool[Array, "row token"],
    *,
    discount: float,
) -> Float[Array, "row token"]:
    """G_t = r_t + discount G_{t+1} over the row's counted tokens; 0 elsewhere. 0 <= discount <= 1.

    With discount 1 and the reward at the last counted token, every counted token has it whole.
    """
    add, keep = jnp.where(mask, widen(reward), 0), jnp.where(mask, discount, 1.0)
    return jnp.where(mask, _backwards(add, keep.astype(add.dtype)), 0)


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
    reward, value = jnp.where(mask, widen(reward), 0), jnp.where(mask, widen(value), 0)
    dtype = value.dtype
    coming = _backwards(value, jnp.where(mask, 0.0, 1.0).astype(dtype))  # at or after a token
    after = jnp.pad(coming[:, 1:], ((0, 0), (0, 1)))
    surprise = jnp.where(mask, reward + discount * after - value, 0)
    keep = jnp.where(mask, discount * trace, 1.0).astype(dtype)
    return jnp.where(mask, _backwards(surprise, keep), 0)


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
    of_token = jnp.broadcast_to(label[:, None], mask.shape)
    return group_scale(x.reshape(-1), of_token.reshape(-1), mask.reshape(-1)).reshape(mask.shape)


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
