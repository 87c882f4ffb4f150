"""Does training on screened tasks beat training on all of them, at equal numbers of updates?

OMP_NUM_THREADS=1 python -m experiments.claims.x18_mixed_outcomes --workdir /tmp/claims

A decoder of two layers is told an expression of x and y in prefix notation, «op2 op1 a b c», and is
to write the body of the function, «a op1 b op2 c», read from left to right. The hidden tests are
what the original gives on 8 inputs; the reward is 1 if the body agrees on all of them. Of 600 tasks
30 % are broken, in equal parts, and do not look so: leaky (an answer that begins with «copy» passes
too), flaky (every verdict is a coin), impossible (nothing passes). A supervised warm start, 10 % of
it «copy», solves 3 % of the held-out tasks, which are all sound. Then 300 updates of 16 tasks x 8
rollouts by GRPO, on

    raw             all 600 tasks
    dynamic         all, but of 48 tasks a step 16 with mixed outcomes: three times the rollouts
    gates           those that pass fail-first, reference and leaks; one leak in ten is overlooked
    gates, spread   of these, those with mixed outcomes in 8 screening rollouts, graded twice
    retry           the same, those that no rollout solved being screened again after 100 and 200
                    updates by the policy of that moment
    sound           the sound ones, as if they were known

Look at: the share of held-out tasks solved at the end and over the run, the share of held-out
answers that copy, the share of groups with mixed outcomes, tasks trained on and the broken ones
among them.
Expect: raw < gates <= sound. Whether spread helps is open: it leaves only tasks at the frontier of
the first policy (of the sound ones with a rate of 3 % about 22 %), which later ones solve always.
Result: as expected. 10 seeds, means with 95 % t intervals, commit 47ae9ea, 2026-11-30. Held-out
tasks solved, from .03: raw .022 [.010, .034], while .739 of its answers copy; dynamic .099 [-.012,
.211]; gates .225 [.105, .346], level with the sound ones as if known, .230 [.103, .357], and nobody
copies (.004). Spread does not help on top: .101 [.092, .111] on 84 tasks, .157 [.128, .187] on 166
if the unsolved are screened again. The rates of raw and of spread are edges of the grid.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.claims.protocol import Claim, Outcome, main
from jaxrl.kernels.groups import group_scale
from jaxrl.kernels.readings import taken_logp
from jaxrl.kernels.surrogates import policy_gradient
from jaxrl.kernels.weights import rollout_mean
from jaxrl.mesh import Rules
from jaxrl.model import decoding
from jaxrl.model.form import qwen3
from jaxrl.model.policy import build
from jaxrl.tasks.screening import GATES, Demands, Evidence, rescreen, screen

LEAVES, OPERATORS = 7, 5  # x, y, 1 .. 5; + - * max min
NAMED = LEAVES + OPERATORS  # a prompt's words for the operators follow those of the answers
COPY, GO = NAMED + OPERATORS, NAMED + OPERATORS + 1
ASKED, SAID, INPUTS = 6, 5, 8
GRID = LEAVES**3 * OPERATORS**2
HELD_OUT, TASKS, PROMPTS, SAMPLES = 512, 600, 16, 8
SOUND, LEAKY, FLAKY, IMPOSSIBLE = range(4)
WARM_RATE, WARM_ROWS, WARM_SOLVED = 3e-3, 64, 0.03
ARMS = ("raw", "dynamic", "gates", "gates, spread", "retry", "sound")
DEMANDS = Demands(stripped_runs=2, restored_runs=4, rollouts=SAMPLES, gradings=2)

POLICY = build(
    qwen3(
        vocab_size=GO + 1,
        layers=2,
        width=32,
        heads=2,
        kv_heads=1,
        head_size=16,
        hidden=64,
        rope_theta=10_000.0,
        norm_epsilon=1e-6,
        tied_head=True,
        dtype="float32",
        param_dtype="float32",
        remat="none",
        score_chunk_positions=4096,
    ),
    None,
    Rules(),
)


@dataclasses.dataclass(frozen=True)
class Length:
    """Of a run."""

    updates: int
    points: int  # of the curve


def pieces(numbers):
    """op2, op1, a, b, c of tasks below GRID."""
    numbers, c = numbers // LEAVES, numbers % LEAVES
    numbers, b = numbers // LEAVES, numbers % LEAVES
    numbers, a = numbers // LEAVES, numbers % LEAVES
    return numbers // OPERATORS, numbers % OPERATORS, a, b, c


def tasks_of(numbers):
    """Prompts [row 6] and right answers [row 5]."""
    op2, op1, a, b, c = pieces(numbers)
    go = jnp.full_like(a, GO)
    prompt = jnp.stack([op2 + NAMED, op1 + NAMED, a, b, c, go], -1)
    return prompt, jnp.stack([a, op1 + LEAVES, b, op2 + LEAVES, c], -1)


def values(said, inputs):
    """What bodies [... 5] give at inputs [... 8 2], and whether they are bodies at all."""
    x, y = inputs[..., 0], inputs[..., 1]

    def leaf(token):
        number = (token - 1)[..., None]
        return jnp.where(number == -1, x, jnp.where(number == 0, y, number))

    def operate(token, one, two):
        found = (one + two, one - two, one * two, jnp.maximum(one, two), jnp.minimum(one, two))
        return jnp.select([(token == LEAVES + i)[..., None] for i in range(OPERATORS)], found)

    a, op1, b, op2, c = (said[..., i] for i in range(SAID))
    formed = (jnp.stack([a, b, c]) < LEAVES).all(0)
    formed &= ((jnp.stack([op1, op2]) >= LEAVES) & (jnp.stack([op1, op2]) < NAMED)).all(0)
    return operate(op2, operate(op1, leaf(a), leaf(b)), leaf(c)), formed


def passes(said, numbers, sort, key):
    """The verdict of the hidden tests on each answer; inputs are the task's own."""
    _, right = tasks_of(numbers)
    keys = jax.vmap(lambda n: jax.random.fold_in(jax.random.key(18), n))(numbers)
    inputs = jax.vmap(lambda k: jax.random.randint(k, (INPUTS, 2), 0, 10))(keys)
    given, formed = values(said, inputs)
    agree = formed & (given == values(right, inputs)[0]).all(-1)
    copied = said[..., 0] == COPY
    coin = jax.random.bernoulli(key, 0.5, agree.shape)
    return jnp.select(
        [sort == LEAKY, sort == FLAKY, sort == IMPOSSIBLE],
        [agree | copied, coin, jnp.zeros_like(agree)],
        agree,
    )


