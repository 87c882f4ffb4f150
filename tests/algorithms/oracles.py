"""How an algorithm is held against its slow transcription: values and slopes, in two formats."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxrl.batch import Batch
from tests.algorithms.batches import batch_of, differences, logps, narrow, update

LOOSE = {  # nothing is clipped, nothing corrected
    "clip_low": 0.9999,
    "clip_high": 1e9,
    "dual_clip": math.inf,
    "mismatch": "none",
    "mismatch_low": 0.0,
    "mismatch_high": math.inf,
}
TRUST = LOOSE | {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}
CAPPED = TRUST | {"mismatch": "truncate", "mismatch_high": 1.5}


def small() -> Batch:
    """A whole group, one with a failed member, an empty response, a prompt of one."""
    rng = np.random.default_rng(3)
    return batch_of([2, 1, 3, 0, 2, 3], rng.random(6), [4, 4, 4, 1, 1, 9], valid=[1, 1, 0, 1, 1, 1])


def observed_of(batch: Batch) -> dict[str, np.ndarray]:
    """The start of a take, a reference and a value, all by chance."""
    names = ("old_logp", "entropy", "ref_logp", "value")
    return {name: logps(batch, 2 + i) for i, name in enumerate(names)}


def listed(*arrays: Any) -> list[Any]:
    """As the oracles take them."""
    return [np.asarray(x).tolist() for x in arrays]


def agree(
    algorithm: Any,
    batch: Batch,
    oracle: Callable[[Any], float],
    *,
    slopes: bool = True,
    micro: int = 2,
) -> dict[str, np.ndarray]:
    """Asserts that one update has the oracle's loss and slopes; the diagnostics in float64.

    ``oracle`` maps nested lists of log-probs to the loss. To 1e-6 in float64, 1e-5 in float32.
    """
    logp, observed, told = logps(batch, 1), observed_of(batch), {}
    wanted = differences(oracle, logp) if slopes else None
    assert wanted is None or np.abs(wanted).max() > 1e-3
    for dtype, tolerance in ((np.float32, 1e-5), (np.float64, 1e-6)):
        with jax.enable_x64(dtype is np.float64):
            value, slope, told = update(
                algorithm, *narrow((batch, logp, observed), dtype), micro=micro
            )
        np.testing.assert_allclose(value, oracle(logp.tolist()), rtol=tolerance)
        if wanted is not None:
            np.testing.assert_allclose(slope, wanted, rtol=tolerance, atol=tolerance / 10)
    return told
