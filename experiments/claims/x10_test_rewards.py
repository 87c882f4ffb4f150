"""What does a writer of tests learn to write, by the reward that its tests earn?

python -m experiments.claims.x10_test_rewards --workdir /tmp/claims

Two bandits, by REINFORCE on a softmax over kinds of tests, advantages normalised as CoVer's
testers' are, 16 tests a step.

kinds: four kinds. Each step has 16 new programs whose truth is a random number of eighths. A test
is trivial (all pass), random (a coin for each program), inverted (passed by the programs below a
random threshold of the truth) or telling (passed by those at or above one, each outcome flipped
with probability 0.1: inverted tests are the cleaner ones, so nothing but the reward's sign keeps a
writer from them). 400 steps.

planted: 40 fixed tests of 16 fixed programs with truths in sixteenths: 12 trivial, 6 inverted, 10
telling, 6 copies of one more that is telling, 6 random. A test that repeats another's column within
a step is a copy. 300 steps.

Look at: the final probability of each sort of tests (telling holds the copies), the number of
tests that the policy spreads over (exp of its entropy; of kinds in «kinds»).
Expect: the pass rate makes trivial tests; information without the gate makes inverted ones (of the
planted ones inverted and telling tell as much, so that either may win); with the gate, telling
ones; covariance does as well as information. Without a rule for copies the planted writer repeats
itself. With equal programs nothing earns anything and nothing is learnt.
Result: (commit 55786ed, 2026-11-29; 10 seeds, means; rates of 0.1 to 10 by each arm's own reward)
kinds: the pass rate puts .998 on trivial tests; information without the gate .999 on inverted ones;
with the gate information, covariance, bins and bins after Miller-Madow .999 on telling ones alike.
planted: the pass rate .999 trivial; without the gate .80 [.50, 1.10] telling and .20 inverted, by
seed all of one or all of the other; with the gate 1.000 telling, but on 1.02 tests; where copies
earn nothing .961 [.946, .975] telling on 11.4 [10.4, 12.3] tests, .046 of it copies; with equal
programs the policy stays uniform on 40. So the rule for copies, not the information, keeps tests
from being one test.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.protocol import Claim, Outcome, main
from jaxrl.kernels.groups import group_normalize
from jaxrl.kernels.information import (
    binned_information,
    covariance,
    gated,
    pass_rate,
    soft_information,
)
from jaxrl.kernels.surrogates import policy_gradient

PROGRAMS, TESTS = 16, 16
SORTS = ("trivial", "random", "inverted", "telling")
REWARDS = ("pass rate", "information, no gate", "information", "covariance", "bins", "Miller-Madow")
KINDS = tuple(f"kinds: {reward}" for reward in REWARDS)
PLANTED = (
    "planted: pass rate",
    "planted: information, no gate",
    "planted: information",
    "planted: information, copies earn nothing",
    "planted: information, equal programs",
)
COUNTS = {"trivial": 12, "inverted": 6, "telling": 10, "copies": 6, "random": 6}


def reward_of(reward: str, outcome, truth):
    """What each test earns: [program test], [program] -> [test]."""
    group, mask = jnp.zeros(truth.shape, int), jnp.ones(outcome.shape, bool)
    if reward == "pass rate":
        return pass_rate(outcome, group, mask)[0]
    known = (outcome, truth, group, mask)
    gate = covariance(*known)
    if reward == "covariance":
        return gated(gate, gate)[0]
    if reward in ("bins", "Miller-Madow"):
        corrected = reward == "Miller-Madow"
        return gated(binned_information(*known, levels=8, miller_madow=corrected), gate)[0]
    found = soft_information(*known)
    return (found if "no gate" in reward else gated(found, gate))[0]


def drawn_kinds(key, kinds):
    """New programs, and a test of each kind asked for: truth [program], outcome [program test]."""
    programs, edges, coins, flips = jax.random.split(key, 4)
    truth = jax.random.randint(programs, (PROGRAMS,), 0, 9) / 8
    edge = jax.random.randint(edges, kinds.shape, 1, 9) / 8
    above = truth[:, None] >= edge
    coin = jax.random.bernoulli(coins, 0.5, above.shape)
    flip = jax.random.bernoulli(flips, 0.1, above.shape)
    table = jnp.stack([jnp.ones_like(above), coin, ~above, above ^ flip])
    return truth, jnp.take_along_axis(table, kinds[None, None, :], 0)[0].astype(float)


def planted(seed: int):
    """Forty tests of sixteen programs: outcome [program test], truth [program], sorts [test]."""
    rng = np.random.default_rng(seed)
    truth = rng.permutation(PROGRAMS) / (PROGRAMS - 1)
    edges = rng.choice(np.arange(2, PROGRAMS), COUNTS["telling"] + 1, replace=False) - 0.5
    telling = (truth[:, None] * (PROGRAMS - 1) > edges).astype(float)
    inverted = 1 - telling[:, rng.choice(COUNTS["telling"], COUNTS["inverted"], replace=False)]
    columns = {
        "trivial": np.ones((PROGRAMS, COUNTS["trivial"])),
        "inverted": inverted,
        "telling": telling[:, :-1],
        "copies": telling[:, -1:].repeat(COUNTS["copies"], 1),
        "random": (rng.random((PROGRAMS, COUNTS["random"])) > 0.5).astype(float),
    }
    sorts = np.concatenate([[sort] * COUNTS[sort] for sort in columns])
    return np.concatenate(list(columns.values()), 1), truth, sorts


def first_of_column(outcome):
    """1 for a test whose column no test before it has, [test]."""
    same = (outcome[:, :, None] == outcome[:, None, :]).all(0)
    return 1 - jnp.tril(same, -1).any(1)


@functools.partial(jax.jit, static_argnames=("reward", "once", "steps", "kinds"))
def learn(key, table, truth, rate, *, reward: str, once: bool, steps: int, kinds: bool):
    """Logits after training, and the mean reward of each step."""

    def step(logits, key):
        own, world = jax.random.split(key)
        chosen = jax.random.categorical(own, logits, shape=(TESTS,))
        known, outcome = drawn_kinds(world, chosen) if kinds else (truth, table[:, chosen])
        earned = reward_of(reward, outcome, known)
        earned = earned * first_of_column(outcome) if once else earned
        every = jnp.ones(TESTS, bool)
        advantage = group_normalize(earned, jnp.zeros(TESTS, int), every, bound=3.0)

        def loss(logits):
            logp = jax.nn.log_softmax(logits)[chosen]
            return policy_gradient(logp[:, None], advantage[:, None])[0].sum() / TESTS

        return logits - rate * jax.grad(loss)(logits), earned.sum() / TESTS

    start = jnp.zeros(len(SORTS) if kinds else table.shape[1])
    return jax.lax.scan(step, start, jax.random.split(key, steps))


def run(quick: bool, arm: str, rate: float, seed: int) -> Outcome:
    """One writer."""
    which, rule = arm.split(": ", 1)
    kinds = which == "kinds"
    table, truth, sorts = planted(seed)
    if rule.endswith("equal programs"):
        truth = np.full_like(truth, 0.5)
    steps = 20 if quick else 400 if kinds else 300
    logits, earned = learn(
        jax.random.key(seed),
        jnp.asarray(table),
        jnp.asarray(truth),
        rate,
        reward=rule if kinds else rule.removesuffix(", copies earn nothing").split(", eq")[0],
        once=rule.endswith("copies earn nothing"),
        steps=steps,
        kinds=kinds,
    )
    p = np.asarray(jax.nn.softmax(logits), np.float64)
    names = np.asarray(SORTS) if kinds else sorts
    mass = {sort: float(p[names == sort].sum()) for sort in SORTS}
    copies = float(p[names == "copies"].sum())
    mass["telling"] += copies
    told = np.where(p > 0, p * np.log(np.maximum(p, 1e-300)), 0)
    last = np.asarray(earned)[-50:]
    return mass | {
        "copies": copies,
        "tests": float(np.exp(-told.sum())),
        "earned": float(last.sum() / len(last)),
        "reward": np.asarray(earned)[:: max(1, steps // 50)].tolist(),
    }


def claim(quick: bool) -> Claim:
    """Each arm's rate is the one at which it earns most of its own reward."""
    return Claim(
        name="x10_test_rewards",
        arms=KINDS + PLANTED,
        run=functools.partial(run, quick),
        rates=(0.1, 1.0) if quick else (0.1, 0.3, 1.0, 3.0, 10.0),
        choose="earned",
        larger=True,
        shown=(*SORTS, "copies", "tests", "earned"),
        drawn=SORTS,
        against="",
        seeds=2 if quick else 10,
    )


if __name__ == "__main__":
    main(claim, __doc__)
