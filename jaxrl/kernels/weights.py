"""How much a token counts. Denominators are counted inside each minibatch (the rollouts of one
update).

The loss is (token_loss * weight).sum(), so that micro-batches and devices add up without another
division. The mean modes sum to 1 over a minibatch. An empty minibatch has weight 0. ``minibatch``,
``rollout`` and ``group`` are labels, any integers.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl.kernels.groups import group_sum
from jaxrl.kernels.precision import widen

SPAN = 64  # tokens that are counted in one byte, at most 127


def row_tokens(mask: Bool[Array, "row token"]) -> Float[Array, " row"]:
    """Counted tokens of each row.

    Bytes are added up first: XLA writes a widened mask to memory before it sums, at four bytes a
    token, and that costs more than all the rest of a loss.
    """
    span = (1, SPAN)
    part = jax.lax.reduce_window(
        mask.astype(jnp.int8), jnp.int8(0), jax.lax.add, span, span, "SAME"
    )
    return widen(part.astype(jnp.int32).sum(-1))


def _parts(
    label: Int[Array, " row"], minibatch: Int[Array, " row"], mask: Bool[Array, "row token"]
):
    """Tokens of the row's label, and how many labels with a counted token its minibatch holds:
    [row] each.
    """
    tokens = row_tokens(mask)
    counted = tokens > 0
    tokens = group_sum(tokens, label, counted)
    share = 1 / jnp.maximum(group_sum(counted, label, counted), 1)  # rows of one label count once
    return tokens, group_sum(share, minibatch, counted)


def token_mean(
    minibatch: Int[Array, " row"],
    mask: Bool[Array, "row token"],
) -> Float[Array, "row token"]:
    """mask / number of counted tokens in the minibatch. Source: DAPO, arXiv 2503.14476, token-level
    loss.
    """
    tokens = row_tokens(mask)
    tokens = group_sum(tokens, minibatch, tokens > 0)
    return mask / jnp.maximum(tokens, 1)[:, None]


def rollout_mean(
    rollout: Int[Array, " row"],
    minibatch: Int[Array, " row"],
    mask: Bool[Array, "row token"],
) -> Float[Array, "row token"]:
    """mask / (tokens of the rollout * rollouts of the minibatch): the mean of per-rollout token
    means.

    Rollouts without a counted token are in no denominator. Source: GRPO, arXiv 2402.03300.
    """
    tokens, rollouts = _parts(rollout, minibatch, mask)
    return mask / jnp.maximum(tokens * rollouts, 1)[:, None]


def rollout_sum_mean(
    rollout: Int[Array, " row"],
    minibatch: Int[Array, " row"],
    mask: Bool[Array, "row token"],
) -> Float[Array, "row token"]:
    """mask / rollouts of the minibatch: the mean of per-rollout token sums (REINFORCE, RLOO)."""
    _, rollouts = _parts(rollout, minibatch, mask)
    return mask / jnp.maximum(rollouts, 1)[:, None]


def fixed_length(
    rollout: Int[Array, " row"],
    minibatch: Int[Array, " row"],
    mask: Bool[Array, "row token"],
    *,
    length: int,
) -> Float[Array, "row token"]:
    """mask / (length * rollouts of the minibatch), length in tokens and > 0.

    ``length`` is a constant of the config (the longest response allowed), never the padded width.
    Source: Dr. GRPO, arXiv 2503.20783.
    """
    return rollout_sum_mean(rollout, minibatch, mask) / length


def prompt_mean(
    group: Int[Array, " row"],
    minibatch: Int[Array, " row"],
    mask: Bool[Array, "row token"],
) -> Float[Array, "row token"]:
    """mask / (tokens of the prompt's rollouts * prompts of the minibatch): the mean of per-prompt
    token means.

    Prompts without a counted token are in no denominator.
    """
    tokens, prompts = _parts(group, minibatch, mask)
    return mask / jnp.maximum(tokens * prompts, 1)[:, None]


def prompt_sum_mean(
    group: Int[Array, " rollout"],
    minibatch: Int[Array, " rollout"],
    mask: Bool[Array, " rollout"],
    *,
    least: int,
) -> Float[Array, " rollout"]:
    """1 / prompts of the minibatch, for per-rollout losses that are summed inside a prompt.

    Prompts with fewer than ``least`` counted rollouts have weight 0 and are in no denominator.
    """
    members = group_sum(mask, group, mask)
    counted = mask & (members >= least)
    prompts = group_sum(1 / jnp.maximum(members, 1), minibatch, counted)
    return counted / jnp.maximum(prompts, 1)
