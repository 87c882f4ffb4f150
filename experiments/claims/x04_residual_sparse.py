"""Does the residual advantage learn where the verifier is silent, and does it pass its teacher?

python -m experiments.claims.x04_residual_sparse --workdir /tmp/claims

A decoder of two layers is to write each of a prompt's three digits plus one, twice (six tokens).
The reward is 1 only if all six are right. Student and teacher are two moments of one supervised
run: the student never solves a problem (a right token has 23 % probability, the product of six is
below a thousandth), the teacher solves 78 %. Then 200 takes of 32 prompts x 8 rollouts in two
updates each, Adam, labels once a take.

Look at: the solve rate at temperature 1 (exact, over all prompts), also less the teacher's at the
start; its mean over the run; the share of groups whose rewards are all equal; the teacher's solve
rate at the end (it learns in Co-RA alone).
Expect: GRPO never sees a reward; on-policy distillation comes up to the teacher; the residual
advantage leaves the dead zone and passes it; centring makes no difference at six tokens.
Result: as expected. 10 seeds, means with 95 % t intervals, commit 6cd1f6b, 2026-11-30. Solved after
200 takes: GRPO .002, RA .953 [.903, 1.003] (lambda 1) and .958 [.933, .982] (lambda 5), not centred
.938 [.891, .984], the residual alone .699 [.558, .840] (its rate is the edge of the grid), OPD .823
[.796, .851], Co-RA .918 [.813, 1.024]; the teacher starts at .788. Co-RA's teacher unlearns what
its student is asked (to .243 [.177, .310]): it sees the student's rows only.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.claims.protocol import Claim, Outcome, main
from jaxrl.kernels.groups import group_scale
from jaxrl.kernels.ratios import token_ratio
from jaxrl.kernels.readings import taken_logp
from jaxrl.kernels.residuals import residual_advantage, response_center
from jaxrl.kernels.surrogates import clipped_surrogate
from jaxrl.kernels.weights import rollout_mean
from jaxrl.mesh import Rules
from jaxrl.model import decoding
from jaxrl.model.form import qwen3
from jaxrl.model.policy import build

DIGITS, ASKED, SAID, GO = 10, 4, 6, 10  # a prompt is three digits and GO
PROMPTS, SAMPLES, UPDATES, CLIP = 32, 8, 2, 0.2
WARM_STEPS, WARM_ROWS, WARM_RATE = 300, 64, 3e-3

POLICY = build(
    qwen3(
        vocab_size=11,
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
class Arm:
    """A_t = verifier A_ver + residual (a_t - center abar) + distil log(pT / pS); the teacher's own
    learning rate is ``teacher`` times the student's."""

    verifier: float = 1.0
    residual: float = 0.0
    center: float = 1.0
    distil: float = 0.0
    teacher: float = 0.0


ARMS = {
    "GRPO": Arm(),
    "RA 1": Arm(residual=1.0),
    "RA 3": Arm(residual=3.0),
    "RA 5": Arm(residual=5.0),
    "RA 10": Arm(residual=10.0),
    "RA 1, not centred": Arm(residual=1.0, center=0.0),
    "residual alone": Arm(verifier=0.0, residual=1.0),
    "OPD": Arm(verifier=0.0, distil=1.0),
    "Co-RA 1": Arm(residual=1.0, teacher=0.1),
}


@dataclasses.dataclass(frozen=True)
class Start:
    """Which moments of the supervised run: the first at which a right token has this probability,
    or at which this share of problems is solved."""

    student_token: float
    student_solved: float
    teacher_solved: float
    takes: int


