"""Local layers, sinks, experts, stacks: the sampler says what the trainer says, the window is a
window, and routes come back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.model import form, transformer
from jaxrl.model.form import AdapterConfig, stacks
from jaxrl.model.policy import CHOSEN, build
from jaxrl.model.sampler import Sampler
from jaxrl.model.transformer import Guidance
from jaxrl.pool.contract import Request
from tests.model.forms import FORMS, LOCAL, MIMO, MOE, experts
from tests.model.tiny import CONFIG, STUDENT, logp, policy_on, read, rows, sampler_of, seeded

TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]]


@pytest.mark.parametrize("name", FORMS)
def test_the_sampler_says_what_the_trainer_says(name, tmp_path, monkeypatch):
    policy, params = seeded(**FORMS[name])
    recorded = bool(policy.config.sparse_layers)
    monkeypatch.setattr("jaxrl.model.sampler.PIECE", 2)  # a prompt is read in two pieces
    sampler = sampler_of(policy, params, tmp_path, record_routes=recorded)
    asked = [Request(row[:3], 1, i, 1.0, 5, frozenset()) for i, row in enumerate(TOKENS)]
    found = sampler.generate(asked)
    whole = [[*r.prompt, *c.tokens] for r, c in zip(asked, found, strict=True)]
    batch = rows(whole)
    reading = jax.jit(lambda p: policy.score({"student": p}, batch, read, STUDENT))(params)
    for row, completion in enumerate(found):
        np.testing.assert_allclose(reading["logp"][row, 3:], completion.logp, atol=1e-4)
        if recorded:
            assert completion.routes is not None and completion.routes.shape[0] == 8
            assert (completion.routes[-1] == -1).all()  # the last token was never an input
            np.testing.assert_array_equal(reading[CHOSEN][row, :-1], completion.routes[:-1])


@pytest.mark.parametrize("name", FORMS)
def test_later_tokens_and_other_segments_change_nothing(name):
    policy, params = seeded(**FORMS[name])
    whole = np.asarray(logp(policy, params, rows(TOKENS)))
    garbage = np.array(TOKENS)
    garbage[:, 5:] = 19
    np.testing.assert_array_equal(logp(policy, params, rows(garbage))[:, :5], whole[:, :5])
    packed = rows(
        [TOKENS[0][:4] + TOKENS[1][:4]],
        [[1, 1, 1, 1, 2, 2, 2, 2]],
        [[0, 1, 2, 3, 0, 1, 2, 3]],
    )
    found = np.asarray(logp(policy, params, packed))[0]
    np.testing.assert_allclose(found[:4], whole[0, :4], atol=1e-5)
    np.testing.assert_allclose(found[5:], whole[1, 1:4], atol=1e-5)


def test_a_local_layer_sees_its_window_and_no_further():
    policy, params = seeded(**LOCAL | {"local_layers": (1,), "layers": 1})
    whole = np.asarray(logp(policy, params, rows(TOKENS)))
    for changed in range(5):
        other = np.array(TOKENS)
        other[:, changed] = 19
        found = np.asarray(logp(policy, params, rows(other)))
        sees = [j for j in range(1, 8) if changed <= j - 1 < changed + 3]
        for j in range(1, 8):
            if j == changed:
                continue  # the token itself is another
            differs = (found[:, j] != whole[:, j]).all()
            assert differs == (j in sees), (changed, j)


def test_a_sink_takes_its_share():
    policy, params = seeded(layers=1, sinks="all")
    none = np.asarray(
        logp(policy, params | {"blocks/attention/sink": jnp.full((1, 4), -1e9)}, rows(TOKENS))
    )
    plain, weights = seeded(layers=1)
    same = {name: x for name, x in params.items() if "sink" not in name}
    assert same.keys() == weights.keys()
    np.testing.assert_allclose(logp(plain, same, rows(TOKENS)), none, atol=1e-6)
    # a sink that takes everything leaves a layer without attention
    all_of_it = params | {"blocks/attention/sink": jnp.full((1, 4), 1e9)}
    silent = same | {
        "blocks/attention/output/kernel": jnp.zeros_like(same["blocks/attention/output/kernel"])
    }
    np.testing.assert_allclose(
        logp(policy, all_of_it, rows(TOKENS)), logp(plain, silent, rows(TOKENS)), atol=1e-6
    )


def test_stacks_are_named_by_what_differs():
    config = dataclasses.replace(CONFIG, **MIMO)
    assert stacks(config) == {
        "global_dense_blocks": (0,),
        "local_sparse_blocks": (1, 2),
        "global_sparse_blocks": (3,),
    }
    assert stacks(dataclasses.replace(CONFIG, **LOCAL)) == {"blocks": (0, 1, 2, 3)}
    mixed = dataclasses.replace(CONFIG, layers=3, experts=experts(dense_layers=(0,)))
    assert stacks(mixed) == {"dense_blocks": (0,), "sparse_blocks": (1, 2)}


def test_scanned_layers_are_the_unrolled_ones(monkeypatch):
    for changes in (LOCAL, MIMO):
        policy, params = seeded(**changes)
        unrolled = policy.hidden(params, *_plain())
        monkeypatch.setattr(transformer, "UNROLLED_LAYERS", 0)
        np.testing.assert_allclose(policy.hidden(params, *_plain()), unrolled, atol=1e-5)
        monkeypatch.undo()


def _plain():
    tokens = jnp.asarray(TOKENS)
    return tokens, jnp.broadcast_to(jnp.arange(8), tokens.shape), jnp.ones_like(tokens)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_replayed_routes_are_followed_and_unknown_ones_are_chosen(kind):
    policy, params = seeded(experts=experts(router=kind))
    tokens, position, segment = _plain()

    def through(recorded):
        return policy.routed(params, tokens, position, segment, Guidance(recorded, None))

    free, routing = through(None)
    assert routing is not None
    chosen = routing.chosen
    np.testing.assert_allclose(through(chosen)[0], free, atol=1e-6)
    np.testing.assert_allclose(through(chosen[..., ::-1])[0], free, atol=1e-6)  # sets, not lists
    np.testing.assert_array_equal(through(jnp.full_like(chosen, -1))[0], free)
    other = (chosen + 1) % 4
    moved, said = through(other)
    assert said is not None and np.abs(moved - free).max() > 1e-3
    np.testing.assert_array_equal(said.chosen[:, :, 0], chosen[:, :, 0])  # the router's own choice


def test_padding_goes_to_no_expert():
    policy, params = seeded(**MOE)
    tokens, position, segment = _plain()
    segment = segment.at[:, 5:].set(0)
    _, routing = policy.routed(params, tokens, position, segment, transformer.UNGUIDED)
    assert routing is not None
    assert (np.asarray(routing.chosen)[:, 5:] == -1).all()
    assert (np.asarray(routing.chosen)[:, :5] >= 0).all()


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("moe", {"expert": 2}),
        ("mimo", {"data": 2, "expert": 4}),
        ("moe", {"expert": 2, "tensor": 2, "fsdp": 2}),
    ],
    ids=str,
)
def test_experts_split_over_devices_give_the_same_loss_and_gradient(name, sizes):
    plain, params = seeded(**FORMS[name])
    batch = rows(TOKENS * 4)

    def value(policy):
        def loss(p):
            return policy.score({"student": p}, batch, read, STUDENT)["logp"].sum() / 64

        return jax.jit(jax.value_and_grad(loss))

    wanted, grads = value(plain)(params)
    policy = policy_on(sizes, **FORMS[name])
    placed = jax.device_put(params, policy.shardings)
    found, spread = value(policy)(placed)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for key, x in grads.items():
        apart = np.linalg.norm(np.asarray(spread[key]) - np.asarray(x))
        assert apart <= 1e-5 * np.linalg.norm(x), key


def test_an_adapter_starts_as_nothing_and_is_the_product_of_its_factors():
    pattern = "attention/(query|output)|mlp/down"
    adapter = AdapterConfig(rank=2, alpha=3.0, pattern=pattern, dtype="float32")
    policy = policy_on(adapter=adapter)
    params = policy.init(jax.random.key(1))
    plain = {name: x for name, x in params.items() if "adapter" not in name}
    added = sorted(set(params) - set(plain))
    assert {name.rsplit("/", 1)[0] for name in added} == {
        "blocks/attention/query",
        "blocks/attention/output",
        "blocks/mlp/down",
    }
    at = lambda p, params: logp(p, params, rows(TOKENS))  # noqa: E731
    np.testing.assert_array_equal(at(policy, params), at(policy_on(), plain))
    keys = iter(jax.random.split(jax.random.key(2), len(added)))
    moved = params | {name: jax.random.normal(next(keys), params[name].shape) for name in added}
    merged = dict(plain)
    for name in {name.rsplit("/", 1)[0] for name in added}:
        low, high = moved[f"{name}/adapter_in"], moved[f"{name}/adapter_out"]
        change = jnp.stack([jnp.tensordot(a, b, 1) for a, b in zip(low, high, strict=True)])
        merged[f"{name}/kernel"] = plain[f"{name}/kernel"] + 3.0 / 2 * change
    assert np.abs(at(policy, moved) - at(policy, params)).max() > 0.1
    np.testing.assert_allclose(at(policy, moved), at(policy_on(), merged), atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"local_layers": (1, 2), "window": 2}, "model.local_layers"),
        ({"local_layers": (1,)}, "model.window=0"),
        ({"rope_size": 3}, "model.rope_size=3"),
        ({"rope_scaling": ("linear",)}, "model.rope_scaling"),
        ({"local_kv_heads": 3}, "model.local_kv_heads=3"),
        ({"activation": "relu"}, "model.activation='relu'"),
        ({"sinks": "some"}, "model.sinks='some'"),
    ],
    ids=str,
)
def test_a_form_that_cannot_be_is_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"per_token": 5}, "model.experts.per_token=5"),
        ({"router": "hash"}, "model.experts.router='hash'"),
        ({"count": -1}, "model.experts.count=-1"),
    ],
    ids=str,
)
def test_experts_that_cannot_be_are_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        experts(**changes)


def test_what_a_mesh_does_not_divide_is_refused_by_name():
    with pytest.raises(ValueError, match=r"model.experts.count=6 .*mesh.expert = 4"):
        policy_on({"expert": 4}, experts=experts(count=6))
    with pytest.raises(ValueError, match="model.experts.dense_layers"):
        dataclasses.replace(CONFIG, experts=experts(dense_layers=(7,)))
    with pytest.raises(ValueError, match="sampler.record_routes=True"):
        Sampler(
            build(CONFIG, None, policy_on().rules),
            None,
            seed=0,
            slots=2,
            prompt_buckets=(4,),
            max_new_tokens=2,
            samples_per_prompt=1,
            record_routes=True,
        )


def test_a_section_becomes_a_form():
    section = dataclasses.asdict(dataclasses.replace(CONFIG, **MIMO))
    assert form.read(section) == dataclasses.replace(CONFIG, **MIMO)
    with pytest.raises(TypeError, match="surprise"):
        form.read(section | {"surprise": 1})
