"""Does a policy gradient without any correction break when its rollouts are stale?

OMP_NUM_THREADS=1 python -m experiments.claims.x03_staleness --workdir /tmp/x03

A transformer of 2 layers and width 32 is to write a prompt of 3 digits twice; the reward is the
share of right tokens. It starts from nothing. The weights that sample are renewed once in 16 or 64
updates (new rollouts are drawn from them for every update), which stands for an asynchronous
sampler. Arms differ in what they make of rollouts that are not the policy's own, and nothing else:

    no correction   -A logp
    clipped         PPO's clipped ratio to the sampler, 0.2
    token IS        each token's ratio, unclipped
    sequence IS     the product of a response's ratios, unclipped
    GVPO            beta 0.1, the sampler as anchor, unit gradient

Advantages are rewards less their group's mean. Adam, gradient norm clipped at 1. Reported at the
end: accuracy of fresh samples, the largest and the median gradient norm, entropy, effective sample
size of the products of ratios, KL(policy, sampler) a token, share of groups with equal rewards.

Expected: without correction .3 to .7, the others above .98; the unclipped ratios have the largest
gradients.

Result: weaker than expected. 5 seeds, means with 95 % t intervals, commit 47ae9ea, 2026-11-30.
Accuracy without correction .9997 if the sampler is never stale, .997 [.996, .998] at 16 updates,
.764 [.459, 1.07] at 64. At 16 and 64: GVPO .9997 [.9993, 1] and .996 [.987, 1.005], token IS .999
and .964 [.898, 1.03], clipped .978 [.917, 1.04] and .933 [.822, 1.04], sequence IS .816 [.387,
1.25] and .970 [.919, 1.02]. Largest gradients at 64: sequence IS 104 [5, 204], token IS 22 [-8,
52], GVPO 3.2, no correction 3.0, clipped .8. Each arm has its own best rate of 1e-3, 3e-3, 1e-2: no
correction lives by the smallest, GVPO and clipped took the largest, all three edges of the grid.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.claims.protocol import Claim, main
from jaxrl.kernels.divergences import k1
from jaxrl.kernels.groups import group_center, group_mean
from jaxrl.kernels.ratios import token_ratio, truncated_rollout_ratio
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.kernels.steps import over_tokens, rollout_sum
from jaxrl.kernels.surrogates import clipped_surrogate, policy_gradient
from jaxrl.kernels.variance import centred_gap
from jaxrl.kernels.weights import prompt_sum_mean, rollout_sum_mean

VOCAB, DIGITS, WIDTH, HEADS, LAYERS = 11, 3, 32, 4, 2
PROMPT, RESPONSE = DIGITS, 2 * DIGITS
LENGTH = PROMPT + RESPONSE
PROMPTS, SAMPLES = 16, 8  # a step
ROWS = PROMPTS * SAMPLES
BETA = 0.1
EVERY = 16  # updates between two evaluations; staleness is a multiple of it

METHODS = ("no correction", "clipped", "token IS", "sequence IS", "GVPO")

GROUP = jnp.repeat(jnp.arange(PROMPTS), SAMPLES)
ROLLOUT = jnp.arange(ROWS)
ONE = jnp.zeros(ROWS, int)  # all rollouts are of one update
MASK = jnp.broadcast_to(jnp.arange(LENGTH) >= PROMPT, (ROWS, LENGTH))
ALL = jnp.ones(ROWS, bool)


def init(key: jax.Array) -> dict[str, jax.Array]:
    """Weights by name; layers on the first axis."""
    shapes = {
        "embed": (VOCAB, WIDTH),
        "place": (LENGTH, WIDTH),
        "qkv": (LAYERS, WIDTH, 3 * WIDTH),
        "out": (LAYERS, WIDTH, WIDTH),
        "up": (LAYERS, WIDTH, 4 * WIDTH),
        "down": (LAYERS, 4 * WIDTH, WIDTH),
        "head": (WIDTH, VOCAB),
    }
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) / np.sqrt(shape[-2])
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def normed(x: jax.Array) -> jax.Array:
    """Root mean square 1."""
    return x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) / WIDTH + 1e-6)


def forward(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """[row token] -> logits [row token vocab] of each token from those before it."""
    x = jnp.pad(params["embed"][tokens], ((0, 0), (1, 0), (0, 0)))[:, :-1] + params["place"]
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], HEADS, WIDTH // HEADS)

    def layer(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        q, k, v = map(heads, jnp.split(normed(x) @ p["qkv"], 3, axis=-1))
        score = jnp.einsum("rqhd,rkhd->rhqk", q, k) / np.sqrt(WIDTH // HEADS)
        share = jax.nn.softmax(jnp.where(causal, score, -1e9), axis=-1)
        x = x + jnp.einsum("rhqk,rkhd->rqhd", share, v).reshape(x.shape) @ p["out"]
        return x + jax.nn.relu(normed(x) @ p["up"]) @ p["down"], None

    layers = {name: params[name] for name in ("qkv", "out", "up", "down")}
    return normed(jax.lax.scan(layer, x, layers)[0]) @ params["head"]


def logps(params: dict[str, jax.Array], tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-prob of each token, and the entropy there."""
    logits, shape = forward(params, tokens).reshape(-1, VOCAB), tokens.shape
    return taken_logp(logits, tokens.reshape(-1)).reshape(shape), entropy(logits).reshape(shape)


