"""Do groups that lost rollouts count less than whole ones, and can that turn what is learnt?

python -m experiments.claims.x20_group_sizes --workdir /tmp/x20

One policy, two actions, prompts of two kinds in equal number. Thinned prompts lose rollouts by
chance (2 or 3 of 8 are left, as where a sandbox fails) and give reward 1 to the first action; whole
prompts keep all 8 and give 0.9 to the second. With all prompts counting alike the first action is
the better one. A mean that holds the rollout itself shrinks the expected gradient by 1 - 1 / n:
1/2 or 2/3 for thinned prompts, 7/8 for whole ones. Arms differ in the advantage alone (loss: mean
over prompts of the mean over their rollouts of -A logp):

    R - mean               group_center
    full group             the same times (1 - 1/8) / (1 - 1/n): size_factor
    leave one out          R - mean of the others
    (R - mean) / std       group_scale

Reported: how much a thinned prompt counts against a whole one of equal reward (by the expected
gradient at even chances, 4096 prompts; 1 is right) and the chance of the first action after 2000
steps of gradient descent. Expected: the first arm counts thinned prompts for 2/3 and learns the
worse action, the two corrected arms count them for 1 and learn the better one; dividing by the
deviation corrects nothing (few rollouts often have equal rewards) and leaves no difference between
rewards 1 and 0.9.

Result: as expected (commit c1c9877, 2026-11-29; 20 seeds, means with 95 % t intervals). A thinned
prompt counts .666 [.660, .672], 1.000 [.991, 1.008], 1.000 [.991, 1.008] and .535 [.531, .540] in
the order of the arms; the better action ends with chance .005, .987, .989 and .001.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.protocol import Claim, main
from jaxrl.kernels.groups import group_center, group_scale, leave_one_out, size_factor
from jaxrl.kernels.surrogates import policy_gradient
from jaxrl.kernels.weights import prompt_mean

FULL = 8
ARMS = ("R - mean", "full group", "leave one out", "(R - mean) / std")


def advantages(arm: str, reward: jax.Array, group: jax.Array, valid: jax.Array) -> jax.Array:
    """[rollout] by the arm's rule."""
    if arm == "leave one out":
        return leave_one_out(reward, group, valid)
    if arm == "(R - mean) / std":
        return group_scale(reward, group, valid)
    centred = group_center(reward, group, valid)
    if arm == "full group":
        centred = centred * size_factor(group, valid, full=float(FULL))
    return centred


def slopes(
    arm: str, logit: jax.Array, rewards: tuple[float, float], prompts: int, key: jax.Array
) -> jax.Array:
    """Descent direction of the first action's logit: the thinned prompts' part, the whole ones'.

    ``rewards`` of thinned and whole prompts; half of the prompts are of each kind.
    """
    act, thin, size = jax.random.split(key, 3)
    rollouts = prompts * FULL
    group = jnp.repeat(jnp.arange(prompts), FULL)
    thinned = group < prompts // 2
    first = jax.random.bernoulli(act, jax.nn.sigmoid(logit), (rollouts,))
    reward = jnp.where(thinned, rewards[0] * first, rewards[1] * ~first)
    # The first rollouts in a random order of each prompt are left.
    order = jnp.argsort(jnp.argsort(jax.random.uniform(thin, (prompts, FULL)))).reshape(-1)
    left = jnp.repeat(jax.random.randint(size, (prompts,), 2, 4), FULL)
    valid = ~thinned | (order < left)
    weight = prompt_mean(group, jnp.zeros_like(group), valid[:, None])[:, 0]
    advantage = advantages(arm, reward, group, valid)

    def objective(logit: jax.Array, of: jax.Array) -> jax.Array:
        logp = jax.nn.log_sigmoid(jnp.where(first, logit, -logit))
        loss, _ = policy_gradient(logp[:, None], advantage[:, None])
        return (loss[:, 0] * weight * of).sum()

    return -jnp.stack([jax.grad(objective)(logit, of) for of in (thinned, ~thinned)])


@functools.partial(jax.jit, static_argnames=("arm", "steps", "prompts"))
def learn(
    arm: str, steps: int, prompts: int, rate: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How much thinned prompts count against whole ones; the first action's chance over time."""
    measure, draws = jax.random.split(key)
    thinned, whole = slopes(arm, jnp.zeros(()), (1.0, 1.0), prompts, measure)

    def step(logit: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        logit = logit + rate * slopes(arm, logit, (1.0, 0.9), 64, key).sum()
        return logit, jax.nn.sigmoid(logit)

    _, chance = jax.lax.scan(step, jnp.zeros(()), jax.random.split(draws, steps))
    return thinned / -whole, chance


def run(arm: str, rate: float, seed: int, *, steps: int, prompts: int) -> dict[str, Any]:
    """One policy."""
    counts, chance = learn(arm, steps, prompts, jnp.float32(rate), jax.random.key(seed))
    curve = np.asarray(chance, np.float64)
    return {
        "a thinned prompt counts": float(counts),
        "chance of the better action": float(curve[-1]),
        "chance of the better action by step": curve[:: steps // 100],
    }


def claim(quick: bool) -> Claim:
    """2000 steps an arm."""
    return Claim(
        name="x20_group_sizes",
        arms=ARMS,
        run=functools.partial(run, steps=200 if quick else 2000, prompts=256 if quick else 4096),
        rates=(1.0,),  # where it goes does not depend on it, only how fast
        choose="chance of the better action",
        larger=True,
        shown=("a thinned prompt counts", "chance of the better action"),
        drawn=("a thinned prompt counts", "chance of the better action by step"),
        against="R - mean",
        seeds=3 if quick else 20,
    )


if __name__ == "__main__":
    main(claim, __doc__)
