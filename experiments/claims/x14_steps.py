"""X14: does counting decisive steps more help, and must they be the right ones?

python -m experiments.claims.x14_steps --workdir /tmp/x14

Four steps, at each of which one of 48 symbols is seen and one of 8 actions taken from a table of
logits that all steps share. Only one step of a prompt decides whether the response is good: the
action there must be its symbol's. An update: 8 prompts of 16 responses, a knock-out tournament in
each (``jaxrl/tasks/arena.py``) whose judge tells good from bad without error, credit by
``kernels/tournaments.py`` and ``kernels/steps.py``, plain gradient descent. Arms differ in the
steps that the judge names: none (uniform credit), the decisive one, the decisive one with
probability .8 and else another, any one of the four (placebo); and all four, which only pushes
winners harder than losers.

Look at: updates until a response is good with probability .9 (400 if never), each arm at its own
learning rate, which also makes up for a mere change of scale. A run is the mean of 8 tasks: one
task alone picks rates by luck.
Expect: naming the decisive step is faster than uniform credit, .8 nearly as fast; the placebo is
no faster.
Result: as expected but for the placebo, which helps a little. 10 seeds of 8 tasks, means with 95 %
t intervals, 3 to 16 s a run; commit 29932d7, 2026-11-29; 280 is every arm's best rate. Updates:
67.7 [64.0, 71.4] uniform, 41.1 [39.5, 42.8] decisive, 43.3 [41.4, 45.3] with .8, 59.0 [55.0, 63.0]
placebo, 53.0 [52.2, 53.7] every step. Paired to uniform: -26.6 [-29.7, -23.5], -24.4 [-29.0,
-19.8], -8.7 [-14.2, -3.3], -14.8 [-18.3, -11.2]. So more than half of the gain needs no knowledge
of steps: pushing winners harder than losers, as every amplification does, is a gain by itself here.
Knowing the step adds to that 11.8 [9.8, 13.8] updates, naming wrong ones costs 6.0 [2.1, 10.0].
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from experiments.claims.protocol import Claim, Outcome, main
from jaxrl.kernels.groups import group_center
from jaxrl.kernels.steps import amplified, over_tokens, step_gain, step_over_tokens
from jaxrl.kernels.surrogates import policy_gradient
from jaxrl.kernels.tournaments import rank_reward
from jaxrl.kernels.weights import token_mean
from jaxrl.tasks.arena import Opinion, hold, most_rounds

STEPS, SYMBOLS, ACTIONS, PROMPTS, SIZE = 4, 48, 8, 8, 16
TOPOLOGY = "single_elimination"
ROUNDS = most_rounds(TOPOLOGY, SIZE, 1)
RIGHT = {"uniform": None, "decisive": 1.0, "judge .8": 0.8, "placebo": 1 / STEPS, "every step": 1.0}
ENOUGH, TASKS, UPDATES = 0.9, 8, 400


class Naming:
    """Tells good responses from bad ones, and names a step of the good one."""

    def __init__(self, good: np.ndarray, decisive: int, arm: str, draw) -> None:
        self.good, self.decisive, self.draw = good, decisive, draw
        self.right, self.every = RIGHT[arm], arm == "every step"

    def compare(self, first: int, second: int, attempt: int) -> Opinion:
        """1 for good, 0 for bad."""
        scores = (float(self.good[first]), float(self.good[second]))
        if self.right is None or scores[0] == scores[1]:
            return Opinion(scores, ())
        away = 0 if self.draw.random() < self.right else self.draw.integers(1, STEPS)
        named = (int(self.decisive + away) % STEPS,)
        return Opinion(scores, tuple(range(STEPS)) if self.every else named)


@jax.jit
def respond(logits: Array, symbol: Array, key: Array) -> Array:
    """Actions [rollout step]."""
    return jax.random.categorical(key, logits[symbol])


@jax.jit
def descend(
    logits: Array, symbol: Array, action: Array, points: Array, named: Array, rate: float
) -> tuple[Array, Array]:
    """One update; the norm of its gradient."""
    rollout = jnp.arange(PROMPTS * SIZE)
    group, mask = rollout // SIZE, jnp.ones(symbol.shape, bool)
    everyone = jnp.ones(rollout.shape, bool)
    step = jnp.broadcast_to(jnp.arange(STEPS), symbol.shape)
    each = group_center(rank_reward(points, group, everyone), group, everyone)
    gain = step_over_tokens(step_gain(named), step, rollout, mask)
    advantage = amplified(over_tokens(each, rollout, mask), gain, weight=1.0)
    weight = token_mean(jnp.zeros_like(rollout), mask)

    def loss(logits: Array) -> Array:
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits)[symbol], action[..., None], -1)
        return (policy_gradient(logp[..., 0], advantage)[0] * weight).sum()

    slope = jax.grad(loss)(logits)
    return logits - rate * slope, jnp.linalg.norm(slope)


def train(arm: str, rate: float, seed: int, updates: int) -> dict[str, list | float]:
    """Until responses are good often enough, or the updates are used up."""
    draw, keys = np.random.default_rng(seed), jax.random.split(jax.random.key(seed), updates)
    answer = draw.integers(0, ACTIONS, SYMBOLS)
    logits, curve, norms, level = jnp.zeros((SYMBOLS, ACTIONS)), [], [], []
    for key in keys:
        likely = np.asarray(jax.nn.softmax(logits, axis=-1))
        curve.append(float(likely[np.arange(SYMBOLS), answer].mean()))
        if curve[-1] >= ENOUGH:
            break
        symbol = np.repeat(draw.integers(0, SYMBOLS, (PROMPTS, STEPS)), SIZE, axis=0)
        action = np.asarray(respond(logits, jnp.asarray(symbol), key))
        points, named = np.zeros(len(symbol)), np.zeros((len(symbol), ROUNDS, STEPS))
        for first in range(0, len(symbol), SIZE):
            decisive, rows = int(draw.integers(STEPS)), slice(first, first + SIZE)
            good = action[rows, decisive] == answer[symbol[first, decisive]]
            outcome = hold(
                Naming(good, decisive, arm, draw),
                dict.fromkeys(range(SIZE), True),
                topology=TOPOLOGY,
                swiss_rounds=1,
                seed=int(draw.integers(2**31)),
                replays=0,
            )
            points[rows] = [-outcome.rank[player] for player in range(SIZE)]
            named[rows] = [outcome.named(player, ROUNDS, STEPS) for player in range(SIZE)]
            level.append(float(good.all() or not good.any()))
        arrays = (jnp.asarray(x) for x in (symbol, action, points, named))
        logits, norm = descend(logits, *arrays, rate)
        norms.append(float(norm))
    filled = [*curve, *[curve[-1]] * (updates - len(curve))]
    p = np.asarray(jax.nn.softmax(logits, axis=-1))
    return {
        "updates": float(len(curve) if curve[-1] >= ENOUGH else updates),
        "good": curve[-1],
        "entropy": float(-(p * np.log(p)).sum(-1).mean()),
        "level_groups": float(np.mean(level)),
        "norm_median": float(np.median(norms)),
        "norm_max": float(np.max(norms)),
        "curve": filled[:: max(updates // 150, 1)],
    }


def claim(quick: bool) -> Claim:
    """Which steps the judge names."""

    tasks, updates = (2, 8) if quick else (TASKS, UPDATES)

    def run(arm: str, rate: float, seed: int) -> Outcome:
        found = [train(arm, rate, seed * tasks + task, updates) for task in range(tasks)]
        return {name: np.mean([one[name] for one in found], axis=0).tolist() for name in found[0]}

    return Claim(
        name="x14_steps",
        arms=tuple(RIGHT),
        run=run,
        rates=(100.0, 140.0, 200.0, 280.0, 400.0, 560.0),
        choose="updates",
        larger=False,
        shown=("updates", "good", "entropy", "level_groups", "norm_max"),
        drawn=("curve", "updates"),
        against="uniform",
        seeds=2 if quick else 10,
    )


if __name__ == "__main__":
    main(claim, __doc__)
