"""A policy small enough to differentiate by hand, and rollouts written by hand."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.batch import Batch
from jaxrl.mesh import Rules, make_mesh
from jaxrl.pool.contract import Group
from jaxrl.pool.rollout import ACTION, PROMPT, Failure, Rollout, StopReason, Version
from jaxrl.train import state as states
from jaxrl.train.collate import collate
from jaxrl.train.step import Step, make_step

VOCAB = 8


@dataclasses.dataclass(frozen=True)
class Bigram:
    """Logits of a token from the one before: embed[before] * scale @ head. Satisfies what step.py
    asks of a policy."""

    rules: Rules = Rules()

    @property
    def axes(self):
        return {"embed": ("vocab", "embed"), "scale": ("embed",), "head": ("embed", "vocab")}

    def init(self, key):
        embed, head = jax.random.split(key)
        return {
            "embed": jax.random.normal(embed, (VOCAB, 4)),
            "scale": jnp.ones(4),
            "head": jax.random.normal(head, (4, VOCAB)),
        }

    def score(self, params, batch: Batch, read, scorers):
        before = jnp.pad(batch.tokens, ((0, 0), (1, 0)))[:, :-1]
        logits = {}
        for who, view in scorers:
            p = params[who]
            name = who if (who, view) == ("student", "plain") else f"{who}/{view}"
            x = (p["embed"][before] * p["scale"]) @ p["head"] / batch.temperature[..., None]
            logits[name] = x.reshape(-1, VOCAB)
        begun = (batch.segment > 0) & (jnp.arange(batch.tokens.shape[1]) > 0)
        found = read(logits, batch.tokens.reshape(-1))
        return {
            name: jnp.where(begun, x.reshape(batch.tokens.shape), 0) for name, x in found.items()
        }


def rollout(
    group: int,
    sample: int,
    prompt: Sequence[int],
    answer: Sequence[int],
    reward: float | None,
    *,
    logp: Sequence[float] | None = None,
    temperature: float = 1.0,
    failure: Failure = Failure.NONE,
    stop: StopReason = StopReason.STOP,
    facts: dict | None = None,
) -> Rollout:
    """A prompt and an answer; log-probs of the answer default to uniform."""
    asked, said = len(prompt), len(answer)
    spoken = [-math.log(VOCAB)] * said if logp is None else list(logp)
    return Rollout(
        run_id="run",
        group_id=group,
        sample=sample,
        attempt=0,
        task_key=str(group),
        content_hash=str(group),
        split="train",
        source="toy",
        tokens=np.array([*prompt, *answer], np.uint32),
        kind=np.array([PROMPT] * asked + [ACTION] * said, np.uint8),
        step=np.array([-1] * asked + [0] * said, np.int32),
        logp=np.array([0.0] * asked + spoken, np.float32),
        version_index=np.array([65535] * asked + [0] * said, np.uint16),
        temperature=np.array([0.0] * asked + [temperature] * said, np.float32),
        versions=(Version(0, 3, "digest"),),
        reward=reward,
        reward_components={},
        correct=bool(reward),
        stop_reason=stop,
        failure=failure,
        text="",
        facts=facts or {},
        times={},
    )


def group(number: int, rollouts: Sequence[Rollout]) -> Group:
    return Group(number, str(number), tuple(rollouts))


def random_groups(seed: int, groups: int, size: int, longest: int = 7) -> list[Group]:
    """Groups with answers of random lengths 1 .. longest - 2 and random rewards in {0, 1}."""
    random = np.random.default_rng(seed)

    def one(number: int, sample: int) -> Rollout:
        prompt = random.integers(1, VOCAB, 2).tolist()
        answer = random.integers(1, VOCAB, random.integers(1, longest - 1)).tolist()
        logp = (-random.random(len(answer)) * 3).tolist()
        return rollout(number, sample, prompt, answer, float(random.integers(0, 2)), logp=logp)

    return [group(g + 10, [one(g + 10, sample) for sample in range(size)]) for g in range(groups)]


def batch_of(
    groups, *, step_groups: int, size: int, minibatches: int = 1, buckets=(8,)
) -> Any:  # arrays of numpy, not of jax
    return collate(
        groups,
        token_buckets=buckets,
        groups_per_step=step_groups,
        rollouts_per_group=size,
        minibatches=minibatches,
        needs=(),
        algorithm="toy",
    )[0]


def mesh_of(**sizes: int):
    return make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])


def step_of(
    algorithm,
    tx,
    *,
    micro: int,
    size: int,
    epochs=1,
    minibatches=1,
    mesh=None,
    policy=None,
    lesson_txs=None,
    routed=None,
) -> Step:
    return make_step(
        policy or Bigram(),
        algorithm,
        tx,
        mesh=mesh or mesh_of(data=1),
        epochs=epochs,
        minibatches=minibatches,
        micro_rollouts=micro,
        rollouts_per_group=size,
        lesson_txs=lesson_txs,
        routed=routed,
    )


def state_of(algorithm, tx, *, mesh=None, policy=None, freeze=(), seed=0, params=None, others=None):
    policy = policy or Bigram()
    state = states.create(
        policy.init(jax.random.key(seed)) if params is None else params,
        tx,
        freeze=freeze,
        roles=states.roles_of(algorithm),
        key=jax.random.key(seed),
        step=0,
        others=others,
    )
    return states.place(state, policy, mesh or mesh_of(data=1))
