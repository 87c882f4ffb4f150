"""Does predicting the environment's answer hurt alone, and help beside hindsight distillation?

python -m experiments.claims.x15_self_feedback --workdir /tmp/claims

A look-up: each of 64 names (pairs of 8 x 8 symbols) hides a code of two digits. A call is answered
ERR EXPECTED d1 d2 for half of the names, ERR alone for the others, and OK if it is right. The
policy is a two-layer language model with three role tokens (student, teacher who sees the answer,
environment). It starts from a model that was trained, on codes drawn anew each time, to call with
any two digits, to copy a code that it is told, and to answer as an environment: it reads feedback,
and knows no code. Then 100 rounds: one call of each name, 4 updates on what came back, with
``algorithms/self_feedback.py`` itself on this model; no reward. The teacher is the moving average.

Arms: (feedback weight, distillation weight) = (0, 1), (.2, 0), (.2, 1), and (.2, 1) with feedback
that never tells.

Look at: the probability of the right code, exact, over all names and over those that are told;
how often the teacher repeats what it is told; the surprise at the environment's answers.
Expect: (.2, 0) flat or worse than the start (``gain`` <= 0) < (0, 1) < (.2, 1); without words flat.
Result: the first half holds. 5 seeds, means with 95 % t intervals, commit 47ae9ea, 2026-11-30.
Right calls (%), from 1.0: (.2, 0) 1.1 [.9, 1.3], flat; (0, 1) 26.7 [25.1, 28.4], and 52.5 [49.2,
55.7] of the names that are told; (.2, 1) 27.1 [24.9, 29.3]: the feedback term adds .4 [-.6, 1.4],
nothing that can be seen. Without words 1.0. The moving average still repeats 94 to 98 % of what it
is told.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.claims.protocol import Claim, Outcome, main
from jaxrl.algorithms.self_feedback import Algorithm
from jaxrl.batch import ACTION, FEEDBACK, PROMPT, Batch, View
from jaxrl.kernels.readings import taken_logp
from jaxrl.mesh import Rules
from jaxrl.model import policy
from jaxrl.model.form import qwen3

SIDE, NAMES = 8, 64
PAD, STUDENT, TEACHER, ENVIRONMENT, ERR, EXPECTED, OK, NONE = range(8)
DIGIT, LEFT, RIGHT = 8, 18, 18 + SIDE  # ids of the first of each
VOCAB = RIGHT + SIDE
UPDATES, EMA_RATE = 4, 0.99
WORLDS = 2  # codes and calls, from one start: a seed's numbers are means over them

# arm: (feedback weight, distillation weight, are half of the names told?)
ARMS = {
    "(0, 1)": (0.0, 1.0, True),
    "(.2, 0)": (0.2, 0.0, True),
    "(.2, 1)": (0.2, 1.0, True),
    "(.2, 1), no words": (0.2, 1.0, False),
}

MODEL = policy.build(
    qwen3(
        vocab_size=VOCAB,
        layers=2,
        width=64,
        heads=4,
        kv_heads=4,
        head_size=16,
        hidden=128,
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

NAME = jnp.stack([LEFT + jnp.arange(NAMES) // SIDE, RIGHT + jnp.arange(NAMES) % SIDE], axis=-1)


def logits_of(params, tokens):
    """Of the token after each place, [row token vocab]."""
    place = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = MODEL.hidden(params, tokens, place, jnp.ones_like(tokens))
    return MODEL.logits(params, hidden.reshape(-1, hidden.shape[-1])).reshape(*tokens.shape, VOCAB)


def prompt(role, names, *more):
    """Rows of a role token, the name and what follows, [row token]."""
    first = jnp.full((len(names), 1), role)
    return jnp.concatenate([first, names, *more], axis=-1)


def answered(action, code, told):
    """The environment's four tokens."""
    right = (action == code).all(-1, keepdims=True)
    none = jnp.full_like(action, NONE)
    ok, err = (jnp.concatenate([none.at[:, 0].set(word), none], -1) for word in (OK, ERR))
    words = jnp.concatenate([none.at[:, 0].set(ERR).at[:, 1].set(EXPECTED), code], -1)
    return jnp.where(right, ok, jnp.where(told[:, None], words, err))


