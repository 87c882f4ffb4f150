"""What is read off a model's logits where they are alive: one chunk of positions, the whole
vocabulary.

Logits come already divided by the sampling temperature. Nats.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.kernels.precision import widen


def taken_logp(
    logits: Float[Array, "position vocab"],
    taken: Int[Array, " position"],
) -> Float[Array, " position"]:
    """log softmax(logits)[taken], never above 0."""
    logits = widen(logits)
    chosen = jnp.take_along_axis(logits, taken[:, None], axis=-1)[:, 0]
    logp = chosen - jax.nn.logsumexp(logits, axis=-1)
    # A certain token may round to above 0, depending on the device's logarithm.
    return jnp.where(logp > 0, 0, logp)


def entropy(logits: Float[Array, "position vocab"]) -> Float[Array, " position"]:
    """-sum_v p_v log p_v with p = softmax(logits); a logit of -inf contributes 0."""
    logp = jax.nn.log_softmax(widen(logits), axis=-1)
    possible = logp > -jnp.inf
    return -jnp.where(possible, jnp.exp(logp) * jnp.where(possible, logp, 0), 0).sum(-1)
