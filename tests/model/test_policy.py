import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.batch import View
from jaxrl.kernels.readings import taken_logp
from jaxrl.model import transformer
from jaxrl.model.policy import settled
from tests.model.tiny import (
    MESHES,
    STUDENT,
    logp,
    numpy_logits,
    numpy_logp,
    policy_on,
    read,
    rows,
    seeded,
)

TOKENS = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]]


def gradient(policy, params, batch, weight):
    def loss(p):
        return (policy.score({"student": p}, batch, read, STUDENT)["logp"] * weight).sum()

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_each_token_is_scored_by_what_comes_before_it_at_its_temperature(temperature):
    """cases 1 and 2"""
    policy, params = seeded()
    found = logp(policy, params, rows(TOKENS, temperature=temperature))
    for row, tokens in enumerate(TOKENS):
        right = numpy_logp(policy.config, params, tokens, temperature)
        np.testing.assert_allclose(found[row], right, rtol=1e-4, atol=1e-5)
    assert (np.asarray(found)[:, 0] == 0).all() and (np.asarray(found)[:, 1:] < 0).all()


def test_the_temperature_is_that_of_the_token_it_is_written_beside():
    """case 2"""
    policy, params = seeded()
    temperature = np.array([[1.0, 1.0, 0.5, 1.0, 2.0, 1.0]])
    found = logp(policy, params, rows(TOKENS[:1], temperature=temperature))[0]
    for j in range(1, 6):
        right = numpy_logp(policy.config, params, TOKENS[0], temperature[0, j])[j]
        assert found[j] == pytest.approx(right, rel=1e-4), j


def test_what_comes_later_changes_nothing_before():
    """case 1, the garbage property: tokens from j on say nothing about the log-prob of j - 1"""
    policy, params = seeded()
    whole = np.asarray(logp(policy, params, rows(TOKENS)))
    for j in range(1, 6):
        garbage = np.array(TOKENS)
        garbage[:, j:] = 19
        found = np.asarray(logp(policy, params, rows(garbage)))
        np.testing.assert_array_equal(found[:, :j], whole[:, :j])
        assert (found[:, j] != whole[:, j]).all()


def test_padding_on_either_side_changes_nothing():
    """case 6"""
    policy, params = seeded()
    tokens = [[5, 6, 7, 0, 0], [0, 0, 5, 6, 7]]
    segment = [[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]]
    position = [[0, 1, 2, 0, 0], [0, 0, 0, 1, 2]]
    found = np.asarray(logp(policy, params, rows(tokens, segment, position)))
    alone = np.asarray(logp(policy, params, rows([[5, 6, 7]])))[0]
    np.testing.assert_allclose(found[0], [*alone, 0, 0], atol=1e-6)
    np.testing.assert_allclose(found[1], [0, 0, *alone], atol=1e-6)
    bad = logp(policy, params, rows(tokens, segment, np.tile(np.arange(5), (2, 1))))
    # rotary positions are relative: a constant shift of all of a row's positions is harmless
    np.testing.assert_allclose(bad[1], found[1], atol=1e-5)


def test_packed_segments_equal_rows_of_their_own():
    """case 30"""
    policy, params = seeded()
    x, y = [3, 1, 4], [2, 7, 1, 8]
    packed = rows([x + y + [0]], [[1, 1, 1, 2, 2, 2, 2, 0]], [[0, 1, 2, 0, 1, 2, 3, 0]])
    found = np.asarray(logp(policy, params, packed))[0]
    np.testing.assert_allclose(found[:3], logp(policy, params, rows([x]))[0], atol=1e-6)
    np.testing.assert_allclose(found[3:7], logp(policy, params, rows([y]))[0], atol=1e-6)
    assert found[3] == 0 and found[7] == 0
    changed = rows([[9, 1, 5] + y + [0]], packed.segment, packed.position)
    other = np.asarray(logp(policy, params, changed))[0]
    np.testing.assert_array_equal(other[3:], found[3:])
    assert other[1] != found[1]


@pytest.mark.parametrize(("chunk", "again"), [(1, True), (3, False), (4, True), (100, False)])
def test_the_chunk_size_changes_nothing_nor_does_keeping_logits(chunk, again):
    policy, params = seeded()
    small = policy_on(score_chunk_positions=chunk, score_remat=again)
    batch = rows(TOKENS)
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6)), jnp.float32)
    right, found = gradient(policy, params, batch, weight), gradient(small, params, batch, weight)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, right)


