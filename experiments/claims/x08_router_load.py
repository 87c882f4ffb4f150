"""X8: does a router that learns from rewards alone lose its balance, and what keeps it?

python -m experiments.claims.x08_router_load --workdir /tmp/claims

The task of `x04_residual_sparse` (six tokens, rewarded only if all are right) for a decoder of two
layers whose inner blocks are mixtures of 32 experts, 2 a token. A supervised run with the balance
term ends once 80 % of the problems are solved; then 200 takes of GRPO (16 prompts x 8 rollouts, two
updates, Adam) without that term, by jaxrl's own step. The sampler decodes in bfloat16, the trainer
scores in float32, so that the two differ as an engine and a trainer do. Arms: the router free; free
at 30 times the learning rate of the rest; frozen (no gradient, no moments); replayed (training
follows the sampler's experts, with live gates), also at 30 times; both; and 8 experts instead.

Look at: load of the experts over all problems at the end, of the worse layer: CV, peak, share of
cold experts; the solve rate (exact, temperature 1), whose mean over the last 100 takes picks an
arm's rate; how far apart the log-probs of sampler and trainer are (a mean token, a take's worst),
and how often both choose the same experts, over all takes; load and solve rate once the start's
router is put back into the trained model by `jaxrl.restore_router`.
Expect: 32 experts with a fast router collapse, a free one drifts, a frozen one stays; 8 experts
show none of it; the old router restores the load; replaying narrows the gap, freezing does not.
Result: as expected, but that at the rates which reward picks (3e-4 for every arm, the grid's
lowest; 1e-4 was worse on one seed of an aborted run) a plain free router nearly keeps its balance,
and freezing wins nothing else. 6 seeds, means with 95 % t intervals; commit 8aacaed, 2026-11-30;
about 7 s of one core a run. Start: CV .403 [.363, .442], cold 0, solved .822; with 8 experts .214
[.143, .285], 0, .827. End:

    arm               CV                  cold  solved            gap (nats)  same experts
    free              .500 [.426, .574]   .021  .967 [.954, .980]    .00176      .9881
    free x30         1.167 [1.068, 1.265] .417  .950 [.932, .968]    .00224      .9925
    frozen            .432 [.379, .486]   .010  .966 [.954, .977]    .00205      .9877
    replayed          .509 [.411, .608]   .031  .969 [.959, .979]    .00082      .9900
    replayed x30     1.077 [.982, 1.172]  .422  .959 [.941, .976]    .00125      .9933
    frozen, replayed  .424 [.361, .487]   .005  .966 [.951, .980]    .00084      .9898
    8: free           .238 [.133, .343]   0     .967 [.953, .981]    .00130      .9935
    8: free x30       .363 [.237, .489]   0     .961 [.944, .978]    .00157      .9941
    8: frozen         .218 [.123, .314]   0     .969 [.957, .981]    .00125      .9935

Paired: frozen - free CV -.068 [-.113, -.022], solved -.001 [-.005, .003]; free x30 - free CV +.667
[.564, .769], solved -.017 [-.028, -.007]; replayed - free gap -.00093 [-.00124, -.00063], solved
+.002 [-.004, .009]; replayed x30 - free x30 CV -.090 [-.231, .052], solved +.009 [.004, .015]. So
load follows the router's speed and replaying does not hold it; the gap follows replaying and
freezing widens it a little (+.0003 [.0001, .0005]). The old router in the trained x30 model: CV
back to .429 [.355, .502], cold .005, but solved -.030 [-.034, -.025]: the rest had come to rely on
the new one. 8 experts never have a cold one at this rate, though the fast router costs them balance
too: CV +.126 [.068, .183] against the free one.
Chosen after looking: three development seeds in place of one, which had picked 3e-3 for the free
router by luck (CV 1.2 on fresh seeds); the balance term's weight, for an even start; that rates are
judged by the last 100 takes.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from configs import grpo
from experiments.claims.protocol import DEVELOPMENT_SEED, Claim, Outcome, main
from experiments.claims.x04_residual_sparse import ASKED, SAID, problems
from jaxrl.algorithms import contract
from jaxrl.batch import ACTION, PROMPT, Batch
from jaxrl.kernels import routers
from jaxrl.kernels.readings import taken_logp
from jaxrl.mesh import Rules, make_mesh
from jaxrl.model import decoding
from jaxrl.model.form import ExpertsConfig, qwen3
from jaxrl.model.policy import Policy, build
from jaxrl.model.transformer import UNGUIDED
from jaxrl.pool.rollout import ROUTES
from jaxrl.restore_router import restored
from jaxrl.train import state as states
from jaxrl.train.optimizer import scale_by_rate
from jaxrl.train.routing import ORIGIN, ROUTER, RoutingConfig
from jaxrl.train.step import Step, make_step

PROMPTS, SAMPLES, UPDATES, STRETCH = 16, 8, 2, 20
WARM_ROWS, WARM_RATE, BALANCE, SOLVED, MOST_STRETCHES = 64, 3e-3, 0.1, 0.8, 120
TOKENS = ASKED + SAID
DEVELOPMENT = 3  # runs that a rate is chosen by: one alone picks rates by luck
LOADS = ("cv", "peak", "cold", "solved")


@dataclasses.dataclass(frozen=True)
class Arm:
    """How many experts, and what becomes of their routers."""

    experts: int = 32
    speed: float = 1.0  # the router's learning rate over that of the rest
    frozen: bool = False
    replayed: bool = False


ARMS = {
    "free": Arm(),
    "free x30": Arm(speed=30.0),
    "frozen": Arm(frozen=True),
    "replayed": Arm(replayed=True),
    "replayed x30": Arm(speed=30.0, replayed=True),
    "frozen, replayed": Arm(frozen=True, replayed=True),
    "8 experts, free": Arm(experts=8),
    "8 experts, free x30": Arm(experts=8, speed=30.0),
    "8 experts, frozen": Arm(experts=8, frozen=True),
}


@functools.cache
def policy_of(experts: int, dtype: str) -> Policy:
    """The decoder, computing in this type."""
    config = qwen3(
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
        dtype=dtype,
        param_dtype="float32",
        remat="none",
        score_chunk_positions=4096,
        experts=ExpertsConfig(experts, 2, 16, 0, (), "softmax", True, 1.0),
    )
    return build(config, make_mesh({}, jax.devices()[:1]), Rules())


def batch_of(prompts, said, reward, sampler_logp, facts) -> Batch:
    """Rows of a prompt and what was said, SAMPLES of them a group."""
    rows = said.shape[0]
    tokens = jnp.concatenate([prompts, said], -1).astype(jnp.int32)
    each, ones = jnp.arange(rows), jnp.ones_like(tokens)
    spoken = jnp.broadcast_to(jnp.arange(TOKENS) >= ASKED, tokens.shape)
    return Batch(
        tokens=tokens,
        position=jnp.broadcast_to(jnp.arange(TOKENS), tokens.shape),
        segment=ones,
        kind=jnp.where(spoken, ACTION, PROMPT),
        step=jnp.where(spoken, 0, -1),
        sampler_logp=jnp.pad(sampler_logp, ((0, 0), (ASKED, 0))),
        version=jnp.where(spoken, 0, -1),
        temperature=ones.astype(jnp.float32),
        rollout=each,
        reward=reward,
        valid=jnp.ones(rows, bool),
        truncated=jnp.zeros(rows, bool),
        group=each // SAMPLES,
        minibatch=each // (rows // UPDATES),
        branch_weight=jnp.ones(rows),
        facts=facts,
        views={},
    )


def faster(speed) -> optax.GradientTransformation:
    """Changes of routers times ``speed``."""

    def scaled(changes: Any, _: Any) -> Any:
        return {name: x * speed if ROUTER.search(name) else x for name, x in changes.items()}

    return optax.stateless(scaled)


def step_of(policy: Policy, fields: dict[str, Any], rate, speed, **routed: Any) -> Step:
    """jaxrl's step under Adam whose rate is ``speed`` times larger for the router."""
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.99),
        faster(speed),
        scale_by_rate(lambda _: rate),
    )
    assert policy.mesh is not None
    return make_step(
        policy,
        contract.load(**fields),
        tx,
        mesh=policy.mesh,
        epochs=1,
        minibatches=UPDATES,
        micro_rollouts=PROMPTS * SAMPLES,
        rollouts_per_group=SAMPLES,
        routed=RoutingConfig.of(policy.config, **routed),
    )


