"""Sizes of published models, and how they are trained where that goes with the size.

A variant of this name, ``configs/gvpo.py:qwen3_8b``, is the method on that model. The form is that
of the model's published config.json; the weights come with --config.train.start=CHECKPOINT.
"""

from typing import Any, cast

from ml_collections import ConfigDict

# What Qwen3's forms share (config.json of Qwen/Qwen3-*: rope_theta 1e6, rms_norm_eps 1e-6, heads
# normalised, head_dim 128, vocab_size 151936).
QWEN3 = {
    "family": "qwen3",
    "vocab_size": 151_936,
    "head_size": 128,
    "kv_heads": 8,
    "rope_theta": 1e6,
    "norm_epsilon": 1e-6,
    "qk_norm": True,
}
# layers, hidden_size, num_attention_heads, num_key_value_heads, intermediate_size,
# tie_word_embeddings; num_experts, num_experts_per_tok, moe_intermediate_size, norm_topk_prob
FORMS: dict[str, dict[str, Any]] = {
    "qwen3_0_6b": {"layers": 28, "width": 1024, "heads": 16, "hidden": 3072, "tied_head": True},
    "qwen3_8b": {"layers": 36, "width": 4096, "heads": 32, "hidden": 12_288, "tied_head": False},
    "qwen3_30b_a3b": {
        "family": "qwen3_moe",
        "layers": 48,
        "width": 2048,
        "heads": 32,
        "kv_heads": 4,
        "hidden": 6144,
        "tied_head": False,
        "experts": {"count": 128, "per_token": 8, "hidden": 768, "normalise": True},
    },
    "qwen3_32b": {"layers": 64, "width": 5120, "heads": 64, "hidden": 25_600, "tied_head": False},
}
# Prompts and responses in tokens, groups of a step and their rollouts, sequences decoded side by
# side. The smallest that fill the slices of experiments/aot/; a mesh with more devices wants more
# groups.
SCALES: dict[str, dict[str, int]] = {
    "qwen3_0_6b": {"prompt": 512, "response": 1536, "groups": 2, "rollouts": 4, "slots": 64},
    "qwen3_8b": {"prompt": 1024, "response": 3072, "groups": 4, "rollouts": 8, "slots": 128},
    "qwen3_30b_a3b": {"prompt": 1024, "response": 3072, "groups": 16, "rollouts": 8, "slots": 256},
    "qwen3_32b": {"prompt": 1024, "response": 3072, "groups": 64, "rollouts": 8, "slots": 512},
}
NAMES = tuple(FORMS)


def rollouts(name: str) -> int:
    """Of a step."""
    return SCALES[name]["groups"] * SCALES[name]["rollouts"]


def fill(config: ConfigDict, name: str) -> None:
    """Make the model, and the sizes that go with it, those of a published one."""
    form, scale, sections = {**QWEN3, **FORMS[name]}, SCALES[name], cast(Any, config)
    experts = form.pop("experts", {})
    section = sections.model
    section.update(form)
    section.experts.update(experts)
    section.update(
        dtype="bfloat16",  # the masters stay float32
        remat="full",
        score_chunk_positions=512,  # of 152k logits each, in float32: 297 MiB
    )
    sections.pool.rollouts_per_group = scale["rollouts"]
    sections.sampler.update(
        prompt_buckets=(scale["prompt"],), max_new_tokens=scale["response"], slots=scale["slots"]
    )
    sections.train.update(
        groups=scale["groups"],
        micro_rollouts=rollouts(name),
        token_buckets=(scale["prompt"] + scale["response"],),
    )