def digits(key, rows):
    """Two digits a row, as ids."""
    return DIGIT + jax.random.randint(key, (rows, 2), 0, 10)


@functools.partial(jax.jit, static_argnames="steps")
def started(seed, *, steps):
    """The model before it meets the codes: it reads, writes the format, and knows nothing."""

    def loss(params, key):
        keys = jax.random.split(key, 5)
        code, action = digits(keys[0], NAMES), digits(keys[1], NAMES)
        told = jax.random.uniform(keys[2], (NAMES,)) < 0.5
        lucky = jax.random.uniform(keys[3], (NAMES, 1)) < 0.1
        feedback = answered(jnp.where(lucky, code, action), code, told)
        knows = (feedback[:, 1] == EXPECTED)[:, None]
        said = jnp.where(knows, code, digits(keys[4], NAMES))
        rows = {
            "student": (prompt(STUDENT, NAME, action), 2),
            "teacher": (prompt(TEACHER, NAME, feedback, said), 2),
            "environment": (
                prompt(ENVIRONMENT, NAME, jnp.where(lucky, code, action), feedback),
                4,
            ),
        }
        total = 0.0
        for tokens, last in rows.values():
            logits = logits_of(params, tokens)[:, -last - 1 : -1]
            logp = taken_logp(logits.reshape(-1, VOCAB), tokens[:, -last:].reshape(-1))
            total -= logp.sum() / logp.size
        return total

    tx = optax.adam(optax.cosine_decay_schedule(3e-3, steps))
    keys = jax.random.split(jax.random.key(seed), 2)
    params = MODEL.init(keys[0])

    def step(carry, key):
        params, moments = carry
        changes, moments = tx.update(jax.grad(loss)(params, key), moments)
        return (optax.apply_updates(params, changes), moments), None

    return jax.lax.scan(step, (params, tx.init(params)), jax.random.split(keys[1], steps))[0][0]


def called(params, key):
    """A sampled call of each name, [name 2]."""
    said = []
    for one in jax.random.split(key, 2):
        logits = logits_of(params, prompt(STUDENT, NAME, *said))[:, -1]
        said.append(jax.random.categorical(one, logits)[:, None])
    return jnp.concatenate(said, -1)


def certainty(params, role, code, *before):
    """Probability of the code of each name."""
    rows = prompt(role, NAME, *before, code)
    logits = logits_of(params, rows)[:, -3:-1]
    logp = taken_logp(logits.reshape(-1, VOCAB), code.reshape(-1))
    return jnp.exp(logp.reshape(-1, 2).sum(-1))


def taken(action, feedback) -> Batch:
    """One turn of one rollout a name, in the three contexts."""
    tokens = prompt(STUDENT, NAME, action, feedback)
    place = jnp.broadcast_to(jnp.arange(9), tokens.shape)
    one, rows = jnp.ones_like(tokens), jnp.arange(NAMES)
    kind = jnp.asarray([PROMPT] * 3 + [ACTION] * 2 + [FEEDBACK] * 4)

    def view(row, places):
        index = jnp.broadcast_to(jnp.asarray(places), tokens.shape)
        return View(row, place, one, index)

    hindsight = view(prompt(TEACHER, NAME, feedback, action), [-1] * 3 + [7, 8, 3, 4, 5, 6])
    foresight = view(prompt(ENVIRONMENT, NAME, action, feedback), [-1] * 3 + [3, 4, 5, 6, 7, 8])
    return Batch(
        tokens=tokens,
        position=place,
        segment=one,
        kind=jnp.broadcast_to(kind, tokens.shape),
        step=jnp.where(place < 3, -1, 0),
        sampler_logp=jnp.zeros(tokens.shape),
        version=jnp.zeros_like(tokens),
        temperature=jnp.ones(tokens.shape),
        rollout=rows,
        reward=jnp.zeros(NAMES),
        valid=jnp.ones(NAMES, bool),
        truncated=jnp.zeros(NAMES, bool),
        group=rows,
        minibatch=jnp.zeros_like(rows),
        branch_weight=jnp.ones(NAMES),
        facts={},
        views={"with_feedback": hindsight, "as_environment": foresight},
    )


