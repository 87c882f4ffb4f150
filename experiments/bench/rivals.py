"""What others make of the work of work.py, each by its own installed package, a process each.

    PYTHON -m experiments.bench.rivals step tunix --size 32k --rows 8 --tokens 512 --prompt 128

    plain    plain.py
    tunix    google-tunix: its Trainer with its GRPO loss, its Sampler, its log-softmax
    trl      its GRPOTrainer.training_step as configured by default (gradients are checkpointed)
    torch    transformers' model, log_softmax and gather, fused AdamW; its generate

Started by versus.py, which says who has what environment.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.bench import work
from experiments.bench.plain import Plain
from experiments.bench.work import Run, module

Given = argparse.Namespace
Prepared = tuple[Run, dict[str, str]]
NEVER = 10**9


def plain(given: Given) -> Prepared:
    """By hand."""
    side = Plain(given)
    run = {"step": side.step, "generation": side.generation, "head": side.head}[given.question]
    return run(given), work.versions("jax", "jaxlib", "optax")


def _tunix_model(given: Given) -> Any:
    """Its Qwen3 with the weights of the work."""
    jnp, qwen = module("jax.numpy"), module("tunix.models.qwen3.model")
    size = work.SIZES[given.size]
    config = qwen.ModelConfig(
        num_layers=size.layers,
        vocab_size=size.vocab,
        embed_dim=size.width,
        hidden_dim=size.hidden,
        num_heads=size.heads,
        head_dim=size.head_size,
        num_kv_heads=size.kv_heads,
        rope_theta=int(work.THETA),
        norm_eps=work.EPSILON,
        use_tied_embedding=True,
        dtype=jnp.float32,
        remat_config=qwen.RematConfig.DECODER if given.lean else qwen.RematConfig.NONE,
    )
    model, named = qwen.Qwen3(config, rngs=module("flax.nnx").Rngs(0)), work.weights(size)

    def put(holder: Any, name: str, heads: int = 0, *, flip: bool = False) -> None:
        value = named[f"model.{name}.weight"]
        value = value.T if heads or flip else value
        if heads:
            value = value.reshape(size.width, heads, size.head_size)
        holder.value = jnp.asarray(value.reshape(holder.value.shape))

    put(model.embedder.input_embedding, "embed_tokens")
    put(model.final_norm.w, "norm")
    for index, layer in enumerate(model.layers):
        at, own = f"layers.{index}", layer.attn
        put(layer.input_layernorm.w, f"{at}.input_layernorm")
        put(layer.post_attention_layernorm.w, f"{at}.post_attention_layernorm")
        put(own.q_proj.w, f"{at}.self_attn.q_proj", size.heads)
        put(own.k_proj.w, f"{at}.self_attn.k_proj", size.kv_heads)
        put(own.v_proj.w, f"{at}.self_attn.v_proj", size.kv_heads)
        put(own.o_proj.w, f"{at}.self_attn.o_proj", flip=True)
        put(own.q_norm.w, f"{at}.self_attn.q_norm")
        put(own.k_norm.w, f"{at}.self_attn.k_norm")
        for name in ("gate_proj", "up_proj", "down_proj"):
            put(getattr(layer.mlp, name).kernel, f"{at}.mlp.{name}", flip=True)
    return model


def _tunix_step(given: Given) -> Run:
    """As its GRPO learner wires trainer, loss and example; without old log-probs the update is the
    take's only one."""
    jnp, optax = module("jax.numpy"), module("optax")
    core, learner = module("tunix.rl.algo_core"), module("tunix.rl.grpo.grpo_learner")
    taken = work.take(work.SIZES[given.size], given.rows, given.tokens, given.prompt, given.ragged)
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(work.RATE, weight_decay=0.0))
    often = module("tunix.sft.peft_trainer").TrainingConfig(
        eval_every_n_steps=NEVER, max_steps=NEVER
    )
    trainer = module("tunix.rl.trainer").Trainer(_tunix_model(given), chain, often, lambda: {})
    how = learner.GRPOConfig(
        num_generations=given.rows,
        beta=0.0,
        epsilon=0.2,
        loss_agg_mode="sequence-mean-token-mean",
    )
    how.temperature = 1.0

    def loss(model: Any, train_example: Any, algo_config: Any) -> Any:
        return core.grpo_loss_fn(
            model, train_example, algo_config=how, pad_id=work.PAD, eos_id=work.STOP
        )

    trainer.with_loss_fn(loss, has_aux=True)
    trainer.with_gen_model_input_fn(lambda x: {"train_example": x, "algo_config": how})
    example = learner.TrainExample(
        prompt_ids=jnp.asarray(taken.prompt),
        prompt_mask=jnp.asarray(taken.prompt_mask),
        completion_ids=jnp.asarray(taken.answer),
        completion_mask=jnp.asarray(taken.answer_mask),
        advantages=jnp.asarray(taken.advantage),
        ref_per_token_logps=None,
        old_per_token_logps=None,
    )
    step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)

    def run() -> dict[str, float]:
        found, aux, norm = step(example)
        told = {"loss": float(found), "grad_norm": float(norm)}
        return told | {"entropy": float(aux["entropy"])}

    return run