def sample(params: dict[str, jax.Array], key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens of a step's rollouts and their rewards."""
    ask, speak = jax.random.split(key)
    prompt = jax.random.randint(ask, (PROMPTS, PROMPT), 0, 10)[GROUP]

    def one(t: jax.Array, tokens: jax.Array) -> jax.Array:
        logits = forward(params, tokens)[:, t]
        return tokens.at[:, t].set(jax.random.categorical(jax.random.fold_in(speak, t), logits))

    blank = jnp.pad(prompt, ((0, 0), (0, RESPONSE)), constant_values=10)
    tokens = jax.lax.fori_loop(PROMPT, LENGTH, one, blank)
    right = tokens[:, PROMPT:] == jnp.tile(prompt, 2)
    return tokens, right.sum(-1) / RESPONSE


def token_loss(
    method: str, logp: jax.Array, old_logp: jax.Array, reward: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Loss and weight of each token (of each rollout for GVPO)."""
    advantage = over_tokens(group_center(reward, GROUP, ALL), ROLLOUT, MASK)
    weight = rollout_sum_mean(ROLLOUT, ONE, MASK)
    if method == "no correction":
        return policy_gradient(logp, advantage)[0], weight
    if method == "sequence IS":
        product = truncated_rollout_ratio(logp, old_logp, ROLLOUT, MASK, cap=np.inf)
        return product * policy_gradient(logp, advantage)[0], weight
    if method in ("clipped", "token IS"):
        low, high = (0.2, 0.2) if method == "clipped" else (1.0, np.inf)
        ratio = token_ratio(logp, old_logp)
        return clipped_surrogate(ratio, advantage, clip_low=low, clip_high=high)[0], weight
    assert method == "GVPO", method
    new, anchor = (rollout_sum(x, ROLLOUT, MASK, rollouts=ROWS) for x in (logp, old_logp))
    gap, _ = centred_gap(new, anchor, reward, GROUP, ALL, beta=BETA)
    return gap / BETA, prompt_sum_mean(GROUP, ONE, ALL, least=2)


@functools.partial(jax.jit, static_argnames=("method", "stale", "updates"))
def train(
    method: str, stale: int, updates: int, rate: jax.Array, key: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Accuracy of fresh samples every 16 updates, and what each update tells."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    start, key = jax.random.split(key)
    params = init(start)

    def update(carry: Any, number: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        params, sampler, moments = carry
        renew = number % stale == 0
        sampler = jax.tree.map(lambda new, old: jnp.where(renew, new, old), params, sampler)
        tokens, reward = sample(sampler, jax.random.fold_in(key, number))
        old_logp, _ = logps(sampler, tokens)

        def objective(params: dict[str, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            logp, spread = logps(params, tokens)
            loss, weight = token_loss(method, logp, old_logp, reward)
            return (loss * weight).sum(), (logp, spread)

        grads, (logp, spread) = jax.grad(objective, has_aux=True)(params)
        changes, moments = tx.update(grads, moments, params)
        product = truncated_rollout_ratio(logp, old_logp, ROLLOUT, MASK, cap=np.inf)[:, -1]
        ratio = token_ratio(logp, old_logp)
        varied = group_mean(group_center(reward, GROUP, ALL) ** 2, GROUP, ALL) > 0
        told = {
            "gradient": optax.global_norm(grads),
            "entropy": jnp.where(MASK, spread, 0).sum() / MASK.sum(),
            "sample size": product.sum() ** 2 / (product**2).sum() / ROWS,
            "KL": jnp.where(MASK, ratio * k1(logp, old_logp), 0).sum() / MASK.sum(),
            "equal groups": 1 - varied.sum() / ROWS,
        }
        return (optax.apply_updates(params, changes), sampler, moments), told

    def stretch(carry: Any, numbers: jax.Array) -> tuple[Any, Any]:
        carry, told = jax.lax.scan(update, carry, numbers)
        _, reward = sample(carry[0], jax.random.fold_in(key, updates + numbers[0]))
        return carry, (reward.sum() / ROWS, told)

    numbers = jnp.arange(updates).reshape(-1, EVERY)
    _, (accuracy, told) = jax.lax.scan(stretch, (params, params, tx.init(params)), numbers)
    return accuracy, told


def run(arm: str, rate: float, seed: int, *, updates: int) -> dict[str, Any]:
    """One training; ``arm`` is «method, staleness»."""
    method, stale = arm.rsplit(", ", 1)
    accuracy, told = train(method, int(stale), updates, jnp.float32(rate), jax.random.key(seed))
    found = {name: np.asarray(x, np.float64).reshape(-1) for name, x in told.items()}
    last = max(1, len(found["gradient"]) // 10)
    return {
        "accuracy": float(np.mean(np.asarray(accuracy)[-4:])),
        "largest gradient": float(found["gradient"].max()),
        "median gradient": float(np.median(found["gradient"])),
        "accuracy every 16 updates": np.asarray(accuracy, np.float64),
        "gradient norm": found["gradient"],
    } | {
        name: float(found[name][-last:].mean())
        for name in ("entropy", "sample size", "KL", "equal groups")
    }


def claim(quick: bool) -> Claim:
    """640 updates an arm."""
    arms = [f"{method}, {stale}" for stale in (16, 64) for method in METHODS]
    return Claim(
        name="x03_staleness",
        arms=arms[:2] if quick else ["no correction, 1", *arms],
        run=functools.partial(run, updates=64 if quick else 640),
        rates=(3e-3,) if quick else (1e-3, 3e-3, 1e-2),
        choose="accuracy",
        larger=True,
        shown=(
            "accuracy",
            "largest gradient",
            "median gradient",
            "entropy",
            "sample size",
            "KL",
            "equal groups",
        ),
        drawn=("accuracy every 16 updates", "gradient norm"),
        against="",
        seeds=2 if quick else 5,
    )


if __name__ == "__main__":
    main(claim, __doc__)
