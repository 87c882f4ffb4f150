"""What a policy that only reads thinks of whole texts: log-probs of responses after prompts."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl.batch import Batch
from jaxrl.kernels.readings import taken_logp
from jaxrl.mesh import ways
from jaxrl.model.policy import Policy

STUDENT = ("student", "plain")  # the name under which a policy scores with its own form
SHORTEST = 16  # tokens of the smallest bucket; the others are powers of two


def sequence_logp(
    policy: Policy,
    params: Mapping[str, Array],
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> np.ndarray:
    """log p(response | prompt) of each (prompt, response) in token ids: float32 [pair], in nats,
    summed over the response's tokens, at temperature 1.

    Compiled once for each number of pairs and power of two that holds the longest. Raises
    ValueError for an empty prompt: nothing would predict the first token.
    """
    if not pairs:
        return np.zeros(0, np.float32)
    if not all(prompt for prompt, _ in pairs):
        raise ValueError("a prompt is empty; allowed: at least one token")
    longest = max(len(prompt) + len(response) for prompt, response in pairs)
    width = max(SHORTEST, 1 << (longest - 1).bit_length())
    split = ways(policy.mesh, policy.rules.rows)
    rows = -(-len(pairs) // split) * split
    tokens = np.zeros((rows, width), np.int32)
    begins, ends = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    for row, (prompt, response) in enumerate(pairs):
        begins[row], ends[row] = len(prompt), len(prompt) + len(response)
        tokens[row, : ends[row]] = [*prompt, *response]
    return np.asarray(_totals(policy, params, tokens, begins, ends))[: len(pairs)]


@functools.partial(jax.jit, static_argnums=0)
def _totals(
    policy: Policy, params: Mapping[str, Array], tokens: Any, begins: Any, ends: Any
) -> Float[Array, " row"]:
    place = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    policy = dataclasses.replace(policy, answers_only=False)  # no token of a text is an action
    batch = _texts(tokens, place, place < ends[:, None])
    found = policy.score({STUDENT[0]: params}, batch, _read, (STUDENT,))
    response = (begins[:, None] <= place) & (place < ends[:, None])
    return jnp.where(response, found["logp"], 0).sum(-1)


def _read(logits: Mapping[str, Array], taken: Array) -> dict[str, Array]:
    return {"logp": taken_logp(logits[STUDENT[0]], taken)}


def _texts(
    tokens: Int[Array, "row token"],
    place: Int[Array, "row token"],
    inside: Bool[Array, "row token"],
) -> Batch:
    """Rows that are read and not trained on: one segment each, everything else at rest."""
    still, each = jnp.zeros_like(place), jnp.zeros_like(place[:, 0])
    return Batch(
        tokens=tokens,
        position=jnp.where(inside, place, 0),
        segment=inside.astype(jnp.int32),
        kind=still,
        step=still,
        sampler_logp=still * 0.0,
        version=still,
        temperature=still + 1.0,
        rollout=jnp.arange(each.shape[0]),
        reward=each * 0.0,
        valid=each == 0,
        truncated=each != 0,
        group=each,
        minibatch=each,
        branch_weight=each + 1.0,
        facts={},
        views={},
    )
