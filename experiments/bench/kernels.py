"""Seconds of loss and advantage kernels on [1024, 2048] tokens, ours beside two others, one thread.

    PYTHON -m experiments.bench.kernels [--rows 1024 --tokens 2048 --seconds 4]

PYTHON has jax and jaxtyping, and verl with torch if verl is to be measured. Each line of stdout is
the JSON of one operation: milliseconds for value and gradient by the log-probs (advantages: value)
of

    ours    the jitted kernel under a weight for each token, which the step has from `credit`;
            "+ curves" with all of its diagnostics averaged besides
    bare    the same formula by hand: a clipped surrogate averaged over counted tokens, jitted
    verl    verl.trainer.ppo.core_algos as its trainer calls it, eager, with its metrics

and the ratios. The three take turns, so that a busy machine slows them alike, and what is compared
is the fastest CPU time of each (``process_time``: one thread, waiting does not count).
"""

import argparse
import os

# Before jax and torch start their threads.
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["OMP_NUM_THREADS"] = "1"

import functools  # noqa: E402
import importlib  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Mapping  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from experiments.bench.peers_losses import arrays, trust  # noqa: E402
from jaxrl.kernels import groups, ratios, surrogates, weights  # noqa: E402
from jaxrl.kernels.steps import over_tokens  # noqa: E402
from jaxrl.kernels.trust import Trust, trusted_surrogate  # noqa: E402

Run = Callable[[], Any]


def fastest(runs: Mapping[str, Run], seconds: float) -> dict[str, float]:
    """Milliseconds of CPU that each takes at best, over turns for so many seconds a run."""
    for run in runs.values():
        run()  # compiled, and its memory is there
    best = dict.fromkeys(runs, float("inf"))
    end = time.monotonic() + seconds * len(runs)
    turns = 0
    while turns < 3 or time.monotonic() < end:
        for name, run in runs.items():
            began = time.process_time()
            run()
            best[name] = min(best[name], 1e3 * (time.process_time() - began))
        turns += 1
    return best


def losses(x: dict[str, jax.Array]) -> dict[str, dict[str, Run]]:
    """Ours and the same by hand, by operation."""
    rollout = jnp.arange(x["logp"].shape[0])
    minibatch = jnp.zeros_like(rollout)
    by_token = weights.token_mean(minibatch, x["mask"])
    by_rollout = weights.rollout_mean(rollout, minibatch, x["mask"])
    taken = (x["old"], x["sampler"], x["advantage"], x["mask"])

    def ours(logp: jax.Array, *arrays: jax.Array, how: Trust, curves: bool) -> Any:
        old, sampler, advantage, mask, weight = arrays
        each, diagnostics = trusted_surrogate(
            logp, old, sampler, advantage, rollout, mask, trust=how
        )
        told = {n: (weight * v).sum() for n, v in diagnostics.items()} if curves else {}
        return (each * weight).sum(), jax.lax.stop_gradient(told)

    def gspo(logp: jax.Array, *arrays: jax.Array) -> Any:
        old, _, advantage, mask, weight = arrays
        ratio = ratios.rollout_ratio(logp, old, rollout, mask)
        each, _ = surrogates.clipped_surrogate(ratio, advantage, clip_low=3e-4, clip_high=4e-4)
        return (each * weight).sum(), {}

    def bare(logp: jax.Array, *arrays: jax.Array, whole: bool) -> Any:
        old, sampler, advantage, mask, _ = arrays
        ratio, high = jnp.exp(logp - old), 1.28 if whole else 1.2
        each = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, high) * advantage)
        if whole:
            each = jnp.where(advantage < 0, jnp.minimum(each, -3 * advantage), each)
            each *= jnp.minimum(jnp.exp(old - sampler), 2)
        return (each * mask).sum() / mask.sum(), {}

    def bare_gspo(logp: jax.Array, *arrays: jax.Array) -> Any:
        old, _, advantage, mask, _ = arrays
        tokens = mask.sum(-1)
        ratio = jnp.exp(((logp - old) * mask).sum(-1) / tokens)[:, None]
        gain = advantage[:, :1]
        each = -jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - 3e-4, 1 + 4e-4) * gain)
        return each.mean(), {}

    def ready(function: Callable[..., Any], weight: jax.Array, **how: Any) -> Run:
        objective = functools.partial(function, **how)
        compiled = jax.jit(jax.value_and_grad(objective, has_aux=True))
        return lambda: jax.block_until_ready(compiled(x["logp"], *taken, weight))

    def three(how: Trust, whole: bool) -> dict[str, Run]:
        return {
            "ours": ready(ours, by_token, how=how, curves=False),
            "ours + curves": ready(ours, by_token, how=how, curves=True),
            "bare": ready(bare, by_token, whole=whole),
        }

    corrected = trust(clip_high=0.28, dual_clip=3.0, mismatch="truncate", mismatch_high=2.0)
    return {
        "clipped surrogate": three(trust(), False),
        "dual clip, tis": three(corrected, True),
        "gspo": {"ours": ready(gspo, by_rollout), "bare": ready(bare_gspo, by_rollout)},
    }


