"""Which experts a token goes to, with what gates, and how evenly they are loaded.

Routes are experts' indices, -1 where there is none (padding, or not recorded): such a route has
gate 0 and loads nobody. Ties go to the lower index. Routes carry no gradient; gates do. Loads are
counts, so those of micro-batches are added before a share is taken; everything made of counts is
detached. Sources: Qwen3-MoE (softmax), DeepSeek-V3 and MiMo-V2 (sigmoid with a bias).
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from jaxrl.kernels.precision import widen

COLD = 0.1  # an expert with less than this part of the mean load is cold

Routes = Int[Array, "*token choice"]
Gates = Float[Array, "*token choice"]


def softmax_router(
    logits: Float[Array, "*token expert"], *, per_token: int, normalise: bool, scale: float
) -> tuple[Routes, Gates]:
    """The per_token experts of the highest logit, best first, and their ``softmax_gates``."""
    routes = _highest(widen(logits), per_token)
    return routes, softmax_gates(logits, routes, normalise=normalise, scale=scale)


def sigmoid_router(
    logits: Float[Array, "*token expert"],
    bias: Float[Array, " expert"],
    *,
    per_token: int,
    normalise: bool,
    scale: float,
) -> tuple[Routes, Gates]:
    """The per_token experts of the highest sigmoid(logit) + bias, best first, and their
    ``sigmoid_gates``.

    The bias decides who is chosen and is no part of the gate, so its gradient is 0 and training
    leaves it as it is; what moves it by the load while pre-training is not here. Source:
    DeepSeek-V3, arXiv 2412.19437, Eq. 16; groups of experts are not limited.
    """
    routes = _highest(jax.nn.sigmoid(widen(logits)) + widen(bias), per_token)
    return routes, sigmoid_gates(logits, routes, normalise=normalise, scale=scale)


def softmax_gates(
    logits: Float[Array, "*token expert"], routes: Routes, *, normalise: bool, scale: float
) -> Gates:
    """scale p_e of the given routes, p = softmax over all experts; normalise: over p's sum on them.

    Also the gates of replayed routes: live in the logits, normalised over what is replayed.
    """
    logits = widen(logits)
    if normalise:
        return scale * _softmax_over(_of_routes(logits, routes), routes)
    logp = _of_routes(jax.nn.log_softmax(logits, axis=-1), routes)
    return scale * jnp.where(routes < 0, 0, jnp.exp(logp))


def sigmoid_gates(
    logits: Float[Array, "*token expert"], routes: Routes, *, normalise: bool, scale: float
) -> Gates:
    """scale s_e of the given routes, s = sigmoid(logit); normalise: divided by s's sum on them.

    Also the gates of replayed routes. Departs from the published code, which adds 1e-20 to the sum:
    here the ratio is taken of logarithms, finite and with a gradient however small all s are.
    """
    logits = _of_routes(widen(logits), routes)
    if normalise:
        return scale * _softmax_over(jax.nn.log_sigmoid(logits), routes)
    return scale * jnp.where(routes < 0, 0, jax.nn.sigmoid(logits))


def _highest(score: Array, per_token: int) -> Array:
    return jax.lax.top_k(jax.lax.stop_gradient(score), per_token)[1]


def _of_routes(x: Array, routes: Array) -> Array:
    return jnp.take_along_axis(x, jnp.maximum(routes, 0), axis=-1)


def _softmax_over(x: Array, routes: Array) -> Array:
    """softmax over a token's routes that are there; 0 at others, also where all are missing."""
    gates = jax.nn.softmax(jnp.where(routes < 0, jnp.finfo(x.dtype).min, x), axis=-1)
    return jnp.where(routes < 0, 0, gates)


def balance(
    probability: Float[Array, "*token expert"], share: Float[Array, " expert"]
) -> Float[Array, "*token"]:
    """experts * sum_e f_e p_e: 1 where p or f is uniform, more where both lean to the same experts.

    f = ``load_share`` of the whole batch, detached; p sums to 1 over the experts (softmax of the
    logits; sigmoids over their sum). To be minimised under the tokens' weights. Source: Switch
    Transformers, arXiv 2101.03961, Eq. 4.
    """
    return share.size * (widen(probability) * jax.lax.stop_gradient(widen(share))).sum(-1)


def load(routes: Routes, mask: Bool[Array, " token"], *, experts: int) -> Float[Array, " expert"]:
    """How many routes of counted tokens go to each expert; those of micro-batches are added."""
    counted = jnp.where(mask[:, None], routes, -1)
    return widen((counted[..., None] == jnp.arange(experts)).sum((0, 1)))


def load_share(count: Num[Array, "*layer expert"]) -> Float[Array, "*layer expert"]:
    """f_e = n_e / sum n, the part of all routes that goes to each expert; 0 where none goes."""
    count = jax.lax.stop_gradient(widen(count))
    total = count.sum(-1, keepdims=True)
    return count / jnp.where(total > 0, total, 1)


def max_share(count: Num[Array, "*layer expert"]) -> Float[Array, "*layer"]:
    """max_e f_e: 1 / experts when even, 1 when all goes to one expert."""
    return load_share(count).max(-1)


def normalised_entropy(count: Num[Array, "*layer expert"]) -> Float[Array, "*layer"]:
    """-sum_e f_e log f_e / log experts: 1 when even, 0 when all goes to one expert.

    0 without any load, and 0 for a single expert.
    """
    share = load_share(count)
    entropy = -(share * jnp.log(jnp.where(share > 0, share, 1))).sum(-1)
    return entropy / math.log(max(share.shape[-1], 2))


def load_cv(count: Num[Array, "*layer expert"]) -> Float[Array, "*layer"]:
    """std_e n / mean_e n, over n experts (not n - 1): 0 when even, sqrt(experts - 1) when all goes
    to one expert; 0 without any load.
    """
    relative = count.shape[-1] * load_share(count)
    apart = jnp.where(relative.sum(-1, keepdims=True) > 0, relative - 1, 0)
    return jnp.sqrt((apart * apart).sum(-1) / count.shape[-1])


def load_peak(count: Num[Array, "*layer expert"]) -> Float[Array, "*layer"]:
    """max_e n / mean_e n: 1 when even, ``experts`` when all goes to one; 0 without any load."""
    return count.shape[-1] * max_share(count)


def cold_share(count: Num[Array, "*layer expert"]) -> Float[Array, "*layer"]:
    """The part of the experts with less than a tenth of the mean load; 0 without any load."""
    relative = count.shape[-1] * load_share(count)
    cold = (relative < COLD) & (relative.sum(-1, keepdims=True) > 0)
    return cold.astype(relative.dtype).sum(-1) / count.shape[-1]


def agreement(routes: Routes, recorded: Routes) -> Float[Array, " token"]:
    """|routes and recorded as sets| / choices, whatever their order.

    A missing route (-1) on either side agrees with nothing: average over ``routed`` tokens.
    """
    same = (routes[:, :, None] == recorded[:, None, :]) & (routes[:, :, None] >= 0)
    return widen(same.any(-1)).sum(-1) / routes.shape[-1]


def routed(routes: Routes) -> Bool[Array, " token"]:
    """Has the token all of its routes?"""
    return (routes >= 0).all(-1)