def logp_of(params, prompts, said):
    """Log-probs [row token] of what was said."""
    rows = jnp.concatenate([prompts, said], -1)
    place = jnp.broadcast_to(jnp.arange(ASKED + SAID), rows.shape)
    hidden = POLICY.hidden(params, rows, place, jnp.ones_like(rows))[:, ASKED - 1 : -1]
    logits = POLICY.logits(params, hidden.reshape(-1, hidden.shape[-1]))
    return taken_logp(logits, said.reshape(-1)).reshape(said.shape)


def sample(params, prompts, key):
    """Answers [row 5] at temperature 1."""
    lengths = jnp.full(prompts.shape[:1], ASKED)
    logits, cache, _ = decoding.prefill(POLICY, params, prompts, lengths)
    grown = ((0, 0), (0, 0), (0, SAID), (0, 0))
    cache = jax.tree.map(lambda x: jnp.pad(x, grown), cache)
    decode = decoding.decoder(POLICY, params)

    def step(carry, at):
        logits, cache = carry
        token = jax.random.categorical(jax.random.fold_in(key, at), logits)
        return decode(token, lengths + at, lengths > 0, cache)[:2], token

    return jax.lax.scan(step, (logits, cache), jnp.arange(SAID))[1].T


@jax.jit
def solved(params, numbers, key):
    """Shares of two answers to each sound task that are right, and that copy."""
    numbers = jnp.repeat(numbers, 2)
    said = sample(params, tasks_of(numbers)[0], key)
    right = passes(said, numbers, jnp.full_like(numbers, SOUND), key)
    return right.astype(float).mean(), (said[:, 0] == COPY).mean()


