"""Can a teacher that reads characters teach a student that reads pairs of them, by the text alone?

python -m experiments.claims.x17_text_teacher --workdir /tmp/claims

The task is to write a string of one to six letters backwards. The teacher, a decoder of two layers,
reads and writes single letters and solves 80 %; the student, of the same size, reads and writes
pairs (a last one may be single) and solves 30 %, both after supervised steps. A take is 64 prompts
x 4 responses and four updates on all of them, Adam, 150 takes; the teacher scores each text in its
own letters, its end included. A text in other pieces than the canonical ones, an empty one, or one
without an end is not usable.

Arms: group-variance distillation with length exponents 0, 0.5 and 1; the policy gradient whose
reward is log(teacher / student) of the text at the take's start, plain and under PPO's clip (on a
take's first update the plain one has the gradient of exponent 0); likelihood of as many responses
sampled from the teacher.

Look at: the chance that the right answer is sampled (exact, over 512 prompts); the text's length
over the prompt's while the run goes on, also at its shortest; the share of usable texts.
Expect: distillation works across tokenizers and passes likelihood and the policy gradient at equal
samples; with exponent 0 texts get short first.
Result: it works across tokenizers, the rest does not hold. 10 seeds, means with 95 % t intervals,
commit 47ae9ea, 2026-11-30. Solved, from .30: exponent 0 .358 [.311, .405], 0.5 .402 [.374, .429], 1
.402 [.374, .430]; the policy gradient .354 [.307, .401], clipped .386 [.327, .445]; likelihood of
the teacher's samples .690 [.651, .729], far ahead of all of them (and at the edge of the grid, as
the two of .36). Shortest text over the prompt: .839 [.739, .938] with exponent 0, .938 with 0.5,
.995 [.986, 1.005] with 1: texts do get short first without the length weight.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.claims.protocol import Claim, Outcome, main
from jaxrl.kernels.groups import leave_one_out
from jaxrl.kernels.ratios import token_ratio
from jaxrl.kernels.readings import taken_logp
from jaxrl.kernels.surrogates import clipped_surrogate, policy_gradient
from jaxrl.kernels.variance import centred_gap, length_weight
from jaxrl.kernels.weights import prompt_sum_mean
from jaxrl.mesh import Rules
from jaxrl.model.form import qwen3
from jaxrl.model.policy import Policy, build
from jaxrl.pool.characters import CharacterTokenizer

ALPHABET, LONGEST, WRITTEN = "abcd", 6, 8  # letters of a prompt, and of a response, at most
LETTERS, PAIRS = CharacterTokenizer(ALPHABET, 1), CharacterTokenizer(ALPHABET, 2)
EOS = LETTERS.eos_id
FIRST, FIRST_PAIR = EOS + 1, EOS + 1 + len(ALPHABET)  # ids of "a" and of "aa"
PROMPTS, SAMPLES, UPDATES, CLIP = 64, 4, 4, 0.2
WARM_STEPS, WARM_ROWS, WARM_RATE = 800, 64, 3e-3
TEACHER_SOLVES, STUDENT_SOLVES = 0.8, 0.3

ARMS = {  # form, alpha
    "GVPD 0": ("GVPD", 0.0),
    "GVPD 0.5": ("GVPD", 0.5),
    "GVPD 1": ("GVPD", 1.0),
    "sequence PG": ("PG", 0.0),
    "sequence PG, clipped": ("clipped", 0.0),
    "SFT on the teacher": ("SFT", 0.0),
}


def model(tokenizer: CharacterTokenizer) -> Policy:
    """A small decoder; the id after the tokenizer's own starts a response."""
    config = qwen3(
        vocab_size=tokenizer.vocab_size + 1,
        layers=2,
        width=32,
        heads=2,
        kv_heads=1,
        head_size=16,
        hidden=64,
        rope_theta=100.0,
        norm_epsilon=1e-6,
        tied_head=True,
        dtype="float32",
        param_dtype="float32",
        remat="none",
        score_chunk_positions=4096,
    )
    return build(config, None, Rules())