def begin(step: Step, params, freeze: tuple[str, ...]) -> states.TrainState:
    """New moments, and the routers that distances are taken from."""
    origin = states.scorer({name: x for name, x in params.items() if ROUTER.search(name)})
    made = {"roles": {states.STUDENT, ORIGIN}, "others": {ORIGIN: origin}}
    return states.create(
        params, step.student.tx, freeze=freeze, key=jax.random.key(0), step=0, **made
    )


def look(policy: Policy, params) -> tuple[Any, Any]:
    """Chance that a sampled answer is right, and the experts chosen [layer token k], over all
    problems with their right answers; the last token is no input."""
    prompts, answers = problems(jnp.arange(1000))
    rows = jnp.concatenate([prompts, answers], -1)
    place = jnp.broadcast_to(jnp.arange(TOKENS), rows.shape)
    hidden, routing = policy.routed(params, rows, place, jnp.ones_like(rows), UNGUIDED)
    assert routing is not None
    before = hidden[:, ASKED - 1 : -1].reshape(-1, hidden.shape[-1])
    logp = taken_logp(policy.logits(params, before), answers.reshape(-1)).reshape(answers.shape)
    chosen = jnp.moveaxis(routing.chosen[:, :-1], 2, 0)
    return jnp.exp(logp.sum(-1)).mean(), chosen.reshape(chosen.shape[0], -1, chosen.shape[-1])


