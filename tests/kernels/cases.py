"""One call for each kernel, with the axes of its arrays, so that the laws can act on any of them.

An argument is "axes kind": its axes, then what its values are
    value    any number                     logp     a log-prob, <= 0
    mask     bool                           taken    an index into vocab
    label    any integer, constant inside a unit
    flag     bool that is a signal like any other and guards nothing
    index    of a row into the rollout axis
``out`` is the axes of every array that the kernel returns. A number given as an axis name is the
size of that axis.
"""

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxrl.kernels import (
    calibration,
    contrast,
    divergences,
    drift,
    grades,
    groups,
    hindsight,
    information,
    novelty,
    precision,
    ratios,
    readings,
    residuals,
    returns,
    routers,
    steps,
    surrogates,
    tournaments,
    trust,
    variance,
    weights,
)

SMALL = {"row": 8, "rollout": 8, "token": 5, "position": 8, "vocab": 7, "test": 3, "bucket": 4}
LARGE = SMALL | {
    "row": 16,
    "rollout": 16,
    "token": 9,
    "position": 16,
    "test": 5,
}  # room for padding
SMALL |= {"universe": 8, "example": 8, "step": 8, "rule": 8}
LARGE |= {"universe": 16, "example": 16, "step": 16, "rule": 8}
SMALL |= {"layer": 3, "feature": 3, "entry": 8}  # of a trunk, of a vector, of a memory
LARGE |= {"layer": 3, "feature": 3, "entry": 16}
SMALL |= {"expert": 8, "choice": 2}
LARGE |= {"expert": 8, "choice": 2}

# Entries of a leading axis belong to units (rollouts of one prompt, rows of one rollout); a unit
# may have one member. Units 0, 1 make the first minibatch, units 2, 3 the second.
UNIT = np.array([0, 0, 1, 1, 1, 2, 3, 3])
INDEX = np.array([0, 0, 1, 2, 4, 5, 5, 7])  # of the rows; rollouts 3 and 6 have none


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel, how to call it, and arrays of the small sizes."""

    kernel: Callable[..., Any]
    out: tuple[str, ...]
    arguments: Mapping[str, tuple[tuple[str, ...], str]]  # name -> (axes, kind), in call order
    numbers: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.kernel.__module__.rsplit('.', 1)[-1]}.{self.kernel.__name__}"

    def kind(self, *kinds: str) -> list[str]:
        """Arguments of these kinds."""
        return [name for name, (_, kind) in self.arguments.items() if kind in kinds]

    @property
    def guarded(self) -> list[str]:
        """Float arguments that the mask speaks of."""
        masks = [self.arguments[name][0] for name in self.kind("mask")]
        return [name for name in self.kind("value", "logp") if self.arguments[name][0] in masks]

    def call(self, sizes: Mapping[str, int]) -> Callable[..., Any]:
        """The kernel with its numbers put in."""
        numbers = {
            name: sizes[number] if number in sizes else number
            for name, number in self.numbers.items()
        }
        return lambda *arrays: self.kernel(*arrays, **numbers)

    def arrays(self) -> dict[str, np.ndarray]:
        """The same arrays each time."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        return {
            name: _draw(rng, name, [SMALL[axis] for axis in axes], kind)
            for name, (axes, kind) in self.arguments.items()
        }


