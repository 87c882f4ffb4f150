import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.model import form, transformer
from jaxrl.model.experts import Visiting
from jaxrl.model.layers import attend
from jaxrl.model.policy import build
from jaxrl.model.transformer import bind
from tests.model.forms import experts
from tests.model.tiny import CONFIG, MESHES, numpy_logits, policy_on, seeded


@functools.partial(jax.jit, static_argnums=(0, 2))
def logits_of(policy, params, tokens):
    tokens = jnp.asarray([tokens])
    position = jnp.arange(tokens.shape[1])[None]
    hidden = policy.hidden(params, tokens, position, jnp.ones_like(tokens))
    return policy.logits(params, hidden[0])


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied_head": False}, {"heads": 4, "kv_heads": 4}, {"heads": 3, "kv_heads": 1}],
    ids=str,
)
def test_the_decoder_equals_a_transcription_in_numpy(changes):
    policy, params = seeded(**changes)
    tokens = (3, 1, 4, 1, 5, 9, 2, 6)
    right = numpy_logits(policy.config, params, tokens)
    assert np.abs(right).max() > 1  # the comparison is about more than zeros
    np.testing.assert_allclose(logits_of(policy, params, tokens), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [2, 64, 192])
def test_any_head_size_gives_the_reference_attention(size):
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (2, 4, 5, size))
    key, value = (jax.random.normal(k, (2, 2, 5, size)) for k in keys[1:])
    mask = transformer.visible(jnp.array([[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]]))
    right = jax.nn.dot_product_attention(
        query.swapaxes(1, 2), key.swapaxes(1, 2), value.swapaxes(1, 2), mask=mask[:, None]
    ).swapaxes(1, 2)
    found = attend(query, key, value, mask, scale=size**-0.5)
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


def test_the_same_seed_gives_the_same_bits_on_every_mesh():
    ref = policy_on().init(jax.random.key(0))
    for sizes in MESHES:
        policy = policy_on(sizes)
        params, shardings = policy.init(jax.random.key(0)), policy.shardings
        assert shardings is not None and params.keys() == ref.keys()
        for name, x in params.items():
            np.testing.assert_array_equal(np.asarray(x), np.asarray(ref[name]), err_msg=name)
            assert x.sharding.is_equivalent_to(shardings[name], x.ndim), name
    other = policy_on().init(jax.random.key(1))
    assert (np.asarray(other["embedding"]) != np.asarray(ref["embedding"])).all()


def test_layers_are_drawn_apart():
    kernel = np.asarray(policy_on().init(jax.random.key(0))["blocks/mlp/up/kernel"])
    assert kernel.shape == (2, 16, 24)
    assert (kernel[0] != kernel[1]).all()
    assert kernel.std() == pytest.approx(16**-0.5, rel=0.1)


def test_every_parameter_has_logical_axes_and_a_name():
    policy = policy_on(tied_head=False)
    assert policy.axes.keys() == policy.shapes.keys() == policy.init(jax.random.key(0)).keys()
    assert policy.axes["embedding"] == ("vocab", "embed")
    assert policy.axes["head/kernel"] == ("embed", "vocab")
    name = "blocks/attention/query/kernel"
    assert policy.axes[name] == ("layers", "embed", "heads", "head")
    assert policy.shapes[name].shape == (2, 16, 4, 8)
    for name, axes in policy.axes.items():
        assert len(axes) == len(policy.shapes[name].shape), name


@pytest.mark.parametrize("remat", form.REMAT)
@pytest.mark.parametrize("dense_layers", [(), (1,)], ids=str)
def test_weights_of_experts_that_stay_in_their_stacks_change_nothing(
    remat, dense_layers, monkeypatch
):
    """A shallow stack's experts are visited where they lie; with a dense layer between them in two
    pieces of one stack."""
    shape = {"experts": experts(dense_layers=dense_layers), "layers": 4, "remat": remat}
    policy, params = seeded(**shape)
    tokens = (3, 1, 4, 1, 5, 2)
    asked = []
    within = Visiting.within
    monkeypatch.setattr(
        Visiting, "within", lambda *given, **how: asked.append(given[5]) or within(*given, **how)
    )

    def value():
        loss = lambda p: (logits_of(policy, p, tokens) ** 2).mean()  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(params)

    found, layers = value(), set(asked)
    assert layers == set(range(4) if not dense_layers else range(2))
    jax.clear_caches()  # the constant below is read when tracing
    monkeypatch.setattr(transformer, "UNROLLED_LAYERS", 0)
    asked.clear()
    right = value()
    assert not asked
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, right)


@pytest.mark.parametrize("remat", form.REMAT)
def test_remat_and_scan_change_nothing(remat, monkeypatch):
    policy, params = seeded()
    other = policy_on(remat=remat)
    tokens = (3, 1, 4, 1)

    def value(policy):
        loss = lambda p: (logits_of(policy, p, tokens) ** 2).mean()  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(params)

    right = value(policy)
    jax.clear_caches()  # the constant below is read when tracing
    monkeypatch.setattr(transformer, "UNROLLED_LAYERS", 0)  # a deep stack is scanned
    found = value(other)
    scanned = str(jax.make_jaxpr(lambda p: logits_of(other, p, tokens))(params))
    assert "unroll=1" in scanned
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, right)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"family": "gpt9"}, ["model.family='gpt9'", "qwen3"]),
        ({"remat": "some"}, ["model.remat='some'", "dots"]),
        ({"dtype": "float8"}, ["model.dtype='float8'", "bfloat16"]),
        ({"layers": 0}, ["model.layers=0", "above 0"]),
        ({"kv_heads": 3}, ["model.heads=4", "model.kv_heads=3"]),
        ({"head_size": 7}, ["model.head_size=7", "even"]),
    ],
)
def test_a_bad_model_section_names_the_field(changes, words):
    with pytest.raises(ValueError) as error:
        dataclasses.replace(CONFIG, **changes)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("sizes", "changes", "words"),
    [
        ({"tensor": 2}, {"heads": 3, "kv_heads": 1}, ["model.heads=3", "mesh.tensor = 2", "4"]),
        ({"tensor": 4}, {}, ["model.kv_heads=2", "mesh.tensor = 4"]),
        ({"fsdp": 4}, {"width": 18}, ["model.width=18", "mesh.fsdp = 4", "16 or 20"]),
        ({"tensor": 2}, {"vocab_size": 21}, ["model.vocab_size=21", "20 or 22"]),
    ],
)
def test_an_indivisible_mesh_names_field_value_and_what_is_allowed(sizes, changes, words):
    mesh = policy_on(sizes, kv_heads=4).mesh
    with pytest.raises(ValueError) as error:
        build(dataclasses.replace(CONFIG, **changes), mesh, policy_on().rules)
    assert all(word in str(error.value) for word in words), error.value


def test_parameters_that_do_not_fit_are_all_named_at_once():
    params = policy_on().init(jax.random.key(0))
    wrong = {name: x for name, x in params.items() if name != "norm/scale"}
    wrong["extra"] = params["norm/scale"]
    wrong["embedding"] = params["embedding"][:-1]
    with pytest.raises(ValueError) as error:
        bind(CONFIG, wrong)
    for word in ("missing norm/scale", "surplus extra", "embedding has shape (19, 16)"):
        assert word in str(error.value)


def test_a_policy_is_a_static_argument():
    policy, same = policy_on({"fsdp": 2}), policy_on({"fsdp": 2})
    assert policy == same and hash(policy) == hash(same)
    assert policy != policy_on({"fsdp": 2}, layers=3)
