"""Checkpoints in: judged by transformers where it is installed, and refused where they are bad."""

import dataclasses
import functools
import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.mesh import Rules, make_mesh
from jaxrl.model import pretrained
from jaxrl.model.form import ExpertsConfig
from jaxrl.model.policy import build
from jaxrl.pool.contract import Request
from tests.model import published
from tests.model.tiny import CONFIG, lively, sampler_of

EXPERTS = ExpertsConfig(4, 2, 12, 0, (0,), "sigmoid", True, 1.0)
# A form with all that there is: experts, windows, sinks, two sizes of keys.
MIMO = dataclasses.replace(
    CONFIG,
    family="mimo_v2",
    layers=3,
    tied_head=False,
    qk_norm=False,
    kv_heads=2,
    local_kv_heads=4,
    local_layers=(0, 1),
    window=4,
    sinks="local",
    value_size=6,
    value_scale=0.7,
    rope_size=4,
    experts=EXPERTS,
)
LLAMA = dataclasses.replace(CONFIG, family="llama", qk_norm=False)


@functools.cache
def drawn(config):
    return lively(build(config, None, Rules()).init(jax.random.key(0)))


def exported(path, config=CONFIG, **changes):
    """A checkpoint of random weights, and these."""
    params = drawn(config)
    settings: dict[str, Any] = dict(positions=64, shard_bytes=10**9, tokenizer=None)
    pretrained.export_checkpoint(params, config, path, **{**settings, **changes})
    return params


def ask(path, config=CONFIG, shardings=None):
    return pretrained.import_checkpoint(path, config, shardings, lambda text: None)


def edited(path, **fields):
    """``config.json`` with other values; None drops a field."""
    held = {**json.loads((path / "config.json").read_text()), **fields}
    held = {name: value for name, value in held.items() if value is not None}
    (path / "config.json").write_text(json.dumps(held))


@pytest.mark.slow
@pytest.mark.parametrize("case", published.CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(case, tmp_path):
    model = published.publish(case, tmp_path / "theirs")
    policy, params = published.imported(tmp_path / "theirs")
    ours = published.logits(policy, params, published.TOKENS)
    assert np.abs(ours).max() > 1  # a model that says something
    np.testing.assert_allclose(ours, published.judged(model, published.TOKENS), atol=1e-4)
    sampler = sampler_of(policy, params, tmp_path, prompt_buckets=(8,), max_new_tokens=12)
    prompts = [[5, 9, 2, 7, 30, 1, 4], [11, 3]]
    requests = [
        Request(prompt, group=i, sample=0, temperature=0, max_new_tokens=12, stop_ids=frozenset())
        for i, prompt in enumerate(prompts)
    ]
    said = [done.tokens.tolist() for done in sampler.generate(requests)]
    assert said == [published.continuation(model, prompt, 12) for prompt in prompts]


def test_shards_of_transformers_give_what_its_one_file_gives(tmp_path):
    published.publish("qwen3_moe", tmp_path / "one")
    published.publish("qwen3_moe", tmp_path / "many", max_shard_size="20KB")
    assert len([*(tmp_path / "many").glob("*.safetensors")]) > 3
    _, one = published.imported(tmp_path / "one")
    _, many = published.imported(tmp_path / "many")
    for name, x in one.items():
        np.testing.assert_array_equal(x, many[name], err_msg=name)


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2}, {"expert": 2, "fsdp": 2}])
def test_each_device_gets_its_part(sizes, tmp_path):
    params = exported(tmp_path / "x", MIMO, shard_bytes=4000)
    policy = build(MIMO, make_mesh(sizes, jax.devices()[:4]), Rules())
    found = ask(tmp_path / "x", MIMO, policy.shardings)
    assert found.keys() == params.keys()
    for name, x in params.items():
        assert found[name].sharding == (policy.shardings or {})[name], name
        np.testing.assert_array_equal(found[name], x, err_msg=name)


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("asked", ["bfloat16", "float32"])
def test_numbers_are_cast_to_the_dtype_that_the_config_asks_for(stored, asked, tmp_path):
    params = exported(tmp_path / "x")
    name = "model.layers.1.mlp.up_proj.weight"
    published.tampered(tmp_path / "x", name, lambda x: x.astype(jnp.dtype(stored)))
    found = ask(tmp_path / "x", dataclasses.replace(CONFIG, param_dtype=asked))
    kernel = params["blocks/mlp/up/kernel"][1]
    assert {x.dtype for x in found.values()} == {jnp.dtype(asked)}
    expected = kernel.astype(stored).astype(asked)
    np.testing.assert_array_equal(found["blocks/mlp/up/kernel"][1], expected)


def test_a_head_beside_its_table_is_passed_over_if_it_is_the_table(tmp_path):
    params = exported(tmp_path / "x")
    table = np.asarray(params["embedding"])
    published.tampered(tmp_path / "x", "lm_head.weight", lambda _: table)
    np.testing.assert_array_equal(ask(tmp_path / "x")["embedding"], table)
    published.tampered(tmp_path / "x", "lm_head.weight", lambda _: table + 1)
    with pytest.raises(ValueError, match=r"tied_head=True, but lm_head.weight differs"):
        ask(tmp_path / "x")