def _draw(rng: np.random.Generator, name: str, shape: list[int], kind: str) -> np.ndarray:
    if kind == "value":
        return rng.normal(size=shape).astype(np.float32)
    if kind == "logp":
        return -rng.exponential(size=shape).astype(np.float32)
    if kind == "mask":
        drawn = rng.random(shape) < 0.75
        drawn.flat[-1] &= not drawn.all()  # a law wants one that does not count
        return drawn
    if kind == "flag":
        return rng.random(shape) < 0.6
    if kind == "taken":
        return rng.integers(0, SMALL["vocab"], shape).astype(np.int32)
    if kind == "index":
        return INDEX.astype(np.int32)
    assert kind == "label", kind
    if len(shape) > 1:  # of a token: any integer
        return rng.integers(-1, 3, shape).astype(np.int32)
    return (UNIT // 2 * 3 if name == "minibatch" else 5 - 2 * UNIT).astype(np.int32)


def case(
    kernel: Callable[..., Any], out: str, numbers: Mapping[str, Any], **arguments: str
) -> Case:
    """Axes and kinds are written as words."""
    parsed = {name: tuple(words.split()) for name, words in arguments.items()}
    return Case(
        kernel,
        tuple(out.split()),
        {name: (words[:-1], words[-1]) for name, words in parsed.items()},
        numbers,
    )


TOKEN_LABELS = {"rollout": "row label", "minibatch": "row label", "mask": "row token mask"}
IN_GROUP = {"x": "rollout value", "group": "rollout label", "mask": "rollout mask"}
TWO_LOGPS = {"logp": "row token logp", "old_logp": "row token logp"}
OF_ROLLOUT = {"rollout": "row label", "mask": "row token mask"}
LOGITS = {"logits": "position expert value"}
ROUTES = {"routes": "position choice taken"}
GATES = {"normalise": True, "scale": 1.5}
COUNT = {"count": "step expert value"}
TEACHERS = {name: "row token logp" for name in ("logp", "teacher_logp", "right_logp", "wrong_logp")}
TWO_LOGITS = {"logits": "position vocab value", "ref_logits": "position vocab value"}
TAUGHT = {
    "logits": "position vocab value",
    "teacher_logits": "position vocab value",
    "taken": "position taken",
}
GAP = {
    "logp": "rollout logp",
    "anchor_logp": "rollout logp",
    "reward": "rollout value",
    "group": "rollout label",
    "mask": "rollout mask",
}
VALUES = {"logp": "rollout logp", "anchor_logp": "rollout logp", "reward": "rollout value"}
STRATA = {"behaviour": "rollout label", "group": "rollout label", "mask": "rollout mask"}

UNIVERSES = {"log_q": "universe logp", "gain": "universe value", "mask": "universe mask"}
DRIFT = {
    "log_q_next": "step universe logp",
    "log_q": "step universe logp",
    "weight_next": "step rule value",
    "weight": "step rule value",
    "mask": "step universe mask",
}
CELLS = {
    "outcome": "rollout test value",
    "truth": "rollout value",
    "group": "rollout label",
    "mask": "rollout test mask",
}
REMEMBERED = {
    "features": "rollout feature value",
    "memory": "entry feature value",
    "mask": "entry mask",
}
GRADED = {
    "quality": "rollout value",
    "passed": "rollout flag",
    "group": "rollout label",
    "mask": "rollout mask",
}
POINTS = {"points": "rollout value", "group": "rollout label", "mask": "rollout mask"}

CASES = [
    case(precision.widen, "row token", {}, x="row token value"),
    case(weights.row_tokens, "row", {}, mask="row token mask"),
    case(weights.token_mean, "row token", {}, minibatch="row label", mask="row token mask"),
    case(weights.rollout_mean, "row token", {}, **TOKEN_LABELS),
    case(weights.rollout_sum_mean, "row token", {}, **TOKEN_LABELS),
    case(weights.fixed_length, "row token", {"length": 6}, **TOKEN_LABELS),
    case(
        weights.prompt_mean,
        "row token",
        {},
        group="row label",
        minibatch="row label",
        mask="row token mask",
    ),
    case(
        weights.prompt_sum_mean,
        "rollout",
        {"least": 2},
        group="rollout label",
        minibatch="rollout label",
        mask="rollout mask",
    ),
    case(
        readings.taken_logp, "position", {}, logits="position vocab value", taken="position taken"
    ),
    case(readings.entropy, "position", {}, logits="position vocab value"),
    case(groups.group_sum, "rollout", {}, **IN_GROUP),
    case(groups.group_max, "rollout", {}, **IN_GROUP),
    case(groups.group_mean, "rollout", {}, **IN_GROUP),
    case(groups.group_center, "rollout", {}, **IN_GROUP),
    case(groups.group_scale, "rollout", {}, **IN_GROUP),
    case(groups.leave_one_out, "rollout", {}, **IN_GROUP),
    case(groups.group_normalize, "rollout", {"bound": 0.9}, **IN_GROUP),
    case(
        information.pass_rate,
        "rollout test",
        {},
        outcome="rollout test value",
        group="rollout label",
        mask="rollout test mask",
    ),
    case(information.covariance, "rollout test", {}, **CELLS),
    case(information.soft_information, "rollout test", {}, **CELLS),
    case(
        information.binned_information,
        "rollout test",
        {"levels": 3, "miller_madow": True},
        **CELLS,
    ),
    case(
        information.gated,
        "rollout test",
        {},
        information="rollout test value",
        covariance="rollout test value",
    ),
    case(groups.size_factor, "rollout", {"full": 4.0}, group="rollout label", mask="rollout mask"),
    case(ratios.token_ratio, "row token", {}, **TWO_LOGPS),
    case(ratios.bounded, "row token", {}, gap="row token value"),
    case(
        ratios.rollout_ratio,
        "row token",
        {},
        **TWO_LOGPS,
        rollout="row label",
        mask="row token mask",
    ),
    case(ratios.truncated_ratio, "row token", {"cap": 1.5}, **TWO_LOGPS),
    case(ratios.band_ratio, "row token", {"low": 0.5, "high": 2.0}, **TWO_LOGPS),
    case(ratios.truncated_rollout_ratio, "row token", {"cap": 1.5}, **TWO_LOGPS, **OF_ROLLOUT),
    case(ratios.rollout_band, "row token", {"low": 0.5, "high": 2.0}, **TWO_LOGPS, **OF_ROLLOUT),
    case(
        ratios.rollout_mask,
        "row token",
        {"limit": 0.1},
        **TWO_LOGPS,
        advantage="row token value",
        **OF_ROLLOUT,
    ),
    case(
        trust.mismatch_weight,
        "row token",
        {"kind": "rollout_truncate", "low": 0.0, "high": 1.5},
        old_logp="row token logp",
        sampler_logp="row token logp",
        **OF_ROLLOUT,
    ),
    case(
        trust.trusted_ratio,
        "row token",
        {"trust": trust.Trust(0.2, 0.28, 3.0, "truncate", 0.0, 2.0)},
        ratio="row token value",
        old_logp="row token logp",
        sampler_logp="row token logp",
        advantage="row token value",
        **OF_ROLLOUT,
    ),
    case(
        trust.trusted_surrogate,
        "row token",
        {"trust": trust.Trust(0.2, 0.28, 3.0, "band", 0.5, 2.0)},
        **TWO_LOGPS,
        sampler_logp="row token logp",
        advantage="row token value",
        **OF_ROLLOUT,
    ),
    case(divergences.k1, "row token", {}, **TWO_LOGPS),
    case(divergences.k2, "row token", {}, **TWO_LOGPS),
    case(divergences.k3, "row token", {}, **TWO_LOGPS),
    case(divergences.reverse_kl_loss, "row token", {}, **TWO_LOGPS, ref_logp="row token logp"),
    case(divergences.reverse_kl, "position", {}, **TWO_LOGITS),
    case(divergences.forward_kl, "position", {}, **TWO_LOGITS),
    case(divergences.generalised_jsd, "position", {"alpha": 0.3}, **TWO_LOGITS),
    case(divergences.sampled_jsd_advantage, "row token", {"alpha": 0.3}, **TWO_LOGPS),
    case(
        divergences.top_k_tail,
        "position bucket",
        {"k": 3},
        logits="position vocab value",
        chosen_logits="position vocab value",
    ),
    case(
        divergences.floored_logp,
        "position",
        {},
        logits="position vocab value",
        taken="position taken",
    ),
    case(divergences.floored_logits, "position vocab", {}, logits="position vocab value"),
    case(calibration.calibrated_advantage, "row token", {"width": 0.7}, **TEACHERS),
    case(
        calibration.reweighted_advantage,
        "row token",
        {"share": 0.6, "band": 0.2},
        logp="row token logp",
        teacher_logp="row token logp",
        advantage="row token value",
    ),
    case(
        contrast.contrastive_advantage,
        "row token",
        {"alpha": 0.5},
        **{name: kind for name, kind in TEACHERS.items() if name != "teacher_logp"},
    ),
    case(
        surrogates.policy_gradient,
        "row token",
        {},
        logp="row token logp",
        advantage="row token value",
    ),
    case(
        surrogates.clipped_surrogate,
        "row token",
        {"clip_low": 0.2, "clip_high": 0.28},
        ratio="row token value",
        advantage="row token value",
    ),
    case(
        surrogates.dual_clip,
        "row token",
        {"cap": 1.2},
        token_loss="row token value",
        advantage="row token value",
    ),
    case(
        surrogates.detached_ratio,
        "row token",
        {"low": 0.0, "high": 5.0},
        logp="row token logp",
        ratio="row token value",
        advantage="row token value",
    ),
    case(
        returns.return_to_go,
        "row token",
        {"discount": 0.9},
        reward="row token value",
        mask="row token mask",
    ),
    case(
        returns.gae,
        "row token",
        {"discount": 0.9, "trace": 0.8},
        reward="row token value",
        value="row token value",
        mask="row token mask",
    ),
    case(
        returns.whiten,
        "row token",
        {},
        x="row token value",
        label="row label",
        mask="row token mask",
    ),
    case(
        returns.clipped_value,
        "row token",
        {"clip": 0.2},
        value="row token value",
        old_value="row token value",
        target="row token value",
    ),
    case(variance.centred_gap, "rollout", {"beta": 0.3}, **GAP),
    case(variance.gap_weights, "rollout", {"beta": 0.3}, **GAP),
    case(variance.stratified_gap, "rollout", {"beta": 0.3}, **VALUES, **STRATA),
    case(variance.stratified_weights, "rollout", {"beta": 0.3}, **VALUES, **STRATA),
    case(variance.accompanied, "rollout", {}, **STRATA),
    case(variance.length_weight, "rollout", {"alpha": 0.5}, length="rollout value"),
    case(residuals.residual_advantage, "position", {}, **TAUGHT),
    case(residuals.top_residual, "position", {"kept": 3}, **TAUGHT),
    case(residuals.missing_mass, "position", {"kept": 3}, teacher_logits="position vocab value"),
    case(
        residuals.overlap,
        "position",
        {},
        logits="position vocab value",
        other_logits="position vocab value",
    ),
    case(
        residuals.stored_residual,
        "row token",
        {},
        logp="row token logp",
        teacher_logp="row token logp",
        teacher_overlap="row token value",
        self_overlap="row token value",
    ),
    case(
        residuals.response_center,
        "row token",
        {},
        x="row token value",
        weight="row token value",
        rollout="row label",
        mask="row token mask",
    ),
    case(novelty.network_novelty, "position", {}, square_error="position layer value"),
    case(
        novelty.novelty_reward,
        "rollout",
        {"weight": 0.5},
        novelty="rollout value",
        correct="rollout mask",
    ),
    case(novelty.neighbour_novelty, "rollout", {"neighbours": 2}, **REMEMBERED),
    case(novelty.elliptical_novelty, "rollout", {"ridge": 1.0}, **REMEMBERED),
    case(
        steps.rollout_sum,
        "rollout",
        {"rollouts": "rollout"},
        x="row token value",
        rollout="row index",
        mask="row token mask",
    ),
    case(
        steps.over_tokens,
        "row token",
        {},
        x="rollout value",
        rollout="row index",
        mask="row token mask",
    ),
    case(
        steps.over_last_token,
        "row token",
        {},
        x="rollout value",
        rollout="row index",
        mask="row token mask",
    ),
    case(
        grades.overlong_penalty,
        "rollout",
        {"limit": 3, "buffer": 2, "penalty": 0.5},
        length="rollout value",
    ),
    case(
        hindsight.turn_sum,
        "row token",
        {},
        x="row token value",
        turn="row token label",
        mask="row token mask",
    ),
    case(hindsight.turn_mean, "row token", {}, turn="row token label", **TOKEN_LABELS),
    case(
        hindsight.hindsight_gap,
        "position",
        {},
        logits="position vocab value",
        hindsight_logits="position vocab value",
    ),
    case(hindsight.feedback_loss, "row token", {}, logp="row token logp", mask="row token mask"),
    case(drift.renormalised, "universe", {}, log_q="universe logp", mask="universe mask"),
    case(drift.exponentiated_gradient, "universe", {"rate": 0.7}, **UNIVERSES),
    case(
        drift.tilted,
        "universe",
        {"stay": 1.0, "home": 0.1},
        log_q="universe logp",
        log_base="universe logp",
        gain="universe value",
        mask="universe mask",
    ),
    case(
        drift.bounded_move,
        "universe",
        {"kappa": 0.02},
        log_q="universe logp",
        log_target="universe logp",
        mask="universe mask",
    ),
    case(
        drift.relative_entropy,
        "step",
        {},
        log_q="step universe logp",
        log_p="step universe logp",
        mask="step universe mask",
    ),
    case(drift.archive_weights, "rule", {"sharpness": 1.0}, score="rule value"),
    case(
        drift.rule_utility,
        "rule",
        {"harm": 1.0},
        rule_right="example rule value",
        model_right="example value",
        mask="example mask",
    ),
    case(drift.clipped_consistency, "row token", {"cap": 2.0}, logp="row token logp"),
    case(drift.drift_bound, "step", {"loss_bound": 1.0, "consistency_weight": 0.1}, **DRIFT),
    case(drift.tight_drift_bound, "step", {"loss_bound": 1.0, "consistency_weight": 0.1}, **DRIFT),
    case(groups.group_quantile, "rollout", {"fraction": 0.3}, **IN_GROUP),
    case(
        grades.usable_quality,
        "rollout",
        {},
        quality="rollout value",
        graded="rollout flag",
        passed="rollout flag",
        group="rollout label",
        mask="rollout mask",
    ),
    case(grades.quality_product, "rollout", {"least_spread": 0.1}, **GRADED),
    case(grades.redistributed, "rollout", {"cap": 1.5}, **GRADED),
    case(
        grades.length_penalty,
        "rollout",
        {
            "penalty": 0.2,
            "quantile": 0.3,
            "pass_rate": 0.3,
            "slack": 0.2,
            "full": 2.0,
            "power": 1.5,
        },
        length="rollout value",
        passed="rollout flag",
        group="rollout label",
        mask="rollout mask",
    ),
    case(
        grades.segment_scale,
        "row token",
        {"harsher": 2.0, "most": 2.0, "least": 0.5},
        advantage="row token value",
        flagged="row token flag",
        group="row label",
        mask="row token mask",
    ),
    case(
        surrogates.signed_band,
        "row token",
        {
            "positive_low": 0.2,
            "positive_high": 1.0,
            "negative_low": 0.1,
            "negative_high": 1.5,
        },
        logp="row token logp",
        ratio="row token value",
        advantage="row token value",
    ),
    case(tournaments.tournament_rank, "rollout", {}, **POINTS),
    case(tournaments.rank_reward, "rollout", {}, **POINTS),
    case(steps.step_gain, "rollout vocab", {}, named="rollout bucket vocab value"),
    case(
        steps.step_over_tokens,
        "row token",
        {},
        x="rollout vocab value",
        step="row token taken",
        rollout="row index",
        mask="row token mask",
    ),
    case(
        steps.amplified,
        "row token",
        {"weight": 0.7},
        advantage="row token value",
        gain="row token value",
    ),
    case(routers.softmax_router, "position choice", {"per_token": 2, **GATES}, **LOGITS),
    case(
        routers.sigmoid_router,
        "position choice",
        {"per_token": 2, **GATES},
        **LOGITS,
        bias="expert value",
    ),
    case(routers.softmax_gates, "position choice", GATES, **LOGITS, **ROUTES),
    case(routers.sigmoid_gates, "position choice", GATES, **LOGITS, **ROUTES),
    case(
        routers.balance,
        "position",
        {},
        probability="position expert value",
        share="expert value",
    ),
    case(routers.load, "expert", {"experts": "expert"}, **ROUTES, mask="position mask"),
    case(routers.load_share, "step expert", {}, **COUNT),
    case(routers.max_share, "step", {}, **COUNT),
    case(routers.normalised_entropy, "step", {}, **COUNT),
    case(routers.load_cv, "step", {}, **COUNT),
    case(routers.load_peak, "step", {}, **COUNT),
    case(routers.cold_share, "step", {}, **COUNT),
    case(routers.agreement, "position", {}, **ROUTES, recorded="position choice taken"),
    case(routers.routed, "position", {}, **ROUTES),
]
