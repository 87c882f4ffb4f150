"""A model small enough for a test, its weights on disk, rows to score, and the decoder in numpy."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.batch import Batch, View
from jaxrl.kernels.readings import taken_logp
from jaxrl.mesh import Rules, make_mesh
from jaxrl.model.form import ModelConfig, qwen3
from jaxrl.model.policy import Policy, build
from jaxrl.model.sampler import Sampler
from jaxrl.model.versions import write_weights
from jaxrl.pool.rollout import Version

CONFIG = qwen3(
    vocab_size=20,
    layers=2,
    width=16,
    heads=4,
    kv_heads=2,
    head_size=8,
    hidden=24,
    rope_theta=10_000.0,
    norm_epsilon=1e-6,
    tied_head=True,
    dtype="float32",
    param_dtype="float32",
    remat="none",
    score_chunk_positions=16,
)
STUDENT = (("student", "plain"),)
MESHES = ({}, {"fsdp": 2}, {"fsdp": 2, "tensor": 2}, {"data": 4})


def policy_on(sizes: Mapping[str, int] | None = None, **changes: Any) -> Policy:
    """A tiny policy on the first devices, or without a mesh."""
    mesh = None
    if sizes is not None:
        count = int(np.prod(list(sizes.values()), dtype=int))
        mesh = make_mesh(sizes, jax.devices()[:count])
    return build(dataclasses.replace(CONFIG, **changes), mesh, Rules())


def seeded(**changes: Any) -> tuple[Policy, dict[str, jax.Array]]:
    """A policy without a mesh and lively weights of a fixed seed."""
    policy = policy_on(**changes)
    return policy, _drawn(policy)


@functools.lru_cache(maxsize=16)
def _drawn(policy: Policy) -> dict[str, jax.Array]:
    return lively(policy.init(jax.random.key(1)))


@jax.jit
def lively(params: Mapping[str, jax.Array], scale: float = 2.0) -> dict[str, jax.Array]:
    """Weights whose every parameter matters: no norm at its initial 1, logits far from flat."""
    grown = {}
    for place, (name, x) in enumerate(sorted(params.items())):
        noise = jax.random.normal(jax.random.key(100 + place), x.shape, x.dtype)
        grown[name] = x * (1 + 0.3 * noise) if name.endswith("scale") else x * scale
    return grown


def drawn(shapes: Mapping[str, Any], seed: int = 1) -> dict[str, Any]:
    """Weights of these shapes without a compilation: every parameter matters, none is large."""
    draw = np.random.default_rng(seed)
    made = {name: draw.normal(0, 0.3, form.shape) for name, form in shapes.items()}
    return {
        name: (x + name.endswith("scale")).astype(shapes[name].dtype) for name, x in made.items()
    }


def rows(
    tokens: Any,
    segment: Any = None,
    position: Any = None,
    temperature: float | Any = 1.0,
    views: Mapping[str, View] | None = None,
) -> Batch:
    """A batch for `score`; everything that it does not look at is filled with zeros."""
    tokens = np.asarray(tokens, np.int32)
    segment = np.ones_like(tokens) if segment is None else np.asarray(segment, np.int32)
    if position is None:
        position = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape) * (segment > 0)
    nothing = jnp.zeros(tokens.shape, jnp.int32)
    each = jnp.zeros(tokens.shape[0], jnp.int32)
    return Batch(
        tokens=jnp.asarray(tokens),
        position=jnp.asarray(position, jnp.int32),
        segment=jnp.asarray(segment),
        kind=nothing,
        step=nothing,
        sampler_logp=nothing * 0.0,
        version=nothing,
        temperature=jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), tokens.shape),
        rollout=jnp.arange(tokens.shape[0]),
        reward=each * 0.0,
        valid=each == 0,
        truncated=each != 0,
        group=each,
        minibatch=each,
        branch_weight=each + 1.0,
        facts={},
        views=views or {},
    )


def read(logits: Mapping[str, jax.Array], taken: jax.Array) -> dict[str, jax.Array]:
    """The student's log-prob of the taken token."""
    return {"logp": taken_logp(logits["student"], taken)}


def logp(policy: Policy, params: Mapping[str, jax.Array], batch: Batch) -> jax.Array:
    """`score` with `read`, jitted."""
    score = jax.jit(lambda p, b: policy.score({"student": p}, b, read, STUDENT)["logp"])
    return score(params, batch)


def sampler_of(
    policy: Policy, params: Mapping[str, jax.Array], path: Any, **changes: Any
) -> Sampler:
    """A sampler that has loaded these weights from disk."""
    settings: dict[str, Any] = dict(
        seed=3,
        slots=4,
        prompt_buckets=(4, 8),
        max_new_tokens=5,
        samples_per_prompt=3,
        record_routes=False,
    )
    sampler = Sampler(policy, policy.mesh, **{**settings, **changes})
    digest = write_weights(path / "v=0-0", params, epoch=0, step=0)
    sampler.load(Version(0, 0, digest), str(path / "v=0-0"))
    return sampler


def numpy_logits(
    config: ModelConfig, params: Mapping[str, Any], tokens: Sequence[int]
) -> np.ndarray:
    """The decoder again, [token vocab], in numpy and float64, one head at a time."""
    weights = {name: np.asarray(x, np.float64) for name, x in params.items()}
    size, count = config.head_size, len(tokens)

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_epsilon) * scale

    def turn(x: np.ndarray) -> np.ndarray:
        turned = np.empty_like(x)
        for position in range(count):
            for pair in range(size // 2):
                angle = position * config.rope_theta ** (-2 * pair / size)
                a, b = x[position, pair], x[position, pair + size // 2]
                turned[position, pair] = a * np.cos(angle) - b * np.sin(angle)
                turned[position, pair + size // 2] = b * np.cos(angle) + a * np.sin(angle)
        return turned

    x = weights["embedding"][np.asarray(tokens)]
    for layer in range(config.layers):
        at = {n[7:]: w[layer] for n, w in weights.items() if n.startswith("blocks/")}
        inner = norm(x, at["attention_norm/scale"])
        for head in range(config.heads):
            shared = head // (config.heads // config.kv_heads)
            query = inner @ at["attention/query/kernel"][:, head]
            key = inner @ at["attention/key/kernel"][:, shared]
            value = inner @ at["attention/value/kernel"][:, shared]
            query = turn(norm(query, at["attention/query_norm/scale"]))
            key = turn(norm(key, at["attention/key_norm/scale"]))
            scores = np.exp(query @ key.T / np.sqrt(size)) * np.tril(np.ones((count, count)))
            mixed = scores / scores.sum(-1, keepdims=True) @ value
            x = x + mixed @ at["attention/output/kernel"][head]
        inner = norm(x, at["mlp_norm/scale"])
        gate = inner @ at["mlp/gate/kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * (inner @ at["mlp/up/kernel"])) @ at["mlp/down/kernel"]
    last = norm(x, weights["norm/scale"])
    return last @ (weights["embedding"].T if config.tied_head else weights["head/kernel"])


def numpy_logp(
    config: ModelConfig, params: Mapping[str, Any], tokens: Sequence[int], temperature: float
) -> np.ndarray:
    """[token] log-prob of each token after the ones before it; 0 for the first."""
    logits = numpy_logits(config, params, tokens) / temperature
    table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.array([0.0] + [table[j - 1, tokens[j]] for j in range(1, len(tokens))])
