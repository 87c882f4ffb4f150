"""How new a response is, and what that adds to its reward. Source: ExpDis, arXiv 2610.10536.

Features come from the student's own hidden states; no gradient flows back into them or into the
networks that judge them: novelty is a reward. The last two functions are the paper's alternatives
to random networks (appendix C.1); they look at one feature vector a rollout and at the features of
what was kept before, ``memory``, whose counted entries are in any order.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl.kernels.precision import widen


def network_novelty(
    square_error: Float[Array, "position layer"],
) -> Float[Array, " position"]:
    """mean over layers of sqrt(e + 1e-8), with e >= 0 the mean squared error of a predictor against
    its frozen random target.

    No running normalisation. No gradient: the predictor learns from e itself.
    """
    error = jax.lax.stop_gradient(widen(square_error))
    return jnp.sqrt(jnp.maximum(error, 0) + 1e-8).sum(-1) / error.shape[-1]


def novelty_reward(
    novelty: Float[Array, " rollout"],
    correct: Bool[Array, " rollout"],
    *,
    weight: float,
) -> Float[Array, " rollout"]:
    """1 + weight * novelty if correct, else -1: what is new earns nothing unless it is right."""
    bonus = weight * jax.lax.stop_gradient(jnp.where(correct, widen(novelty), 0))
    return jnp.where(correct, 1 + bonus, -1)


def neighbour_novelty(
    features: Float[Array, "rollout feature"],
    memory: Float[Array, "entry feature"],
    mask: Bool[Array, " entry"],
    *,
    neighbours: int,
) -> Float[Array, " rollout"]:
    """Mean of 1 - cosine to the nearest ``neighbours`` counted entries, or to all if there are
    fewer; 0 without any. In [0, 2].
    """
    cosine = jax.lax.stop_gradient(_direction(features) @ _direction(memory).T)
    distance = jnp.where(mask, jnp.clip(1 - cosine, 0, 2), jnp.inf)
    nearest = jnp.sort(distance, axis=-1)[:, :neighbours]
    found = jnp.isfinite(nearest)
    return jnp.where(found, nearest, 0).sum(-1) / jnp.maximum(found.sum(-1), 1)


def elliptical_novelty(
    features: Float[Array, "rollout feature"],
    memory: Float[Array, "entry feature"],
    mask: Bool[Array, " entry"],
    *,
    ridge: float,
) -> Float[Array, " rollout"]:
    """sqrt(f^T (ridge I + sum over counted entries of m m^T)^-1 f), f and m of length 1.

    ridge > 0. 1 / sqrt(ridge) without an entry, and less the more entries point where f does.
    """
    kept = jnp.where(mask[:, None], _direction(memory), 0)
    unit = _direction(features)
    matrix = ridge * jnp.eye(unit.shape[-1], dtype=unit.dtype) + kept.T @ kept
    square = (unit * jnp.linalg.solve(matrix, unit.T).T).sum(-1)
    return jax.lax.stop_gradient(jnp.sqrt(jnp.maximum(square, 0)))


def _direction(x: Float[Array, "row feature"]) -> Float[Array, "row feature"]:
    """x at length 1, detached; 0 stays 0."""
    x = jax.lax.stop_gradient(widen(x))
    square = (x**2).sum(-1, keepdims=True)
    return x / jnp.sqrt(jnp.where(square > 0, square, 1))