class Ids:
    """A tokenizer for Tunix' sampler whose text is the number of a prompt."""

    def __init__(self, prompts: list[np.ndarray], stop: int) -> None:
        self.prompts, self.stop = prompts, stop

    def encode(self, text: str, **_: Any) -> list[int]:
        """The prompt of this number."""
        return self.prompts[int(text)].tolist()

    def decode(self, tokens: Any, **_: Any) -> str:
        """Nobody reads it."""
        return ""

    def bos_id(self) -> None:
        """None is put in front."""

    def eos_id(self) -> int:
        """One that the model cannot say."""
        return self.stop

    def pad_id(self) -> int:
        """Of the work."""
        return work.PAD

    def dedup_bos_ids(self, ids: Any) -> Any:
        """There are none."""
        return ids


def _tunix_generation(given: Given) -> Run:
    """Its Sampler: one batch, or batches of ``rows`` until all of a mixed lot are served, each for
    as long as its longest answer."""
    size, sampling = work.SIZES[given.size], module("tunix.generate.sampler")
    if given.question == "mixed":
        lot = work.mixed(size, given.count, given.prompt, given.new)
    else:
        taken = work.take(size, given.rows, given.prompt + 8, given.prompt, False)
        lot = [(row, given.new) for row in taken.prompt]
    ids = Ids([prompt for prompt, _ in lot], size.vocab + 7)
    places = given.places or given.prompt + given.new
    cache = sampling.CacheConfig(
        cache_size=places,
        num_layers=size.layers,
        num_kv_heads=size.kv_heads,
        head_dim=size.head_size,
    )
    sampler = sampling.Sampler(_tunix_model(given), ids, cache)
    sampler.tokenize = lambda text: np.array(ids.encode(text), np.int32)
    how = {} if given.greedy else {"temperature": 1.0, "top_p": 1.0}

    def run() -> dict[str, float]:
        made = []
        for start in range(0, len(lot), given.rows):
            part = lot[start : start + given.rows]
            found = sampler(
                [str(start + i) for i in range(len(part))],
                max_generation_steps=max(new for _, new in part),
                max_prompt_length=given.prompt,
                eos_tokens=[ids.stop],
                return_logprobs=True,
                seed=0,
                **how,
            )
            made += [
                np.asarray(tokens)[:new]
                for tokens, (_, new) in zip(found.tokens, part, strict=True)
            ]
        return work.sameness(np.concatenate(made))

    return run


def _tunix_head(given: Given) -> Run:
    """The logits as its model makes them, then its log-softmax at the taken ids."""
    jax, pick = module("jax"), module("tunix.rl.common").selective_log_softmax
    hidden, table, taken = (jax.numpy.asarray(x) for x in work.head_arrays(given))

    def mean(hidden: Any, table: Any) -> Any:
        return pick((hidden @ table.T)[None], taken[None]).mean()

    ready = jax.jit(jax.value_and_grad(mean, (0, 1)) if given.gradient else mean)

    def run() -> dict[str, float]:
        found = jax.block_until_ready(ready(hidden, table))
        return {"mean": float(found[0] if given.gradient else found)}

    return run


