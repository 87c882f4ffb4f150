"""jaxrl on the work of work.py, through what users run: the config of GRPO (or of residual
advantages), the trainer's own step, the trainer's own sampler, the policy's own head.

    PYTHON -m experiments.bench.ours step jaxrl --size 32k --rows 8 --tokens 512 --prompt 128

--micro, --chunk, --remat and --keep are its own fields: what is alive at once. ``residual`` is the
step with a teacher of the student's form beside it, read in the same pass. Started by versus.py.
"""

import argparse
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from configs import grpo, residual
from experiments.bench import work
from experiments.bench.work import Run, Size, Take
from jaxrl.kernels.readings import taken_logp
from jaxrl.model.sampler import Sampler
from jaxrl.model.versions import write_weights
from jaxrl.pool.contract import Group, Request
from jaxrl.pool.rollout import ACTION, PROMPT, Failure, Rollout, StopReason, Version
from jaxrl.train import heap, loop, rounds, settings, state

Given = argparse.Namespace


def parameters(size: Size) -> dict[str, jax.Array]:
    """The work's weights by our names: blocks stacked, kernels ``[in ... out]``."""
    named, layers = work.weights(size), range(size.layers)

    def stacked(name: str, *shape: int) -> jax.Array:
        each = [named[f"model.layers.{layer}.{name}.weight"].T for layer in layers]
        return jnp.asarray(np.stack(each).reshape(size.layers, *shape) if shape else np.stack(each))

    width, one = size.width, size.head_size
    shapes = {
        "attention_norm/scale": ("input_layernorm",),
        "mlp_norm/scale": ("post_attention_layernorm",),
        "attention/query/kernel": ("self_attn.q_proj", width, size.heads, one),
        "attention/key/kernel": ("self_attn.k_proj", width, size.kv_heads, one),
        "attention/value/kernel": ("self_attn.v_proj", width, size.kv_heads, one),
        "attention/output/kernel": ("self_attn.o_proj", size.heads, one, width),
        "attention/query_norm/scale": ("self_attn.q_norm",),
        "attention/key_norm/scale": ("self_attn.k_norm",),
        "mlp/gate/kernel": ("mlp.gate_proj",),
        "mlp/up/kernel": ("mlp.up_proj",),
        "mlp/down/kernel": ("mlp.down_proj",),
    }
    blocks = {f"blocks/{name}": stacked(*how) for name, how in shapes.items()}  # type: ignore[arg-type]
    whole = {"embedding": "embed_tokens", "norm/scale": "norm"}
    return blocks | {ours: jnp.asarray(named[f"model.{x}.weight"]) for ours, x in whole.items()}


def config_of(given: Given) -> Any:
    """That of the method, with the work's model, optimizer and shapes."""
    config: Any = (residual if given.who == "residual" else grpo).get_config()
    size = work.SIZES[given.size]
    config.model.update(
        vocab_size=size.vocab,
        layers=size.layers,
        width=size.width,
        heads=size.heads,
        kv_heads=size.kv_heads,
        head_size=size.head_size,
        hidden=size.hidden,
        rope_theta=work.THETA,
        norm_epsilon=work.EPSILON,
        score_chunk_positions=given.chunk,
        remat=given.remat,
        score_remat=not given.keep,
    )
    config.optimizer.update(learning_rate=work.RATE, warmup_updates=0, b2=0.999)
    config.algorithm.trust.update(dual_clip=float("inf"), mismatch="none", mismatch_high=1.0)
    config.pool.update(rollouts_per_group=given.rows, tokenizer="characters")
    answer = given.tokens - given.prompt
    config.sampler.update(prompt_buckets=(given.prompt,), max_new_tokens=answer, slots=given.rows)
    micro = given.micro or given.rows
    config.train.update(groups=1, minibatches=1, micro_rollouts=micro, steps=1)
    config.train.update(token_buckets=(given.tokens,))
    config.train.packing.rows = "plain"
    config.task.update(train_prompts=64, held_out_prompts=16)
    return config


def group_of(taken: Take, vocab: int) -> Group:
    """The work's group as the pool hands it on."""

    def one(sample: int) -> Rollout:
        asked = taken.prompt[sample][taken.prompt_mask[sample] > 0]
        said = taken.answer[sample][taken.answer_mask[sample] > 0]
        kinds = np.repeat([PROMPT, ACTION], [len(asked), len(said)])
        acted = kinds == ACTION
        return Rollout(
            run_id="bench",
            group_id=0,
            sample=sample,
            attempt=0,
            task_key="0",
            content_hash="0",
            split="train",
            source="bench",
            tokens=np.concatenate([asked, said]).astype(np.uint32),
            kind=kinds.astype(np.uint8),
            step=np.where(acted, 0, -1).astype(np.int32),
            logp=np.where(acted, -np.log(vocab), 0).astype(np.float32),
            version_index=np.where(acted, 0, 65535).astype(np.uint16),
            temperature=acted.astype(np.float32),
            versions=(Version(0, 0, "bench"),),
            reward=float(taken.reward[sample]),
            reward_components={},
            correct=False,
            stop_reason=StopReason.STOP,
            failure=Failure.NONE,
            text="",
            facts={},
            times={},
        )

    return Group(0, "0", tuple(one(sample) for sample in range(len(taken.reward))))