class Side:
    """A model and how it reads texts, given as letters [row place] in 0 ... 3 and lengths [row]."""

    def __init__(self, tokenizer: CharacterTokenizer) -> None:
        self.policy, self.width = model(tokenizer), tokenizer.width
        self.go = tokenizer.vocab_size
        self.said = WRITTEN // tokenizer.width + 1  # tokens of a response, its end included

    def tokens(self, letters, length):
        """Canonical tokens [row piece] and how many there are [row]; zeros behind."""
        place = jnp.arange(letters.shape[1])
        inside = place < length[:, None]
        if self.width == 1:
            return jnp.where(inside, FIRST + letters, 0), length
        first, second = letters[:, ::2], letters[:, 1::2]
        double = FIRST_PAIR + len(ALPHABET) * first + second
        found = jnp.where(inside[:, 1::2], double, jnp.where(inside[:, ::2], FIRST + first, 0))
        return found, -(-length // 2)

    def response(self, letters, length):
        """Canonical tokens with the end, and their mask."""
        found, count = self.tokens(letters, length)
        place = jnp.arange(self.said)
        found = jnp.pad(found, ((0, 0), (0, self.said - found.shape[1])))
        return jnp.where(place == count[:, None], EOS, found), place <= count[:, None]

    def text(self, said):
        """Letters, length and usable [row] of what was sampled; "a"s where it is not usable."""
        place = jnp.arange(self.said)
        ended = (said == EOS).any(-1)
        count = jnp.where(ended, jnp.argmax(said == EOS, axis=-1), 0)
        inside = place < count[:, None]
        single = (said >= FIRST) & (said < FIRST_PAIR)
        if self.width == 1:
            usable = (single | ~inside).all(-1) & (count > 0)
            letters = jnp.where(inside & usable[:, None], said - FIRST, 0)
            return letters[:, :WRITTEN], count, usable
        double = (said >= FIRST_PAIR) & (said < self.go)
        last = place == count[:, None] - 1
        # A single letter ends the text.
        usable = (double | (single & last) | ~inside).all(-1) & (count > 0)
        at = jnp.where(double, said - FIRST_PAIR, 0)
        pair = jnp.stack([at // len(ALPHABET), at % len(ALPHABET)], axis=-1)
        alone = jnp.stack([said - FIRST, jnp.zeros_like(said)], axis=-1)
        letters = jnp.where(single[..., None], alone, pair)
        letters = jnp.where((inside & usable[:, None])[..., None], letters, 0)
        length = 2 * count - (single & last).any(-1)
        return letters.reshape(said.shape[0], -1)[:, :WRITTEN], length, usable

    def logits(self, params, prompt, said):
        """[row token vocab] before each token said; ``prompt`` is letters and length."""
        asked, count = self.tokens(*prompt)
        go = jnp.full((said.shape[0], 1), self.go)
        rows = jnp.concatenate([asked, go, said], -1)
        places = jnp.arange(asked.shape[1]) < count[:, None]
        rest = jnp.ones((said.shape[0], 1 + said.shape[1]), bool)
        segment = jnp.concatenate([places, rest], -1).astype(jnp.int32)
        position = jnp.where(segment > 0, jnp.cumsum(segment, -1) - 1, 0)
        hidden = self.policy.hidden(params, rows, position, segment)
        hidden = hidden[:, asked.shape[1] : -1]
        flat = self.policy.logits(params, hidden.reshape(-1, hidden.shape[-1]))
        return flat.reshape(*said.shape, -1)

    def logp(self, params, prompt, said):
        """[row token]."""
        logits = self.logits(params, prompt, said)
        flat = taken_logp(logits.reshape(-1, logits.shape[-1]), said.reshape(-1))
        return flat.reshape(said.shape)

    def sample(self, params, prompt, key):
        """Tokens [row token] at temperature 1, zeros after the end; mask."""
        rows = prompt[1].shape[0]

        def step(carry, at):
            said, ended = carry
            logits = self.logits(params, prompt, said)
            drawn = jax.random.categorical(jax.random.fold_in(key, at), logits[:, at])
            drawn = jnp.where(ended, 0, drawn)
            return (said.at[:, at].set(drawn), ended | (drawn == EOS)), ~ended

        start = jnp.zeros((rows, self.said), jnp.int32), jnp.zeros(rows, bool)
        (said, _), mask = jax.lax.scan(step, start, jnp.arange(self.said))
        return said, mask.T


TEACHER, STUDENT = Side(LETTERS), Side(PAIRS)


def questions(key, count):
    """(prompt, answer), each letters [row 8 or 6] and length [row]; longer strings are likelier."""
    keys = jax.random.split(key)
    length = 1 + jax.random.categorical(
        keys[0], jnp.log(jnp.arange(1.0, LONGEST + 1)), shape=(count,)
    )
    letters = jax.random.randint(keys[1], (count, LONGEST), 0, len(ALPHABET))
    place = jnp.arange(WRITTEN)
    at = jnp.clip(length[:, None] - 1 - place, 0)
    backwards = jnp.take_along_axis(letters, at, axis=-1)
    return (letters, length), (jnp.where(place < length[:, None], backwards, 0), length)


def solving(side, params):
    """Chance that the right answer is sampled, over 512 prompts."""
    prompt, answer = questions(jax.random.key(512), 512)
    said, mask = side.response(*answer)
    return jnp.exp(jnp.where(mask, side.logp(params, prompt, said), 0).sum(-1)).mean()


def likelihood(side, params, prompt, text, counted):
    """Mean over the counted texts of -log p."""
    said, mask = side.response(*text)
    total = jnp.where(mask, side.logp(params, prompt, said), 0).sum(-1)
    return -jnp.where(counted, total, 0).sum() / jnp.maximum(counted.sum(), 1)


@functools.partial(jax.jit, static_argnums=0)
def warm_up(side, goal, key):
    """Supervised steps until ``goal`` of the problems is solved: (parameters, solve rate)."""
    tx = optax.adam(WARM_RATE)
    keys = jax.random.split(key)
    params = side.policy.init(keys[0])

    def more(carry):
        _, _, solved, count = carry
        return (solved < goal) & (count < WARM_STEPS)

    def update(carry, key):
        params, moments = carry
        prompt, answer = questions(key, WARM_ROWS)
        every = jnp.ones(WARM_ROWS, bool)
        grads = jax.grad(functools.partial(likelihood, side))(params, prompt, answer, every)
        changes, moments = tx.update(grads, moments)
        return (optax.apply_updates(params, changes), moments), None

    def step(carry):
        params, moments, _, count = carry
        drawn = jax.random.split(jax.random.fold_in(keys[1], count), 5)
        (params, moments), _ = jax.lax.scan(update, (params, moments), drawn)
        return params, moments, solving(side, params), count + 5

    start = params, tx.init(params), jnp.zeros(()), 0
    params, _, solved, _ = jax.lax.while_loop(more, step, start)
    return params, solved


@functools.cache
def models_of(seed: int):
    """Teacher and student of a seed, the same for all arms, and what they solve."""
    keys = jax.random.split(jax.random.key(seed))
    teacher, able = warm_up(TEACHER, TEACHER_SOLVES, keys[0])
    student, begun = warm_up(STUDENT, STUDENT_SOLVES, keys[1])
    if able < TEACHER_SOLVES or begun < STUDENT_SOLVES:
        raise ValueError(f"seed {seed}: supervised steps end at {able} and {begun}")
    return teacher, student, float(able), float(begun)


GROUP = jnp.repeat(jnp.arange(PROMPTS), SAMPLES)
EVERY = jnp.ones(GROUP.shape, bool)


def loss_of(form, alpha, logp, old, mask, taught, length, usable):
    """Loss of a take's responses; ``logp`` and ``old`` are [row token], ``taught`` [row]."""
    total = jnp.where(mask, logp, 0).sum(-1)
    share = prompt_sum_mean(GROUP, jnp.zeros_like(GROUP), usable, least=2)
    if form == "GVPD":
        gap = length_weight(length * 1.0, alpha=alpha) * (total - taught)
        none = jnp.zeros_like(gap)
        each, _ = centred_gap(gap, none, none, GROUP, usable, beta=1.0)
        return (each * share).sum()
    reward = taught - jnp.where(mask, old, 0).sum(-1)
    advantage = leave_one_out(reward, GROUP, usable)[:, None] * mask
    if form == "PG":
        each, _ = policy_gradient(logp, advantage)
    else:
        ratio = token_ratio(jnp.where(mask, logp, 0), jnp.where(mask, old, 0))
        each, _ = clipped_surrogate(ratio, advantage, clip_low=CLIP, clip_high=CLIP)
    return (jnp.where(mask, each, 0).sum(-1) * share).sum() / SAMPLES


@functools.partial(jax.jit, static_argnums=(0, 1))
def train(takes, form, student, teacher, alpha, rate, key):
    """After each fifth take: solve rate, length over the prompt's, share of usable texts."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.99))

    def take(carry, key):
        params, moments = carry
        keys = jax.random.split(key)
        prompt, _ = questions(keys[0], PROMPTS)
        prompt = tuple(jnp.repeat(x, SAMPLES, axis=0) for x in prompt)
        said, mask = STUDENT.sample(params, prompt, keys[1])
        letters, length, usable = STUDENT.text(said)
        old = STUDENT.logp(params, prompt, said)
        theirs, counted = TEACHER.response(letters, length)
        taught = jnp.where(counted, TEACHER.logp(teacher, prompt, theirs), 0).sum(-1)
        shown: Any = None
        whole: Any = None
        if form == "SFT":
            shown, _ = TEACHER.sample(teacher, prompt, keys[1])
            *shown, whole = TEACHER.text(shown)

        def loss(params):
            if form == "SFT":
                return likelihood(STUDENT, params, prompt, shown, whole)
            logp = STUDENT.logp(params, prompt, said)
            return loss_of(form, alpha, logp, old, mask, taught, length, usable)

        for _ in range(UPDATES):
            changes, moments = tx.update(jax.grad(loss)(params), moments)
            params = jax.tree.map(lambda p, c: p - rate * c, params, changes)
        spoken = jnp.where(usable, length / prompt[1], 0).sum() / jnp.maximum(usable.sum(), 1)
        return (params, moments), (spoken, usable.mean())

    def stretch(carry, keys):
        carry, told = jax.lax.scan(take, carry, keys)
        return carry, (solving(STUDENT, carry[0]), *(x.mean() for x in told))

    keys = jax.random.split(key, takes).reshape(-1, 5)
    return jax.lax.scan(stretch, (student, tx.init(student)), keys)[1]


def outcome(takes: int, arm: str, rate: float, seed: int) -> Outcome:
    """One run."""
    teacher, student, able, begun = models_of(seed)
    key = jax.random.key(seed + 1)
    form, alpha = ARMS[arm]
    found = train(takes, form, student, teacher, alpha, rate, key)
    solved, spoken, usable = jax.tree.map(np.asarray, found)
    return {
        "solved": float(solved[-1]),
        "under the teacher": able - float(solved[-1]),
        "mean of the run": float(solved.mean()),
        "shortest": float(spoken.min()),
        "usable": float(usable.mean()),
        "solve rate": [begun, *solved.tolist()],
        "length over the prompt's": spoken.tolist(),
    }


def claim(quick: bool) -> Claim:
    """Six ways to learn from the same teacher with as many samples."""
    return Claim(
        name="x17_text_teacher",
        arms=tuple(ARMS),
        run=functools.partial(outcome, 10 if quick else 150),
        rates=(1e-3,) if quick else (1e-4, 3e-4, 1e-3, 3e-3),
        choose="solved",
        larger=True,
        shown=("solved", "under the teacher", "mean of the run", "shortest", "usable"),
        drawn=("solve rate", "length over the prompt's"),
        against="GVPD 0",
        seeds=1 if quick else 10,
    )


if __name__ == "__main__":
    main(claim, __doc__)
