"""The step against plain gradients and against numbers by hand, on a policy of two matrices."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.algorithms.contract import load
from jaxrl.batch import Credit
from jaxrl.kernels.readings import taken_logp
from jaxrl.kernels.weights import rollout_mean, token_mean
from jaxrl.pool.rollout import Failure, StopReason
from jaxrl.train import optimizer
from jaxrl.train.collate import collate
from jaxrl.train.rounding import onto_weights
from tests.train.toy import (
    VOCAB,
    Bigram,
    batch_of,
    group,
    mesh_of,
    random_groups,
    rollout,
    state_of,
    step_of,
)

SGD = optax.sgd(1.0)  # the update is minus the gradient

TRUST = {
    "clip_low": 0.2,
    "clip_high": 0.3,
    "dual_clip": 3.0,
    "mismatch": "truncate",
    "mismatch_low": 0.0,
    "mismatch_high": 2.0,
}
GRPO = {
    "trust": TRUST,
    "kl_weight": 0.0,
    "scale_by_std": False,
    "full_group": 0.0,
    "mask_limit": math.inf,
    "dynamic_sampling": False,
    "weighting": "token_mean",
    "length_tokens": 0,
}


def grpo(**changes):
    return load("grpo", **(GRPO | changes))


def gvpo(**changes):
    fields = {"beta": 0.5, "anchor": "start", "unit_grad": False, "keep_truncated": False}
    fields |= {"strata": False}
    return load("gvpo", **(fields | changes))


@dataclasses.dataclass(frozen=True)
class Charge:
    """Token loss = the fact `charge`, with the gradient of charge * logp; weights by name."""

    weighting: str

    scorers = (("student", "plain"),)
    observers = ()
    refresh = "take"
    coupled = False
    lessons = ()
    needs = ("token_charge",)

    def observe(self, logits, taken):
        raise AssertionError("nobody is observed")

    def credit(self, batch, observed):
        minibatch = batch.minibatch[batch.rollout]
        if self.weighting == "token_mean":
            weight = token_mean(minibatch, batch.acted)
        else:
            weight = rollout_mean(batch.rollout, minibatch, batch.acted)
        return Credit(advantage=jnp.zeros(batch.tokens.shape), weight=weight)

    def read(self, logits, taken):
        return {"logp": taken_logp(logits["student"], taken)}

    def loss(self, reading, batch, observed, credit):
        logp = reading["logp"]
        return batch.facts["token_charge"] * (1 + logp - jax.lax.stop_gradient(logp)), {}

    def keep(self, rewards, facts):
        return True


def charged(number, charges, *, failure=Failure.NONE, tokens=None):
    """A rollout whose action tokens cost what is said."""
    answer = tokens or [3] * len(charges)
    fact = np.array([0, *charges], np.float32)
    return rollout(number, 0, [1], answer, 0.0, failure=failure, facts={"token_charge": fact})


def charge_batch(rollouts, *, slots=None, minibatches=1):
    groups = [group(r.group_id, [r]) for r in rollouts]
    return collate(
        groups,
        token_buckets=(8,),
        groups_per_step=slots or len(groups),
        rollouts_per_group=1,
        minibatches=minibatches,
        needs=("token_charge",),
        algorithm="charge",
    )[0]


def run(algorithm, batch, *, micro=64, size=1, tx: Any = SGD, state=None, **cuts):
    """One take from the same start; parameters on the host, and numbers."""
    mesh = cuts.get("mesh")
    state = state or state_of(algorithm, tx, mesh=mesh)
    state, metrics = step_of(algorithm, tx, micro=micro, size=size, **cuts)(state, batch)
    assert all(np.isfinite(x) for x in metrics.values())
    return jax.device_get(state), {name: float(x) for name, x in metrics.items()}


def trained(state):
    return state.roles["student"].params


def assert_close(a, b, tolerance=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=1e-6), a, b)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def plain(algorithm, batch):
    """Loss and gradient without any cutting, scanning or sharding."""
    policy, params = Bigram(), Bigram().init(jax.random.key(0))
    batch = jax.tree.map(jnp.asarray, batch)
    models = {"student": params, "reference": params}
    observed = {}
    if algorithm.observers:
        observed = policy.score(models, batch, algorithm.observe, algorithm.observers)
    credit = algorithm.credit(batch, observed)

    def loss(params):
        reading = policy.score({"student": params}, batch, algorithm.read, algorithm.scorers)
        return (algorithm.loss(reading, batch, observed, credit)[0] * credit.weight).sum()

    value, grads = jax.value_and_grad(loss)(params)
    return value, {name: params[name] - g for name, g in grads.items()}


@pytest.mark.parametrize("name", ["grpo", "gvpo"])
@pytest.mark.parametrize("devices", [1, 4])
def test_accumulated_is_plain(name, devices):
    """Any number of micro-batches, on one device or four: the gradient of the undivided batch."""
    algorithm = grpo(weighting="rollout_mean") if name == "grpo" else gvpo(coupling="written")
    batch = batch_of(random_groups(0, 3, 4), step_groups=4, size=4)  # 16 rows, 4 of them empty
    value, wanted = plain(algorithm, batch)
    numbers = []
    for micro in (16, 4) if devices == 4 or name == "gvpo" else (16, 4, 1):
        state, metrics = run(algorithm, batch, micro=micro, size=4, mesh=mesh_of(data=devices))
        assert metrics["loss/total"] == pytest.approx(float(value), rel=1e-5, abs=1e-7)
        assert_close(trained(state), wanted)
        numbers.append(metrics)
    for metrics in numbers[1:]:
        assert metrics == pytest.approx(numbers[0], rel=1e-4, abs=1e-6)


def test_masked_rows_count_nowhere():
    """Case 10: losses [[1, 3], [5, 7]], the second row masked: 2 under both means."""
    rollouts = [charged(1, [1, 3]), charged(2, [5, 7], failure=Failure.INFRA)]
    for weighting in ("token_mean", "rollout_mean"):
        assert run(Charge(weighting), charge_batch(rollouts))[1]["loss/total"] == pytest.approx(2)


def test_dummy_rows_change_nothing():
    """Case 14: row losses [[1, 1], [3, 3]] and rows that are only padding: seq-mean 2."""
    rollouts = [charged(1, [1, 1]), charged(2, [3, 3])]
    algorithm = Charge("rollout_mean")
    state, metrics = run(algorithm, charge_batch(rollouts))
    assert metrics["loss/total"] == pytest.approx(2)
    for slots in (4, 8):
        more, padded = run(algorithm, charge_batch(rollouts, slots=slots))
        assert padded == pytest.approx(metrics, rel=1e-6)
        assert_close(trained(more), trained(state), 1e-6)


def test_order_of_records_changes_nothing():
    """Case 18: groups in another order, cut into other micro-batches: the same update."""
    groups = random_groups(1, 4, 2)
    results = [
        run(grpo(), batch_of(order, step_groups=4, size=2), micro=micro, size=2)
        for order, micro in ((groups, 8), ([groups[i] for i in (2, 0, 3, 1)], 2))
    ]
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5, abs=1e-6)
    assert_close(trained(results[0][0]), trained(results[1][0]))


@pytest.mark.parametrize("micro", [1, 2])
def test_token_mean_is_over_all_tokens(micro):
    """Case 19: X one token of loss 1, Y three of loss 0: 0.25 for every split."""
    batch = charge_batch([charged(1, [1]), charged(2, [0, 0, 0])])
    assert run(Charge("token_mean"), batch, micro=micro)[1]["loss/total"] == pytest.approx(0.25)


def test_scale_is_that_of_one_batch():
    """Case 20: losses -1, 2 x 2 tokens: -1, also when accumulated, also when duplicated."""
    once = [charged(i, [-1, -1], tokens=[2 + i, 3]) for i in (1, 2)]
    twice = once + [charged(i + 2, [-1, -1], tokens=[2 + i, 3]) for i in (1, 2)]
    results = [
        run(Charge("token_mean"), charge_batch(rollouts), micro=micro)
        for rollouts, micro in ((once, 2), (once, 1), (twice, 4), (twice, 1))
    ]
    for state, metrics in results:
        assert metrics["loss/total"] == pytest.approx(-1)
        assert_close(trained(state), trained(results[0][0]))


def test_updates_follow_each_other():
    """Two minibatches, two epochs: four SGD steps, each on its own half."""
    charges = [charged(1, [1, 3]), charged(2, [2], tokens=[5]), charged(3, [4]), charged(4, [6, 6])]
    algorithm, tx = Charge("token_mean"), optax.sgd(0.05)
    halves = [charge_batch(charges[:2]), charge_batch(charges[2:])]
    state = state_of(algorithm, tx)
    step = step_of(algorithm, tx, micro=2, size=1)
    for half in (*halves, *halves):
        state, _ = step(state, half)
    at_once, metrics = run(
        algorithm, charge_batch(charges, minibatches=2), tx=tx, micro=2, epochs=2, minibatches=2
    )
    assert_close(trained(at_once), trained(jax.device_get(state)))
    assert metrics["optim/updates"] == 4
    assert metrics["loss/total"] == pytest.approx(
        (2 + 16 / 3) / 2
    )  # (1+3+2)/3 and (4+6+6)/3, each twice
    assert int(at_once.step) == 1  # a take, not an update


ADAM = optimizer.build(
    optimizer.OptimizerConfig(
        name="adamw",
        learning_rate=0.1,
        warmup_updates=4,
        decay_updates=0,
        final_fraction=1.0,
        b1=0.9,
        b2=0.95,
        epsilon=1e-8,
        weight_decay=0.1,
        moments="float32",
        rounding="nearest",
        clip_norm=1.0,
        train="auto",
        freeze=(),
        rates=(),
    )
)


@pytest.fixture(scope="module")
def grpo_step():
    """GRPO under AdamW with two minibatches, compiled once for the tests of odd batches."""
    return grpo(), step_of(grpo(), ADAM, micro=4, size=2, minibatches=2)


def warm(grpo_step):
    """A state that has moments."""
    algorithm, step = grpo_step
    batch = batch_of(random_groups(2, 4, 2), step_groups=4, size=2, minibatches=2)
    return step(state_of(algorithm, ADAM), batch)[0]


def spoiled(batch, rows):
    """The same batch with rewards that are no numbers: collate would not let them through."""
    reward = np.array(batch.reward)
    reward[rows] = math.nan
    return dataclasses.replace(batch, reward=reward)


@pytest.mark.parametrize("trouble", ["nothing taken", "all failed", "rewards that are no numbers"])
def test_a_skipped_step_changes_nothing_and_is_counted(grpo_step, trouble):
    algorithm, step = grpo_step
    groups = random_groups(3, 4, 2)
    if trouble == "nothing taken":
        groups = []
    if trouble == "all failed":
        lost = [dataclasses.replace(r, failure=Failure.INFRA) for g in groups for r in g.rollouts]
        groups = [group(g.id, [r for r in lost if r.group_id == g.id]) for g in groups]
    batch = batch_of(groups, step_groups=4, size=2, minibatches=2)
    if trouble == "rewards that are no numbers":
        batch = spoiled(batch, [0, 2, 4, 6])
    state = warm(grpo_step)
    before = jax.device_get(state)
    state, metrics = step(state, batch)
    assert_same(jax.device_get(state.roles), before.roles)  # parameters, moments, schedule
    assert int(state.step) == int(before.step) + 1
    assert metrics["optim/skipped"] == 2 and metrics["optim/updates"] == 0
    assert metrics["batch/empty"] == (0 if "rewards" in trouble else 2)


def test_one_bad_update_does_not_stop_the_other(grpo_step):
    algorithm, step = grpo_step
    batch = batch_of(random_groups(3, 4, 2), step_groups=4, size=2, minibatches=2)
    state = warm(grpo_step)
    before = jax.device_get(state)
    state, metrics = step(state, spoiled(batch, [0]))
    assert metrics["optim/skipped"] == 1 and metrics["optim/updates"] == 1
    assert not np.array_equal(trained(state)["embed"], trained(before)["embed"])
    assert optax.tree.get(state.roles["student"].opt_state, "updates_made") == 3
    assert metrics["optim/learning_rate"] == pytest.approx(0.1 * 3 / 4)  # of update 2


def test_a_reward_that_is_no_number_costs_its_rollout_only(grpo_step):
    """Through collate: the rollout is out, its group is centred without it, the step is made."""
    algorithm, step = grpo_step
    groups = random_groups(3, 4, 2)
    first, *others = groups[0].rollouts
    first = dataclasses.replace(first, reward=math.nan)
    groups[0] = group(groups[0].id, [first, *others])
    batch = batch_of(groups, step_groups=4, size=2, minibatches=2)
    _, metrics = step(warm(grpo_step), batch)
    assert metrics["batch/valid_rollouts"] == 7
    assert metrics["optim/skipped"] == 0


def test_the_state_is_consumed(grpo_step):
    _, step = grpo_step
    state = warm(grpo_step)
    step(state, batch_of([], step_groups=4, size=2, minibatches=2))
    assert trained(state)["embed"].is_deleted()


def test_garbage_where_nothing_counts_changes_nothing():
    """T0 (e): 1e9 and NaN at masked positions reach neither loss nor gradient."""
    groups = random_groups(4, 2, 2)
    bad = dataclasses.replace(groups[0].rollouts[0], failure=Failure.INFRA)
    groups[0] = group(groups[0].id, [bad, groups[0].rollouts[1]])
    batch = batch_of(groups, step_groups=3, size=2)
    algorithm = grpo(kl_weight=0.1)
    step = step_of(algorithm, SGD, micro=2, size=2)
    clean, numbers = step(state_of(algorithm, SGD), batch)
    for garbage in (1e9, math.nan, -math.inf):
        dirty = dataclasses.replace(
            batch,
            reward=np.where(batch.valid, batch.reward, np.float32(garbage)),
            sampler_logp=np.where(batch.acted, batch.sampler_logp, np.float32(garbage)),
        )
        state, metrics = step(state_of(algorithm, SGD), dirty)
        assert_same(jax.device_get(state), jax.device_get(clean))
        assert_same(metrics, numbers)


def test_frozen_and_reference_stay_bit_for_bit():
    algorithm = grpo(kl_weight=0.1)
    state = state_of(algorithm, ADAM, freeze=("^scale$", "head"))
    before, metrics = jax.device_get(state), {}
    step = step_of(algorithm, ADAM, micro=4, size=2, epochs=2)
    for seed in range(3):
        state, metrics = step(state, batch_of(random_groups(seed, 4, 2), step_groups=4, size=2))
    after = jax.device_get(state)
    assert_same(after.roles["student"].frozen, before.roles["student"].frozen)
    assert_same(after.roles["reference"], before.roles["reference"])
    assert set(optax.tree.get(after.roles["student"].opt_state, "mu")) == {"embed"}
    assert not np.array_equal(trained(after)["embed"], trained(before)["embed"])
    assert metrics["loss/reference_kl_mean"] > 0  # the student has left its reference


def test_a_role_with_a_rate_follows_the_student():
    algorithm = grpo(kl_weight=0.1)
    state = state_of(algorithm, SGD)
    followed = dataclasses.replace(state.roles["reference"], ema_rate=0.75)
    state = dataclasses.replace(state, roles=state.roles | {"reference": followed})
    old = jax.device_get(followed.params)
    state, _ = run(
        algorithm, batch_of(random_groups(0, 2, 2), step_groups=2, size=2), state=state, size=2
    )
    for name, x in state.roles["reference"].params.items():
        np.testing.assert_allclose(x, 0.75 * old[name] + 0.25 * trained(state)[name], rtol=1e-6)


@pytest.mark.parametrize(("dtype", "still"), [("float32", 1 - 1 / VOCAB), ("bfloat16", 1.0)])
def test_steps_too_small_for_the_masters_show(dtype, still):
    """Case 33: at a rate of 3e-6 bfloat16 parameters do not move, and a curve says so.

    One token of the vocabulary is a prompt: in float32 its embedding moves, an eighth of all.
    """
    algorithm, tx = Charge("token_mean"), onto_weights(optax.adam(3e-6), "nearest")
    params = {name: x.astype(dtype) for name, x in Bigram().init(jax.random.key(0)).items()}
    state = state_of(algorithm, tx, freeze=("head", "scale"), params=params)
    batch = charge_batch([charged(i, [1], tokens=[2]) for i in range(3)])
    _, metrics = run(algorithm, batch, tx=tx, state=state)
    assert metrics["optim/frac_params_unchanged"] == pytest.approx(still)
    assert metrics["optim/updates"] == 1 and metrics["optim/grad_norm"] > 0


@pytest.mark.parametrize("anchor", ["start", "frozen"])
def test_gvpo_has_two_forms_and_one_gradient(anchor):
    """As written with whole groups in a micro-batch, and as weights with one rollout in each."""
    batch = batch_of(random_groups(5, 3, 4), step_groups=4, size=4, minibatches=2)
    cuts = {"size": 4, "epochs": 2, "minibatches": 2, "tx": optax.sgd(0.3)}
    written, _ = run(gvpo(anchor=anchor, coupling="written"), batch, micro=4, **cuts)
    weights, _ = run(gvpo(anchor=anchor, coupling="weights"), batch, micro=1, **cuts)
    assert_close(trained(written), trained(weights))
    start = jax.device_get(state_of(gvpo(anchor=anchor, coupling="weights"), SGD))
    assert not np.allclose(trained(weights)["embed"], trained(start)["embed"], atol=1e-3)


def moved(algorithm, groups, *, size, **cuts):
    before = jax.device_get(state_of(algorithm, SGD))
    state, metrics = run(algorithm, batch_of(groups, step_groups=2, size=size), size=size, **cuts)
    change = optax.tree.norm(optax.tree.sub(trained(state), trained(before)))
    return float(change), metrics


def one_answer(number, samples, reward):
    return group(number, [rollout(number, i, [1], [2 + i, 3], reward) for i in range(samples)])


def test_a_group_of_one_teaches_nothing():
    groups = [one_answer(1, 1, 1.0), one_answer(2, 1, 0.0)]
    change, metrics = moved(grpo(), groups, size=1)
    assert change == 0 and metrics["optim/updates"] == 1 and metrics["optim/grad_norm"] == 0
    change, metrics = moved(gvpo(coupling="written"), groups, size=1)
    assert change == 0 and metrics["optim/skipped"] == 1  # no prompt has two rollouts: no weight


def test_equal_rewards():
    groups = [one_answer(1, 3, 1.0), one_answer(2, 3, 0.0)]
    change, metrics = moved(grpo(scale_by_std=True), groups, size=3)
    assert change == 0 and metrics["optim/updates"] == 1 and metrics["credit/advantage_std"] == 0
    for coupling in ("written", "weights"):  # at the anchor there is nothing to pull back either
        change, metrics = moved(gvpo(coupling=coupling), groups, size=3)
        assert change == pytest.approx(0, abs=1e-6) and metrics["optim/updates"] == 1


def test_numbers_by_hand():
    """Rewards 1, 0, 0 and a failed one; lengths 2, 1, 3; uniform sampler against a uniform
    policy."""
    rollouts = [
        rollout(1, 0, [1], [2, 3], 1.0),
        rollout(1, 1, [1], [4], 0.0, logp=[-math.log(VOCAB) - 0.5]),
        rollout(1, 2, [1], [5, 6, 7], 0.0, stop=StopReason.LENGTH),
        rollout(1, 3, [1], [5, 6, 7, 7], 1.0, failure=Failure.ENV),
    ]
    algorithm = grpo()
    params = jax.tree.map(jnp.zeros_like, Bigram().init(jax.random.key(0)))
    state = state_of(algorithm, ADAM, params=params | {"scale": jnp.ones(4)})
    batch = batch_of([group(1, rollouts)], step_groups=1, size=4)
    _, metrics = run(algorithm, batch, tx=ADAM, size=4, state=state)
    wanted = {
        "reward/mean": 1 / 3,
        "reward/std": math.sqrt(2) / 3,  # population: sqrt(1/3 - 1/9)
        "response/length_mean": 2,
        "response/length_max": 3,
        "response/truncated_frac": 1 / 3,
        "batch/valid_rollouts": 3,
        "batch/action_tokens": 6,
        "batch/empty": 0,
        "sampler/gap_mean": 0.5 / 6,
        "sampler/gap_max": 0.5,
        # 2/3 twice, -1/3 four times: mean 0, mean square (2 * 4/9 + 4 * 1/9) / 6 = 2/9
        "credit/advantage_std": math.sqrt(2) / 3,
        "loss/entropy_mean": math.log(VOCAB),
        "optim/learning_rate": 0.1 / 4,
        "metrics/nonfinite": 0,
    }
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_at_most_one_compilation_a_bucket():
    """Case 38: 50 batches of random lengths, two buckets."""
    algorithm = load("sft")
    step = step_of(algorithm, SGD, micro=4, size=2)
    state = state_of(algorithm, SGD)
    random = np.random.default_rng(0)
    used = set()
    for seed in range(50):
        groups = random_groups(
            seed, int(random.integers(0, 3)), 2, longest=int(random.integers(3, 12))
        )
        batch = batch_of(groups, step_groups=2, size=2, buckets=(5, 12))
        used.add(batch.tokens.shape)
        state, _ = step(state, batch)
    assert used == {(4, 5), (4, 12)}
    assert step.trace_count == 2
    assert step.jitted(state)._cache_size() == 2  # nor is a trace compiled again
    assert int(state.step) == 50


@pytest.mark.parametrize(
    ("cuts", "words"),
    [
        ({"minibatches": 3}, "train.minibatches=3 does not cut 8 rollouts"),
        ({"micro": 3}, "train.micro_rollouts=3; allowed: divisors of the 8 rollouts"),
        ({"micro": 2, "mesh": {"data": 4}}, "mesh.data \\* mesh.fsdp \\* mesh.expert = 4"),
        ({"coupling": "written", "micro": 1}, "multiples of pool.rollouts_per_group=2"),
    ],
)
def test_cuts_that_do_not_fit(cuts, words):
    algorithm = gvpo(coupling=cuts.pop("coupling", "weights"))
    mesh = mesh_of(**cuts.pop("mesh", {"data": 1}))
    step = step_of(algorithm, SGD, size=2, mesh=mesh, **({"micro": 8} | cuts))
    with pytest.raises(ValueError, match=words):
        step(state_of(algorithm, SGD, mesh=mesh), batch_of([], step_groups=4, size=2))
