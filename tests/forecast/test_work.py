"""FLOPs by formula: by hand, and against what a compiler counts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from configs import gvpo
from jaxrl.forecast import program, work
from jaxrl.model import flops
from jaxrl.train import collate, loop, rounds, settings
from tests.model.tiny import CONFIG, policy_on


def test_a_position_by_hand():
    # 2 layers of: query 16 x 4 x 8, key and value 16 x 2 x 8 each, output 4 x 8 x 16, three 16 x 24
    kernels = 2 * (512 + 2 * 256 + 512 + 3 * 384)
    one = flops.forward(CONFIG, 10)
    assert one.trunk == 2 * kernels
    assert one.head == 2 * 16 * 20
    # 5.5 keys seen in the mean, in 2 layers, by 4 heads: 8 products with each, 8 with its value
    assert one.attention == 2 * 2 * 5.5 * 4 * (8 + 8)


def test_a_local_layer_sees_its_window():
    local = dataclasses.replace(CONFIG, local_layers=(1, 0), window=3)
    # 1, 2, 3, 3, 3 keys; and all of 5 on the other layer
    assert flops.keys_seen(local, 0, 5) == 12 / 5
    assert flops.keys_seen(local, 1, 5) == 3
    assert flops.keys_seen(dataclasses.replace(local, window=50), 0, 5) == 3


def test_a_token_goes_through_its_experts_only():
    experts = dataclasses.replace(CONFIG.experts, count=8, per_token=2, hidden=6)
    sparse = dataclasses.replace(CONFIG, experts=experts)
    attention = 512 + 2 * 256 + 512
    router = 16 * 8
    assert flops.forward(sparse, 4).trunk == 2 * 2 * (attention + router + 2 * 3 * 16 * 6)


def test_the_formula_is_the_compilers_count_of_a_forward_pass():
    policy, tokens = policy_on(layers=3), 12
    ids = jnp.zeros((2, tokens), jnp.int32)

    def all_logits(params: Any) -> jax.Array:
        hidden = policy.hidden(params, ids, ids, ids + 1)
        return policy.logits(params, hidden.reshape(-1, hidden.shape[-1]))

    text = str(jax.jit(all_logits).lower(policy.shapes).compile().as_text())
    one = flops.forward(policy.config, tokens)
    over, _ = work.attention_overhead(policy.config, tokens, work.DENSE)
    right = 2 * tokens * one.scaled(1, over, 1).all
    assert program.count(text).flops == pytest.approx(right, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "logits_too"), [("full", True), ("inner", False)])
def test_the_formula_is_the_compilers_count_of_a_step(remat, logits_too):
    config: Any = gvpo.get_config("tiny")
    config.model.update(remat=remat, score_remat=logits_too, layers=9)  # so many are scanned
    config.train.micro_rollouts = 8
    config.sampler.update(max_new_tokens=16, prompt_buckets=(32,))
    phases = settings.phases(config)
    phase = phases[-1]
    models = rounds.build_models(phases, jax.devices()[:1])
    algorithm, step = loop.prepare(models, phase)
    rows, tokens = 16, max(phase.train.token_buckets)
    where = jax.sharding.NamedSharding(models.mesh, jax.sharding.PartitionSpec())
    batch = collate.form(rows, tokens, minibatches=2, facts={}, views={}, where=where)
    text = step.jitted(rounds.form(phase, models)).lower(rounds.form(phase, models), batch)
    counted = program.count(str(text.compile().as_text()))
    done = work.work(
        algorithm,
        step.plan(rows, packed=False),
        {"student": phase.model, "reference": phase.model},
        {"plain": tokens},
        {"student": models.policy.shapes},
        {"plain": work.DENSE},
        observes_student=False,
    )
    assert counted.unknown_trips == 0
    assert counted.flops == pytest.approx(done.executed.all, rel=0.05)
    assert done.useful.all < done.executed.all


def test_full_remat_repeats_the_trunk_but_its_last_product():
    full = dataclasses.replace(CONFIG, remat="full")
    kernels = 512 + 2 * 256 + 512 + 3 * 384
    assert work.computed_again(full, work.SPLASH) == ((kernels - 384) / kernels, 1.0)
    inner = dataclasses.replace(CONFIG, remat="inner")
    assert work.computed_again(inner, work.SPLASH) == (512 / kernels, 0.0)  # the output projection
    assert work.computed_again(CONFIG, work.DENSE) == (0.0, 0.0)


def test_what_kernels_of_attention_compute_beyond_the_half():
    """Of 2048.5 keys seen in the mean: half a block of 512 more; going back tokamax's has blocks of
    1024, and five products where the other has seven and four would do."""
    tokens, seen = 4096, 2048.5
    forth, back = work.attention_overhead(CONFIG, tokens, work.SPLASH)
    assert forth == pytest.approx((seen + 256) / seen)
    assert back == pytest.approx((seen + 256) / seen * 7 / 4)
    forth, back = work.attention_overhead(CONFIG, tokens, work.TOKAMAX)
    assert forth == pytest.approx((seen + 256) / seen)
    assert back == pytest.approx((seen + 512) / seen * 5 / 4)


def test_what_experts_products_cost():
    """A take of 8 rows of 8 tokens, read by student and reference: three matrices forward, three to
    the inputs, gate and up again (full remat), and the gradient of the one that is trained."""
    experts = dataclasses.replace(CONFIG.experts, count=8, per_token=2, hidden=6)
    sparse = dataclasses.replace(CONFIG, experts=experts, remat="full")
    phases = settings.phases(gvpo.get_config("tiny"))
    algorithm, step = loop.prepare(rounds.build_models(phases, jax.devices()[:1]), phases[-1])
    done = work.work(
        algorithm,
        step.plan(8, packed=False),
        {"student": sparse, "reference": sparse},
        {"plain": 8},
        {"student": ["blocks/mlp/gate"]},
        {"plain": work.TOKAMAX},
        observes_student=False,
    )
    one = 2 * 2 * 2 * 16 * 6  # of a position and a matrix: 2 layers, 2 of the experts
    assert done.experts == 8 * 8 * one * (2 * 3 + 3 + 2)
    assert done.experts_own == 8 * 8 * one