def step(given: Given, program: pathlib.Path | None = None) -> Run:
    """The trainer's step on the work's take, the batch on the device; its program's text is
    written, if asked for."""
    size = work.SIZES[given.size]
    phases = settings.phases(config_of(given).lock())
    phase = phases[-1]
    with tempfile.TemporaryDirectory() as folder:
        parts = rounds.assemble(phases, epath.Path(folder))
    algorithm, trainer = loop.prepare(parts, phase)
    taken = work.take(size, given.rows, given.tokens, given.prompt, given.ragged)
    batch, _ = loop.lay_out(parts, phase, algorithm, [group_of(taken, size.vocab)])
    batch = jax.device_put(batch)
    params = parameters(size)
    teacher = parts.policy.init(jax.random.key(1)) if given.who == "residual" else None
    fresh = rounds.fresh(phase, parts.policy, params, teacher)
    held = [state.place(fresh, parts.policy, parts.mesh)]
    del params, teacher, fresh
    if program is not None:
        text = trainer.jitted(held[0]).lower(held[0], batch).compile().as_text()
        program.write_text(str(text))

    def run() -> dict[str, float]:
        held[0], metrics = trainer(held[0], batch)  # the old state is consumed
        names = ("loss/total", "optim/grad_norm", "loss/entropy_mean")
        found = jax.device_get([metrics[name] for name in names])
        return dict(zip(("loss", "grad_norm", "entropy"), map(float, found), strict=True))

    return run


def generation(given: Given) -> Run:
    """The trainer's sampler: one prompt after another in so many slots, whatever their lengths."""
    size = work.SIZES[given.size]
    new = (given.places or given.prompt + given.new) - given.prompt
    phases = settings.phases(config_of(given).lock())
    models = rounds.build_models(phases)
    sampler = Sampler(
        models.policy,
        models.mesh,
        seed=0,
        slots=given.slots or given.rows,
        prompt_buckets=(given.prompt,),
        max_new_tokens=new,
        samples_per_prompt=1,
        record_routes=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        where = f"{folder}/weights"
        digest = write_weights(where, parameters(size), epoch=0, step=0)
        sampler.load(Version(0, 0, digest), where)
    if given.question == "mixed":
        lot = work.mixed(size, given.count, given.prompt, given.new)
    else:
        taken = work.take(size, given.rows, given.prompt + 8, given.prompt, False)
        lot = [(row, given.new) for row in taken.prompt]
    heat = 0.0 if given.greedy else 1.0
    requests = [
        Request(prompt.tolist(), index, 0, heat, count, frozenset())
        for index, (prompt, count) in enumerate(lot)
    ]

    def run() -> dict[str, float]:
        made = [one.tokens for one in sampler.generate(requests)]
        return work.sameness(np.concatenate(made))

    return run


def head(given: Given) -> Run:
    """The policy's walk over chunks of positions, the trunk left out."""
    hidden, table, taken = (jnp.asarray(x) for x in work.head_arrays(given))
    policy = rounds.build_models(settings.phases(config_of(given).lock())).policy
    read = lambda logits, taken: {"logp": taken_logp(logits["student"], taken)}  # noqa: E731

    everywhere = jnp.ones((1, len(taken)), bool)
    ones = everywhere.astype(jnp.float32)

    def logits(x: Any, temperature: Any, whole: Any) -> Any:
        return jnp.matmul(x / temperature[:, None], whole["embedding"].T)

    def mean(hidden: Any, table: Any) -> Any:
        known, whole = {"student": hidden[None]}, {"student": {"embedding": table}}
        heads = {"student": logits}
        rows = (taken[None], ones, everywhere)
        return policy.walk(known, whole, heads, *rows, read)["logp"].mean()

    ready = jax.jit(jax.value_and_grad(mean, (0, 1)) if given.gradient else mean)

    def run() -> dict[str, float]:
        found = jax.block_until_ready(ready(hidden, table))
        return {"mean": float(found[0] if given.gradient else found)}

    return run


def floor(given: Given) -> Run:
    """Nothing but float32 matrix products."""
    one = jnp.asarray(np.random.default_rng(0).standard_normal((work.GEMM,) * 2, np.float32))
    product = jax.jit(jnp.matmul)

    def run() -> dict[str, float]:
        made = one
        for _ in range(work.GEMMS):
            made = product(one, one).block_until_ready()
        return {"corner": float(made[0, 0])}

    return run


if __name__ == "__main__":
    asked = work.parser().parse_args()
    heap.keep()  # as whatever starts a run does
    questions = {"step": step, "generation": generation, "mixed": generation, "head": head}
    questions["floor"] = floor
    work.serve(lambda: (questions[asked.question](asked), work.versions("jax", "jaxlib", "jaxrl")))
