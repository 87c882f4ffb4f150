"""Batches made of random numbers, and what one update of an algorithm makes of them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.algorithms.contract import Algorithm
from jaxrl.batch import ACTION, PAD, PROMPT, Batch, View

SLOTS = 3  # rollouts of a group
ROWS = 4 * SLOTS


def batch_of(lengths, reward, group, *, valid=None, truncated=None, minibatch=None) -> Batch:
    """Two prompt tokens, then so many action tokens, in each row."""
    rows = len(lengths)
    place = np.arange(2 + max(lengths) + 1)  # at least one token of padding
    lengths = np.asarray(lengths)[:, None]
    kind = np.where(place < 2, PROMPT, np.where(place < 2 + lengths, ACTION, PAD))
    zeros = np.zeros(kind.shape, np.int32)
    rng = np.random.default_rng(11)
    arrays: dict[str, Any] = dict(
        tokens=rng.integers(0, 5, kind.shape),
        position=np.where(kind != PAD, place, 0),
        segment=(kind != PAD).astype(np.int32),
        kind=kind,
        step=zeros,
        sampler_logp=-rng.exponential(size=kind.shape),
        version=zeros,
        temperature=np.ones(kind.shape),
        rollout=np.arange(rows),
        reward=np.asarray(reward, float),
        valid=np.ones(rows, bool) if valid is None else np.asarray(valid, bool),
        truncated=np.zeros(rows, bool) if truncated is None else np.asarray(truncated, bool),
        group=np.asarray(group),
        minibatch=np.zeros(rows, int) if minibatch is None else np.asarray(minibatch),
        branch_weight=np.ones(rows),
    )
    return Batch(**arrays, facts={}, views={})


def ragged(seed=0) -> Batch:
    """Two updates of two groups; an empty response, failed and truncated rollouts, a lone one."""
    rng = np.random.default_rng(seed)
    return batch_of(
        lengths=[3, 1, 4, 0, 4, 2, 1, 3, 2, 4, 1, 3],
        reward=rng.random(ROWS),
        group=np.repeat([40, 7, 8, 21], SLOTS),
        valid=[1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1],
        truncated=[0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0],
        minibatch=np.repeat([0, 0, 1, 1], SLOTS),
    )


def shown(batch: Batch, **held) -> Batch:
    """The batch with a view for each name, which holds whole rows: those where ``held`` is true."""
    frame: Any = (batch.tokens, batch.position, batch.segment)
    views = {}
    for name, rows in held.items():
        index: Any = np.where(np.asarray(rows, bool)[:, None], batch.position + 1, -1)
        views[name] = View(*[*frame, index])
    return dataclasses.replace(batch, views=views)


def narrow(tree, dtype):
    """Floats of a pytree in this number format."""
    return jax.tree.map(
        lambda x: np.asarray(x, dtype if np.issubdtype(x.dtype, np.floating) else None), tree
    )


def logps(batch: Batch, seed: int) -> np.ndarray:
    """Random log-probs at every token."""
    return -np.random.default_rng(seed).exponential(size=batch.tokens.shape)


def cut(tree, start: int, stop: int):
    """Rows from start to stop, which are rollouts too; they are counted from 0 again."""
    part = jax.tree.map(lambda x: np.asarray(x)[start:stop], tree)
    if isinstance(part, Batch):
        part = dataclasses.replace(part, rollout=part.rollout - start)
    return part


@functools.partial(jax.jit, static_argnums=0)
def credited(algorithm: Algorithm, batch: Batch, observed: dict):
    """What the algorithm's credit gives for the whole batch."""
    return algorithm.credit(batch, observed)


@functools.partial(jax.jit, static_argnums=0)
def _micro(algorithm, logp, batch, observed, credit):
    def objective(logp):
        reading = {"logp": logp, "entropy": jnp.ones_like(logp)}
        token_loss, diagnostics = algorithm.loss(reading, batch, observed, credit)
        return (token_loss * credit.weight).sum(), diagnostics

    return jax.value_and_grad(objective, has_aux=True)(logp)


def update(
    algorithm: Algorithm,
    batch: Batch,
    logp: np.ndarray | jax.Array,
    observed: dict,
    *,
    micro: int,
):
    """(loss, d loss / d logp, diagnostics): the loss sees so many rollouts at a time."""
    credit = credited(algorithm, batch, observed)
    parts = [
        _micro(algorithm, *(cut(x, i, i + micro) for x in (logp, batch, observed, credit)))
        for i in range(0, batch.valid.shape[0], micro)
    ]
    diagnostics = jax.tree.map(lambda *x: np.concatenate(x), *(part[0][1] for part in parts))
    return (
        sum(part[0][0] for part in parts),
        np.concatenate([part[1] for part in parts]),
        diagnostics,
    )


def differences(function, x) -> np.ndarray:
    """Central differences of a function of nested lists."""
    x, step = np.asarray(x, np.float64), 1e-6
    slope = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        move = np.zeros_like(x)
        move[at] = step
        slope[at] = (function((x + move).tolist()) - function((x - move).tolist())) / (2 * step)
    return slope
