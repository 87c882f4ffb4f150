"""The number format that every formula computes in."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num


def widen(x: Num[Array, "..."] | Bool[Array, "..."]) -> Float[Array, "..."]:
    """x in promote_types(its dtype, float32): bfloat16, ints and bools become float32, float64
    stays.

    Staying in float64 is what lets finite differences check a formula.
    """
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
