import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.model.drawing import draw, invert, largest
from jaxrl.model.sampler import Sampler
from jaxrl.model.versions import write_weights
from jaxrl.pool.contract import Request
from jaxrl.pool.rollout import StopReason, Version
from tests.model.tiny import logp, numpy_logits, policy_on, rows, sampler_of, seeded

PROMPTS = ([3, 1], [4, 1, 5, 9], [2, 6, 5, 3, 5, 8], [9])


def request(prompt, group=0, sample=0, temperature=1.0, limit=5, stop=()):
    return Request(prompt, group, sample, temperature, limit, frozenset(stop))


def group_of(temperature=1.0, samples=3, stop=()):
    return [
        request(prompt, group, sample, temperature, stop=stop)
        for group, prompt in enumerate(PROMPTS)
        for sample in range(samples)
    ]


@pytest.fixture(scope="module")
def sampler(tmp_path_factory):
    """Its prompts are read in pieces of four tokens."""
    policy, params = seeded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrl.model.sampler.PIECE", 4)
        yield sampler_of(policy, params, tmp_path_factory.mktemp("weights"))


def ids(completions):
    return [completion.tokens.tolist() for completion in completions]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_trainers(sampler, temperature):
    policy, params = seeded()
    gaps = []
    for asked, got in zip(
        requests := group_of(temperature), sampler.generate(requests), strict=True
    ):
        whole = [*asked.prompt, *got.tokens]
        padded = np.zeros((1, 13), np.int32)
        padded[0, : len(whole)] = whole
        segment = (np.arange(13) < len(whole))[None].astype(np.int32)
        scored = np.asarray(logp(policy, params, rows(padded, segment, temperature=temperature)))
        gaps.extend(np.abs(scored[0, len(asked.prompt) : len(whole)] - got.logp))
        assert (got.logp <= 0).all() and len(got.logp) == len(got.tokens)
    assert np.mean(gaps) <= 1e-6 and np.max(gaps) <= 1e-4 and len(gaps) == 60


def test_greedy_is_the_argmax_of_the_full_forward(sampler):
    policy, params = seeded()
    for asked, got in zip(requests := group_of(0.0, 1), sampler.generate(requests), strict=True):
        whole = list(asked.prompt)
        for token in got.tokens:
            assert token == numpy_logits(policy.config, params, whole)[-1].argmax()
            whole.append(int(token))


def test_a_sample_depends_on_nothing_but_its_request(sampler, tmp_path):
    """not on its slot, its neighbours, their order or the attempt, to the last bit; nor on what of
    its prompt is held or shared; a group's samples differ"""
    requests = group_of()
    found = sampler.generate(requests)
    same = lambda one, other: np.testing.assert_array_equal(one.logp, other.logp)  # noqa: E731
    for one, other in zip(found[::3], sampler.generate(requests[::3]), strict=True):
        same(one, other)  # prompts that go alone have rows enough for all
    later = request([*PROMPTS[2], 7, 7], 2)
    sampler._prompts.clear()
    cold = sampler.generate([later])[0]
    sampler._prompts.clear()
    sampler.generate([requests[6]])
    same(cold, sampler.generate([later])[0])  # goes on from the first piece of the one before
    together = ids(found)
    assert together == ids(sampler.generate(requests))
    assert together[::-1] == ids(sampler.generate(requests[::-1]))
    assert together[7] == ids(sampler.generate([requests[7]]))[0]
    policy, params = seeded()
    assert together == ids(sampler_of(policy, params, tmp_path, slots=7).generate(requests))
    for group in range(4):
        assert len({tuple(tokens) for tokens in together[3 * group : 3 * group + 3]}) == 3
    other = sampler_of(policy, params, tmp_path, seed=4)
    assert together != ids(other.generate(requests))


def test_the_terminator_is_kept_and_the_reason_is_true(sampler):
    """case 4: several stop ids, nothing appended at the limit, a lone terminator"""
    free = sampler.generate(group_of(samples=2))
    stop = {int(free[0].tokens[2]), int(free[3].tokens[0]), 19}
    for plain, got in zip(free, sampler.generate(group_of(samples=2, stop=stop)), strict=True):
        places = [j for j, token in enumerate(plain.tokens) if token in stop]
        end = places[0] + 1 if places else 5
        np.testing.assert_array_equal(got.tokens, plain.tokens[:end])
        assert got.stop_reason is (StopReason.STOP if places else StopReason.LENGTH)
    assert len(sampler.generate(group_of(samples=2, stop=stop))[3].tokens) == 1
    last = [int(free[0].tokens[-1])]
    if last[0] not in free[0].tokens[:-1]:
        assert sampler.generate([request(PROMPTS[0], stop=last)])[0].stop_reason is StopReason.STOP
    short = sampler.generate([request(PROMPTS[0], limit=1)])[0]
    assert len(short.tokens) == 1 and short.stop_reason is StopReason.LENGTH


