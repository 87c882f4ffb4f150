"""MiMo-V2.6's credit: passes are worth what a grader says, failures stay failures.

An exploit that the grader confirmed is a failure before any statistic. With f_i in (0, 1] the
quality of a pass and b_i = 1 - its length penalty:

    grading = "product"         R_i = pass_i f_i b_i (offline rubrics), A = R - mean
    grading = "redistribution"  on passes A_i <- lam f_i b_i A_i of binary rewards with lam =
                                min(sum A / sum f b A, cap), then A <- A - mean (online)
    loss = -mean over prompts of  sum_{i,t} sg(r) A logp / sum_i L_i,  r = policy / sampler

without a standard deviation; a token with r outside of the band of A's sign is dropped and still
counted. One grading for a run: a rollout never meets both. Source: equations 1 to 5 of MiMo-V2.6's
report, as notes on it tell. Departs: the band stays where it is set (there it follows the entropy,
by a rule that is not published); the length penalty multiplies what a pass is worth, which for f =
1 is the report's subtraction, so that redistribution turns no sign whatever the lengths. A product
whose grades hardly differ falls back to pass_i b_i: a length is measured, no opinion with noise.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.algorithms.contract import Diagnostics, Logits, Reading
from jaxrl.batch import Batch, Credit
from jaxrl.kernels import grades
from jaxrl.kernels.divergences import k3
from jaxrl.kernels.groups import group_center
from jaxrl.kernels.ratios import token_ratio
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.steps import over_tokens, rollout_sum
from jaxrl.kernels.surrogates import signed_band
from jaxrl.kernels.weights import prompt_mean


def _check(where: str, fields: Any, **allowed: tuple[int | float, int | float]) -> None:
    for name, (low, high) in allowed.items():
        if not low <= vars(fields)[name] <= high:
            raise ValueError(f"{where}.{name}={vars(fields)[name]!r}; allowed: {low} to {high}")


@dataclasses.dataclass(frozen=True)
class Band:
    """Ratios that are trained, current policy over sampler, by the sign of the advantage."""

    positive_low: float  # all four: low in [0, 1], high >= 1
    positive_high: float
    negative_low: float
    negative_high: float

    def __post_init__(self) -> None:
        for sign in ("positive", "negative"):
            _check("band", self, **{f"{sign}_low": (0, 1), f"{sign}_high": (1, math.inf)})


@dataclasses.dataclass(frozen=True)
class Length:
    """Numbers of kernels/grades.py's ``length_penalty``."""

    penalty: float  # the most that a pass loses, in [0, 0.99]; 0: length is no matter
    quantile: float  # of the passes' lengths, against which they are measured, in [0, 1]
    pass_rate: float  # only groups that pass more often, in [0, 1]
    slack: float  # so much longer, as a share, costs nothing, >= 0
    full: float  # so much longer costs the whole penalty, > slack
    power: float  # how the penalty grows between them, >= 1

    def __post_init__(self) -> None:
        _check("length", self, penalty=(0, 0.99), quantile=(0, 1), pass_rate=(0, 1))
        _check("length", self, full=(self.slack + 1e-6, math.inf), power=(1, math.inf))
        _check("length", self, slack=(0, math.inf))


@dataclasses.dataclass(frozen=True)
class Segments:
    """Numbers of kernels/grades.py's ``segment_scale``."""

    use: bool  # asks for the fact "token_flagged" of each token
    harsher: float  # times the blame for flagged tokens, >= 1
    most: float  # bound on what clean tokens of good rollouts get, >= 1
    least: float  # bound on what clean tokens of bad rollouts are let off, in [0, 1]

    def __post_init__(self) -> None:
        _check("segments", self, harsher=(1, math.inf), most=(1, math.inf), least=(0, 1))


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Raises ValueError naming a field that is out of range."""

    grading: str  # "product" or "redistribution", see above
    least_spread: float  # product: std of the passes' qualities below which they are 1, >= 0
    cap: float  # redistribution: bound on the factor that makes up for qualities below 1, >= 1
    band: Band
    length: Length
    segments: Segments
    dynamic_sampling: bool  # refuse groups in which nobody gets an advantage

    scorers = (("student", "plain"),)
    observers = ()
    refresh = "take"
    coupled = False
    lessons = ()

    def __post_init__(self) -> None:
        if self.grading not in ("product", "redistribution"):
            allowed = "'product', 'redistribution'"
            raise ValueError(f"algorithm.grading={self.grading!r}; allowed: {allowed}")
        _check("algorithm", self, least_spread=(0, math.inf), cap=(1, math.inf))

    @property
    def needs(self) -> tuple[str, ...]:
        """The grader's verdict of each rollout, and flagged tokens if they are scaled."""
        return ("grade", "exploit", "graded", "token_flagged")[: 3 + self.segments.use]

    def observe(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Nothing: the policy is held against the sampler."""
        return {}

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """Advantages by verdict, exploit, quality, length and segment; a mean over prompts."""
        acted, rollout = batch.acted, batch.rollout
        group, minibatch = batch.group[rollout], batch.minibatch[rollout]
        weight = prompt_mean(group, minibatch, acted)
        facts = batch.facts
        passed = (batch.reward >= 1) & (facts["exploit"] == 0)
        who = (passed, batch.group, batch.valid)
        quality = grades.usable_quality(facts["grade"], facts["graded"] > 0, *who)
        length = rollout_sum(acted, rollout, acted, rollouts=batch.valid.shape[0])
        brevity = 1 - grades.length_penalty(length, *who, **vars(self.length))
        if self.grading == "product":
            reward = grades.quality_product(quality, *who, least_spread=self.least_spread)
            advantage = group_center(reward * brevity, batch.group, batch.valid)
        else:
            advantage = grades.redistributed(quality * brevity, *who, cap=self.cap)
        advantage = over_tokens(advantage, rollout, acted)
        if self.segments.use:
            numbers = {name: x for name, x in vars(self.segments).items() if name != "use"}
            flagged = facts["token_flagged"] > 0
            advantage = grades.segment_scale(advantage, flagged, group, acted, **numbers)
        return Credit(advantage, weight)

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """Log-prob of the taken token, and the entropy for the curves."""
        student = logits["student"]
        return {
            "logp": taken_logp(student, taken),
            "entropy": jax.lax.stop_gradient(entropy(student)),
        }

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """-sg(r) A logp inside of the band, 0 outside."""
        logp, sampler_logp = reading["logp"], batch.sampler_logp
        ratio = token_ratio(logp, sampler_logp)
        token_loss, told = signed_band(logp, ratio, credit.advantage, **vars(self.band))
        sampler_kl = jax.lax.stop_gradient(k3(sampler_logp, logp))
        return token_loss, told | {"entropy": reading["entropy"], "sampler_kl": sampler_kl}

    def keep(self, rewards: np.ndarray, facts: Mapping[str, Any]) -> bool:
        """With dynamic sampling: some passed and some did not, exploits being no passes; under the
        product, passes of different quality do as well. Rollouts without a reward are neither.
        """
        usable = np.isfinite(rewards)
        passed = usable & (rewards >= 1) & (np.asarray(facts["exploit"]) == 0)
        quality = np.asarray(facts["grade"], float)[passed]
        graded = bool(passed.any() and np.asarray(facts["graded"])[passed].all())
        spread = float(quality.std()) if graded and self.grading == "product" else 0.0
        mixed = bool(passed.any() and not passed[usable].all())
        told = mixed or spread > max(self.least_spread, 1e-6)
        return told or not self.dynamic_sampling
