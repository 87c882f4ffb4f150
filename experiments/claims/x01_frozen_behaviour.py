"""Which methods find the regularised optimum from rollouts of a policy that is never refreshed?

python -m experiments.claims.x01_frozen_behaviour --workdir /tmp/claims

A response is 16 independent choices among 4 tokens, its reward the mean of their scores, so the
optimum pi* ~ reference exp(R / beta) is known exactly. All rollouts come from the reference: 8
prompts of 4 rollouts a step, 2000 steps of plain gradient descent, beta 0.02. Importance sampling
and the clip have the same target: beta log(policy / reference) is taken off their reward. The
policy gradient without correction has the plain reward: with the other it would be GVPO itself,
whose gradient is REINFORCE's with that reward, whoever sampled.

Look at: KL(policy, pi*), the share of runs that end more than 1 nat off, the mean reward less
pi*'s, the largest gradient.
Expect: GVPO reaches pi*; exact sequence importance sampling has huge gradients and ends far off, at
a reward that looks fine; PPO's clip against the rollouts' policy stalls on the way; a policy
gradient without correction collapses.
Result: as expected, but importance sampling fails at times only, once its rate is chosen. 10 seeds,
means with 95 % t intervals, a second a run; commit 1a8fc3c, 2026-11-29. KL to pi*: GVPO 6e-8 (rate
32, the edge of the grid; 2 and 8 do as well), sequence IS 1.56 [-1.81, 4.93] (rate 0.5: one run of
ten ends more than 1 nat off; on the development seed 0.06 there, 11.7 to 19.2 at rates of 2 to 32),
clip 2.03 [1.68, 2.39] (rate 8; 2.4 to 2.6 at every other), no correction 0.72 [0.66, 0.79] (rate
0.125; 5.9 to 10.3 above it). Largest gradients: 0.04, 12.8, 0.05, 0.08. Reward less pi*'s: 0,
-0.011 [-0.024, 0.002], -0.096 [-0.109, -0.083], +0.010 [0.004, 0.017].
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.protocol import Claim, Outcome, main
from jaxrl.kernels.groups import leave_one_out
from jaxrl.kernels.ratios import token_ratio
from jaxrl.kernels.surrogates import clipped_surrogate, policy_gradient
from jaxrl.kernels.variance import centred_gap

CHOICES, CLIP, POINTS = 4, 0.2, 40


@dataclasses.dataclass(frozen=True)
class Bandit:
    """How long responses are, how many are drawn, and how strongly the anchor holds."""

    positions: int
    prompts: int
    samples: int
    beta: float
    steps: int


def loss_of(arm: str, bandit: Bandit, logp, ref_logp, reward, group):
    """Loss of a step's rollouts; log-probs are [rollout position] of the tokens that were drawn."""
    every, beta, prompts = jnp.ones(group.shape, bool), bandit.beta, bandit.prompts
    total, anchor = logp.sum(-1), ref_logp.sum(-1)
    if arm in ("GVPO", "GVPO with token means"):
        scale = 1 / bandit.positions if arm != "GVPO" else 1
        each, _ = centred_gap(scale * total, scale * anchor, reward, group, every, beta=beta)
        return each.sum() / prompts / beta  # the scale of REINFORCE, as unit_grad does
    regularised = jax.lax.stop_gradient(reward - beta * (total - anchor))
    plain = arm == "no correction"
    advantage = leave_one_out(reward if plain else regularised, group, every)[:, None]
    if arm == "sequence IS":  # exact: neither clamped nor truncated
        ratio = jax.lax.stop_gradient(jnp.exp(total - anchor))[:, None]
        each, _ = policy_gradient(total[:, None], ratio * advantage)
    elif plain:
        each, _ = policy_gradient(total[:, None], advantage)
    else:
        advantage = jnp.broadcast_to(advantage, logp.shape)
        ratio = token_ratio(logp, ref_logp)
        each, _ = clipped_surrogate(ratio, advantage, clip_low=CLIP, clip_high=CLIP)
    return each.sum() / group.size


@functools.partial(jax.jit, static_argnums=(0, 1))
def train(arm: str, bandit: Bandit, rate, seed):
    """Numbers of the run's end, and KL(policy, pi*) on the way."""
    keys = jax.random.split(jax.random.key(seed), 3)
    ref = jax.nn.log_softmax(jax.random.normal(keys[0], (bandit.positions, CHOICES)))
    score = jax.random.uniform(keys[1], ref.shape)
    optimum = jax.nn.log_softmax(ref + score / bandit.positions / bandit.beta)
    group = jnp.repeat(jnp.arange(bandit.prompts), bandit.samples)
    at = jnp.arange(bandit.positions)

    def reward_of(logp):
        return (jnp.exp(logp) * score).sum() / bandit.positions

    def distance(logits):
        logp = jax.nn.log_softmax(logits)
        return (jnp.exp(logp) * (logp - optimum)).sum()

    def step(logits, key):
        drawn = jax.random.categorical(key, ref, shape=(group.size, bandit.positions))
        reward = score[at, drawn].sum(-1) / bandit.positions

        def loss(logits):
            logp = jax.nn.log_softmax(logits)[at, drawn]
            return loss_of(arm, bandit, logp, ref[at, drawn], reward, group)

        gradient = jax.grad(loss)(logits)
        weight = jnp.exp((jax.nn.log_softmax(logits) - ref)[at, drawn].sum(-1))
        effective = weight.sum() ** 2 / (weight**2).sum() / weight.size
        told = distance(logits), jnp.sqrt((gradient**2).sum()), effective
        return logits - rate * gradient, told

    steps = jax.random.split(keys[2], bandit.steps)
    logits, (way, norm, effective) = jax.lax.scan(step, ref, steps)
    reward = reward_of(jax.nn.log_softmax(logits))
    return {
        "KL to the optimum": distance(logits),
        "reward": reward,
        "reward over pi*'s": reward - reward_of(optimum),
        "far off": (distance(logits) > 1).astype(jnp.float32),
        "largest gradient": norm.max(),
        "effective share of samples": effective[-100:].mean(),
        "log10 KL": jnp.log10(jnp.maximum(way[:: bandit.steps // POINTS], 1e-9)),
    }


def outcome(bandit: Bandit, arm: str, rate: float, seed: int) -> Outcome:
    """What a run comes to; a policy that has left the numbers is as far off as can be told."""
    found = {name: np.asarray(x) for name, x in train(arm, bandit, rate, seed).items()}
    return {name: np.nan_to_num(x, nan=1e9, posinf=1e9).tolist() for name, x in found.items()}


def claim(quick: bool) -> Claim:
    """Four methods on the hard target."""
    steps = 80 if quick else 2000
    bandit = Bandit(positions=16, prompts=8, samples=4, beta=0.02, steps=steps)
    return Claim(
        name="x01_frozen_behaviour",
        arms=("GVPO", "sequence IS", "clip", "no correction"),
        run=functools.partial(outcome, bandit),
        rates=(0.5,) if quick else (0.03, 0.125, 0.5, 2.0, 8.0, 32.0),
        choose="KL to the optimum",
        larger=False,
        shown=("KL to the optimum", "far off", "reward over pi*'s", "largest gradient"),
        drawn=("log10 KL",),
        against="GVPO",
        seeds=2 if quick else 10,
    )


if __name__ == "__main__":
    main(claim, __doc__)