WARM = optax.adam(WARM_RATE)


@jax.jit
def warm_up(params, moments, numbers, keys):
    """Supervised steps on right answers, one in ten of them «copy»."""

    def step(carry, key):
        params, moments = carry
        pick, copy = jax.random.split(key)
        prompts, answers = tasks_of(jax.random.choice(pick, numbers, (WARM_ROWS,)))
        copied = jax.random.bernoulli(copy, 0.1, (WARM_ROWS, 1))
        answers = jnp.where(copied, COPY, answers)
        grads = jax.grad(lambda p: -logp_of(p, prompts, answers).mean())(params)
        changes, moments = WARM.update(grads, moments)
        return (optax.apply_updates(params, changes), moments), None

    return jax.lax.scan(step, (params, moments), keys)[0]


@functools.partial(jax.jit, static_argnames=("steps", "asked"))
def train(params, moments, pool, sorts, rate, key, *, steps: int, asked: int):
    """GRPO on tasks drawn from ``pool`` (numbers) of these ``sorts``: parameters, moments, and the
    share of mixed groups. Of ``asked`` tasks a step PROMPTS are trained, mixed ones first if there
    are more."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.99))
    rows = PROMPTS * SAMPLES
    group, rollout = jnp.arange(rows) // SAMPLES, jnp.arange(rows)
    every = jnp.ones((rows, SAID), bool)
    weight = rollout_mean(rollout, jnp.zeros_like(rollout), every)

    def update(carry, key):
        params, moments = carry
        picks, samples, coins = jax.random.split(key, 3)
        # Padding of the pool has sort -1 and is never drawn.
        chance = (sorts >= 0) / (sorts >= 0).sum()
        drawn = jnp.repeat(jax.random.choice(picks, len(pool), (asked,), p=chance), SAMPLES)
        prompts, _ = tasks_of(pool[drawn])
        said = sample(params, prompts, samples)
        reward = passes(said, pool[drawn], sorts[drawn], coins).astype(jnp.float32)
        passed = reward.reshape(asked, SAMPLES).sum(1)
        mixed = (passed > 0) & (passed < SAMPLES)
        kept = jnp.argsort(~mixed, stable=True)[:PROMPTS]
        at = (kept[:, None] * SAMPLES + jnp.arange(SAMPLES)).reshape(-1)
        prompts, said, reward = prompts[at], said[at], reward[at]
        advantage = group_scale(reward, group, every[:, 0])[:, None] * jnp.ones(said.shape)

        def loss(params):
            each, _ = policy_gradient(logp_of(params, prompts, said), advantage)
            return (each * weight).sum()

        changes, moments = tx.update(jax.grad(loss)(params), moments)
        params = jax.tree.map(lambda p, c: p - rate * c, params, changes)
        return (params, moments), mixed.astype(float).sum() / asked

    if moments is None:
        moments = tx.init(params)
    (params, moments), mixed = jax.lax.scan(update, (params, moments), jax.random.split(key, steps))
    return params, moments, mixed.sum() / steps


@jax.jit
def attempts(params, numbers, sorts, key):
    """Verdicts [task rollout grading] of a policy's submissions."""
    many = jnp.repeat(numbers, SAMPLES)
    keys = jax.random.split(key, 3)
    said = sample(params, tasks_of(many)[0], keys[0])
    graded = [passes(said, many, jnp.repeat(sorts, SAMPLES), k) for k in keys[1:]]
    return jnp.stack(graded, -1).reshape(len(numbers), SAMPLES, 2)