def trained(key, params, rate, *, algorithm, worded, rounds):
    """What each round told, the state before it first."""
    keys = jax.random.split(key, 3)
    code = digits(keys[0], NAMES)
    told = (jax.random.permutation(keys[1], NAMES) < NAMES // 2) & worded
    wording = jax.random.permutation(keys[1], NAMES) < NAMES // 2
    adam = optax.scale_by_adam()

    def update(carry, batch):
        params, average, moments = carry
        credit = algorithm.credit(batch, {})

        def loss(params):
            models = {"student": params, "self": average}
            reading = MODEL.score(models, batch, algorithm.read, algorithm.scorers)
            return (algorithm.loss(reading, batch, {}, credit)[0] * credit.weight).sum()

        changes, moments = adam.update(jax.grad(loss)(params), moments)
        params = jax.tree.map(lambda p, c: p - rate * c, params, changes)
        average = jax.tree.map(lambda a, p: EMA_RATE * a + (1 - EMA_RATE) * p, average, params)
        return params, average, moments

    def measured(params, average):
        right = certainty(params, STUDENT, code)
        words = answered(jnp.full_like(code, PAD), code, jnp.ones(NAMES, bool))
        return {
            "right": right.sum() / NAMES,
            "right, told": jnp.where(wording, right, 0).sum() / wording.sum(),
            "teacher": certainty(average, TEACHER, code, words).sum() / NAMES,
        }

    def one(carry, key):
        before = measured(*carry[:2])
        action = called(carry[0], key)
        feedback = answered(action, code, told)
        batch = taken(action, feedback)
        logits = logits_of(carry[0], batch.views["as_environment"].tokens)[:, 4:8]
        surprise = -taken_logp(logits.reshape(-1, VOCAB), feedback.reshape(-1))
        carry, _ = jax.lax.scan(lambda c, _: (update(c, batch), None), carry, None, length=UPDATES)
        return carry, before | {"surprise": surprise.sum() / surprise.size}

    start = (params, params, adam.init(params))
    carry, found = jax.lax.scan(one, start, jax.random.split(keys[2], rounds))
    last = measured(*carry[:2])
    return {name: jnp.append(found[name], x) for name, x in last.items()} | {
        "surprise": found["surprise"]
    }


@functools.partial(jax.jit, static_argnames=("algorithm", "worded", "rounds"))
def repeated(params, seed, rate, **static):
    """The mean of what the worlds of a seed told."""
    keys = jax.random.split(jax.random.key(seed), WORLDS)
    found = jax.vmap(lambda key: trained(key, params, rate, **static))(keys)
    return jax.tree.map(lambda x: x.sum(0) / WORLDS, found)


@functools.cache
def start(seed: int, steps: int):
    """The same for all arms of a seed."""
    return jax.block_until_ready(started(seed, steps=steps))


def run(quick: bool, arm: str, rate: float, seed: int) -> Outcome:
    """One run's numbers, in percent."""
    feedback_weight, distillation_weight, worded = ARMS[arm]
    found = repeated(
        start(seed, 20 if quick else 1500),
        seed,
        rate,
        algorithm=Algorithm(feedback_weight, distillation_weight),
        worded=worded,
        rounds=3 if quick else 100,
    )
    curves = {name: np.asarray(x, np.float64) for name, x in found.items()}
    percent = {name: 100 * curves[name] for name in ("right", "right, told", "teacher")}
    last = {name: float(x[-1]) for name, x in percent.items()}
    return {
        **last,
        "gain": last["right"] - float(percent["right"][0]),
        "teacher before": float(percent["teacher"][0]),
        "surprise": float(curves["surprise"][-1]),
        "curve": percent["right"].tolist(),
    }


def claim(quick: bool) -> Claim:
    """Four arms."""
    return Claim(
        name="x15_self_feedback",
        arms=tuple(ARMS),
        run=functools.partial(run, quick),
        rates=(1e-3,) if quick else (1e-4, 3e-4, 1e-3),
        choose="right",
        larger=True,
        shown=("right", "gain", "right, told", "teacher before", "teacher", "surprise"),
        drawn=("curve", "surprise"),
        against="(0, 1)",
        seeds=2 if quick else 5,
    )


if __name__ == "__main__":
    main(claim, __doc__)
