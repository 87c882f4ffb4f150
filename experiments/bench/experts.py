"""Tokens a second of a mixture of experts, beside a loop over the experts and a dense block.

    PYTHON -m experiments.bench.experts [--experts 16 --per-token 4 --tokens-an-expert 128 256]
    PYTHON -m experiments.bench.experts --step --threads 2 --experts 8 --per-token 2 --width 256
        --hidden 256

Each line of stdout is the JSON of one shape, and after them comes a table: tokens/s for the value
and the gradients by x, the gates and all weights of

    padded   jaxrl.model.experts.mixture as it runs on CPU
    ragged   the same through jax.lax.ragged_dot, only if --ragged is given: XLA:CPU computes every
             row under every expert
    masked   a loop (lax.scan) over the experts, each of which computes every token; a mask keeps
             its own
    picked   a loop over the experts, each of which fetches its own tokens into room for twice the
             mean and adds what it made to their rows: a capacity, so that it drops tokens where the
             load is uneven
    dense    one SwiGLU block as wide as the active experts of a token together

and the ratios. With --step each is not a block but a whole model of --layers layers, and what is
timed is the train step as the trainer builds it (jaxrl.train.rounds and loop, GRPO of
configs/router.py, one update a take, AdamW) on rollouts of 64 tokens, in --micro-batches of as many
tokens. All take turns in one process, after --warm turns that do not count: a product of a size
that had not come up before takes XLA:CPU milliseconds the first time, and loads move. Of each block
the fastest run counts, of each step the median: CPU time on one core, or, with --threads 2, the
time that passed (a step tells both). Freed memory stays with the process: else what is measured is
how the system hands out pages, to some of them and not to others.
"""

import argparse
import os

from jaxrl.train import heap

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
asked.add_argument("--step", action="store_true", help="whole train steps")
asked.add_argument("--layers", type=int, default=4, help="of a step's model")
asked.add_argument("--micro-batches", type=int, default=1, help="of a step, of these tokens each")
asked.add_argument("--warm", type=int, default=150, help="turns of each before those that count")
asked.add_argument("--seed", type=int, default=0)
given = asked.parse_args()
if given.threads == 1:  # before jax starts its threads
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
heap.keep()  # as whatever starts a run does

import functools  # noqa: E402
import json  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Mapping  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from etils import epath  # noqa: E402

from configs import router  # noqa: E402
from jaxrl.kernels.routers import softmax_router  # noqa: E402
from jaxrl.model import policy  # noqa: E402
from jaxrl.model.experts import mixture  # noqa: E402
from jaxrl.pool.contract import Group  # noqa: E402
from jaxrl.pool.rollout import ACTION, PROMPT, Failure, Rollout, StopReason, Version  # noqa: E402
from jaxrl.train import loop, rounds, settings, state  # noqa: E402

Run = Callable[[], Any]
LONG, ASKED, GROUP = 64, 16, 8  # tokens of a rollout, of its prompt; rollouts of a group


