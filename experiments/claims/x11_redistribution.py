"""X11: does handing out a group's advantage by quality separate good passes from poor ones?

python -m experiments.claims.x11_redistribution --workdir /tmp/x11

A softmax over 500 outcomes: 50 good passes (quality 1), 200 poor ones (quality .4), 250 failures.
16 groups of 16 draws an update, 1500 updates of plain gradient descent on-policy; advantages by
``kernels/grades.py``, loss by ``kernels/surrogates.py``. Arms: the verdict alone; down-weighting
alone (A_i f_i at passes, nothing made up for, not centred again); the product R_i = pass_i f_i; the
redistribution, with the cap of 1.5 and without; and the capped one under a grader that errs by
N(0, .3).

Look at: probability of good and of poor passes at the end, updates until good ones have .9 (1500 if
never), entropy at the end. All arms have one rate: in a bandit the largest rate falls on the first
good outcome at once and wins, so that rates cannot be chosen by what is reached.
Expect: the verdict alone keeps the start's odds among passes; all others turn to good passes. No
entropy explosion: in a bandit a sum that is not 0 is a baseline.
Result: as expected. 10 seeds, means with 95 % t intervals, 10 to 117 s a run on a busy core; commit
e3ac216, 2026-11-29, rate 2. Good and poor passes at the end: verdict alone .186 [.183, .188] and
.759, down-weighting .982 [.970, .993] and .015, product .999 and .000, redistribution .996 [.995,
.997] and .003, without the cap .997 and .002, noisy grades .994 [.992, .995] and .005. Updates
until .9: never; 1204 [1097, 1312]; 482 [459, 506]; 824 [761, 887]; 716 [643, 790]; 973 [893, 1053].
Entropy 5.72, .58, .03, .12, .10, .17: nothing explodes, and making up for low grades is faster. The
product is fastest, since it alone pushes poor passes down; redistribution never does. Before, with
each arm at its own rate of .3 to 30 (commit 6051610, 10 seeds): .189 [.184, .195] good for the
verdict alone at rate 3, .9999 for all others at 30, the edge of the grid.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.claims.protocol import Claim, Outcome, main
from jaxrl.kernels.grades import quality_product, redistributed
from jaxrl.kernels.groups import group_center
from jaxrl.kernels.surrogates import signed_band
from jaxrl.kernels.weights import prompt_mean

GOOD, POOR, FAILING = 50, 200, 250
GROUPS, SIZE = 16, 16
POOR_QUALITY, NOISE, LEAST = 0.4, 0.3, 0.05
ENOUGH = 0.9
CAPS = {"redistribution": 1.5, "no cap": 1e9, "noisy grades": 1.5}
ARMS = ("verdict alone", "down-weighting alone", "product", *CAPS)
BAND = {"positive_low": 0.2, "positive_high": 5.0, "negative_low": 0.2, "negative_high": 5.0}


def advantage(arm: str, quality: Array, passed: Array, group: Array) -> Array:
    """[rollout], by the arm's rule."""
    everyone = jnp.ones_like(passed)
    base = group_center(passed.astype(jnp.float32), group, everyone)
    if arm == "verdict alone":
        return base
    if arm == "down-weighting alone":
        return jnp.where(passed, quality, 1) * base
    if arm == "product":
        reward = quality_product(quality, passed, group, everyone, least_spread=0.05)
        return group_center(reward, group, everyone)
    return redistributed(quality, passed, group, everyone, cap=CAPS[arm])


@functools.partial(jax.jit, static_argnames=("arm", "updates"))
def train(arm: str, rate: float, seed: int, *, updates: int) -> dict[str, Array]:
    """Numbers at the end, and the good passes' probability before each update."""
    truth = jnp.asarray([1.0] * GOOD + [POOR_QUALITY] * POOR + [1.0] * FAILING)
    passing = jnp.arange(GOOD + POOR + FAILING) < GOOD + POOR
    group = jnp.repeat(jnp.arange(GROUPS), SIZE)
    mask = jnp.ones((GROUPS * SIZE, 1), bool)
    weight = prompt_mean(group, jnp.zeros_like(group), mask)

    def update(logits: Array, key: Array) -> tuple[Array, tuple[Array, ...]]:
        draw, err = jax.random.split(key)
        drawn = jax.random.categorical(draw, logits, shape=group.shape)
        quality, passed = truth[drawn], passing[drawn]
        if arm == "noisy grades":
            quality = jnp.clip(quality + NOISE * jax.random.normal(err, drawn.shape), LEAST, 1)
        credit = advantage(arm, quality, passed, group)[:, None]

        def loss(logits: Array) -> Array:
            logp = jax.nn.log_softmax(logits)[drawn][:, None]
            return (signed_band(logp, jnp.ones_like(logp), credit, **BAND)[0] * weight).sum()

        slope = jax.grad(loss)(logits)
        level = jnp.abs(credit.reshape(GROUPS, SIZE)).max(-1) == 0
        p = jax.nn.softmax(logits)
        told = (p[:GOOD].sum(), (p * truth * passing).sum(), jnp.linalg.norm(slope))
        return logits - rate * slope, (*told, level.sum() / GROUPS)

    start = jnp.zeros(truth.shape)
    keys = jax.random.split(jax.random.key(seed), updates)
    logits, (curve, worth, norm, level) = jax.lax.scan(update, start, keys)
    p, logp = jax.nn.softmax(logits), jax.nn.log_softmax(logits)
    return {
        "good": p[:GOOD].sum(),
        "poor": p[GOOD : GOOD + POOR].sum(),
        "worth": worth.sum() / updates,
        "updates": (jnp.maximum.accumulate(curve) < ENOUGH).sum(),
        "entropy": -(p * logp).sum(),
        "kl_to_start": (p * (logp - jax.nn.log_softmax(start))).sum(),
        "level_groups": level.sum() / updates,
        "norm_median": jnp.median(norm),
        "norm_max": norm.max(),
        "curve": curve[:: max(updates // 150, 1)],
    }


def claim(quick: bool) -> Claim:
    """Rules for the advantage of passes."""

    def run(arm: str, rate: float, seed: int) -> Outcome:
        found = train(arm, rate, seed, updates=30 if quick else 1500)
        return {name: x.tolist() for name, x in found.items()}

    return Claim(
        name="x11_redistribution",
        arms=ARMS,
        run=run,
        rates=(2.0,),
        choose="worth",
        larger=True,
        shown=("good", "poor", "updates", "entropy", "kl_to_start", "level_groups", "norm_max"),
        drawn=("curve", "entropy"),
        against="verdict alone",
        seeds=2 if quick else 10,
    )


if __name__ == "__main__":
    main(claim, __doc__)