def told(policy: Policy, params, first) -> dict[str, Any]:
    """The numbers that are looked at; ``first`` are the experts chosen at the start."""
    solved, chosen = look(policy, params)
    every, experts = jnp.ones(chosen.shape[1], bool), policy.config.experts.count
    count = jax.vmap(lambda routes: routers.load(routes, every, experts=experts))(chosen)
    kept = jax.vmap(routers.agreement)(chosen, first)
    return {
        "solved": solved,
        "cv": routers.load_cv(count).max(),
        "peak": routers.load_peak(count).max(),
        "cold": routers.cold_share(count).max(),
        "flipped": (kept < 1).mean(),  # tokens and layers whose set of experts is another
        "moved": 1 - kept.mean(),  # routes that go elsewhere
    }


def sample(policy: Policy, params, prompts, key) -> tuple[Any, Any, Any]:
    """Answers [row 6] at temperature 1, their log-probs, and the experts of each input."""
    lengths = jnp.full(prompts.shape[:1], ASKED)
    grown = ((0, 0), (0, 0), (0, SAID), (0, 0))
    logits, cache, shown = decoding.prefill(policy, params, prompts, lengths)
    cache = jax.tree.map(lambda x: jnp.pad(x, grown), cache)
    logits, cache, shown = jax.tree.map(
        lambda x: jnp.repeat(x, SAMPLES, axis=0), (logits, cache, shown)
    )
    decode, places = decoding.decoder(policy, params), jnp.repeat(lengths, SAMPLES)

    def step(carry, at):
        logits, cache = carry
        token = jax.random.categorical(jax.random.fold_in(key, at), logits)
        logp = taken_logp(logits, token)
        logits, cache, went = decode(token, places + at, places > 0, cache)
        assert went is not None
        went = jnp.where(at == SAID - 1, -1, went)  # the last token is no input
        return (logits, cache), (token, logp, went)

    found = jax.lax.scan(step, (logits, cache), jnp.arange(SAID))[1]
    said, logp, went = (jnp.moveaxis(x, 0, 1) for x in found)
    return said, logp, jnp.concatenate([shown, went], 1).astype(jnp.int16)


@functools.partial(jax.jit, static_argnums=0)
def warm_stretch(experts: int, state, key):
    """Five supervised takes with the balance term, and what is solved then."""
    policy = policy_of(experts, "float32")
    plain = {"recorded": False, "replay": False}
    step = step_of(policy, {"name": "sft"}, WARM_RATE, 1.0, balance_weight=BALANCE, **plain)

    def take(state, key):
        prompts, answers = problems(jax.random.randint(key, (WARM_ROWS,), 0, 1000))
        nothing = jnp.zeros(answers.shape)
        batch = batch_of(prompts, answers, jnp.ones(WARM_ROWS), nothing, {})
        return step.take(state, batch)[0], None

    state, _ = jax.lax.scan(take, state, jax.random.split(key, 5))
    return state, look(policy, state.roles[states.STUDENT].all)[0]


