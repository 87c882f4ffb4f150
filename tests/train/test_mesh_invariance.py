"""Case 40: the same seed on any mesh, with the real policy; and what its step never holds."""

import dataclasses
import math

import jax
import numpy as np
import optax
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxrl.mesh import Rules
from jaxrl.model.form import qwen3
from jaxrl.model.policy import build
from jaxrl.pool.local import LocalPool
from jaxrl.train import state as states
from tests.model.tiny import policy_on, sampler_of
from tests.pool.scripted import Letters, Sums
from tests.train.test_step import assert_same, grpo, gvpo
from tests.train.toy import batch_of, mesh_of, random_groups, step_of

SMALL = qwen3(
    vocab_size=8,
    layers=2,
    width=8,
    heads=2,
    kv_heads=2,
    head_size=4,
    hidden=16,
    rope_theta=10_000.0,
    norm_epsilon=1e-6,
    tied_head=True,
    dtype="float32",
    param_dtype="float32",
    remat="none",
    score_chunk_positions=16,
)
SGD = optax.sgd(0.1)
MESHES = [
    {"data": 1},
    {"fsdp": 2},
    {"fsdp": 2, "tensor": 2},
    {"data": 4},
    {"fsdp": 2, "context": 2},
]
ALGORITHMS = {
    "grpo": grpo(kl_weight=0.1, weighting="rollout_mean"),
    "gvpo": gvpo(coupling="weights", anchor="frozen"),
}


def start(algorithm, mesh):
    policy = build(SMALL, mesh, Rules())
    state = states.create(
        policy.init(jax.random.key(1)),
        SGD,
        freeze=(),
        roles=states.roles_of(algorithm),
        key=jax.random.key(2),
        step=0,
    )
    return policy, states.place(state, policy, mesh)


def steps(algorithm, sizes):
    """State before, state and numbers after two takes of two updates, all on the host."""
    mesh = mesh_of(**sizes)
    policy, state = start(algorithm, mesh)
    before = jax.device_get(state)
    step = step_of(algorithm, SGD, micro=4, size=2, minibatches=2, mesh=mesh, policy=policy)
    numbers = []
    for seed in range(2):
        groups = random_groups(seed, 7, 2)  # of 8: the last slots are padding
        state, metrics = step(state, batch_of(groups, step_groups=8, size=2, minibatches=2))
        del metrics["optim/frac_params_unchanged"]  # counts last bits
        numbers.append({name: float(x) for name, x in metrics.items()})
    assert step.trace_count == 1
    return before, jax.device_get(state), numbers


def change(before, after):
    """Minus the sum of the gradients of the updates."""
    return optax.tree.sub(after.roles["student"].params, before.roles["student"].params)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_any_mesh_gives_the_same_step(name):
    """Init and key bit for bit; loss, gradient (what SGD makes of it) and curves to 1e-5."""
    one = steps(ALGORITHMS[name], MESHES[0])
    for sizes in MESHES[1:]:
        before, after, numbers = steps(ALGORITHMS[name], sizes)
        assert_same(before, one[0])
        assert_same(after.key, one[1].key)
        for mine, theirs in zip(numbers, one[2], strict=True):
            assert mine["loss/total"] == pytest.approx(theirs["loss/total"], rel=1e-5, abs=1e-7)
            assert mine["optim/grad_norm"] == pytest.approx(theirs["optim/grad_norm"], rel=1e-5)
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
        apart = optax.tree.norm(optax.tree.sub(change(before, after), change(*one[:2])))
        assert apart <= 1e-5 * optax.tree.norm(change(*one[:2]))