@pytest.mark.parametrize(
    ("sizes", "again"), [(sizes, sizes != {"fsdp": 2}) for sizes in MESHES], ids=str
)
def test_every_mesh_gives_the_same_loss_and_gradient(sizes, again):
    """case 40"""
    policy, params = seeded()
    generator = np.random.default_rng(1)
    batch = rows(generator.integers(0, 20, (4, 5)))
    weight = jnp.asarray(generator.normal(size=(4, 5)), jnp.float32)
    sharded = policy_on(sizes, score_chunk_positions=2, score_remat=again)
    right = gradient(policy, params, batch, weight)
    placed = jax.device_put(params, sharded.shardings)
    loss, grads = gradient(sharded, placed, batch, weight)
    assert float(loss) == pytest.approx(float(right[0]), rel=1e-5)
    for name, x in grads.items():
        peak = np.abs(right[1][name]).max()
        np.testing.assert_allclose(x, right[1][name], atol=1e-5 * peak, err_msg=name)


def test_gradients_that_are_asked_for_wait_for_each_other():
    """And no other is made for that: a frozen reader's head has none."""

    def loss(states, head, frozen):
        tree = ({"a": states, "b": states}, {"a": {"head": head}, "b": {"head": frozen}})
        states, heads = settled(tree)
        return sum((states[name] * heads[name]["head"]).sum() for name in states)

    given = jnp.arange(3.0), jnp.ones(3), jnp.full(3, 5.0)
    found = jax.grad(loss, (0, 1))(*given)
    np.testing.assert_array_equal(found, [[6, 6, 6], [0, 1, 2]])
    for asked, waiting in (((0, 1), 3), ((0,), 2), ((1,), 1)):
        traced = jax.make_jaxpr(jax.grad(loss, asked))(*given)
        (barrier,) = [e for e in traced.eqns if e.primitive.name == "optimization_barrier"]
        assert len(barrier.invars) == waiting


def test_what_is_read_as_a_constant_alone_settles_nothing():
    def loss(states, head):
        states, heads = settled(({"a": states, "teacher": 2 * states}, {"a": {"head": head}}))
        target = jax.lax.stop_gradient(states["teacher"])
        return (states["a"] * heads["a"]["head"] * target).sum()

    found = jax.grad(loss, (0, 1))(jnp.arange(3.0), jnp.ones(3))
    np.testing.assert_array_equal(found, [[0, 2, 4], [0, 2, 8]])


@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_a_view_of_the_student_may_teach_it_on_any_mesh(sizes):
    """Its states depend on what is trained, and are read without a gradient."""
    policy = policy_on(sizes)
    params = policy.init(jax.random.key(0))
    plain = rows([*TOKENS, *TOKENS])
    index = jnp.broadcast_to(jnp.arange(len(TOKENS[0])), plain.tokens.shape)
    view = View(plain.tokens, plain.position, plain.segment, index)
    batch = rows([*TOKENS, *TOKENS], views={"shown": view})
    scorers = (("student", "plain"), ("student", "shown"))

    def both(logits, taken):
        own, theirs = (taken_logp(logits[name], taken) for name in ("student", "student/shown"))
        return {"loss": (own - jax.lax.stop_gradient(theirs)) ** 2 / 2 + own}

    def loss(p):
        return policy.score({"student": p}, batch, both, scorers)["loss"].sum()

    found = jax.jit(jax.grad(loss))(params)
    right = gradient(policy, params, batch, 1.0)[1]  # both views are the same: they do not differ
    for name, slope in right.items():
        np.testing.assert_allclose(found[name], slope, rtol=1e-4, atol=1e-5)


def test_rows_that_do_not_divide_over_the_mesh_are_named():
    policy = policy_on({"data": 2, "fsdp": 2})
    params = policy.init(jax.random.key(0))
    allowed = r"rows of a micro-batch=2 .*mesh.data \* mesh.fsdp \* mesh.expert = 4"
    with pytest.raises(ValueError, match=allowed):
        logp(policy, params, rows(TOKENS))


def test_several_scorers_share_one_walk_over_the_vocabulary():
    policy, params = seeded()
    frozen = policy.init(jax.random.key(9))

    def both(logits, taken):
        assert logits.keys() == {"student", "reference/plain"}
        logp, other = (jax.nn.log_softmax(logits[k]) for k in ("student", "reference/plain"))
        return {
            "logp": taken_logp(logits["student"], taken),
            "kl": (jnp.exp(logp) * (logp - other)).sum(-1),
        }

    who = {"student": params, "reference": frozen}
    scorers = (*STUDENT, ("reference", "plain"))
    found = jax.jit(lambda w: policy.score(w, rows(TOKENS), both, scorers))(who)
    np.testing.assert_allclose(found["logp"], logp(policy, params, rows(TOKENS)), atol=1e-6)
    mine, theirs = (numpy_logits(policy.config, p, TOKENS[0]) for p in (params, frozen))
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (mine, theirs))
    right = (p * np.log(p / q)).sum(-1)
    np.testing.assert_allclose(found["kl"][0, 1:], right[:-1], rtol=1e-4)
    assert found["kl"][0, 0] == 0