def timed(runs: Mapping[str, Run], seconds: float) -> dict[str, np.ndarray]:
    """CPU and passed seconds [turn 2] of each, over turns for so many seconds a run."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(given.warm):
            run()
    end = time.monotonic() + seconds * len(runs)
    while len(next(iter(taken.values()))) < 5 or time.monotonic() < end:
        for name, run in runs.items():
            began = time.process_time(), time.perf_counter()
            run()
            taken[name].append((time.process_time() - began[0], time.perf_counter() - began[1]))
    return {name: np.array(each) for name, each in taken.items()}


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


def blocks(tokens: int) -> dict[str, Run]:
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


def rollouts(groups: int, vocabulary: int) -> list[Group]:
    """Groups of random tokens, all of one length, with random rewards."""
    random = np.random.default_rng(given.seed)
    said = np.arange(LONG) >= ASKED

    def one(group: int, sample: int) -> Rollout:
        return Rollout(
            run_id="bench",
            group_id=group,
            sample=sample,
            attempt=0,
            task_key=str(group),
            content_hash=str(group),
            split="train",
            source="bench",
            tokens=random.integers(3, vocabulary, LONG).astype(np.uint32),
            kind=np.where(said, ACTION, PROMPT).astype(np.uint8),
            step=np.where(said, 0, -1).astype(np.int32),
            logp=np.where(said, -np.log(vocabulary), 0).astype(np.float32),
            version_index=np.where(said, 0, 65535).astype(np.uint16),
            temperature=said.astype(np.float32),
            versions=(Version(0, 0, "bench"),),
            reward=float(sample % 2),
            reward_components={},
            correct=bool(sample % 2),
            stop_reason=StopReason.STOP,
            failure=Failure.NONE,
            text="",
            facts={},
            times={},
        )

    return [Group(g, str(g), tuple(one(g, s) for s in range(GROUP))) for g in range(groups)]


def step_of(tokens: int, folder: str, *, dense: bool) -> Run:
    """The trainer's step on one take, compiled and run once."""
    config: Any = router.get_config()
    size = {"layers": given.layers, "width": given.width, "dtype": given.dtype}
    config.model.update(heads=4, kv_heads=2, head_size=given.width // 4, **size)
    config.model.hidden = given.hidden * given.per_token
    config.model.experts.update(
        count=0 if dense else given.experts, per_token=given.per_token, hidden=given.hidden
    )
    config.sampler.update(record_routes=False, prompt_buckets=(ASKED,), max_new_tokens=LONG - ASKED)
    config.pool.rollouts_per_group = GROUP
    config.task.update(train_prompts=64, held_out_prompts=16)
    config.phases.sft.train.balance_weight = 0.0  # a dense model has nothing to balance
    if tokens % (LONG * GROUP):
        raise SystemExit(f"{tokens} tokens; allowed with --step: multiples of {LONG * GROUP}")
    groups, micro = given.micro_batches * tokens // (LONG * GROUP), tokens // LONG
    config.train.update(groups=groups, micro_rollouts=micro, minibatches=1, token_buckets=(LONG,))
    phases = settings.phases(config.lock())
    parts, phase = rounds.assemble(phases, epath.Path(folder)), phases[-1]
    algorithm, step = loop.prepare(parts, phase)
    batch, _ = loop.lay_out(parts, phase, algorithm, rollouts(groups, config.model.vocab_size))
    params = parts.policy.init(jax.random.key(given.seed))
    fresh = rounds.fresh(phase, parts.policy, params, None)
    held = [state.place(fresh, parts.policy, parts.mesh)]

    def run() -> None:
        held[0], metrics = step(held[0], batch)  # the old state is consumed
        jax.block_until_ready((held[0], metrics))
        if step.trace_count > 1:  # with another mixture than the one that was put in its place
            raise SystemExit("the step was traced again")

    run()
    return run


def steps(tokens: int) -> dict[str, Run]:
    """Whole steps: the model's own mixture, loops in its place, and a dense model."""

    def looped(loop: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def mix(*arrays: jax.Array, activation: Any) -> jax.Array:
            flat = (a.reshape(-1, a.shape[-1]) for a in arrays[:3])
            return loop(*flat, *arrays[3:]).reshape(arrays[0].shape)

        return mix

    made, own = {}, policy.Visiting
    forms = {"padded": own, "masked": lambda: looped(masked), "picked": lambda: looped(picked)}
    with tempfile.TemporaryDirectory() as folder:
        for name, form in forms.items():
            policy.Visiting = form  # what is traced now keeps it
            try:
                made[name] = step_of(tokens, folder, dense=False)
            finally:
                policy.Visiting = own
        made["dense"] = step_of(tokens, folder, dense=True)
    return made


def table(lines: list[dict[str, Any]]) -> str:
    """Tokens/s of each, and how many times faster than each padded is."""
    rows = ["| tokens an expert | form | tokens/s | padded over it |", "|--:|---|--:|--:|"]
    for line in lines:
        for name, rate in line["tokens_s"].items():
            ratio = line[f"padded_over_{name}"]
            rows.append(f"| {line['tokens_an_expert']} | {name} | {rate} | {ratio:.2f} |")
    return "\n".join(rows)


def main() -> None:
    """Measure and print."""
    lines = []
    for load in given.tokens_an_expert:
        tokens = load * given.experts // given.per_token
        taken = timed((steps if given.step else blocks)(tokens), given.seconds)
        typical = np.median if given.step else np.min
        both: dict[str, list[float]] = {n: typical(x, axis=0).tolist() for n, x in taken.items()}
        found = {name: each[given.threads - 1] for name, each in both.items()}
        line = vars(given) | {"tokens_an_expert": load, "tokens": tokens}
        line |= {"turns": len(taken["padded"]), "load_average": round(os.getloadavg()[0], 1)}
        line |= {"tokens_s": {name: round(tokens / s) for name, s in found.items()}}
        line |= {f"padded_over_{n}": round(found[n] / found["padded"], 2) for n in found}
        if given.step:
            cpu = {f"cpu_{n}": round(both[n][0] / both["padded"][0], 2) for n in both}
            line |= {"cpu_ms": {n: round(1e3 * both[n][0]) for n in both}, **cpu}
        lines.append(line | {"jax": jax.__version__})
        print(json.dumps(lines[-1]), flush=True)
    print(table(lines))


if __name__ == "__main__":
    main()
