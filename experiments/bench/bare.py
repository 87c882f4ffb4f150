"""What kernels.py times: our kernels, and the same formulas as one would write them by hand.

By hand means plain jnp on the same arrays, with none of what a kernel promises besides: labels for
rollouts and groups, garbage behind the mask, clamped ratios, diagnostics. Losses are those of each
token, or of each rollout with one column. On the arrays of peers_losses.py both sides agree, value
and gradient.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from experiments.bench.peers_losses import trust
from jaxrl.kernels import (
    calibration,
    contrast,
    divergences,
    grades,
    groups,
    hindsight,
    ratios,
    residuals,
    returns,
    steps,
    surrogates,
)
from jaxrl.kernels.trust import Trust, trusted_surrogate

Arrays = Mapping[str, jax.Array]
Loss = Callable[[jax.Array, Arrays], jax.Array]  # of log-probs: the loss of each token
Signal = Callable[[Arrays], jax.Array]  # what each token is worth
CUT = {"mismatch_high": 2.0}
BAND = {"mismatch": "band", "mismatch_low": 0.5, "mismatch_high": 2.0}
MEAN_BAND = {"mismatch": "rollout_band", "mismatch_low": 0.5, "mismatch_high": 2.0}
DUAL = {"clip_high": 0.28, "dual_clip": 3.0, "mismatch": "truncate", **CUT}


def _clip(ratio: jax.Array, gain: jax.Array, low: float = 0.2, high: float = 0.2) -> jax.Array:
    return -jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - low, 1 + high) * gain)


def clipped(logp: jax.Array, x: Arrays) -> jax.Array:
    """The clipped surrogate by hand, which everything is compared with besides its own formula."""
    return _clip(jnp.exp(logp - x["old"]), x["advantage"])


def _trusted(how: Trust) -> Loss:
    def loss(logp: jax.Array, x: Arrays) -> jax.Array:
        given = (x["old"], x["sampler"], x["advantage"], x["rollout"], x["mask"])
        return trusted_surrogate(logp, *given, trust=how)[0]

    return loss


def _dual(logp: jax.Array, x: Arrays) -> jax.Array:
    each = _clip(jnp.exp(logp - x["old"]), x["advantage"], high=0.28)
    each = jnp.where(x["advantage"] < 0, jnp.minimum(each, -3 * x["advantage"]), each)
    return each * jnp.minimum(jnp.exp(x["old"] - x["sampler"]), 2)


def _banded(logp: jax.Array, x: Arrays) -> jax.Array:
    rho = jnp.exp(x["old"] - x["sampler"])
    return clipped(logp, x) * jnp.where((rho >= 0.5) & (rho <= 2), rho, 0)


def _gap(x: Arrays, to: jax.Array, of: jax.Array) -> jax.Array:
    return ((to - of) * x["mask"]).sum(-1, keepdims=True)


def _mean_gap(x: Arrays, to: jax.Array, of: jax.Array) -> jax.Array:
    return _gap(x, to, of) / x["mask"].sum(-1, keepdims=True)


def _mean_banded(logp: jax.Array, x: Arrays) -> jax.Array:
    rho = jnp.exp(_mean_gap(x, x["old"], x["sampler"]))
    return clipped(logp, x) * ((rho >= 0.5) & (rho <= 2))


def _with_kl(logp: jax.Array, x: Arrays, advantage: jax.Array) -> jax.Array:
    given = (x["old"], x["sampler"], advantage, x["rollout"], x["mask"])
    return trusted_surrogate(logp, *given, trust=trust())[0] + 0.04 * divergences.k3(logp, x["ref"])


def _with_kl_by_hand(logp: jax.Array, x: Arrays, advantage: jax.Array) -> jax.Array:
    gap = x["ref"] - logp
    each = _clip(jnp.exp(logp - x["old"]), advantage) + 0.04 * (jnp.exp(gap) - 1 - gap)
    return (each * x["mask"]).sum(-1, keepdims=True) / x["mask"].sum(-1, keepdims=True)


def _masked(logp: jax.Array, x: Arrays) -> jax.Array:
    rollout, given = x["rollout"], (x["old"], x["advantage"])
    kept = ratios.rollout_mask(logp, *given, rollout, x["mask"], limit=0.1)
    ratio = ratios.token_ratio(logp, x["old"])
    return kept * surrogates.clipped_surrogate(ratio, given[1], clip_low=0.2, clip_high=0.2)[0]


def _masked_by_hand(logp: jax.Array, x: Arrays) -> jax.Array:
    left = _mean_gap(x, x["old"], jax.lax.stop_gradient(logp)) > 0.1
    return clipped(logp, x) * ~(left & (x["advantage"] < 0))


def _gspo(logp: jax.Array, x: Arrays) -> jax.Array:
    ratio = ratios.rollout_ratio(logp, x["old"], x["rollout"], x["mask"])
    each, _ = surrogates.clipped_surrogate(ratio, x["advantage"], clip_low=3e-4, clip_high=4e-4)
    return each


def _gspo_by_hand(logp: jax.Array, x: Arrays) -> jax.Array:
    mean = jnp.exp(_mean_gap(x, jax.lax.stop_gradient(logp), x["old"]))
    ratio = mean * jnp.exp(logp - jax.lax.stop_gradient(logp))
    return _clip(ratio, x["advantage"], 3e-4, 4e-4)


def _gspo_by_rollout(logp: jax.Array, x: Arrays) -> jax.Array:
    return _clip(jnp.exp(_mean_gap(x, logp, x["old"])), x["advantage"][:, :1], 3e-4, 4e-4)


def _cispo(logp: jax.Array, x: Arrays) -> jax.Array:
    ratio = ratios.token_ratio(logp, x["old"])
    return surrogates.detached_ratio(logp, ratio, x["advantage"], low=0.0, high=1.2)[0]


def _cispo_by_hand(logp: jax.Array, x: Arrays) -> jax.Array:
    ratio = jax.lax.stop_gradient(jnp.exp(logp - x["old"]))
    return -jnp.minimum(ratio, 1.2) * x["advantage"] * logp


def _signed(logp: jax.Array, x: Arrays) -> jax.Array:
    bands = {"positive_low": 0.5, "positive_high": 2.0, "negative_low": 0.6, "negative_high": 3.0}
    ratio = ratios.token_ratio(logp, x["old"])
    return surrogates.signed_band(logp, ratio, x["advantage"], **bands)[0]


def _signed_by_hand(logp: jax.Array, x: Arrays) -> jax.Array:
    ratio = jax.lax.stop_gradient(jnp.exp(logp - x["old"]))
    low, high = jnp.where(x["advantage"] < 0, 0.6, 0.5), jnp.where(x["advantage"] < 0, 3.0, 2.0)
    return -jnp.where((ratio >= low) & (ratio <= high), ratio, 0) * x["advantage"] * logp


def _pull(logp: jax.Array, x: Arrays) -> jax.Array:
    gap = x["ref"] - logp
    return jnp.exp(logp - x["old"]) * (jnp.exp(gap) - 1 - gap)


def _value_by_hand(value: jax.Array, x: Arrays) -> jax.Array:
    near = jnp.clip(value, x["old"] - 0.2, x["old"] + 0.2)
    return jnp.maximum((value - x["ref"]) ** 2, (near - x["ref"]) ** 2) / 2


def losses() -> dict[str, tuple[Loss, Loss]]:
    """Operation -> (ours, by hand)."""
    return {
        "clipped surrogate": (_trusted(trust()), clipped),
        "dual clip, tis": (_trusted(trust(**DUAL)), _dual),
        "icepop": (_trusted(trust(**BAND)), _banded),
        "tis by rollout": (
            _trusted(trust(mismatch="rollout_truncate", **CUT)),
            lambda p, x: clipped(p, x) * jnp.minimum(jnp.exp(_gap(x, x["old"], x["sampler"])), 2.0),
        ),
        "geometric rejection": (_trusted(trust(**MEAN_BAND)), _mean_banded),
        "grpo": (
            lambda p, x: _with_kl(p, x, x["advantage"]),
            lambda p, x: _with_kl_by_hand(p, x, x["advantage"]),
        ),
        "grpo, one advantage a rollout": (
            lambda p, x: _with_kl(p, x, x["advantage"][:, :1]),
            lambda p, x: _with_kl_by_hand(p, x, x["advantage"][:, :1]),
        ),
        "sequence masking": (_masked, _masked_by_hand),
        "gspo": (_gspo, _gspo_by_hand),
        "gspo, one advantage a rollout": (_gspo, _gspo_by_rollout),
        "cispo": (_cispo, _cispo_by_hand),
        "signed band": (_signed, _signed_by_hand),
        "policy gradient": (
            lambda p, x: surrogates.policy_gradient(p, x["advantage"])[0],
            lambda p, x: -x["advantage"] * p,
        ),
        "k2": (
            lambda p, x: divergences.k2(p, x["ref"]),
            lambda p, x: (p - x["ref"]) ** 2 / 2,
        ),
        "k3": (
            lambda p, x: divergences.k3(p, x["ref"]),
            lambda p, x: jnp.exp(x["ref"] - p) - 1 - (x["ref"] - p),
        ),
        "reverse kl": (lambda p, x: divergences.reverse_kl_loss(p, x["old"], x["ref"]), _pull),
        "feedback": (
            lambda p, x: hindsight.feedback_loss(p, x["mask"]),
            lambda p, x: -p * x["mask"],
        ),
        "clipped value": (
            lambda p, x: returns.clipped_value(p, x["old"], x["ref"], clip=0.2)[0],
            _value_by_hand,
        ),
    }


def _of_groups(kernel: Callable[..., jax.Array]) -> Signal:
    # Which rollouts count is a fact of the batch, as in the algorithms.
    def signal(x: Arrays) -> jax.Array:
        each = kernel(x["reward"], x["group"], x["valid"])
        return steps.over_tokens(each, x["rollout"], x["mask"])

    return signal


def _by_reshaping(relative: Callable[[jax.Array], jax.Array], size: int) -> Signal:
    return lambda x: relative(x["reward"].reshape(-1, size)).reshape(-1, 1) * x["mask"]


def _centred(of: jax.Array) -> jax.Array:
    return of - of.mean(1, keepdims=True)


def _backwards(x: Arrays, discount: float, trace: float, value: jax.Array) -> jax.Array:
    def step(later, token):
        reward, value, counts = token
        advantage = reward + discount * (later[0] + trace * later[1]) - value
        later = jnp.where(counts, value, later[0]), jnp.where(counts, advantage, later[1])
        return later, later[1]

    taken = (x["late"].T, value.T, x["mask"].T)
    nothing = jnp.zeros(value.shape[0])
    return jax.lax.scan(step, (nothing, nothing), taken, reverse=True)[1].T * x["mask"]


def _returns(x: Arrays) -> jax.Array:
    def step(later, token):
        later = jnp.where(token[1], token[0] + 0.99 * later, later)
        return later, later

    nothing = jnp.zeros(x["late"].shape[0])
    taken = (x["late"].T, x["mask"].T)
    return jax.lax.scan(step, nothing, taken, reverse=True)[1].T * x["mask"]


def _white(signal: jax.Array, x: Arrays) -> jax.Array:
    tokens = x["mask"].sum()
    apart = (signal - (signal * x["mask"]).sum() / tokens) * x["mask"]
    return apart / jnp.sqrt((apart * apart).sum() / (tokens - 1))


def _gae(x: Arrays) -> jax.Array:
    return returns.gae(x["late"], x["logp"], x["mask"], discount=0.99, trace=0.95)


def _whitened(signal: jax.Array, x: Arrays) -> jax.Array:
    return returns.whiten(signal, jnp.zeros_like(x["rollout"]), x["mask"])


def _scaled_segments(x: Arrays) -> jax.Array:
    given = (x["advantage"], x["flag"], x["group"], x["mask"])
    return grades.segment_scale(*given, harsher=2.0, most=2.0, least=0.5)


def _segments_by_hand(size: int) -> Signal:
    def total(each: jax.Array) -> jax.Array:
        of = each.sum(-1).reshape(-1, size).sum(-1, keepdims=True)
        return jnp.broadcast_to(of, (of.shape[0], size)).reshape(-1, 1)

    def signal(x: Arrays) -> jax.Array:
        good, bad = (jnp.maximum(s * x["advantage"] * x["mask"], 0) for s in (1, -1))
        lift = jnp.minimum(2, 1 + total(good * x["flag"]) / total(good * ~x["flag"]))
        ease = jnp.maximum(0.5, 1 - total(bad * x["flag"]) / total(bad * ~x["flag"]))
        return jnp.where(x["flag"], -2 * bad, lift * good - ease * bad)

    return signal


def _calibrated(x: Arrays) -> jax.Array:
    right, wrong = x["ref"] - x["old"], x["sampler"] - x["old"]
    low = x["old"] - jnp.maximum(0, jnp.maximum(-right, -wrong))
    high = x["old"] + jnp.maximum(0, jnp.maximum(right, wrong))
    return jnp.maximum(0, low - x["logp"]) - jnp.maximum(0, x["logp"] - high)


def _jensen(x: Arrays) -> jax.Array:
    def half(other: jax.Array) -> jax.Array:
        return jnp.log(0.5 + 0.5 * jnp.exp(other - x["logp"])) / 2

    return (half(x["ref"]) - half(x["old"])) / 2


def _of_response(x: Arrays) -> jax.Array:
    center = (x["by_rollout"] * x["sampler"]).sum(-1) / x["by_rollout"].sum(-1)
    return (x["sampler"] - center[:, None]) * x["mask"]


def _last(x: Arrays) -> jax.Array:
    last = x["mask"].shape[1] - 1 - jnp.argmax(x["mask"][:, ::-1], -1)
    return jnp.where(jnp.arange(x["mask"].shape[1]) == last[:, None], x["reward"][:, None], 0)


def _of_teachers() -> dict[str, tuple[Signal, Signal]]:
    agreement = {"share": 0.5, "band": 0.2}
    return {
        "residual, stored": (
            lambda x: residuals.stored_residual(x["logp"], x["old"], x["ref"], x["sampler"]),
            lambda x: jnp.exp(x["old"]) - jnp.exp(x["logp"]) - (x["ref"] - x["sampler"]),
        ),
        "residual, centred": (
            lambda x: residuals.response_center(
                x["sampler"], x["by_rollout"], x["rollout"], x["mask"]
            ),
            _of_response,
        ),
        "calibrated": (
            lambda x: calibration.calibrated_advantage(
                x["logp"], x["old"], x["ref"], x["sampler"], width=1.0
            ),
            _calibrated,
        ),
        "reweighted": (
            lambda x: calibration.reweighted_advantage(
                x["logp"], x["old"], x["advantage"], **agreement
            ),
            lambda x: (
                x["advantage"]
                * (
                    0.5
                    + 0.5
                    * jnp.clip(jnp.exp(jnp.sign(x["advantage"]) * (x["old"] - x["logp"])), 0.8, 1.2)
                )
            ),
        ),
        "contrastive": (
            lambda x: contrast.contrastive_advantage(x["logp"], x["ref"], x["old"], alpha=1),
            lambda x: (x["ref"] - x["old"]) / 2,
        ),
        "contrastive, jsd": (
            lambda x: contrast.contrastive_advantage(x["logp"], x["ref"], x["old"], alpha=0.5),
            _jensen,
        ),
    }


def signals(size: int) -> dict[str, tuple[Signal, Signal]]:
    """Operation -> (ours, by hand, which knows that groups of ``size`` lie side by side)."""

    def relative(of: jax.Array) -> jax.Array:
        return _centred(of) / of.std(1, ddof=1, keepdims=True)

    scaled = _by_reshaping(relative, size)
    of_rollouts = (
        lambda x: groups.group_scale(x["reward"], x["group"], x["valid"]),
        lambda x: relative(x["reward"].reshape(-1, size)).reshape(-1),
    )
    return _of_teachers() | {
        "advantage of rollouts": of_rollouts,
        "advantage of rollouts, vectorised": of_rollouts,
        "advantage": (_of_groups(groups.group_scale), scaled),
        "advantage, vectorised": (_of_groups(groups.group_scale), scaled),
        "advantage, dr. grpo": (_of_groups(groups.group_center), _by_reshaping(_centred, size)),
        "advantage, rloo": (
            _of_groups(groups.leave_one_out),
            _by_reshaping(lambda of: _centred(of) * size / (size - 1), size),
        ),
        "reward at the last token": (
            lambda x: steps.over_last_token(x["reward"], x["rollout"], x["mask"]),
            _last,
        ),
        "amplified": (
            lambda x: steps.amplified(x["advantage"], x["old"], weight=1.0),
            lambda x: x["advantage"] * jnp.where(x["advantage"] > 0, 1 + x["old"], 1),
        ),
        "whitened": (
            lambda x: _whitened(x["sampler"], x),
            lambda x: _white(x["sampler"], x),
        ),
        "return to go": (
            lambda x: returns.return_to_go(x["late"], x["mask"], discount=0.99),
            _returns,
        ),
        "gae": (_gae, lambda x: _backwards(x, 0.99, 0.95, x["logp"])),
        "gae, whitened": (
            lambda x: _whitened(_gae(x), x),
            lambda x: _white(_backwards(x, 0.99, 0.95, x["logp"]), x),
        ),
        "segments": (_scaled_segments, _segments_by_hand(size)),
    }