def test_a_view_scores_the_same_tokens_behind_another_context():
    policy, params = seeded()
    view = View(
        tokens=jnp.array([[9, 9, 3, 1, 4]]),
        position=jnp.array([[0, 1, 2, 3, 4]]),
        segment=jnp.ones((1, 5), jnp.int32),
        index=jnp.array([[-1, 3, 4]]),
    )
    batch = rows([[3, 1, 4]], views={"hint": view})

    def hinted(logits, taken):
        return {"logp": taken_logp(logits["student/hint"], taken)}

    scorers = (("student", "hint"),)
    found = jax.jit(lambda p: policy.score({"student": p}, batch, hinted, scorers))(params)["logp"]
    right = numpy_logp(policy.config, params, [9, 9, 3, 1, 4], 1.0)
    np.testing.assert_allclose(found[0], [0, right[3], right[4]], rtol=1e-4)
    with pytest.raises(ValueError, match="view 'other'.*'hint'"):
        policy.score({"student": params}, batch, hinted, (("student", "other"),))


def test_logits_are_float32_sums_of_bfloat16_products():
    """case 8: in bfloat16 the logits would both be 10"""
    policy, _ = seeded(dtype="bfloat16", width=2, vocab_size=2, tied_head=False)
    params = dict(policy.init(jax.random.key(0)))
    params["head/kernel"] = jnp.array([[10.0, 10.0], [1.0, 0.0]])
    logits = policy.logits(params, jnp.array([[1, 0.03]], jnp.bfloat16))
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, [[10.030029, 10.0]], rtol=1e-6)
    np.testing.assert_allclose(taken_logp(logits, jnp.array([0])), [-0.678245], rtol=1e-5)


def test_bfloat16_compute_keeps_float32_masters_and_readings():
    policy, params = seeded()
    half = policy_on(dtype="bfloat16")
    batch = rows(TOKENS)
    loss, grads = gradient(half, params, batch, 1.0)
    right, _ = gradient(policy, params, batch, 1.0)
    assert {x.dtype for x in grads.values()} == {jnp.dtype("float32")}
    found = logp(half, params, batch)
    assert found.dtype == jnp.float32 and (found <= 0).all()
    assert float(loss) == pytest.approx(float(right), rel=0.1)


def test_a_tied_head_is_the_embedding():
    """case 37: a change of the embedding changes what is predicted where its token is not read"""
    policy, params = seeded()
    grown = {**params, "embedding": params["embedding"].at[7].multiply(3.0)}
    before, after = (np.asarray(logp(policy, p, rows([[3, 1, 4]]))) for p in (params, grown))
    assert (before[:, 1:] != after[:, 1:]).all()
    loose, apart = seeded(tied_head=False)
    grown = {**apart, "embedding": apart["embedding"].at[7].multiply(3.0)}
    before, after = (np.asarray(logp(loose, p, rows([[3, 1, 4]]))) for p in (apart, grown))
    np.testing.assert_array_equal(before, after)


def test_a_tied_model_with_a_head_of_its_own_is_the_same():
    policy, params = seeded()
    config, own = transformer.untied(policy.config, params)
    assert not config.tied_head and set(own) == set(transformer.shapes(config))
    loose = policy_on(tied_head=False)
    told, again = (logp(p, x, rows([[3, 1, 4]])) for p, x in ((policy, params), (loose, own)))
    np.testing.assert_allclose(told, again, atol=1e-6)
    assert transformer.untied(config, own) == (config, own)


def avals(jaxpr):
    """Every array of a jaxpr and of the jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield from (v.aval for v in (*equation.invars, *equation.outvars))
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from avals(inner)


def test_no_array_is_as_wide_as_tokens_times_vocabulary():
    """case 9, at its shape: B=2, T=512, D=256, V=32768"""
    batch, tokens, width, vocab = 2, 512, 256, 32768
    policy = policy_on(layers=1, width=width, vocab_size=vocab, hidden=16, score_chunk_positions=64)
    facts = rows(np.ones((batch, tokens)))

    def chunked(p):
        return policy.score({"student": p}, facts, read, STUDENT)["logp"].mean()

    def dense(p):
        hidden = policy.hidden(p, facts.tokens, facts.position, facts.segment)
        logits = policy.logits(p, hidden[:, :-1].reshape(-1, width))
        logp = jax.nn.log_softmax(logits)
        return jnp.take_along_axis(logp, facts.tokens[:, 1:].reshape(-1, 1), axis=1).mean()

    def widest(loss):
        return max(
            x.size
            for x in avals(jax.make_jaxpr(jax.value_and_grad(loss))(policy.shapes).jaxpr)
            if hasattr(x, "shape")
        )

    assert widest(chunked) < batch * tokens * vocab
    assert widest(dense) >= batch * (tokens - 1) * vocab  # the walk sees what it looks for

    def scratch(loss):
        compiled = jax.jit(jax.value_and_grad(loss)).lower(policy.shapes).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes - 4 * vocab * width

    assert scratch(chunked) < 0.25 * scratch(dense)
