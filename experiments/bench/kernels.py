"""Seconds of loss and advantage kernels on [1024, 2048] tokens, ours beside two others, one thread.

    PYTHON -m experiments.bench.kernels [--rows 1024 --tokens 2048 --seconds 4 --only gspo]

PYTHON has jax and jaxtyping, and verl with torch if verl is to be measured. Each line of stdout is
the JSON of one operation: milliseconds for value and gradient by the log-probs (advantages: value)
of

    ours     the jitted kernel, its losses averaged under a weight for each token, which the step
             has from ``credit``
    bare     the same formula by hand (bare.py), averaged over counted tokens, jitted
    clipped  the bare clipped surrogate, whatever the operation
    curves   ours with all of its diagnostics averaged besides (clipped surrogates)
    verl     verl.trainer.ppo.core_algos as its trainer calls it, eager, with its metrics
    copy     one array of [rows, tokens] float32 copied into another: what memory costs

and the ratios. All take turns in random order, so that a busy machine slows them alike; a ratio is
the median over turns of that inside one turn, in CPU time (``process_time``: one thread, waiting
does not count), and milliseconds are medians too. A kernel is to take at most 1.2 x bare.

``grpo`` is the whole loss of GRPO: clipped surrogate and k3 under one mean over rollouts, with an
advantage at each token (as a step has it) or one number a rollout; verl's is its policy loss and
KL term, one backward pass. Advantages are made for each token, or left as numbers of rollouts.

On a CPU memory is what costs: a temporary of [1024, 2048] takes as long as an exponential of each
of its entries. With verl in the turns (88a48a0, --seconds 2, verl 0.9.1, torch 2.13.0, jax 0.10.2,
one of two cores, the other idle) GRPO's loss as a whole takes verl 11.8 x as long, 13.3 x with one
advantage a rollout, and its advantages 59 x by group, which is verl's default. Each operation takes
at most 1.2 x the clipped surrogate or the same formula by hand: grpo 1.17 and 1.16, contrastive jsd
1.17, segments 1.09, all others below 1.

All ten of verl's single functions together take 13.5 x ours; one by one seven take 10 x or more,
not CISPO (5.3), k3 (4.4) and vectorised advantages (3.5; 8.5 as numbers of rollouts, where most of
our .29 ms is the call). The last cannot be had: verl's take 3.3 copies of one array (``copy``), and
what has to read the mask and write the advantages takes .6 of one. CISPO and k3 would have to take
3.2 and 3.0 copies; to read and write once takes 2.5 and 2, and XLA passes over memory twice, once
for the value and once for the gradient.
"""

import argparse
import os

from jaxrl.train import heap

# Before jax and torch start their threads.
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["OMP_NUM_THREADS"] = "1"
heap.keep()  # as whatever starts a run does: else some runs measure how the system hands out pages

import importlib  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Mapping  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from experiments.bench import bare  # noqa: E402
from experiments.bench.peers_losses import arrays, trust  # noqa: E402
from jaxrl.kernels import weights  # noqa: E402
from jaxrl.kernels.steps import over_last_token  # noqa: E402
from jaxrl.kernels.trust import Trust, trusted_surrogate  # noqa: E402

Run = Callable[[], Any]


def turns(runs: Mapping[str, Run], seconds: float) -> dict[str, np.ndarray]:
    """Milliseconds of CPU that each takes in each of its turns, for so many seconds a run."""
    for run in runs.values():
        run()  # compiled, and its memory is there
    taken: dict[str, list[float]] = {name: [] for name in runs}
    order, rng = list(runs), np.random.default_rng(0)
    end = time.monotonic() + seconds * len(runs)
    while len(taken[order[0]]) < 5 or time.monotonic() < end:
        rng.shuffle(order)
        for name in order:
            began = time.process_time()
            runs[name]()
            taken[name].append(1e3 * (time.process_time() - began))
    return {name: np.array(ms) for name, ms in taken.items()}


