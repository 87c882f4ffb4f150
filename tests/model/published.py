"""Tiny checkpoints of each published family, made and judged by transformers on CPU torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs import base
from jaxrl.mesh import Rules
from jaxrl.model import pretrained
from jaxrl.model.form import ModelConfig
from jaxrl.model.policy import Policy, build

SIZES: dict[str, Any] = dict(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.2,
    tie_word_embeddings=False,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
MOE = dict(moe_intermediate_size=12, num_experts_per_tok=2)
LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
# Names of cases -> (class of the configuration, what differs from SIZES).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {}),
    "qwen3 tied": ("Qwen3Config", dict(tie_word_embeddings=True)),
    "llama 3": ("LlamaConfig", dict(rope_parameters=LLAMA3)),
    "llama tied": ("LlamaConfig", dict(tie_word_embeddings=True)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(MOE, num_experts=6, norm_topk_prob=True)),
    "qwen3_moe mixed": ("Qwen3MoeConfig", dict(MOE, num_experts=6, mlp_only_layers=[1])),
    "gemma3": (
        "Gemma3TextConfig",
        dict(
            num_hidden_layers=4,
            layer_types=LAYERS,
            sliding_window=4,
            query_pre_attn_scalar=12,
            tie_word_embeddings=True,
        ),
    ),
    "mimo_v2": (
        "MiMoV2FlashConfig",
        dict(
            MOE,
            num_hidden_layers=4,
            num_key_value_heads=1,
            n_routed_experts=6,
            v_head_dim=6,
            head_dim=12,
            sliding_window=4,
            layer_types=["full_attention", *["sliding_attention"] * 2, "full_attention"],
        ),
    ),
}
TOKENS = np.random.default_rng(0).integers(3, 40, (2, 17))


def torch_or_skip() -> tuple[Any, Any]:
    """(torch, transformers), silent; skips the test where they are not installed."""
    why = "transformers on torch is the judge: pip install -e '.[judge]'"
    torch = pytest.importorskip("torch", reason=why)
    transformers = pytest.importorskip("transformers", reason=why)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return torch, transformers


def publish(case: str, path: Path, **changes: Any) -> Any:
    """Write a random checkpoint of a case and return the torch model."""
    torch, transformers = torch_or_skip()
    name, differing = CASES[case]
    torch.manual_seed(1)
    config = getattr(transformers, name)(**{**SIZES, **differing})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():  # nothing stays at the value that it is born with
        for parameter_name, x in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in parameter_name or "sinks" in parameter_name:
                x += 0.5 * torch.randn_like(x)
            elif "e_score_correction_bias" in parameter_name:
                x += 0.2 * torch.randn_like(x)
    model.eval().save_pretrained(path, **changes)
    return model


def judged(model: Any, tokens: np.ndarray) -> np.ndarray:
    """The judge's logits, [row token vocab]."""
    torch, _ = torch_or_skip()
    with torch.no_grad():
        return model(torch.asarray(tokens)).logits.numpy()


def reload(path: Any, dtype: str = "float32", **arguments: Any) -> Any:
    """The judge's model of a directory."""
    torch, transformers = torch_or_skip()
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=vars(torch)[dtype], attn_implementation="eager", **arguments
    )


def config_of(path: Any, **changes: Any) -> ModelConfig:
    """The form of a checkpoint, computed as the base config says."""
    own = base.get_config("tiny").to_dict()["model"]
    return pretrained.model_config(path, {**own, **changes})


def imported(path: Any, mesh: Any = None, **changes: Any) -> tuple[Policy, dict[str, jax.Array]]:
    """A policy in the form of a checkpoint, and its parameters."""
    policy = build(config_of(path, **changes), mesh, Rules())
    params = pretrained.import_checkpoint(path, policy.config, policy.shardings, print)
    return policy, params


def logits(policy: Policy, params: Any, tokens: np.ndarray) -> np.ndarray:
    """Our logits, [row token vocab]."""
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    @jax.jit
    def run(params: Any, tokens: Any) -> Any:
        hidden = policy.hidden(params, tokens, position, jnp.ones(tokens.shape, jnp.int32))
        return policy.logits(params, hidden.reshape(-1, hidden.shape[-1]))

    return np.asarray(run(params, tokens)).reshape(*tokens.shape, -1)


def continuation(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The judge's greedy continuation, of exactly ``count`` tokens."""
    torch, _ = torch_or_skip()
    made = model.generate(
        torch.asarray([list(prompt)]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    return made[0, len(prompt) :].tolist()


def tampered(path: Path, name: str, change: Any) -> None:
    """Write ``model.safetensors`` of a directory again with one tensor changed; None drops it."""
    held = load_file(path / "model.safetensors")
    made = change(held.get(name))
    held = {key: x for key, x in held.items() if key != name}
    save_file({**held, **({} if made is None else {name: made})}, path / "model.safetensors")