def tunix(given: Given) -> Prepared:
    """google-tunix."""
    asked = {"step": _tunix_step, "head": _tunix_head}
    run = asked.get(given.question, _tunix_generation)(given)
    return run, work.versions("jax", "jaxlib", "flax", "google-tunix")


def _torch_model(given: Given) -> tuple[Any, Any]:
    """torch, and transformers' Qwen3 with the weights of the work."""
    torch, transformers = module("torch"), module("transformers")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    size = work.SIZES[given.size]
    config = transformers.Qwen3Config(
        vocab_size=size.vocab,
        hidden_size=size.width,
        intermediate_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_size,
        tie_word_embeddings=True,
        rms_norm_eps=work.EPSILON,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": work.THETA},
        pad_token_id=work.PAD,
        eos_token_id=work.STOP,
        bos_token_id=work.STOP,
        attn_implementation="sdpa",
    )
    model = transformers.Qwen3ForCausalLM(config)
    named = {name: torch.from_numpy(x) for name, x in work.weights(size).items()}
    lacking = model.load_state_dict(named, strict=False)
    if lacking.unexpected_keys or set(lacking.missing_keys) - {"lm_head.weight"}:
        raise SystemExit(f"the weights do not fit: {lacking}")
    model.tie_weights()
    return torch, model


def _torch_step(given: Given) -> Run:
    """The loop that one writes without a trainer."""
    torch, model = _torch_model(given)
    taken = work.take(work.SIZES[given.size], given.rows, given.tokens, given.prompt, given.ragged)
    batch = {name: torch.from_numpy(x).long() for name, x in vars(taken).items() if x.ndim == 2}
    tokens = torch.cat([batch["prompt"], batch["answer"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["answer_mask"]], 1)
    counted, advantage = batch["answer_mask"], torch.from_numpy(taken.advantage)[:, None]
    chain = torch.optim.AdamW(model.parameters(), lr=work.RATE, weight_decay=0.0, fused=True)
    if given.lean:
        model.gradient_checkpointing_enable()
        model.train()

    def run() -> dict[str, float]:
        kept = batch["answer"].shape[1] + 1
        found = model(input_ids=tokens, attention_mask=mask, logits_to_keep=kept, use_cache=False)
        logits = found.logits[:, :-1].float()
        logp = torch.log_softmax(logits, -1).gather(-1, batch["answer"][..., None])[..., 0]
        ratio = torch.exp(logp - logp.detach())
        each = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss = ((each * counted).sum(1) / counted.sum(1).clamp(min=1)).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        chain.step()
        chain.zero_grad(set_to_none=True)
        return {"loss": float(loss), "grad_norm": float(norm)}

    return run


def _torch_generation(given: Given) -> Run:
    """transformers' generate: one batch, or batches of ``rows``, padded in front."""
    torch, model = _torch_model(given)
    model.eval()
    size = work.SIZES[given.size]
    if given.question == "mixed":
        lot = work.mixed(size, given.count, given.prompt, given.new)
    else:
        taken = work.take(size, given.rows, given.prompt + 8, given.prompt, False)
        lot = [(row, given.new) for row in taken.prompt]
    how = {"do_sample": False}
    if not given.greedy:
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}

    def run() -> dict[str, float]:
        made = []
        for start in range(0, len(lot), given.rows):
            part = lot[start : start + given.rows]
            wide = max(len(prompt) for prompt, _ in part)
            padded = [np.pad(prompt, (wide - len(prompt), 0)) for prompt, _ in part]
            tokens = torch.from_numpy(np.stack(padded)).long()
            new = max(new for _, new in part)
            with torch.no_grad():
                found = model.generate(
                    input_ids=tokens,
                    attention_mask=(tokens != work.PAD).long(),
                    max_new_tokens=new,
                    min_new_tokens=new,
                    pad_token_id=work.PAD,
                    eos_token_id=None,
                    **how,
                )
            rows = found[:, wide:].numpy()
            made += [row[:new] for row, (_, new) in zip(rows, part, strict=True)]
        return work.sameness(np.concatenate(made))

    return run


