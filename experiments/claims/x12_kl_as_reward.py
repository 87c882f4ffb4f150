"""Does k3, given as a reward, stop teaching long before the student is the teacher?

python -m experiments.claims.x12_kl_as_reward --workdir /tmp/x12

One categorical distribution over 8 tokens stands at a distance from its teacher (the logits differ
by that times standard normal numbers) and learns from its own samples. Arms:

    k1 reward        A = -k1, policy gradient: the gradient of KL(student, teacher)
    k3 reward        A = -k3, policy gradient
    k1 loss          k1 differentiated: no expected gradient
    k3 loss          k3 differentiated: the gradient of KL(teacher, student)
    reverse KL loss  kernels/divergences.py's, with the gradient of KL(student, teacher)

Reported: the norm of the expected gradient (all tokens enumerated) at distances 1, .3, .1 and .03
and its cosine with the gradient of KL(student, teacher) at .1; KL(student, teacher) after 2000
steps of plain gradient descent on 64 samples each, beside where it started, from distances 1 and
.3; rewards are less their mean over the samples. The rate is each arm's best by the geometric mean
of the two.

Expected: as a reward k3's gradient falls with the square of the distance, k1's with the distance,
so that k3's is 10 to 50 times smaller near the teacher.

Result: as expected, and worse (commit c1c9877, 2026-11-29; 20 seeds, means). k1's gradient over
k3's as a reward is 2.2, 5.2, 16 and 52 at distances 1, .3, .1, .03. What is left of k3's does not
point to the teacher: cosine -.12 [-.36, .11] at .1. With its best rate the student ends further
away than it began, KL .54 from .31 and .080 from .035; k1 as a reward, the reverse KL loss and k3
as a loss end below 2e-6, k1 as a loss stays where it was (.31, .038).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.protocol import Claim, main
from jaxrl.kernels.divergences import k1, k3, reverse_kl, reverse_kl_loss
from jaxrl.kernels.groups import group_center
from jaxrl.kernels.readings import taken_logp
from jaxrl.kernels.surrogates import policy_gradient

TOKENS, SAMPLES = 8, 64
DISTANCES = (1.0, 0.3, 0.1, 0.03)
STARTS = DISTANCES[:2]
ARMS = ("k1 reward", "k3 reward", "k1 loss", "k3 loss", "reverse KL loss")


def token_loss(
    arm: str, logits: jax.Array, teacher: jax.Array, taken: jax.Array, *, centred: bool
) -> jax.Array:
    """Loss of each of the tokens drawn from softmax(logits)."""
    many = (taken.shape[0], TOKENS)
    logp = taken_logp(jnp.broadcast_to(logits, many), taken)[:, None]
    ref_logp = taken_logp(jnp.broadcast_to(teacher, many), taken)[:, None]
    estimate = {"k1": k1, "k3": k3}.get(arm[:2])
    if estimate is None:
        return reverse_kl_loss(logp, jax.lax.stop_gradient(logp), ref_logp)[:, 0]
    distance = estimate(logp, ref_logp)
    if arm.endswith("loss"):
        return distance[:, 0]
    reward = -jax.lax.stop_gradient(distance)[:, 0]
    if centred:
        reward = group_center(reward, jnp.zeros_like(taken), jnp.ones_like(taken, bool))
    return policy_gradient(logp, reward[:, None])[0][:, 0]


def expected_gradient(arm: str, logits: jax.Array, teacher: jax.Array) -> jax.Array:
    """Over all tokens, each with its probability."""
    chance = jax.nn.softmax(logits)

    def objective(logits: jax.Array) -> jax.Array:
        every = token_loss(arm, logits, teacher, jnp.arange(TOKENS), centred=False)
        return (chance * every).sum()

    return jax.grad(objective)(logits)


@functools.partial(jax.jit, static_argnames=("arm", "steps"))
def learn(arm: str, steps: int, rate: jax.Array, key: jax.Array) -> tuple[jax.Array, ...]:
    """Expected gradients [distance token] of the arm and of KL(student, teacher); that KL before
    each step [start step]."""
    start, apart, draws = jax.random.split(key, 3)
    teacher = jax.random.normal(start, (TOKENS,))
    direction = jax.random.normal(apart, (TOKENS,))

    def step(logits: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        taken = jax.random.categorical(key, logits, shape=(SAMPLES,))

        def objective(logits: jax.Array) -> jax.Array:
            return token_loss(arm, logits, teacher, taken, centred=True).sum() / SAMPLES

        before = reverse_kl(logits[None], teacher[None])[0]
        return logits - rate * jax.grad(objective)(logits), before

    def train(distance: jax.Array) -> jax.Array:
        start = teacher + distance * direction
        return jax.lax.scan(step, start, jax.random.split(draws, steps))[1]

    def gradients(arm: str) -> jax.Array:
        places = [teacher + d * direction for d in DISTANCES]
        return jnp.stack([expected_gradient(arm, place, teacher) for place in places])

    kl = jax.vmap(train)(jnp.asarray(STARTS))
    return gradients(arm), gradients("reverse KL loss"), kl


def run(arm: str, rate: float, seed: int, *, steps: int) -> dict[str, Any]:
    """One student from each start."""
    of_arm, right, kl = map(np.asarray, learn(arm, steps, jnp.float32(rate), jax.random.key(seed)))
    norms = np.linalg.norm(of_arm, axis=-1)
    found: dict[str, Any] = {f"gradient at {d:g}": x for d, x in zip(DISTANCES, norms, strict=True)}
    near = DISTANCES.index(0.1)
    found["cosine"] = of_arm[near] @ right[near] / (norms[near] * np.linalg.norm(right[near]))
    for start, curve in zip(STARTS, np.maximum(kl, 1e-12), strict=True):
        found[f"KL at {start:g}"] = curve[0]
        found[f"KL from {start:g}"] = curve[-steps // 10 :].mean()
        found[f"log10 KL from {start:g}"] = np.log10(curve.reshape(50, -1).mean(-1))
    found["mean log10 KL"] = np.mean([np.log10(found[f"KL from {start:g}"]) for start in STARTS])
    return found


def claim(quick: bool) -> Claim:
    """2000 steps an arm."""
    return Claim(
        name="x12_kl_as_reward",
        arms=ARMS,
        run=functools.partial(run, steps=200 if quick else 2000),
        rates=(0.3,) if quick else (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
        choose="mean log10 KL",
        larger=False,
        shown=(
            *(f"KL {word} {start:g}" for start in STARTS for word in ("at", "from")),
            *(f"gradient at {d:g}" for d in DISTANCES),
            "cosine",
        ),
        drawn=[f"log10 KL from {start:g}" for start in STARTS],
        against="",
        seeds=3 if quick else 20,
    )


if __name__ == "__main__":
    main(claim, __doc__)