def advantages(x: dict[str, jax.Array]) -> dict[str, Run]:
    """Rewards to an advantage at each token: ours, and the same by reshaping equal groups."""
    rollout, size = jnp.arange(x["reward"].shape[0]), int((x["group"] == x["group"][0]).sum())

    @jax.jit
    def ours(reward: jax.Array, group: jax.Array, mask: jax.Array) -> jax.Array:
        return over_tokens(groups.group_scale(reward, group, mask.any(-1)), rollout, mask)

    @jax.jit
    def bare(reward: jax.Array, mask: jax.Array) -> jax.Array:
        of = reward.reshape(-1, size)
        scaled = (of - of.mean(1, keepdims=True)) / (of.std(1, ddof=1, keepdims=True) + 1e-6)
        return scaled.reshape(-1, 1) * mask

    return {
        "ours": lambda: jax.block_until_ready(ours(x["reward"], x["group"], x["mask"])),
        "bare": lambda: jax.block_until_ready(bare(x["reward"], x["mask"])),
    }


def verl(given: Mapping[str, np.ndarray]) -> dict[str, Run]:
    """The same operations by verl, if it is installed."""
    if importlib.util.find_spec("verl") is None:
        return {}
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    helper = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    actor = importlib.import_module("verl.workers.config").ActorConfig
    t = {name: torch.from_numpy(np.array(value)) for name, value in given.items()}
    mask, logp = t["mask"].float(), t["logp"].requires_grad_()
    advantage = t["advantage"].contiguous()
    scores = torch.zeros(mask.shape)
    scores[:, 0] = t["reward"]

    def policy(name: str, low: float, high: float, dual: float, how: str, tis: bool) -> Run:
        numbers = actor(
            strategy="fsdp",
            clip_ratio=low,
            clip_ratio_low=low,
            clip_ratio_high=high,
            clip_ratio_c=dual,
            rollout_n=8,
            ppo_micro_batch_size_per_gpu=1,
        )

        def run() -> None:
            logp.grad, weight = None, None
            if tis:
                weight, _ = helper.compute_rollout_correction_weights(
                    t["old"] - t["sampler"], mask, "token", 2.0
                )
            arguments = (t["old"], logp, advantage, mask, how, numbers, weight)
            core.get_policy_loss_fn(name)(*arguments)[0].backward()

        return run

    def credit(estimate: Callable[..., Any]) -> Run:
        return lambda: estimate(scores.clone(), mask, given["group"])

    mean, rollouts = "token-mean", "seq-mean-token-mean"
    return {
        "clipped surrogate": policy("vanilla", 0.2, 0.2, 1e9, mean, False),
        "dual clip, tis": policy("vanilla", 0.2, 0.28, 3.0, mean, True),
        "gspo": policy("gspo", 3e-4, 4e-4, 1e9, rollouts, False),
        "advantage": credit(core.compute_grpo_outcome_advantage),
        "advantage, vectorised": credit(core.compute_grpo_vectorized_outcome_advantage),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each run of an operation")
    asked = parser.parse_args()
    given = arrays(asked.rows, asked.tokens)
    given["advantage"] = np.broadcast_to(given["advantage"][:, None], given["logp"].shape)
    x = {name: jnp.asarray(value) for name, value in given.items()}
    credited = advantages(x)
    table = losses(x) | {"advantage": credited, "advantage, vectorised": credited}
    others = verl(given)
    for operation, runs in table.items():
        more = {"verl": others[operation]} if operation in others else {}
        found = fastest({**runs, **more}, asked.seconds)
        line = {"operation": operation, "rows": asked.rows, "tokens": asked.tokens}
        line |= {"cpu_ms": {name: round(ms, 3) for name, ms in found.items()}}
        line |= {"ours_over_bare": round(found["ours"] / found["bare"], 3)}
        if more:
            line |= {"verl_over_ours": round(found["verl"] / found["ours"], 2)}
        print(json.dumps(line | {"jax": jax.__version__}), flush=True)


if __name__ == "__main__":
    main()