def _torch_head(given: Given) -> Run:
    """log_softmax and gather."""
    torch = module("torch")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    hidden, table, taken = (torch.from_numpy(x) for x in work.head_arrays(given))
    for leaf in (hidden, table):
        leaf.requires_grad_()

    def run() -> dict[str, float]:
        hidden.grad = table.grad = None
        with torch.set_grad_enabled(given.gradient):
            logp = torch.log_softmax(hidden @ table.T, -1).gather(-1, taken.long()[:, None])
            if given.gradient:
                logp.mean().backward()
        return {"mean": float(logp.mean())}

    return run


def torch(given: Given) -> Prepared:
    """torch with transformers."""
    asked = {"step": _torch_step, "head": _torch_head}
    run = asked.get(given.question, _torch_generation)(given)
    return run, work.versions("torch", "transformers")


def _trl_trainer(given: Given) -> tuple[Any, Any, Any]:
    """torch, the trainer and the model as it trains it."""
    torch, model = _torch_model(given)
    trl, tokenizers = module("trl"), module("tokenizers")
    words = tokenizers.models.WordLevel({"<pad>": 0, "<stop>": 1, "<unk>": 2}, unk_token="<unk>")
    tokenizer = module("transformers").PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words),
        pad_token="<pad>",
        eos_token="<stop>",
        unk_token="<unk>",
    )
    how = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=given.rows,
        num_generations=given.rows,
        max_completion_length=given.tokens - given.prompt,
        beta=0.0,
        loss_type="grpo",
        report_to=[],
        learning_rate=work.RATE,
        max_steps=NEVER,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=how,
        train_dataset=module("datasets").Dataset.from_dict({"prompt": ["x"] * 64}),
        processing_class=tokenizer,
    )
    trainer.create_optimizer_and_scheduler(num_training_steps=NEVER)
    trainer.current_gradient_accumulation_steps = 1
    trainer._prepare_inputs = lambda inputs: inputs  # it would generate: measured apart
    model = trainer.model
    model.train()
    if how.gradient_checkpointing:
        model.gradient_checkpointing_enable(how.gradient_checkpointing_kwargs)
    return torch, trainer, model


def trl(given: Given) -> Prepared:
    """TRL's trainer; its head and its generation are those of torch."""
    torch, trainer, model = _trl_trainer(given)
    taken = work.take(work.SIZES[given.size], given.rows, given.tokens, given.prompt, given.ragged)
    batch = {
        "prompt_ids": torch.from_numpy(taken.prompt).long(),
        "prompt_mask": torch.from_numpy(taken.prompt_mask),
        "completion_ids": torch.from_numpy(taken.answer).long(),
        "completion_mask": torch.from_numpy(taken.answer_mask),
        "advantages": torch.from_numpy(taken.advantage),
        "num_items_in_batch": torch.tensor(taken.answer_mask.sum()),
    }

    def run() -> dict[str, float]:
        trainer._step = 1
        loss = trainer.training_step(model, batch, num_items_in_batch=None)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        trainer.optimizer.zero_grad(set_to_none=True)
        curves = trainer._metrics["train"]
        told = {"loss": float(loss), "grad_norm": float(norm)}
        told["entropy"] = float(curves["entropy"][0])
        for values in curves.values():
            values.clear()
        return told

    return run, work.versions("torch", "transformers", "trl")


RIVALS: dict[str, Callable[[Given], Prepared]] = {
    "plain": plain,
    "tunix": tunix,
    "torch": torch,
    "trl": trl,
}


if __name__ == "__main__":
    asked = work.parser().parse_args()
    work.serve(lambda: RIVALS[asked.who](asked))
