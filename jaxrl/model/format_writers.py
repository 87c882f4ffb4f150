"""``config.json`` of published families, written from the form of a model.

What is written is read again and compared with the form, so that a family whose ``config.json``
cannot say all of it is refused instead of written wrongly.
"""

from typing import Any

from jaxrl.model.form import ModelConfig
from jaxrl.model.formats import (
    ARCHITECTURES,
    DEMANDS,
    GLOBAL,
    LOCAL,
    ROPE_FIELDS,
    differing,
    fields_of,
    read_config,
)


def write_config(config: ModelConfig, *, positions: int) -> dict[str, Any]:
    """The ``config.json`` of a model; ``positions`` are the most that it is meant for.

    Rotary positions are said in both spellings, and what MiMo calls otherwise on the hub in both
    words. Raises ValueError if the family's ``config.json`` cannot say all of the form.
    """
    kind, architecture = next(
        (kind, name) for kind, (family, name) in ARCHITECTURES.items() if family == config.family
    )
    made: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": kind,
        "dtype": config.param_dtype,
        "torch_dtype": config.param_dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied_head,
        "max_position_embeddings": positions,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_theta": config.rope_theta,
        **{k: v for k, v in DEMANDS[config.family].items() if v is not None},
        **WRITERS[config.family](config),
    }
    if config.outputs:
        raise ValueError(f"model.outputs={config.outputs}; allowed: 0 (logits) in an export")
    where = f"an export of model.family={config.family!r}"
    faults = differing(read_config(made, where), fields_of(config))
    if faults:
        raise ValueError(
            f"config.json of model.family={config.family!r} cannot say the form: "
            + "; ".join(faults)
        )
    return made


def _rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """The newer spelling of a rotary scaling, with its base."""
    kind, *numbers = config.rope_scaling
    named = dict(zip(ROPE_FIELDS, numbers, strict=False))
    word = "default" if kind == "none" else kind
    return {"rope_type": word, "rope_theta": config.rope_theta, **named}


def _scaling(config: ModelConfig) -> dict[str, Any]:
    """The older spelling; nothing where nothing is scaled."""
    held = {name: x for name, x in _rope_parameters(config).items() if name != "rope_theta"}
    return {} if held["rope_type"] == "default" else {"rope_scaling": held}


def _write_dense(config: ModelConfig) -> dict[str, Any]:
    return {"rope_parameters": _rope_parameters(config), **_scaling(config)}


def _write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    return {
        **_write_dense(config),
        "num_experts": experts.count,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.hidden,
        "norm_topk_prob": experts.normalise,
        "mlp_only_layers": list(experts.dense_layers),
        "decoder_sparse_step": 1,
    }


def _local(config: ModelConfig) -> dict[str, Any]:
    """Windows, and rotary positions by kind of layer."""
    words = [LOCAL if config.is_local(i) else GLOBAL for i in range(config.layers)]
    near = {"rope_type": "default", "rope_theta": config.local_rope_theta}
    return {
        "layer_types": words,
        "sliding_window": config.window or 1,  # no layer uses it where none is local
        "rope_parameters": {GLOBAL: _rope_parameters(config), LOCAL: near},
    }


def _write_gemma3(config: ModelConfig) -> dict[str, Any]:
    scalar = config.attention_scale**-2 if config.attention_scale else config.head_size
    return {
        **_local(config),
        **_scaling(config),
        "rope_local_base_freq": config.local_rope_theta,
        "query_pre_attn_scalar": round(scalar),
    }


def _write_mimo_v2(config: ModelConfig) -> dict[str, Any]:
    experts, size = config.experts, config.head_size
    made = _local(config)
    # Between two steps of int(size * share), so that no rounding falls below.
    share = (config.rope_size or size) / size
    share = share if int(size * share) == config.rope_size else (config.rope_size + 0.25) / size
    for rope in made["rope_parameters"].values():
        rope["partial_rotary_factor"] = share
    return {
        **made,
        "partial_rotary_factor": share,
        "layernorm_epsilon": config.norm_epsilon,
        "v_head_dim": config.value_width,
        "attention_value_scale": config.value_scale,
        "sliding_window_size": max(1, config.window - 1),
        "swa_rope_theta": config.local_rope_theta,
        "swa_head_dim": size,
        "swa_v_head_dim": config.value_width,
        "swa_num_attention_heads": config.heads,
        "swa_num_key_value_heads": config.local_kv_heads or config.kv_heads,
        "hybrid_layer_pattern": [int(config.is_local(i)) for i in range(config.layers)],
        "moe_layer_freq": [int(config.is_sparse(i)) for i in range(config.layers)],
        "mlp_layer_types": [
            "sparse" if config.is_sparse(i) else "dense" for i in range(config.layers)
        ],
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.hidden,
        "norm_topk_prob": experts.normalise,
        "routed_scaling_factor": experts.scale,
    }


WRITERS = {
    "qwen3": _write_dense,
    "llama": _write_dense,
    "qwen3_moe": _write_qwen3_moe,
    "gemma3": _write_gemma3,
    "mimo_v2": _write_mimo_v2,
}