class _Read(dict[str, jax.Array]):
    """Arrays, and which of them were asked for."""

    def __init__(self, x: Mapping[str, jax.Array]) -> None:
        super().__init__(x)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> jax.Array:
        self.names.add(name)
        return super().__getitem__(name)


def _compiled(
    function: Callable[[Mapping[str, jax.Array]], Any], x: Mapping[str, jax.Array]
) -> Run:
    """Called with the arrays that it reads alone: handing over the others takes time too."""
    asked = _Read(x)
    jax.eval_shape(lambda: function(asked))
    given = {name: x[name] for name in sorted(asked.names)}
    ready = jax.jit(function)
    return lambda: jax.block_until_ready(ready(given))


def _by_logp(objective: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """Value and gradient by the log-probs among the arrays."""
    differentiated = jax.value_and_grad(objective, **how)
    return lambda x: differentiated(x["logp"], x)


def _summed(loss: jax.Array, weight: jax.Array) -> jax.Array:
    """As the step does it (train/accumulate.py: weighted_sum)."""
    return jnp.where(weight != 0, loss * weight, 0).sum()


def _ours(loss: bare.Loss, weight: str, x: Mapping[str, jax.Array]) -> Run:
    def objective(logp: jax.Array, x: Mapping[str, jax.Array]) -> jax.Array:
        return _summed(loss(logp, x), x[weight])

    return _compiled(_by_logp(objective), x)


def _bare(loss: bare.Loss, x: Mapping[str, jax.Array]) -> Run:
    def objective(logp: jax.Array, x: Mapping[str, jax.Array]) -> jax.Array:
        each, mask = loss(logp, x), x["mask"]
        by_rollout = each.shape[1] == 1
        return each.mean() if by_rollout else (each * mask).sum() / mask.sum()

    return _compiled(_by_logp(objective), x)


def _curves(how: Trust, x: Mapping[str, jax.Array]) -> Run:
    def objective(logp: jax.Array, x: Mapping[str, jax.Array]) -> Any:
        given = (x["old"], x["sampler"], x["advantage"], x["rollout"], x["mask"])
        each, diagnostics = trusted_surrogate(logp, *given, trust=how)
        weight = x["by_token"]
        told = {name: (weight * value).sum() for name, value in diagnostics.items()}
        return _summed(each, weight), jax.lax.stop_gradient(told)

    return _compiled(_by_logp(objective, has_aux=True), x)


def operations(x: Mapping[str, jax.Array]) -> dict[str, dict[str, Run]]:
    """Ours and bare, by operation."""
    size = int((x["group"] == x["group"][0]).sum())
    table = {}
    for name, pair in bare.losses().items():
        weight = "by_rollout" if name.startswith(("gspo", "grpo")) else "by_token"
        table[name] = {"ours": _ours(pair[0], weight, x), "bare": _bare(pair[1], x)}
    for name, pair in bare.signals(size).items():
        table[name] = {"ours": _compiled(pair[0], x), "bare": _compiled(pair[1], x)}
    table["clipped surrogate"]["curves"] = _curves(trust(), x)
    table["dual clip, tis"]["curves"] = _curves(trust(**bare.DUAL), x)
    return table


def device_arrays(given: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """The arrays of `arrays`, and what the kernels take besides: labels, weights, a late reward."""
    x = {name: jnp.asarray(value) for name, value in given.items()}
    rollout, mask = jnp.arange(len(x["reward"])), x["mask"]
    minibatch = jnp.zeros_like(rollout)
    return x | {
        "rollout": rollout,
        "valid": mask.any(-1),
        "flag": x["ref"] < -1.8,
        "late": over_last_token(x["reward"], rollout, mask),
        "by_token": weights.token_mean(minibatch, mask),
        "by_rollout": weights.rollout_mean(rollout, minibatch, mask),
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
    advantage = t["advantage"]

    def distance(how: str) -> Any:
        return core.agg_loss(core.kl_penalty(logp, t["ref"], "low_var_kl"), mask, how)

    def policy(
        name: str, low: float, high: float, dual: float, how: str, tis: bool, kl: float = 0
    ) -> Run:
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
            term = core.get_policy_loss_fn(name)(*arguments)[0]
            (term + kl * distance(how) if kl else term).backward()

        return run

    def with_gradient(loss: Callable[[], Any]) -> Run:
        def run() -> None:
            logp.grad = None
            loss().backward()

        return run

    mean, rollouts = "token-mean", "seq-mean-token-mean"
    grpo = policy("vanilla", 0.2, 0.2, 1e9, rollouts, False, 0.04)
    value = with_gradient(lambda: core.compute_value_loss(logp, t["ref"], t["old"], mask, 0.2)[0])
    return {
        "clipped surrogate": policy("vanilla", 0.2, 0.2, 1e9, mean, False),
        "dual clip, tis": policy("vanilla", 0.2, 0.28, 3.0, mean, True),
        "gspo": policy("gspo", 3e-4, 4e-4, 1e9, rollouts, False),
        "cispo": policy("cispo", 0.9999, 0.2, 1e9, mean, False),
        "grpo": grpo,
        "grpo, one advantage a rollout": grpo,
        "k3": with_gradient(lambda: distance(mean)),
        "clipped value": value,
        **_verl_advantages(core, t["reward"], t["old"], mask, given["group"]),
    }


def _verl_advantages(
    core: Any, reward: Any, value: Any, mask: Any, group: np.ndarray
) -> dict[str, Run]:
    scores = mask.new_zeros(mask.shape)
    scores[:, 0] = reward

    def credit(estimate: Callable[..., Any]) -> Run:
        return lambda: estimate(scores.clone(), mask, group)

    by_group = credit(core.compute_grpo_outcome_advantage)
    vectorised = credit(core.compute_grpo_vectorized_outcome_advantage)
    return {
        "advantage": by_group,
        "advantage, vectorised": vectorised,
        "advantage of rollouts": by_group,
        "advantage of rollouts, vectorised": vectorised,
        "advantage, rloo": credit(core.compute_rloo_outcome_advantage),
        "gae, whitened": lambda: core.compute_gae_advantage_return(scores, value, mask, 0.99, 0.95),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each run of an operation")
    parser.add_argument("--only", default="", help="operations whose name has this in it")
    asked = parser.parse_args()
    given = arrays(asked.rows, asked.tokens)
    given["advantage"] = np.repeat(given["advantage"][:, None], asked.tokens, axis=1)
    x = device_arrays(given)
    yardstick, others = _bare(bare.clipped, x), verl(given)
    source, target = given["logp"].copy(), np.empty_like(given["logp"])
    copy: Run = lambda: np.copyto(target, source)  # noqa: E731
    for operation, runs in operations(x).items():
        if asked.only not in operation:
            continue
        more = {"verl": others[operation]} if operation in others else {}
        found = turns({**runs, "clipped": yardstick, "copy": copy, **more}, asked.seconds)

        def ratio(above: str, below: str, found: Mapping[str, np.ndarray] = found) -> float:
            return round(float(np.median(found[above] / found[below])), 3)

        line = {"operation": operation, "rows": asked.rows, "tokens": asked.tokens}
        line |= {"cpu_ms": {name: round(float(np.median(ms)), 3) for name, ms in found.items()}}
        line |= {"turns": len(found["ours"]), "ours_over_bare": ratio("ours", "bare")}
        line |= {"ours_over_clipped": ratio("ours", "clipped")}
        if more:
            line |= {"verl_over_ours": ratio("verl", "ours")}
            line |= {"verl_over_copy": ratio("verl", "copy")}
        print(json.dumps(line | {"jax": jax.__version__}), flush=True)


if __name__ == "__main__":
    main()
