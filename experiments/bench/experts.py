"""Tokens a second of a mixture of experts, value and gradient, beside a loop and a dense block.

    PYTHON -m experiments.bench.experts [--experts 16 --per-token 4 --tokens-an-expert 128 256]

Each line of stdout is the JSON of one shape: tokens/s for the value and the gradients by x, the
gates and all weights of

    padded   jaxrl.model.experts.mixture as it runs on CPU
    ragged   the same through jax.lax.ragged_dot, only if --ragged is given: XLA:CPU computes every
             row under every expert
    masked   a loop (lax.scan) over the experts, each of which computes every token; a mask keeps
             its own
    picked   a loop over the experts, each of which fetches its own tokens into room for twice the
             mean and adds what it made to their rows: a capacity, so that it drops tokens where the
             load is uneven
    dense    one SwiGLU block as wide as the active experts of a token together

and the ratios. All take turns in one process, and of each the fastest run counts: CPU time on one
core, or, with --threads 2, the time that passed. Freed memory stays with the process: else what is
measured is how the system hands out pages, to some of them and not to others.
"""

import argparse
import ctypes
import os

asked = argparse.ArgumentParser()
asked.add_argument("--experts", type=int, default=16)
asked.add_argument("--per-token", type=int, default=4)
asked.add_argument("--tokens-an-expert", type=int, nargs="+", default=[128, 256])
asked.add_argument("--width", type=int, default=384)
asked.add_argument("--hidden", type=int, default=384, help="of one expert")
asked.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
asked.add_argument("--threads", type=int, choices=(1, 2), default=1)
asked.add_argument("--lean", type=float, default=0.0, help="deviation of experts' logits")
asked.add_argument("--seconds", type=float, default=4.0, help="for each of them")
asked.add_argument("--ragged", action="store_true")
asked.add_argument("--seed", type=int, default=0)
given = asked.parse_args()
if given.threads == 1:  # before jax starts its threads
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
for parameter, value in ((-4, 0), (-1, 2**31 - 1), (-8, 1)):  # no mmap, no trim, one arena
    ctypes.CDLL("libc.so.6").mallopt(parameter, value)

import functools  # noqa: E402
import json  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Mapping  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from jaxrl.kernels.routers import softmax_router  # noqa: E402
from jaxrl.model.experts import mixture  # noqa: E402

Run = Callable[[], Any]


def fastest(runs: Mapping[str, Run], seconds: float) -> dict[str, float]:
    """Seconds that each takes at best, over turns for so many seconds a run."""
    clock = time.process_time if given.threads == 1 else time.perf_counter
    best = dict.fromkeys(runs, float("inf"))
    end = time.monotonic() + seconds * len(runs)
    turns = 0
    while turns < 5 or time.monotonic() < end:
        for name, run in runs.items():
            began = clock()
            run()
            best[name] = min(best[name], clock() - began)
        turns += 1
    return best


def swiglu(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Of one expert, or of the dense block."""
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def masked(x: jax.Array, routes: jax.Array, gates: jax.Array, *weights: jax.Array) -> jax.Array:
    """Every expert on every token."""

    def one(total: jax.Array, own: Any) -> tuple[jax.Array, None]:
        e, *weight = own
        share = jnp.where(routes == e, gates, 0).sum(1, keepdims=True).astype(x.dtype)
        return total + share * swiglu(x, *weight), None

    return jax.lax.scan(one, jnp.zeros_like(x), (jnp.arange(weights[0].shape[0]), *weights))[0]


def picked(x: jax.Array, routes: jax.Array, gates: jax.Array, *weights: jax.Array) -> jax.Array:
    """Every expert on room for twice its mean load."""
    room = min(2 * routes.size // weights[0].shape[0], x.shape[0])

    def one(total: jax.Array, own: Any) -> tuple[jax.Array, None]:
        e, *weight = own
        share = jnp.where(routes == e, gates, 0).sum(1, keepdims=True).astype(x.dtype)
        (mine,) = jnp.nonzero((routes == e).any(1), size=room, fill_value=x.shape[0])
        made = swiglu(x.at[mine].get(mode="fill", fill_value=0), *weight)
        made = made * share.at[mine].get(mode="fill", fill_value=0)
        return total.at[mine].add(made, mode="drop"), None

    return jax.lax.scan(one, jnp.zeros_like(x), (jnp.arange(weights[0].shape[0]), *weights))[0]


def runs(tokens: int) -> dict[str, Run]:
    """Compiled, and run once."""
    experts, width, hidden = given.experts, given.width, given.hidden
    keys = iter(jax.random.split(jax.random.key(given.seed), 10))

    def normal(*shape: int) -> jax.Array:
        drawn = jax.random.normal(next(keys), shape) / shape[-2] ** 0.5
        return drawn.astype(given.dtype)

    x, wide = normal(tokens, width) * tokens**0.5, hidden * given.per_token
    logits = jax.random.normal(next(keys), (tokens, experts))
    logits += given.lean * jax.random.normal(next(keys), (experts,))
    routes, gates = softmax_router(logits, per_token=given.per_token, normalise=True, scale=1.0)
    inward, dense = (experts, width, hidden), (width, wide)
    weights = (normal(*inward), normal(*inward), normal(experts, hidden, width))
    one = (normal(*dense), normal(*dense), normal(wide, width))

    def ready(mix: Callable[..., jax.Array], weights: tuple[jax.Array, ...]) -> Run:
        def objective(x: jax.Array, gates: jax.Array, weights: Any, routes: jax.Array) -> jax.Array:
            made = mix(x, routes, gates, *weights).astype(jnp.float32)
            return (made * made).sum()

        compiled = jax.jit(jax.value_and_grad(objective, (0, 1, 2)))
        run = lambda: jax.block_until_ready(compiled(x, gates, weights, routes))  # noqa: E731
        run()
        return run

    ours = functools.partial(mixture, activation=jax.nn.silu)
    every = {
        "padded": ready(functools.partial(ours, matmul="padded"), weights),
        "masked": ready(masked, weights),
        "picked": ready(picked, weights),
        "dense": ready(lambda x, routes, gates, *one: swiglu(x, *one), one),
    }
    if given.ragged:
        every["ragged"] = ready(functools.partial(ours, matmul="ragged"), weights)
    return every


def main() -> None:
    """Measure and print."""
    for load in given.tokens_an_expert:
        tokens = load * given.experts // given.per_token
        found = fastest(runs(tokens), given.seconds)
        line = vars(given) | {"tokens_an_expert": load, "tokens": tokens}
        line |= {"tokens_s": {name: round(tokens / s) for name, s in found.items()}}
        line |= {f"padded_over_{n}": round(found[n] / found["padded"], 2) for n in found}
        print(json.dumps(line | {"jax": jax.__version__}), flush=True)


if __name__ == "__main__":
    main()