@functools.cache
def start_of(experts: int, seed: int) -> dict[str, Any]:
    """Parameters at the first moment that solves enough: the same for all arms of a seed."""
    policy = policy_of(experts, "float32")
    keys = jax.random.split(jax.random.key(seed), MOST_STRETCHES + 1)
    plain = {"recorded": False, "replay": False, "balance_weight": BALANCE}
    step = step_of(policy, {"name": "sft"}, WARM_RATE, 1.0, **plain)
    state = begin(step, policy.init(keys[0]), ())
    for key in keys[1:]:
        state, solved = warm_stretch(experts, state, key)
        if solved >= SOLVED:
            return state.roles[states.STUDENT].all
    raise ValueError(f"seed {seed}: not solved after {MOST_STRETCHES} stretches")


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def train(experts: int, frozen: bool, replayed: bool, takes: int, params, rate, speed, key):
    """Parameters at the end, what ``told`` says after each stretch, metrics of each take."""
    policy, engine = policy_of(experts, "float32"), policy_of(experts, "bfloat16")
    whole: Any = grpo.get_config()
    fields = whole.algorithm.to_dict()
    step = step_of(policy, fields, rate, speed, recorded=True, replay=replayed, balance_weight=0.0)
    first = look(policy, params)[1]

    def take(state, key):
        keys = jax.random.split(key)
        prompts, answers = problems(jax.random.randint(keys[0], (PROMPTS,), 0, 1000))
        said, logp, routes = sample(engine, state.roles[states.STUDENT].all, prompts, keys[1])
        prompts, answers = (jnp.repeat(x, SAMPLES, axis=0) for x in (prompts, answers))
        right = (said == answers).all(-1).astype(jnp.float32)
        alike = right.reshape(PROMPTS, SAMPLES).std(-1) == 0
        state, metrics = step.take(state, batch_of(prompts, said, right, logp, {ROUTES: routes}))
        return state, metrics | {"alike": alike.mean()}

    def stretch(state, keys):
        state, metrics = jax.lax.scan(take, state, keys)
        return state, (told(policy, state.roles[states.STUDENT].all, first), metrics)

    state = begin(step, params, ("router/",) if frozen else ())
    keys = jax.random.split(key, takes).reshape(-1, STRETCH)
    state, (numbers, metrics) = jax.lax.scan(stretch, state, keys)
    metrics = jax.tree.map(lambda x: x.reshape(-1), metrics)
    return state.roles[states.STUDENT].all, numbers, metrics


@functools.partial(jax.jit, static_argnums=0)
def told_of(experts: int, params, start):
    """``told`` of parameters beside those of the start."""
    policy = policy_of(experts, "float32")
    return told(policy, params, look(policy, start)[1])


def outcome(takes: int, arm: Arm, rate: float, seed: int) -> Outcome:
    """One run."""
    start, key = start_of(arm.experts, seed), jax.random.key(seed + 1)
    kind = arm.experts, arm.frozen, arm.replayed
    end, numbers, metrics = train(*kind, takes, start, rate, arm.speed, key)
    numbers, metrics = jax.tree.map(np.asarray, (numbers, metrics))
    before = jax.tree.map(float, told_of(arm.experts, start, start))
    after, _ = restored(start, end, "router/")
    back = jax.tree.map(float, told_of(arm.experts, after, start))
    whole = {name: float(x.mean()) for name, x in metrics.items()}
    far = [x[-1] for name, x in metrics.items() if "/distance_" in name]
    curves = {name: [before[name], *x.tolist()] for name, x in numbers.items()}
    return {
        **{name: x[-1] for name, x in curves.items()},
        **{f"{name} over takes": x for name, x in curves.items()},
        **{f"{name} at the start": before[name] for name in LOADS},
        **{f"{name} restored": back[name] for name in LOADS},
        "solved late": float(np.mean(curves["solved"][-5:])),
        "gap": whole["sampler/gap_mean"],
        "worst gap": whole["sampler/gap_max"],
        "same experts": whole["router/agreement"],
        "drift in a take": whole["router/drift"],
        "router moved": float(max(far)),
        "reward": whole["reward/mean"],
        "groups without a difference": whole["alike"],
        "norm_median": float(np.median(metrics["optim/grad_norm"])),
        "norm_max": float(metrics["optim/grad_norm"].max()),
        "entropy": whole["loss/entropy_mean"],
    }


def claim(quick: bool) -> Claim:
    """What becomes of the experts' loads."""
    takes = STRETCH if quick else 200

    def run(arm: str, rate: float, seed: int) -> Outcome:
        several = range(DEVELOPMENT if seed == DEVELOPMENT_SEED else 1)
        found = [outcome(takes, ARMS[arm], rate, seed + more) for more in several]
        return {name: np.mean([one[name] for one in found], axis=0).tolist() for name in found[0]}

    return Claim(
        name="x08_router_load",
        arms=("free x30", "8 experts, frozen") if quick else tuple(ARMS),
        run=run,
        rates=(1e-3,) if quick else (3e-4, 1e-3, 3e-3),
        choose="solved late",
        larger=True,
        shown=(*LOADS, "gap", "worst gap", "same experts", *(f"{name} restored" for name in LOADS)),
        drawn=("cv over takes", "cold over takes", "solved over takes"),
        against="" if quick else "free",
        seeds=2 if quick else 6,
    )


if __name__ == "__main__":
    main(claim, __doc__)