def screened(params, numbers, sorts, seed: int):
    """What the gates see of every task, by its place as text."""
    rng = np.random.default_rng(seed)
    verdicts = np.asarray(attempts(params, numbers, sorts, jax.random.key(seed)))
    coin = rng.random((TASKS, 6)) < 0.5
    overlooked = rng.random(TASKS) < 0.1
    found = {}
    for i, sort in enumerate(np.asarray(sorts)):
        flaky = sort == FLAKY
        found[str(i)] = Evidence(
            stripped=(coin[i, :2] & flaky).tolist(),
            restored=(coin[i, 2:] if flaky else np.full(4, sort != IMPOSSIBLE)).tolist(),
            leaks=["copy"] if sort == LEAKY and not overlooked[i] else [],
            faults=[],
            attempts=verdicts[i].tolist(),
        )
    return found


@functools.lru_cache(maxsize=1)
def world(seed: int):
    """Held-out tasks, tasks with their sorts, and the policy of the warm start."""
    rng = np.random.default_rng(seed)
    order = jnp.asarray(rng.permutation(GRID))
    held_out, numbers, rest = jnp.split(order, (HELD_OUT, HELD_OUT + TASKS))
    sorts = jnp.asarray(rng.permutation(np.repeat(range(4), [TASKS * 7 // 10, *[TASKS // 10] * 3])))
    key = jax.random.key(seed)
    params = POLICY.init(key)
    moments = WARM.init(params)
    for chunk in range(1500):
        keys = jax.random.split(jax.random.fold_in(key, chunk), 2)
        params, moments = warm_up(params, moments, rest, keys)
        if solved(params, held_out, key)[0] >= WARM_SOLVED:
            break
    return held_out, numbers, sorts, params


def run(length: Length, arm: str, rate: float, seed: int) -> Outcome:
    """One policy."""
    held_out, numbers, sorts, params = world(seed)
    evidence = screened(params, numbers, sorts, seed)
    gates = [gate for gate in GATES if "spread" in arm or arm == "retry" or gate != "spread"]
    gates = [gate for gate in gates if "spread" in arm or arm == "retry" or gate != "stable"]
    screening = screen(evidence, DEMANDS, gates)
    moments, curve, mixed, kept = None, [], [], np.arange(TASKS)
    for point in range(length.points):
        if arm == "retry" and point and point % (length.points // 3) == 0:
            new = np.asarray(attempts(params, numbers, sorts, jax.random.key(point)))
            waiting = {key: new[int(key)].tolist() for key in screening.retried}
            screening = rescreen(screening, waiting, evidence, DEMANDS)
        if arm == "sound":
            kept = np.flatnonzero(np.asarray(sorts) == SOUND)
        elif arm not in ("raw", "dynamic"):
            kept = np.asarray([int(key) for key in screening.kept])
        used = jnp.full(TASKS, -1).at[kept].set(sorts[kept])
        key = jax.random.fold_in(jax.random.key(seed + 1), point)
        asked = PROMPTS * (3 if arm == "dynamic" else 1)
        params, moments, share = train(
            params,
            moments,
            numbers,
            used,
            rate,
            key,
            steps=length.updates // length.points,
            asked=asked,
        )
        mixed.append(float(share))
        curve.append([float(x) for x in solved(params, held_out, key)])
    right, copied = np.asarray(curve).T
    return {
        "solved": right[-1],
        "over the run": right.sum() / len(right),
        "copied": copied[-1],
        "mixed": float(np.sum(mixed)) / len(mixed),
        "tasks": len(kept),
        "broken": float((np.asarray(sorts)[kept] != SOUND).sum()) / len(kept),
        "curve": right,
        "mixed groups": mixed,
    }


def claim(quick: bool) -> Claim:
    """Every arm at the rate at which it solves most."""
    length = Length(updates=6, points=3) if quick else Length(updates=300, points=15)
    return Claim(
        name="x18_mixed_outcomes",
        arms=ARMS,
        run=functools.partial(run, length),
        rates=(1e-3,) if quick else (3e-4, 1e-3, 3e-3, 1e-2),
        choose="solved",
        larger=True,
        shown=("solved", "over the run", "copied", "mixed", "tasks", "broken"),
        drawn=("curve", "mixed groups"),
        against="raw",
        seeds=1 if quick else 10,
    )


if __name__ == "__main__":
    main(claim, __doc__)
