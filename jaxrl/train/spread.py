"""Histograms that add up: counts in bins which do not depend on the numbers.

Bins are even in the logarithm on both sides of 0, eight a decade, from 1e-4 to 1e3; what is smaller
shares one bin, what is larger the outermost. So those of micro-batches and devices are added.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

_A_DECADE, _SMALLEST, _DECADES = 8, -4, 7
_SIZES = 10.0 ** (_SMALLEST + np.arange(_DECADES * _A_DECADE + 1) / _A_DECADE)
EDGES = np.concatenate([-_SIZES[::-1], _SIZES])  # between the bins, of which there is one more


def counts(x: Array, counted: Array) -> Float[Array, " bin"]:
    """How many of the entries of ``x`` that are ``counted`` lie in each bin."""
    sure = jnp.where(counted, x.astype(jnp.float32), 0)
    # Comparisons are summed as they are made; a scatter would take one entry after another.
    above = jnp.where(counted[..., None], sure[..., None] > EDGES.astype(np.float32), False)
    above = above.sum(tuple(range(x.ndim)), dtype=jnp.float32)
    total = counted.sum(dtype=jnp.float32)
    return jnp.concatenate([total[None], above]) - jnp.concatenate([above, jnp.zeros(1)])


def limits(bins: np.ndarray) -> np.ndarray:
    """The right edge of each bin, that of the last one a bin further."""
    return np.append(EDGES, EDGES[-1] * 10 ** (1 / _A_DECADE))[: len(bins)]