def test_what_nothing_is_lost_by_is_passed_over_and_said(tmp_path):
    exported(tmp_path / "x", MIMO)
    for name in ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.mtp.layers.0.x.weight"):
        published.tampered(tmp_path / "x", name, lambda _: np.ones(3, np.int64))
    notes = []
    pretrained.import_checkpoint(tmp_path / "x", MIMO, None, notes.append)
    assert len(notes) == 1 and "passed over 2 tensors" in notes[0]


def test_all_that_does_not_fit_is_named_at_once(tmp_path):
    exported(tmp_path / "x")
    up = "model.layers.0.mlp.up_proj.weight"
    published.tampered(tmp_path / "x", "model.norm.weight", lambda _: None)
    published.tampered(tmp_path / "x", "model.extra.weight", lambda _: np.ones(2, np.float32))
    published.tampered(tmp_path / "x", up, lambda x: x[:-1])
    published.tampered(tmp_path / "x", "model.layers.1.mlp.up_proj.weight", lambda x: x.astype(int))
    with pytest.raises(ValueError) as error:
        ask(tmp_path / "x")
    for words in (
        "missing model.norm.weight",
        "surplus model.extra.weight",
        f"{up} has shape (23, 16), expected (24, 16)",
        "model.layers.1.mlp.up_proj.weight has dtype I64, allowed: F32, F16, BF16",
    ):
        assert words in str(error.value), error.value


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.experts.2.up_proj.weight"]
)
def test_a_number_that_is_not_finite_is_refused_by_name(bad, name, tmp_path):
    exported(tmp_path / "x", MIMO)

    def spoil(x):
        x = x.copy()
        x[-1, -1] = bad
        return x

    published.tampered(tmp_path / "x", name, spoil)
    for refuse in (
        lambda: ask(tmp_path / "x", MIMO),
        lambda: pretrained.check_checkpoint(tmp_path / "x", MIMO, values=True),
    ):
        with pytest.raises(ValueError, match=f"{name} holds NaN or infinity"):
            refuse()


def test_a_number_beyond_the_dtype_is_refused(tmp_path):
    exported(tmp_path / "x")
    name = "model.norm.weight"
    published.tampered(tmp_path / "x", name, lambda x: np.full_like(x, 3.4e38))
    ask(tmp_path / "x")
    with pytest.raises(ValueError, match=f"{name}: a number is beyond what bfloat16"):
        ask(tmp_path / "x", dataclasses.replace(CONFIG, param_dtype="bfloat16"))


def test_a_form_of_another_size_names_every_field(tmp_path):
    exported(tmp_path / "x")
    other = dataclasses.replace(CONFIG, vocab_size=32, layers=3, rope_theta=5e5, tied_head=False)
    with pytest.raises(ValueError) as error:
        ask(tmp_path / "x", other)
    for field in ("vocab_size=32", "layers=3", "rope_theta=500000.0", "tied_head=False"):
        assert f"model.{field}, the checkpoint's is" in str(error.value), error.value


def test_a_wrong_vocabulary_size_is_refused(tmp_path):
    exported(tmp_path / "x")
    edited(tmp_path / "x", vocab_size=24)
    wide = dataclasses.replace(CONFIG, vocab_size=24)
    with pytest.raises(ValueError, match=r"\(20, 16\), expected \(24, 16\) \(model.vocab_size=24"):
        ask(tmp_path / "x", wide)


REFUSED = [
    ({"model_type": "gpt2"}, "model_type='gpt2'; allowed: qwen3, llama"),
    ({"architectures": ["Qwen3ForSequenceClassification"]}, r"architectures=\['Qwen3ForSeq"),
    ({"attention_bias": True}, "attention_bias=True; allowed: False"),
    ({"use_sliding_window": True}, "use_sliding_window=True; allowed: False"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'; allowed: 'silu'"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*fp8"),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope_type='yarn'; allowed: 'default'",
    ),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor=0; allowed: a number above 0"),
    ({"hidden_size": None}, "hidden_size=None; allowed: a whole number"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000; allowed: at most"),
    ({"num_hidden_layers": "2"}, "num_hidden_layers='2'; allowed: a whole number"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings=1; allowed: true or false"),
    ({"layer_types": ["sliding_attention"] * 2}, "layer_types=.*allowed: all 'full_attention'"),
    ({"layer_types": ["full_attention"]}, "layer_types=.*allowed: 2 of"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_what_is_not_computed_is_refused_by_field(fields, words, tmp_path):
    exported(tmp_path / "x")
    edited(tmp_path / "x", **fields)
    with pytest.raises(ValueError, match=words):
        ask(tmp_path / "x")


def test_groups_of_experts_are_refused(tmp_path):
    exported(tmp_path / "x", MIMO)
    edited(tmp_path / "x", n_group=2)
    with pytest.raises(ValueError, match="n_group=2; allowed: 1"):
        ask(tmp_path / "x", MIMO)


def _index(path, weight_map):
    held = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(held))


def _cut(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def _longer(path):
    file = path / "model.safetensors"
    file.write_bytes((10**15).to_bytes(8, "little") + file.read_bytes()[8:])


def _header(path, **entry):
    held = {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **entry}}
    raw = json.dumps(held).encode()
    (path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))


def _twice(path):
    one = '"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
    raw = f"{{{one}, {one}}}".encode()
    (path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))


def _overlapping(path):
    entry = {"dtype": "F32", "shape": [2]}
    raw = json.dumps(
        {n: {**entry, "data_offsets": at} for n, at in (("x", [0, 8]), ("y", [4, 12]))}
    )
    raw = raw.encode()
    (path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(12))


class _Bomb:
    def __reduce__(self):
        return (print, ("unpickled",))


def _pickled(path):
    import pickle

    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb()))