def problems(numbers):
    """Prompts [row 4] and right answers [row 6] of numbers below 1000."""
    digits = jnp.stack([numbers // 100, numbers // 10 % 10, numbers % 10], axis=-1)
    go = jnp.full((*numbers.shape, 1), GO)
    answer = (digits + 1) % DIGITS
    return jnp.concatenate([digits, go], -1), jnp.concatenate([answer, answer], -1)


def logits_of(params, prompts, said):
    """Logits [position vocab] before each token that was said, rows one after another."""
    rows = jnp.concatenate([prompts, said], -1)
    place = jnp.broadcast_to(jnp.arange(ASKED + SAID), rows.shape)
    hidden = POLICY.hidden(params, rows, place, jnp.ones_like(rows))[:, ASKED - 1 : -1]
    return POLICY.logits(params, hidden.reshape(-1, hidden.shape[-1]))


def logp_of(params, prompts, said):
    """Log-probs [row token] of what was said."""
    return taken_logp(logits_of(params, prompts, said), said.reshape(-1)).reshape(said.shape)


def solving(params):
    """Chance that a sampled answer is right, and that a token is after right ones; all prompts."""
    prompts, answers = problems(jnp.arange(1000))
    logp = logp_of(params, prompts, answers)
    return jnp.exp(logp.sum(-1)).mean(), jnp.exp(logp).mean()


def sample(params, prompts, key):
    """Answers [row 6] at temperature 1."""
    lengths = jnp.full(prompts.shape[:1], ASKED)
    logits, cache, _ = decoding.prefill(POLICY, params, prompts, lengths)
    grown = ((0, 0), (0, 0), (0, SAID), (0, 0))
    cache = jax.tree.map(lambda x: jnp.pad(x, grown), cache)
    decode = decoding.decoder(POLICY, params)

    def step(carry, at):
        logits, cache = carry
        token = jax.random.categorical(jax.random.fold_in(key, at), logits)
        return decode(token, lengths + at, lengths > 0, cache)[:2], token

    _, said = jax.lax.scan(step, (logits, cache), jnp.arange(SAID))
    return said.T


@jax.jit
def warm_up(seed):
    """Parameters after each supervised step, and what they solve."""
    keys = jax.random.split(jax.random.key(seed), 2)
    tx = optax.adam(WARM_RATE)

    def step(carry, key):
        params, moments = carry
        prompts, answers = problems(jax.random.randint(key, (WARM_ROWS,), 0, 1000))
        grads = jax.grad(lambda p: -logp_of(p, prompts, answers).mean())(params)
        changes, moments = tx.update(grads, moments)
        params = optax.apply_updates(params, changes)
        return (params, moments), (params, *solving(params))

    params = POLICY.init(keys[0])
    steps = jax.random.split(keys[1], WARM_STEPS)
    return jax.lax.scan(step, (params, tx.init(params)), steps)[1]


@functools.partial(jax.jit, static_argnums=(0, 1))
def train(takes, learns, student, teacher, arm, rate, key):
    """Solve rate after each tenth take, share of groups without a difference, and the teacher's
    solve rate at the end. ``arm`` is a mapping of numbers, so that one program serves all arms in
    which the teacher ``learns``, and one the others."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.99))
    rows = PROMPTS * SAMPLES
    group, rollout = jnp.arange(rows) // SAMPLES, jnp.arange(rows)
    minibatch, every = rollout // (rows // UPDATES), jnp.ones((rows, SAID), bool)
    weight = rollout_mean(rollout, minibatch, every)

    def descend(role, moments, rate, loss):
        grads = jax.grad(loss)(role)
        changes, moments = tx.update(grads, moments)
        return jax.tree.map(lambda p, c: p - rate * c, role, changes), moments

    def take(carry, key):
        (student, moments), (teacher, teacher_moments) = carry
        keys = jax.random.split(key)
        prompts, answers = problems(jax.random.randint(keys[0], (PROMPTS,), 0, 1000))
        prompts, answers = (jnp.repeat(x, SAMPLES, axis=0) for x in (prompts, answers))
        said = sample(student, prompts, keys[1])
        flat = said.reshape(-1)
        both = [logits_of(model, prompts, said) for model in (student, teacher)]
        old, taught = (taken_logp(logits, flat).reshape(said.shape) for logits in both)
        residual = residual_advantage(both[0], both[1], flat).reshape(said.shape)
        centred = response_center(residual, weight, rollout, every)
        residual = arm["center"] * centred + (1 - arm["center"]) * residual
        right = (said == answers).all(-1).astype(jnp.float32)
        verified = group_scale(right, group, every[:, 0])[:, None] * jnp.ones(said.shape)
        label = arm["verifier"] * verified + arm["residual"] * residual
        label += arm["distil"] * (taught - old)

        def loss(params, at, old, label):
            logp = logp_of(params, prompts[at], said[at])
            bounds = {"clip_low": CLIP, "clip_high": CLIP}
            each, _ = clipped_surrogate(token_ratio(logp, old[at]), label[at], **bounds)
            return (each * weight[at]).sum()

        for update in range(UPDATES):
            at = np.arange(rows // UPDATES) + update * (rows // UPDATES)
            student, moments = descend(
                student, moments, rate, lambda p, at=at: loss(p, at, old, label)
            )
            if learns:
                teacher, teacher_moments = descend(
                    teacher,
                    teacher_moments,
                    rate * arm["teacher"],
                    lambda p, at=at: loss(p, at, taught, verified),
                )
        equal = (jnp.abs(verified[::SAMPLES, 0]) == 0).mean()
        return ((student, moments), (teacher, teacher_moments)), equal

    def stretch(carry, keys):
        carry, equal = jax.lax.scan(take, carry, keys)
        return carry, (solving(carry[0][0])[0], equal.mean())

    keys = jax.random.split(key, takes).reshape(-1, 10)
    carry = tuple((role, tx.init(role)) for role in (student, teacher))
    carry, (solved, equal) = jax.lax.scan(stretch, carry, keys)
    return solved, equal, solving(carry[1][0])[0]


@functools.cache
def moments_of(start: Start, seed: int):
    """Student and teacher with what they solve: the same for all arms of a seed."""
    models, solved, token = jax.tree.map(np.asarray, warm_up(seed))
    ready = (token >= start.student_token) & (solved >= start.student_solved)
    able = solved >= start.teacher_solved
    if not (ready.any() and able.any()):
        raise ValueError(f"seed {seed}: {WARM_STEPS} supervised steps do not make {start}")
    return [
        (jax.tree.map(lambda x, at=at: x[at], models), float(solved[at]))
        for at in (int(np.argmax(ready)), int(np.argmax(able)))
    ]


def outcome(start: Start, arm: str, rate: float, seed: int) -> Outcome:
    """One run."""
    (student, before), (teacher, taught) = moments_of(start, seed)
    numbers, key = dataclasses.asdict(ARMS[arm]), jax.random.key(seed + 1)
    learns = ARMS[arm].teacher > 0
    found = train(start.takes, learns, student, teacher, numbers, rate, key)
    curve, equal, after = jax.tree.map(np.asarray, found)
    return {
        "solved": float(curve[-1]),
        "over the teacher": float(curve[-1]) - taught,
        "mean of the run": float(curve.mean()),
        "groups without a difference": float(equal.mean()),
        "teacher at the end": float(after),
        "student at the start": before,
        "teacher at the start": taught,
        "solve rate": [before, *curve.tolist()],
    }


SHOWN = ("solved", "over the teacher", "mean of the run", "groups without a difference")


def claim(quick: bool) -> Claim:
    """A student that solves nothing under a good teacher."""
    start = Start(0.23, 0.0, 0.78, takes=20 if quick else 200)
    return Claim(
        name="x04_residual_sparse",
        arms=("GRPO", "RA 1", "RA 5", "RA 1, not centred", "residual alone", "OPD", "Co-RA 1"),
        run=functools.partial(outcome, start),
        rates=(2e-3,) if quick else (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
        choose="solved",
        larger=True,
        shown=(*SHOWN, "teacher at the end"),
        drawn=("solve rate",),
        against="GRPO",
        seeds=2 if quick else 10,
    )


if __name__ == "__main__":
    main(claim, __doc__)