def test_no_mesh_is_left_out():
    """The parameters are split where the mesh says so, before the step and after it."""
    mesh = mesh_of(fsdp=2, tensor=2)
    algorithm = ALGORITHMS["grpo"]
    policy, state = start(algorithm, mesh)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    step = step_of(algorithm, SGD, micro=16, size=2, mesh=mesh, policy=policy)
    state, _ = step(state, batch_of(random_groups(0, 8, 2), step_groups=8, size=2))
    for before, after in zip(jax.tree.leaves(shardings), jax.tree.leaves(state), strict=True):
        assert after.sharding.is_equivalent_to(before, after.ndim)
    split = [x for x in state.roles["student"].params.values() if not x.is_fully_replicated]
    assert len(split) >= 5


def sampled(sizes, params, path):
    """What three takes of a local pool hand over when its sampler lives on a mesh."""
    sampler = sampler_of(policy_on(sizes, vocab_size=128), params, path)
    pool = LocalPool(
        sampler,
        Letters(),
        Sums(5),  # 2 a step: the third take crosses into the second epoch
        run_id="run",
        seed=7,
        rollouts_per_group=3,
        temperature=1.0,
        max_new_tokens=5,
        max_prompt_tokens=8,
        watchdog_s=120.0,
        max_refills=0,
    )
    assert sampler.version is not None
    pool.publish(sampler.version, str(path / "v=0-0"))
    return [pool.take(2, step) for step in range(3)]


@pytest.mark.slow
def test_any_mesh_draws_the_same_prompts_and_the_same_samples(tmp_path):
    """Data order and sampling keys bit for bit: the same groups, in each the same token ids."""
    params = policy_on(vocab_size=128).init(jax.random.key(1))
    one = sampled(MESHES[0], params, tmp_path)
    texts = {r.tokens.tobytes() for groups, _ in one for group in groups for r in group.rollouts}
    assert len(texts) == 3 * 2 * 3  # nothing is equal for want of variety
    for sizes in MESHES[1:]:
        for (groups, manifest), (wanted, expected) in zip(
            sampled(sizes, params, tmp_path), one, strict=True
        ):
            assert [g.id for g in groups] == [g.id for g in wanted]
            assert [key for key, _ in manifest.groups] == [key for key, _ in expected.groups]
            for group, same in zip(groups, wanted, strict=True):
                for mine, theirs in zip(group.rollouts, same.rollouts, strict=True):
                    assert mine.task_key == theirs.task_key
                    assert mine.tokens.tobytes() == theirs.tokens.tobytes()
                    np.testing.assert_allclose(mine.logp, theirs.logp, atol=1e-5)


def shapes(jaxpr):
    """Shapes of every array that a jaxpr, or one inside it, computes."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield variable.aval.shape
        for parameter in jax.tree.leaves(equation.params):
            if isinstance(parameter, ClosedJaxpr):
                yield from shapes(parameter.jaxpr)
            elif isinstance(parameter, Jaxpr):
                yield from shapes(parameter)


def largest(chunk):
    """Elements of the largest array in the whole step: 8 rollouts x 8 tokens, a vocabulary of
    512."""
    config = dataclasses.replace(SMALL, vocab_size=512, score_chunk_positions=chunk)
    mesh = mesh_of(data=1)
    policy = build(config, mesh, Rules())
    algorithm = ALGORITHMS["gvpo"]
    state = jax.eval_shape(
        lambda: states.create(
            policy.init(jax.random.key(0)),
            SGD,
            freeze=(),
            roles=states.roles_of(algorithm),
            key=jax.random.key(0),
            step=0,
        )
    )
    step = step_of(algorithm, SGD, micro=8, size=2, epochs=2, mesh=mesh, policy=policy)
    traced = step.jitted(state).trace(state, batch_of([], step_groups=4, size=2))
    return max(math.prod(shape) for shape in shapes(traced.jaxpr.jaxpr))


def test_no_array_has_rollout_token_vocab_elements():
    """Case 9: logits exist a chunk of positions at a time, in the whole step with its gradient."""
    assert largest(chunk=16) < 8 * 8 * 512
    assert largest(chunk=64) >= 8 * 8 * 512  # the walk sees them when they are there
