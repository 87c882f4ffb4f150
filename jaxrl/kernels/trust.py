"""How far a method of PPO's kind trusts its rollouts: the clips, and the sampler's correction.

Two distances are kept apart. The policy moves away from the take's start (logp against old_logp):
the clips bound that. The sampler was never quite the policy of the take's start (old_logp against
sampler_logp: other kernels, other weights): the correction for the mismatch weighs that, detached,
on the policy term alone.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl.kernels.divergences import excess, k3
from jaxrl.kernels.precision import widen
from jaxrl.kernels.ratios import (
    band_ratio,
    bounded,
    rollout_band,
    truncated_ratio,
    truncated_rollout_ratio,
)
from jaxrl.kernels.surrogates import Diagnostics, clipped_surrogate, dual_clip

MISMATCHES = ("none", "truncate", "band", "rollout_truncate", "rollout_band")


@dataclasses.dataclass(frozen=True)
class Trust:
    """Raises ValueError naming a field that is out of range."""

    clip_low: float  # ratios below 1 - clip_low are clipped, in [0, 1)
    clip_high: float  # ratios above 1 + clip_high are clipped, >= 0
    dual_clip: float  # bound on the ratio of tokens with negative advantage, > 1; inf: none
    mismatch: str  # one of MISMATCHES, see `mismatch_weight`
    mismatch_low: float  # lower end of a band, in [0, 1]; 0 where nothing is dropped
    mismatch_high: float  # cap, or upper end of a band, >= 1; inf: no cap

    def __post_init__(self) -> None:
        banded = self.mismatch.endswith("band")
        bad = {
            "clip_low": (0 <= self.clip_low < 1, "0 <= clip_low < 1"),
            "clip_high": (self.clip_high >= 0, "clip_high >= 0"),
            "dual_clip": (self.dual_clip > 1, "dual_clip > 1, inf for none"),
            "mismatch": (self.mismatch in MISMATCHES, f"one of {MISMATCHES}"),
            "mismatch_low": (
                0 <= self.mismatch_low <= 1 if banded else self.mismatch_low == 0,
                "0 <= mismatch_low <= 1 with a band, else 0",
            ),
            "mismatch_high": (self.mismatch_high >= 1, "mismatch_high >= 1, inf for no cap"),
        }
        for name, (good, allowed) in bad.items():
            if not good:
                raise ValueError(f"trust.{name}={vars(self)[name]!r}; allowed: {allowed}")


def mismatch_weight(
    old_logp: Float[Array, "row token"],
    sampler_logp: Float[Array, "row token"],
    rollout: Int[Array, " row"],
    mask: Bool[Array, "row token"],
    *,
    kind: str,
    low: float,
    high: float,
) -> tuple[Float[Array, "row token"], Diagnostics]:
    """Weight of each token's policy term, detached; rho_t = exp(old_logp - sampler_logp).

        none              1
        truncate          min(rho_t, high)                                      TIS
        band              rho_t in [low, high], else 0                          IcePop, MIS
        rollout_truncate  min(prod_t rho_t, high) at all tokens of a rollout    TIS, sequence
        rollout_band      1 if exp(mean_t log rho_t) in [low, high], else 0     geometric rejection

    1 at masked tokens. ``mismatch_truncated``: 1 where the cap holds; ``mismatch_dropped``: 1 where
    the weight is 0. Denominators of the loss are counted over all tokens, dropped ones too.
    """
    old_logp, sampler_logp = widen(old_logp), widen(sampler_logp)
    if kind == "none":
        return jnp.ones_like(old_logp), {}
    if kind == "truncate":
        weight = truncated_ratio(old_logp, sampler_logp, cap=high)
    elif kind == "band":
        weight = band_ratio(old_logp, sampler_logp, low=low, high=high)
    elif kind == "rollout_truncate":
        weight = truncated_rollout_ratio(old_logp, sampler_logp, rollout, mask, cap=high)
    else:
        weight = rollout_band(old_logp, sampler_logp, rollout, mask, low=low, high=high)
    weight = jnp.where(mask, weight, 1)
    hit = weight == 0 if kind.endswith("band") else weight >= high
    name = "mismatch_dropped" if kind.endswith("band") else "mismatch_truncated"
    return weight, {"mismatch": weight, name: (hit & mask).astype(weight.dtype)}


def trusted_ratio(
    ratio: Float[Array, "row token"],
    old_logp: Float[Array, "row token"],
    sampler_logp: Float[Array, "row token"],
    advantage: Float[Array, "row token"],
    rollout: Int[Array, " row"],
    mask: Bool[Array, "row token"],
    *,
    trust: Trust,
) -> tuple[Float[Array, "row token"], Diagnostics]:
    """w times the clipped surrogate -min(r A, clip(r) A), at most -dual_clip A where A < 0.

    w = `mismatch_weight`, which is on A already when clips are decided (it is >= 0 and changes
    none, but that a token of weight 0 is not clipped); 0 at masked tokens. To be minimised. Adds
    ``sampler_kl``, KL(sampler, old) by k3, to the diagnostics. Sources: PPO, arXiv 1707.06347; dual
    clip, arXiv 1912.09729.
    """
    ratio = jnp.where(mask, widen(ratio), 1)
    return _trusted(ratio, old_logp, sampler_logp, advantage, rollout, mask, trust)


def _trusted(
    ratio: Array,
    old_logp: Array,
    sampler_logp: Array,
    advantage: Array,
    rollout: Array,
    mask: Array,
    trust: Trust,
) -> tuple[Array, Diagnostics]:
    """`trusted_ratio` of ratios that are finite behind the mask."""
    weight, corrected = mismatch_weight(
        old_logp,
        sampler_logp,
        rollout,
        mask,
        kind=trust.mismatch,
        low=trust.mismatch_low,
        high=trust.mismatch_high,
    )
    advantage = jnp.where(mask, widen(advantage) * weight, 0)
    token_loss, diagnostics = clipped_surrogate(
        ratio, advantage, clip_low=trust.clip_low, clip_high=trust.clip_high
    )
    token_loss, dual = dual_clip(token_loss, advantage, cap=trust.dual_clip)
    old_logp, sampler_logp = (jnp.where(mask, widen(x), 0) for x in (old_logp, sampler_logp))
    distance = {"sampler_kl": jax.lax.stop_gradient(k3(sampler_logp, old_logp))}
    return token_loss, diagnostics | dual | corrected | distance


def trusted_surrogate(
    logp: Float[Array, "row token"],
    old_logp: Float[Array, "row token"],
    sampler_logp: Float[Array, "row token"],
    advantage: Float[Array, "row token"],
    rollout: Int[Array, " row"],
    mask: Bool[Array, "row token"],
    *,
    trust: Trust,
) -> tuple[Float[Array, "row token"], Diagnostics]:
    """`trusted_ratio` with each token's own r = exp(logp - old_logp).

    Gradient -w r A by logp where nothing is clipped. Adds ``old_kl``, KL(old, current) by k3:
    tokens are drawn from the old policy.
    """
    gap = jnp.where(mask, widen(logp) - widen(old_logp), 0)
    token_loss, diagnostics = _trusted(
        jnp.exp(bounded(gap)), old_logp, sampler_logp, advantage, rollout, mask, trust
    )
    return token_loss, diagnostics | {"old_kl": jax.lax.stop_gradient(excess(bounded(gap)))}
