"""Does novelty find more solutions, and does an explorer keep its cost away from the student?

python -m experiments.claims.x16_exploration --workdir /tmp/claims

Walks: from a digit to a goal 2 to 24 steps further on, as at most eight steps of 1 to 9 and an end
token; many strings of steps solve a prompt. The start was taught on distances up to 16: by twos (48
%), by threes (48 %), by nines (4 %), each with a last step of what is left. Walks by twos cannot
reach further than 16 steps, those by nines can. The start was also taught to copy four digits,
which is never trained again. The policy is a network of three layers on a window of the prompt and
what was said; its hidden states over the response alone are judged by ``model/novelty.py``, credit
and loss are ``algorithms/exp_dis.py`` itself (without refills: groups that do not vary weigh 0).

Arms, at 300 updates of 16 prompts x 16 rollouts: DAPO (as ExpDis has it, no novelty); DAPO +
novelty, in the policy that is measured; ExpDis: 200 updates of an explorer, the shortest right walk
of each prompt copied by the student in 25 updates of 16 (about two passes, as in the paper), and 75
of the student's own, without novelty. One learning rate for all of an arm's parts.

Look at: pass@16 and distinct right walks among 64 samples, on prompts held out, near (up to 16) and
far; accuracy of copying, as a share of the start's.
Expect: DAPO has the fewest distinct walks; DAPO + novelty the most, and copies worse; ExpDis more
walks than DAPO, and copies as well.
Result: half as expected. 5 seeds, means with 95 % t intervals, commit 47ae9ea, 2026-11-30. Distinct
right walks near: DAPO 1.83 [1.72, 1.94], ExpDis 2.00 [1.83, 2.17], more by .17 [-.01, .35]; far .49
and .52, pass@16 far .373 and .421, level. Copying kept: DAPO .926 [.854, .997], ExpDis .988 [.975,
1.002], better by .063 [.004, .122]. Novelty in the measured policy costs copying (.665 [.553,
.777]) and finds no more walks at its best rate, an edge of the grid: 1.51 [.89, 2.14] near.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.claims.protocol import Claim, Outcome, main
from jaxrl.algorithms.contract import load
from jaxrl.algorithms.exp_dis import Algorithm, Prediction
from jaxrl.batch import ACTION, PAD, Batch, View
from jaxrl.kernels.novelty import network_novelty
from jaxrl.kernels.readings import entropy, taken_logp
from jaxrl.model import novelty

END, WALK, COPY, NOTHING = 10, 11, 12, 13  # besides the digits
ASKED, SAID, LONGEST = 5, 9, 16  # tokens of prompt and response; distance of the demonstrations
FURTHEST, UNITS, SHARES = 24, (2, 3, 9), (0.48, 0.48, 0.04)
WIDTH, EMBED, HIDDEN = 128, 12, 64
PROMPTS, SAMPLES = 16, 16  # of an update
UPDATES, EXPLORER, COPIES = 300, 200, 25
TAUGHT, LESSONS = 1200, 256  # updates and rollouts of the start
WEIGHT, PREDICTOR_RATE = 0.5, 1e-3

ARMS = ("DAPO", "DAPO + novelty", "ExpDis")

Params = dict[str, jax.Array]


# -- the task


def walks() -> tuple[np.ndarray, np.ndarray]:
    """All prompts (start, distance), and whether each is held out."""
    asked = np.array([(s, d) for s in range(10) for d in range(2, FURTHEST + 1)])
    out = np.random.default_rng(7).random(len(asked)) < 0.25
    return asked, out


def prompt_of(start: Any, distance: Any) -> Any:
    """[..., ASKED] ids: walk, start, goal in two digits."""
    goal = start + distance
    parts = (0 * start + WALK, start, goal // 10, goal % 10, 0 * start + NOTHING)
    return jnp.stack(parts, -1)


def demonstration(unit: int, distance: int) -> list[int]:
    """Steps of so many as long as they fit, then what is left; the end; nothing."""
    steps = [unit] * (distance // unit) + [distance % unit] * (distance % unit > 0)
    return (steps + [END] + [NOTHING] * SAID)[:SAID]


DEMONSTRATIONS = np.array([[demonstration(u, d) for d in range(LONGEST + 1)] for u in UNITS])


def acted(said: jax.Array) -> jax.Array:
    """Tokens up to the end token, which counts."""
    ended = jnp.cumsum(said == END, -1)
    return (ended == 0) | ((ended == 1) & (said == END))


def arrives(said: jax.Array, distance: jax.Array) -> jax.Array:
    """Whether the steps are at least 1 each, end in time, and add up."""
    mask = acted(said) & (said != END)
    whole = (said == END).any(-1) & ~(mask & (said == 0)).any(-1)
    return whole & (jnp.where(mask, said, 0).sum(-1) == distance)


# -- the policy


def init(key: jax.Array) -> Params:
    """A network from a window to logits over digits and the end."""
    sizes = {
        "embed": (NOTHING + 1, EMBED),
        "first": ((ASKED + SAID) * EMBED, WIDTH),
        "second": (WIDTH, WIDTH),
        "third": (WIDTH, WIDTH),
        "head": (WIDTH, END + 1),
    }
    keys = jax.random.split(key, len(sizes))
    scale = {"embed": 1.0, "head": 0.1}
    return {
        name: jax.random.normal(k, size) * (scale[name] if name in scale else size[0] ** -0.5)
        for k, (name, size) in zip(keys, sizes.items(), strict=True)
    }


def states(params: Params, window: jax.Array) -> list[jax.Array]:
    """The hidden states of three layers, [row width] each."""
    x = params["embed"][window].reshape(window.shape[0], -1)
    first = jax.nn.relu(x @ params["first"])
    second = first + jax.nn.relu(first @ params["second"])
    return [first, second, second + jax.nn.relu(second @ params["third"])]


def windows(asked: jax.Array, said: jax.Array, seen: int) -> jax.Array:
    """What is seen before each token (seen 0) or with it (seen 1), one row a token."""
    place = jnp.arange(SAID)
    shown = place[None, :] < place[:, None] + seen
    said = jnp.where(shown[None], said[:, None, :], NOTHING)
    asked = jnp.broadcast_to(asked[:, None, :], (*said.shape[:2], ASKED))
    return jnp.concatenate([asked, said], -1).reshape(-1, ASKED + SAID)


def logits_of(params: Params, asked: jax.Array, said: jax.Array) -> jax.Array:
    """[row * token, digit] logits of each token of a response."""
    return states(params, windows(asked, said, 0))[-1] @ params["head"]


def features(params: Params, said: jax.Array) -> jax.Array:
    """[row, 3, width]: mean over the response's tokens, read without the prompt."""
    asked = jnp.full((said.shape[0], ASKED), NOTHING)
    each = states(params, windows(asked, said, 1))
    shaped = [x.reshape(*said.shape, WIDTH) for x in each]
    return jnp.stack([novelty.pooled(x, acted(said)) for x in shaped], 1)


