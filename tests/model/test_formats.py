"""``config.json`` as it is published, in older and newer spellings, against the form it means."""

from typing import Any

import pytest

from jaxrl.model.formats import differing, read_config, shortest

SIZES: dict[str, Any] = dict(
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def read(kind: str, **fields: Any) -> dict[str, Any]:
    return read_config({**SIZES, "model_type": kind, **fields}, "config.json")


def test_llama_3_as_it_is_published_and_as_transformers_5_saves_it():
    scaling = dict(
        factor=32.0,
        high_freq_factor=4.0,
        low_freq_factor=1.0,
        original_max_position_embeddings=8192,
        rope_type="llama3",
    )
    hub = read(
        "llama",
        architectures=["LlamaForCausalLM"],
        attention_bias=False,
        mlp_bias=False,
        pretraining_tp=1,
        rms_norm_eps=1e-5,
        rope_scaling=scaling,
        rope_theta=500000.0,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
    )
    assert hub["rope_scaling"] == ("llama3", 32.0, 1.0, 4.0, 8192)
    assert (hub["rope_theta"], hub["head_size"], hub["tied_head"]) == (500000.0, 16, True)
    newer = {**scaling, "rope_theta": 500000.0}
    saved = read("llama", rms_norm_eps=1e-5, rope_parameters=newer, tie_word_embeddings=True)
    assert not differing(saved, hub)
    other = read("llama", rms_norm_eps=1e-5, rope_parameters={**newer, "factor": 8.0})
    assert [text.split("=")[0] for text in differing(other, hub)] == [
        "model.rope_scaling",
        "model.tied_head",
    ]


def test_linear_scaling_in_its_oldest_spelling():
    assert read("llama", rope_scaling={"type": "linear", "factor": 2})["rope_scaling"] == (
        "linear",
        2.0,
    )


def test_qwen3_as_it_is_published():
    found = read(
        "qwen3",
        head_dim=128,
        hidden_act="silu",
        max_window_layers=28,
        rms_norm_eps=1e-6,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=None,
        use_sliding_window=False,
        tie_word_embeddings=True,
    )
    assert (found["qk_norm"], found["head_size"], found["rope_theta"]) == (True, 128, 1e6)
    assert found["rope_scaling"] == ("none",) and found["experts"] == {"count": 0}


def test_a_head_that_is_not_stated_is_what_transformers_takes_it_for():
    assert read("qwen3")["head_size"] == 128  # transformers.Qwen3Config().head_dim
    width, heads = read("llama")["width"], read("llama")["heads"]
    assert read("llama")["head_size"] == read("qwen3_moe")["head_size"] == width // heads


def test_qwen3_moe_as_it_is_published():
    found = read(
        "qwen3_moe",
        head_dim=128,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        moe_intermediate_size=768,
        norm_topk_prob=True,
        num_experts=128,
        num_experts_per_tok=8,
    )
    assert found["experts"] == {
        "count": 128,
        "per_token": 8,
        "hidden": 768,
        "shared_hidden": 0,
        "dense_layers": (0, 2, 3, 4, 6),
        "router": "softmax",
        "normalise": True,
        "scale": 1.0,
    }


def test_gemma_3_as_it_is_published():
    fields = dict(
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=168,
        sliding_window=512,
    )
    hub = read(
        "gemma3_text",
        rope_local_base_freq=10000,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
        rope_theta=1000000,
        sliding_window_pattern=6,
        **fields,
    )
    assert hub["local_layers"] == (1, 1, 1, 1, 1, 0) and hub["window"] == 512
    assert (hub["embed_scale"], hub["norm_offset"], hub["post_norms"]) == (8.0, 1.0, True)
    assert hub["attention_scale"] == pytest.approx(168**-0.5) and hub["tied_head"]
    assert (hub["rope_theta"], hub["local_rope_theta"]) == (1e6, 1e4)
    assert hub["rope_scaling"] == ("linear", 8.0)
    near, far = "sliding_attention", "full_attention"
    saved = read(
        "gemma3_text",
        layer_types=[near] * 5 + [far] + [near] * 2,
        rope_parameters={
            near: {"rope_type": "default", "rope_theta": 1e4},
            far: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
        **fields,
    )
    assert not differing(saved, hub)


def test_mimo_as_it_is_published_and_as_transformers_5_saves_it():
    fields = dict(
        attention_value_scale=0.707,
        head_dim=192,
        moe_intermediate_size=32,
        n_group=1,
        n_routed_experts=16,
        norm_topk_prob=True,
        num_experts_per_tok=4,
        topk_group=1,
        v_head_dim=128,
    )
    hub = read(
        "mimo_v2_flash",
        add_full_attention_sink_bias=False,
        add_swa_attention_sink_bias=True,
        hybrid_layer_pattern=[0, 1, 1, 1, 1, 0, 1, 1],
        layernorm_epsilon=1e-5,
        moe_layer_freq=[0, 1, 1, 1, 1, 1, 1, 1],
        n_shared_experts=None,
        partial_rotary_factor=0.334,
        rope_theta=5000000,
        routed_scaling_factor=None,
        scoring_func="sigmoid",
        sliding_window=128,
        sliding_window_size=128,
        swa_head_dim=192,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        swa_rope_theta=10000,
        swa_v_head_dim=128,
        topk_method="noaux_tc",
        **fields,
    )
    assert hub["window"] == 129  # the hub counts the tokens before the query
    assert (hub["rope_size"], hub["value_size"], hub["local_kv_heads"]) == (64, 128, 4)
    assert (hub["norm_epsilon"], hub["sinks"], hub["qk_norm"]) == (1e-5, "local", False)
    assert hub["experts"]["dense_layers"] == (0,) and hub["experts"]["router"] == "sigmoid"
    near, far = "sliding_attention", "full_attention"
    turned = {"rope_type": "default", "partial_rotary_factor": 0.334}
    saved = read(
        "mimo_v2_flash",
        layer_types=[far, near, near, near, near, far, near, near],
        mlp_layer_types=["dense"] + ["sparse"] * 7,
        rms_norm_eps=1e-5,
        rope_parameters={far: turned | {"rope_theta": 5e6}, near: turned | {"rope_theta": 1e4}},
        routed_scaling_factor=1.0,
        sliding_window=129,
        **fields,
    )
    assert not differing(saved, hub)
    plain = read("mimo_v2_flash", **fields)  # what is absent is as in the published model
    assert not differing(plain, hub)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"topk_method": "greedy"}, "topk_method='greedy'; allowed: 'noaux_tc'"),
        ({"n_shared_experts": 1}, "n_shared_experts=1; allowed: 0"),
        ({"add_swa_attention_sink_bias": False}, "sink_bias=False; allowed: True"),
        ({"swa_num_key_value_heads": 3}, "swa_num_key_value_heads=3; allowed: 4"),
        ({"hybrid_layer_pattern": [0, 2] * 4}, "hybrid_layer_pattern=.*allowed: 8 of"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, "factor=None"),
        ({"rope_parameters": {"full_attention": 5}}, "full_attention=5; allowed: a mapping"),
        ({"rms_norm_eps": 10**400}, "allowed: a number above 0"),
    ],
)
def test_what_mimo_could_say_and_is_not_computed_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        read("mimo_v2_flash", **fields)


@pytest.mark.parametrize(
    ("pattern", "short"),
    [([1, 0, 1, 0], (1, 0)), ([1, 1, 0, 1], (1, 1, 0)), ([0, 0], (0,)), ([0, 1, 1], (0, 1, 1))],
)
def test_a_pattern_is_said_once(pattern, short):
    assert shortest(pattern) == short