HOSTILE = [
    (_cut, "model.safetensors is truncated: it has"),
    (_longer, "its header is said to be 1000000000000000 bytes long"),
    (lambda p: (p / "model.safetensors").write_bytes(b"x"), "its header is said to be"),
    (lambda p: (p / "model.safetensors").write_bytes(bytes(8)), "its header is not JSON"),
    (lambda p: _header(p, dtype="Q4"), "x has the unknown dtype 'Q4'"),
    (lambda p: _header(p, shape=[3]), r"x has 8 bytes, but F32 \[3\] takes 12"),
    (lambda p: _header(p, shape=[-2]), "x is described by"),
    (lambda p: _header(p, data_offsets=[-8, 0]), "x is described by"),
    (lambda p: _header(p, extra=1), "x is described by"),
    (_twice, "a name stands twice"),
    (_overlapping, "y overlaps x"),
    (_pickled, "pickled weights only .pytorch_model.bin."),
    (lambda p: (p / "model.safetensors").unlink(), "model.safetensors is missing, and so is"),
    (lambda p: _index(p, {"a": "../model.safetensors"}), "names the file '../model.safetensors'"),
    (lambda p: _index(p, {"a": "/etc/x.safetensors"}), "names the file '/etc/x.safetensors'"),
    (lambda p: _index(p, {"a": ".."}), "names the file '..'"),
    (lambda p: _index(p, {"a": "a\\b.safetensors"}), "names the file"),
    (lambda p: _index(p, {"a": "pytorch_model.bin"}), "names the file 'pytorch_model.bin'"),
    (lambda p: _index(p, {"a": "b.safetensors"}), "shards of .* are missing: b.safetensors"),
    (lambda p: _index(p, ["a"]), "weight_map="),
    (lambda p: _index(p, {"a": "model.safetensors"}), "a is not in model.safetensors"),
    (lambda p: (p / "config.json").write_text("[]"), "config.json must hold a mapping"),
    (lambda p: (p / "config.json").write_text("[" * 10**5), "config.json is not JSON"),
    (lambda p: (p / "config.json").unlink(), "config.json is missing"),
]


@pytest.mark.parametrize(("harm", "words"), HOSTILE)
def test_hostile_and_broken_files_are_refused(harm, words, tmp_path, capsys):
    exported(tmp_path / "x")
    harm(tmp_path / "x")
    before = {file.name: file.read_bytes() for file in (tmp_path / "x").iterdir()}
    with pytest.raises(ValueError, match=words):
        ask(tmp_path / "x")
    assert {file.name: file.read_bytes() for file in (tmp_path / "x").iterdir()} == before
    assert "unpickled" not in capsys.readouterr().out


def test_a_path_that_is_not_there_or_leaves_its_package_is_refused(tmp_path):
    with pytest.raises(ValueError, match="config.json is missing"):
        ask(tmp_path / "nothing")
    with pytest.raises(ValueError, match="'no_such_one' is not installed"):
        ask("package://no_such_one/x.gguf")
    with pytest.raises(ValueError, match="allowed: a file inside the package"):
        ask("package://jaxrl/../pyproject.toml")
    with pytest.raises(ValueError, match="allowed: a file inside the package"):
        ask("package://jaxrl//etc/passwd")
    assert pretrained.locate("package://jaxrl/mesh.py").name == "mesh.py"


@pytest.mark.slow
def test_the_host_holds_a_shard_at_most_beside_what_is_placed(tmp_path):
    """Peak resident memory of a process that imports 300 MB."""
    wide = dataclasses.replace(
        CONFIG, width=1024, heads=16, kv_heads=16, head_size=64, hidden=4096, layers=4
    )
    shapes = build(wide, None, Rules()).shapes
    params = {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()}
    pretrained.export_checkpoint(
        params, wide, tmp_path / "x", positions=64, shard_bytes=150 * 10**6, tokenizer=None
    )
    command = [sys.executable, "-m", "experiments.bench.import_peak", str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["placed_bytes"] > 250e6 and told["largest_shard_bytes"] < 0.7 * told["placed_bytes"]
    allowed = told["placed_bytes"] + 1.2 * told["largest_shard_bytes"]
    assert told["peak_bytes"] <= allowed, told