def sample(params: Params, key: jax.Array, asked: jax.Array) -> jax.Array:
    """A response to each prompt; after the end come tokens that mean nothing."""

    def one(said: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        place, key = step
        logits = states(params, jnp.concatenate([asked, said], -1))[-1] @ params["head"]
        token = jax.random.categorical(key, logits)
        token = jnp.where((said == END).any(-1), NOTHING, token)
        return said.at[:, place].set(token), None

    start = jnp.full((asked.shape[0], SAID), NOTHING)
    return jax.lax.scan(one, start, (jnp.arange(SAID), jax.random.split(key, SAID)))[0]


# -- training


def algorithm(weight: float) -> Algorithm:
    """ExpDis' update, with or without novelty; no shaping of lengths."""
    found = load(
        "exp_dis",
        trust={
            "clip_low": 0.2,
            "clip_high": 0.28,
            "dual_clip": math.inf,
            "mismatch": "none",
            "mismatch_low": 0.0,
            "mismatch_high": math.inf,
        },
        novelty_weight=weight,
        length_tokens=SAID,
        dynamic_sampling=True,
        overlong_penalty=0.0,
        overlong_limit_tokens=SAID,
        overlong_buffer_tokens=1,
    )
    assert isinstance(found, Algorithm)
    return found


def batch_of(said: jax.Array, right: jax.Array, group: jax.Array) -> Batch:
    """Responses as a Batch; the prompt is not in the rows, which only credit and loss look at."""
    rows, kind = said.shape[0], jnp.where(acted(said), ACTION, PAD)
    zeros, flat = jnp.zeros_like(said), jnp.zeros(rows, jnp.int32)
    place = jnp.broadcast_to(jnp.arange(1, SAID + 1), said.shape)  # something comes before each
    view = View(tokens=said, position=place, segment=zeros + 1, index=place)
    return Batch(
        tokens=said,
        position=place,
        segment=(kind != PAD).astype(jnp.int32),
        kind=kind,
        step=zeros,
        sampler_logp=jnp.zeros(said.shape),
        version=zeros,
        temperature=jnp.ones(said.shape),
        rollout=jnp.arange(rows),
        reward=right.astype(jnp.float32),
        valid=flat == 0,
        truncated=~(said == END).any(-1),
        group=group,
        minibatch=flat,
        branch_weight=jnp.ones(rows),
        facts={},
        views={"response_only": view},
    )


def tokens_of(said: jax.Array) -> jax.Array:
    """Ids that the head knows, one a row; what means nothing is read as the end and not counted."""
    return jnp.minimum(said, END).reshape(-1)


def moved(params: Params, change: Any) -> Params:
    """Parameters after an update."""
    return jax.tree.map(jnp.add, params, change)


def reinforced(
    method: Algorithm, tx: optax.GradientTransformation, carry: tuple, key: jax.Array
) -> tuple[tuple, dict[str, Params]]:
    """One update of the policy, then one of the predictor. The scan's body."""
    params, moments, networks, predictor_moments = carry
    draw, speak = jax.random.split(key)
    table, out = walks()
    train = jnp.asarray(table[~out])
    number = jax.random.randint(draw, (PROMPTS,), 0, train.shape[0])
    number = jnp.repeat(number, SAMPLES)
    start, distance = train[number, 0], train[number, 1]
    asked = prompt_of(start, distance)
    said = sample(params, speak, asked)
    group = jnp.repeat(jnp.arange(PROMPTS), SAMPLES)
    batch = batch_of(said, arrives(said, distance), group)
    logits, ids = logits_of(params, asked, said), tokens_of(said)
    observed = {"old_logp": taken_logp(logits, ids), "entropy": entropy(logits)}
    seen = features(params, said)
    new = network_novelty(novelty.error(networks, seen))
    observed["novelty"] = jnp.repeat(new, SAID)
    observed = {name: x.reshape(said.shape) for name, x in observed.items()}
    credit = method.credit(batch, observed)

    def loss(params: Params) -> jax.Array:
        logp = taken_logp(logits_of(params, asked, said), ids).reshape(said.shape)
        each, _ = method.loss({"logp": logp}, batch, observed, credit)
        return (each * credit.weight).sum()

    slope = jax.grad(loss)(params)
    change, moments = tx.update(slope, moments, params)
    params = moved(params, change)
    networks, predictor_moments = predicted(networks, predictor_moments, batch, seen)
    told = {
        "right": batch.reward.mean(),
        "varies": (credit.weight.sum(-1) > 0).mean(),
        "entropy": (observed["entropy"] * batch.acted).sum() / batch.acted.sum(),
        "length": batch.acted.sum(-1).mean(),
        "slope": optax.tree.norm(slope),
        "novelty": new.mean(),
    }
    record = {"said": said, "number": number, "right": batch.reward > 0}
    return (params, moments, networks, predictor_moments), {"told": told, "record": record}


def predicted(networks: Params, moments: Any, batch: Batch, seen: jax.Array) -> tuple[Params, Any]:
    """One update of the predictor, by the method's own lesson."""
    lesson, tx = Prediction(), optax.adam(PREDICTOR_RATE)
    credit = lesson.credit(batch, {})

    def loss(trained: Params) -> jax.Array:
        error = novelty.error({**networks, **trained}, seen)
        error = jnp.repeat(error, SAID, 0)
        reading = lesson.read({"novelty/response_only": error}, jnp.zeros(len(error), jnp.int32))
        reading = {name: x.reshape(batch.tokens.shape) for name, x in reading.items()}
        return (lesson.loss(reading, batch, {}, credit)[0] * credit.weight).sum()

    trained = {n: x for n, x in networks.items() if not n.startswith(novelty.FROZEN)}
    change, later = tx.update(jax.grad(loss)(trained), moments)
    return {**networks, **moved(trained, change)}, later


@functools.partial(jax.jit, static_argnums=(0, 1))
def segment(weight: float, rate: float, carry: tuple, keys: jax.Array) -> tuple:
    """So many updates as there are keys."""
    method, tx = algorithm(weight), optax.adam(rate, b2=0.95)
    return jax.lax.scan(functools.partial(reinforced, method, tx), carry, keys)


def carry_of(params: Params, rate: float, key: jax.Array) -> tuple:
    """A policy with new moments and new networks."""
    networks = novelty.init(key, layers=3, width=WIDTH, hidden=HIDDEN)
    trained = {n: x for n, x in networks.items() if not n.startswith(novelty.FROZEN)}
    moments = optax.adam(rate, b2=0.95).init(params)
    return params, moments, networks, optax.adam(PREDICTOR_RATE).init(trained)


@functools.partial(jax.jit, static_argnums=0)
def copied(rate: float, params: Params, moments: Any, asked: jax.Array, said: jax.Array) -> tuple:
    """Supervised updates, one for each leading entry: token mean of the cross-entropy."""
    tx = optax.adam(rate, b2=0.95)

    def one(carry: tuple, rows: tuple[jax.Array, jax.Array]) -> tuple[tuple, None]:
        params, moments = carry

        def loss(params: Params) -> jax.Array:
            logp = taken_logp(logits_of(params, *rows), tokens_of(rows[1]))
            counted = acted(rows[1]).reshape(-1) & (rows[1][:, :1] != NOTHING).any()
            return -jnp.where(counted, logp, 0).sum() / jnp.maximum(counted.sum(), 1)

        change, moments = tx.update(jax.grad(loss)(params), moments)
        return (moved(params, change), moments), None

    return jax.lax.scan(one, (params, moments), (asked, said))[0]


@functools.cache
def taught(seed: int, updates: int) -> Params:
    """The start of every arm of a seed: walks of three kinds, and copies."""
    rng = np.random.default_rng(seed)
    shape = (updates, LESSONS)
    unit = rng.choice(len(UNITS), shape, p=SHARES)
    start, distance = rng.integers(0, 10, shape), rng.integers(2, LONGEST + 1, shape)
    digits = rng.integers(0, 10, (*shape, 4))
    copy = rng.random(shape) < 0.5
    flag = np.full((*shape, 1), COPY)
    answer = np.concatenate([digits, np.full((*shape, 1), END)], -1)
    answer = np.pad(answer, ((0, 0), (0, 0), (0, SAID - 5)), constant_values=NOTHING)
    walk = np.asarray(prompt_of(jnp.asarray(start), jnp.asarray(distance)))
    asked = np.where(copy[..., None], np.concatenate([flag, digits], -1), walk)
    said = np.where(copy[..., None], answer, DEMONSTRATIONS[unit, distance])
    params = init(jax.random.key(seed))
    moments = optax.adam(2e-3, b2=0.95).init(params)
    return copied(2e-3, params, moments, jnp.asarray(asked), jnp.asarray(said))[0]


def distilled(record: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts and walks that the student copies: the shortest right one of each prompt."""
    said, number = record["said"].reshape(-1, SAID), record["number"].reshape(-1)
    right = record["right"].reshape(-1)
    length = (said != NOTHING).sum(-1)
    best: dict[int, int] = {}
    for i in np.flatnonzero(right).tolist():
        key, other = number[i], best.get(number[i])
        if other is None or (length[i], *said[i]) < (length[other], *said[other]):
            best[key] = i
    chosen = [best[key] for key in sorted(best)]
    table, out = walks()
    train = table[~out][[number[i] for i in chosen]]
    return np.asarray(prompt_of(jnp.asarray(train[:, 0]), jnp.asarray(train[:, 1]))), said[chosen]


# -- what is measured


@functools.partial(jax.jit, static_argnums=2)
def _answers(params: Params, key: jax.Array, samples: int) -> tuple[jax.Array, ...]:
    table, out = walks()
    held = jnp.asarray(table[out])
    start, distance = (jnp.repeat(held[:, i], samples) for i in (0, 1))
    walk, copy = jax.random.split(key)
    said = sample(params, walk, prompt_of(start, distance))
    digits = jax.random.randint(copy, (512, 4), 0, 10)
    flag = jnp.full((512, 1), COPY)
    echoed = sample(params, copy, jnp.concatenate([flag, digits], -1))
    same = (echoed[:, :4] == digits).all(-1) & (echoed[:, 4] == END)
    return said, arrives(said, distance), same.mean()


def examined(params: Params, key: jax.Array, samples: int = 64, k: int = 16) -> dict[str, float]:
    """Accuracy, pass@k and distinct right walks on held-out prompts; accuracy of copies."""
    said, right, copy = (np.asarray(x) for x in _answers(params, key, samples))
    table, out = walks()
    far = table[out][:, 1] > LONGEST
    said, right = said.reshape(len(far), samples, SAID), right.reshape(len(far), samples)
    hits = right.sum(-1)
    missed = np.array([math.comb(samples - h, k) / math.comb(samples, k) for h in hits.tolist()])
    pairs = zip(said, right, strict=True)
    distinct = np.array([len({tuple(w) for w in s[r].tolist()}) for s, r in pairs], float)
    return {
        "avg near": right[~far].mean(),
        "avg far": right[far].mean(),
        "pass@16 far": 1 - missed[far].mean(),
        "distinct near": distinct[~far].mean(),
        "distinct far": distinct[far].mean(),
        "copy": float(copy),
    }


def lessons(record: dict[str, np.ndarray], updates: int, seed: int) -> tuple[jax.Array, jax.Array]:
    """What the student copies, [update, 16, ...]: pass after pass over what is left."""
    asked, said = distilled(record)
    rng, wanted = np.random.default_rng(seed), updates * 16
    passes = -(-wanted // max(len(asked), 1)) * bool(len(asked))
    order = [rng.permutation(len(asked)) for _ in range(passes)]
    rows = np.concatenate([np.zeros(0, int), *order])[:wanted].reshape(-1, 16)
    return jnp.asarray(asked[rows]), jnp.asarray(said[rows])


def run(arm: str, rate: float, seed: int, *, quick: bool) -> Outcome:
    """One arm from a seed's start to the end of its updates."""
    updates, explorer, copies, size = (24, 12, 6, 6) if quick else (UPDATES, EXPLORER, COPIES, 50)
    keys = jax.random.split(jax.random.key(seed + 10_000), updates)
    judge, draw = jax.random.split(jax.random.key(seed + 20_000))
    start = taught(seed, 40 if quick else TAUGHT)
    points, told = [examined(start, judge)], []

    def walk(carry: tuple, weight: float, first: int, last: int) -> tuple:
        records = []
        for begun in range(first, last, size):
            carry, found = segment(weight, rate, carry, keys[begun : min(last, begun + size)])
            told.append(found["told"])
            records.append(jax.device_get(found["record"]))
            points.append(examined(carry[0], judge))
        return carry, jax.tree.map(lambda *x: np.concatenate(x), *records)

    carry = carry_of(start, rate, draw)
    if arm == "ExpDis":
        _, record = walk(carry, WEIGHT, 0, explorer)
        found = {f"explorer {name}": value for name, value in points[-1].items()}
        points = [points[0]] * len(points)  # the student has not moved
        student, _ = copied(rate, start, carry[1], *lessons(record, copies, seed))
        carry, _ = walk(carry_of(student, rate, draw), 0.0, explorer + copies, updates)
    else:
        found = {}
        carry, _ = walk(carry, WEIGHT if arm == "DAPO + novelty" else 0.0, 0, updates)
    last = points[-1]
    curves = {f"{name} by segment": [p[name] for p in points] for name in last}
    means = {f"train {name}": float(told[-1][name][-10:].mean()) for name in told[-1]}
    share = last["copy"] / max(points[0]["copy"], 1e-9)
    spent = {"rollouts": (updates - copies * (arm == "ExpDis")) * PROMPTS * SAMPLES}
    base = {f"start {name}": value for name, value in points[0].items()}
    return {**last, "copy retained": share, **curves, **means, **base, **found, **spent}


def claim(quick: bool) -> Claim:
    """Three arms; rates by pass@16 on what lies further than the demonstrations."""
    return Claim(
        name="x16_exploration",
        arms=ARMS,
        run=functools.partial(run, quick=quick),
        rates=(1e-3,) if quick else (1e-4, 3e-4, 1e-3),
        choose="pass@16 far",
        larger=True,
        shown=(
            "avg near",
            "avg far",
            "pass@16 far",
            "distinct near",
            "distinct far",
            "copy retained",
            "rollouts",
        ),
        drawn=("pass@16 far by segment", "distinct near by segment", "copy by segment"),
        against="DAPO",
        seeds=2 if quick else 5,
    )


if __name__ == "__main__":
    main(claim, __doc__)