def test_each_bucket_compiles_once(sampler):
    """case 38"""
    for length, samples in itertools.product((1, 3, 4, 5, 8), (1, 2, 6)):
        sampler.generate([request([2] * length, 5, k, limit=1 + k % 5) for k in range(samples)])
    rows = {"2 x 4", "2 x 8"}
    known = {f"{what}/{each}" for what in ("read", "decode") for each in rows} | {"admit"}
    assert set(sampler.compilations.values()) == {1}
    assert known <= set(sampler.compilations)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"prompt": [1] * 9}, "prompt of 9 tokens; allowed: 1 to 8"),
        ({"prompt": []}, "prompt of 0 tokens"),
        ({"prompt": [20]}, "allowed: 0 to 19"),
        ({"limit": 6}, "max_new_tokens=6; allowed: 1 to 5"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"stop": range(9)}, "9 stop ids; allowed: 8"),
        ({"group": -1}, "group=-1"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_served_is_named(sampler, bad, words):
    with pytest.raises(ValueError, match="request 1 .*" + words):
        sampler.generate([request([1]), request(**{"prompt": [1], **bad})])


def test_new_weights_replace_the_old_ones_whole(tmp_path):
    """case 37: a probe's log-prob is the trainer's new one; a wrong digest is refused"""
    policy, params = seeded()
    sampler = sampler_of(policy, params, tmp_path, prompt_buckets=(4,))
    asked = request([3, 1, 4], temperature=0.0)
    before = sampler.generate([asked])[0]
    moved = {**params, "embedding": params["embedding"] + 0.05}
    digest = write_weights(tmp_path / "v=0-1", moved, epoch=0, step=1)
    assert sampler.version is not None and digest != sampler.version.digest
    with pytest.raises(ValueError, match="asked for was"):
        sampler.load(Version(0, 1, "0" * 64), str(tmp_path / "v=0-1"))
    np.testing.assert_array_equal(sampler.generate([asked])[0].logp, before.logp)
    sampler.load(Version(0, 1, digest), str(tmp_path / "v=0-1"))
    after = sampler.generate([asked])[0]
    assert after.version == Version(0, 1, digest) and after.logp[0] != before.logp[0]
    scored = np.asarray(logp(policy, moved, rows([[3, 1, 4, *after.tokens]])))[0, 3:]
    np.testing.assert_allclose(after.logp, scored, atol=1e-5)


def test_nothing_is_served_before_the_first_weights():
    sampler = Sampler(
        policy_on(),
        None,
        seed=0,
        slots=2,
        prompt_buckets=(4,),
        max_new_tokens=2,
        samples_per_prompt=1,
        record_routes=False,
    )
    with pytest.raises(RuntimeError, match="no weights"):
        sampler.generate([request([1])])


def test_a_mesh_gives_the_same_samples(sampler, tmp_path):
    policy, params = seeded()
    sharded = policy_on({"data": 2, "tensor": 2})
    other = sampler_of(sharded, params, tmp_path, prompt_buckets=(8,))
    requests = [request(PROMPTS[1], 1, k) for k in range(6)]
    assert ids(other.generate(requests)) == ids(
        sampler_of(policy, params, tmp_path, prompt_buckets=(8,)).generate(requests)
    )
    with pytest.raises(ValueError, match="sampler.slots=3 "):
        sampler_of(sharded, params, tmp_path, slots=3)


def test_draws_follow_the_probabilities_and_never_the_impossible():
    vocab = 300  # more than one block
    mass = np.zeros(vocab, np.float32)
    mass[[5, 130, 299]] = [1, 2, 5]
    uniform = jnp.asarray((np.arange(800) + 0.5) / 800, jnp.float32)
    found = np.asarray(jax.jit(invert)(jnp.tile(mass, (800, 1)), uniform))
    np.testing.assert_array_equal(np.unique(found), [5, 130, 299])
    np.testing.assert_array_equal(
        [(found == token).sum() for token in (5, 130, 299)], [100, 200, 500]
    )
    edges = jnp.array([0.0, 1 - 2**-23, 1 - 2**-24, 1.0])  # 1.0 is what rounding could make of it
    generator = np.random.default_rng(0)
    for _ in range(20):
        rough = generator.random((4, vocab)).astype(np.float32) * (
            generator.random((4, vocab)) < 0.3
        )
        token = np.asarray(jax.jit(invert)(jnp.asarray(rough), edges))
        assert (rough[np.arange(4), token] > 0).all()


def test_the_largest_is_the_first_of_its_equals():
    x = np.random.default_rng(0).integers(0, 9, (40, 300)).astype(np.float32)  # many are alike
    x[0, :299], x[1], x[2, 140:] = -np.inf, -7, 9
    index, value = jax.jit(largest)(jnp.asarray(x))
    np.testing.assert_array_equal(index, x.argmax(-1))
    np.testing.assert_array_equal(value, x.max(-1))
    assert index[:3].tolist() == [299, 0, int(x[2].argmax())]


def test_a_log_prob_is_never_positive_and_is_at_the_temperature():
    """cases 2 and 8"""
    logits = jnp.array([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0], [40.0, 0.0]])
    key = jnp.zeros((4, 2), jnp.uint32)
    temperature = jnp.array([1.0, 0.5, 2.0, 1.0])
    token, found = draw(logits, key, jnp.zeros(4, jnp.int32), temperature)
    right = {0: [-0.126928, -0.018150, -0.313262, 0.0]}
    for row in range(4):
        if token[row] == 0:
            assert found[row] == pytest.approx(right[0][row], abs=1e-6)
    assert (token == 0).any() and (found <= 0).all()


def test_case_3_log_probs_are_over_the_whole_vocabulary():
    # top-p of .8 would keep {0, 1} and say log(.5 / .8) = -.470004 of token 0
    logits = jnp.tile(jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05])), (64, 1))
    key = jnp.stack([jnp.arange(64, dtype=jnp.uint32)] * 2, axis=1)
    token, found = draw(logits, key, jnp.zeros(64, jnp.int32), jnp.ones(64))
    assert set(np.asarray(token).tolist()) == {0, 1, 2, 3}  # nothing is cut off
    np.testing.assert_allclose(found[token == 0], -0.693147, atol=1e-6)
