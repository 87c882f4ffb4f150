"""What is read off a model's logits where they are alive: one chunk of positions, the whole
vocabulary.

Logits come already divided by the sampling temperature. Nats.

What counts here is how often the vocabulary is passed over, so several readings of the same logits
share the parts that they have in common, and the slope of a log-prob is written down: what a
compiler makes of gather, logsumexp and their slopes passes over it three times more.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl.kernels.precision import widen


def _parts(logits: Array) -> tuple[Array, Array, Array]:
    """The largest logit (0 if that is infinite) ``[position 1]``, what the others are above it, and
    the log of the sum of that one's exponentials."""
    peak = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    peak = jnp.where(jnp.isfinite(peak), peak, 0)
    above = logits - peak
    return peak, above, jnp.log(jnp.exp(above).sum(-1))


@jax.custom_vjp
def taken_logp(
    logits: Float[Array, "position vocab"],
    taken: Int[Array, " position"],
) -> Float[Array, " position"]:
    """log softmax(logits)[taken], never above 0."""
    return _taken_logp(logits, taken)[0]


def _taken_logp(logits: Array, taken: Array) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    wide = widen(logits)
    peak, _, log_total = _parts(wide)
    chosen = jnp.take_along_axis(wide, taken[:, None], axis=-1)[:, 0]
    whole = peak[:, 0] + log_total
    logp = chosen - whole
    # A certain token may round to above 0, depending on the device's logarithm.
    return jnp.where(logp > 0, 0, logp), (logits, taken, whole, logp > 0)


def _slope(kept: tuple[Array, Array, Array, Array], given: Array) -> tuple[Array, None]:
    logits, taken, whole, above = kept
    given = jnp.where(above, 0, given)[:, None]
    here = jnp.arange(logits.shape[-1]) == taken[:, None]
    slope = given * (here - jnp.exp(widen(logits) - whole[:, None]))
    return slope.astype(logits.dtype), None


taken_logp.defvjp(_taken_logp, _slope)


def entropy(logits: Float[Array, "position vocab"]) -> Float[Array, " position"]:
    """-sum_v p_v log p_v with p = softmax(logits); a logit of -inf contributes 0."""
    wide = widen(logits)
    peak, _, log_total = _parts(wide)
    # A floor, for exp(floor) * floor is 0 without a choice. Nothing but the logits is shared with
    # the log-prob: what two sums share is written to memory, and costs more than it saves.
    logp = jnp.maximum(wide - (peak + log_total[:, None]), jnp.finfo(wide.dtype).min)
    return -(jnp.exp(logp) * logp).sum(-1)
