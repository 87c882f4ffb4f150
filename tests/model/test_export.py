"""Checkpoints out: transformers loads them and says the same; they come back bit for bit."""

import dataclasses
import json
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

from configs import base
from jaxrl.export import export
from jaxrl.mesh import Rules, make_mesh
from jaxrl.model import adapters, pretrained
from jaxrl.model.form import AdapterConfig, read
from jaxrl.model.policy import build
from jaxrl.model.versions import write_weights
from tests.model import published
from tests.model.test_pretrained import LLAMA, MIMO, ask, drawn, exported
from tests.model.tiny import CONFIG

GEMMA = dataclasses.replace(
    CONFIG,
    family="gemma3",
    layers=3,
    norm_offset=1.0,
    post_norms=True,
    activation="gelu_tanh",
    embed_scale=4.0,
    attention_scale=12**-0.5,
    local_layers=(1, 1, 0),
    window=4,
    rope_scaling=("linear", 8.0),
)
MOE = dataclasses.replace(
    CONFIG,
    family="qwen3_moe",
    experts=dataclasses.replace(MIMO.experts, router="softmax", dense_layers=(), normalise=False),
)
SCALED = dataclasses.replace(LLAMA, rope_scaling=("llama3", 8.0, 1.0, 4.0, 16), rope_theta=5e5)
FORMS = {"qwen3": CONFIG, "llama": SCALED, "moe": MOE, "gemma3": GEMMA, "mimo": MIMO}


@pytest.mark.slow
@pytest.mark.parametrize("case", published.CASES)
def test_transformers_loads_what_is_exported_and_says_the_same(case, tmp_path):
    published.publish(case, tmp_path / "theirs")
    policy, params = published.imported(tmp_path / "theirs")
    settings: dict[str, Any] = dict(positions=64, shard_bytes=20_000, tokenizer=None)
    pretrained.export_checkpoint(params, policy.config, tmp_path / "ours", **settings)
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists()
    again, info = published.reload(tmp_path / "ours", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs = published.judged(published.reload(tmp_path / "theirs"), published.TOKENS)
    np.testing.assert_array_equal(published.judged(again, published.TOKENS), theirs)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_exported_comes_back_bit_for_bit(form, tmp_path):
    config = FORMS[form]
    params = exported(tmp_path / "x", config, shard_bytes=10_000)
    assert len([*(tmp_path / "x").glob("model-*.safetensors")]) > 1
    found = ask(tmp_path / "x", config)
    assert found.keys() == params.keys()
    for name, x in params.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)
    assert published.config_of(tmp_path / "x").family == config.family


def test_an_export_from_a_mesh_is_the_same(tmp_path):
    exported(tmp_path / "one", MIMO)
    policy = build(MIMO, make_mesh({"expert": 2, "fsdp": 2}, jax.devices()[:4]), Rules())
    spread = ask(tmp_path / "one", MIMO, policy.shardings)
    settings: dict[str, Any] = dict(positions=64, shard_bytes=10**9, tokenizer=None)
    pretrained.export_checkpoint(spread, MIMO, tmp_path / "four", **settings)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "four" / file).read_bytes()


def test_no_shard_is_longer_than_asked_and_the_index_names_every_tensor(tmp_path):
    exported(tmp_path / "x", shard_bytes=6000)
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in (tmp_path / "x").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in drawn(CONFIG).values())
    sizes = [(tmp_path / "x" / file).stat().st_size for file in files]
    header = 4000  # names of a few tensors
    assert max(sizes) < 6000 + header


def test_tokenizer_files_and_special_tokens_come_along(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "tokenizer.json").write_text("{}")
    (tmp_path / "t" / "chat_template.jinja").write_text("x")
    (tmp_path / "t" / "secret.bin").write_text("x")
    given = {"eos_token_id": [3, 4], "max_position_embeddings": 999, "hidden_size": 5}
    (tmp_path / "t" / "config.json").write_text(json.dumps(given))
    exported(tmp_path / "x", tokenizer=tmp_path / "t")
    held = json.loads((tmp_path / "x" / "config.json").read_text())
    assert held["eos_token_id"] == [3, 4] and held["max_position_embeddings"] == 999
    assert held["hidden_size"] == CONFIG.width
    names = {file.name for file in (tmp_path / "x").iterdir()}
    expected = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert names == expected


def test_an_export_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    (tmp_path / "x.tmp").mkdir()
    (tmp_path / "x.tmp" / "junk").write_text("of an export that was cut off")

    def fail(*arguments):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(pretrained, "_on_disk", fail)
        with pytest.raises(OSError, match="disk full"):
            exported(tmp_path / "x")
    assert not (tmp_path / "x").exists()
    exported(tmp_path / "x")
    assert not (tmp_path / "x" / "junk").exists() and not (tmp_path / "x.tmp").exists()
    with pytest.raises(ValueError, match="exists already"):
        exported(tmp_path / "x")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dataclasses.replace(CONFIG, sinks="all"), "cannot say the form: model.sinks='all'"),
        (
            dataclasses.replace(CONFIG, qk_norm=False),
            "model.qk_norm=False, the checkpoint's",
        ),
        (dataclasses.replace(GEMMA, attention_scale=0.3), "model.attention_scale=0.3"),
        (dataclasses.replace(LLAMA, local_layers=(1,), window=3), "model.local_layers"),
        (dataclasses.replace(CONFIG, outputs=1, tied_head=False), "model.outputs=1; allowed: 0"),
    ],
)
def test_a_form_that_the_family_cannot_say_is_refused(config, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        exported(tmp_path / "x", config)
    assert not [*tmp_path.iterdir()]


def test_adapters_are_merged_into_an_export_and_never_left(tmp_path):
    adapter = AdapterConfig(rank=2, alpha=3.0, pattern="attention|mlp/down", dtype="float32")
    config = dataclasses.replace(CONFIG, adapter=adapter)
    policy = build(config, None, Rules())
    params = policy.init(jax.random.key(0))
    for place, name in enumerate(sorted(params)):
        if name.endswith("adapter_out"):
            params[name] = jax.random.normal(jax.random.key(place), params[name].shape)
    with pytest.raises(ValueError, match="is an adapter's; allowed: merged"):
        pretrained.export_checkpoint(
            params, config, tmp_path / "x", positions=64, shard_bytes=10**9, tokenizer=None
        )
    plain = build(adapters.without(config), None, Rules())
    made = adapters.merged(params, config)
    assert made.keys() == plain.shapes.keys()
    theirs = published.logits(policy, params, published.TOKENS % 20)
    ours = published.logits(plain, made, published.TOKENS % 20)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    base_only = {name: x for name, x in params.items() if not adapters.is_adapter(name)}
    other = published.logits(plain, base_only, published.TOKENS % 20)
    assert np.abs(other - theirs).max() > 1e-2  # the adapter says something


def test_the_last_weights_of_a_run_are_exported_by_one_command(tmp_path):
    config = base.get_config("tiny")
    policy = build(read(config.to_dict()["model"]), None, Rules())
    for step in (2, 10):
        params = policy.init(jax.random.key(step))
        write_weights(tmp_path / "run" / "weights" / f"v=0-{step}", params, epoch=0, step=step)
    (tmp_path / "run" / "config.json").write_text(config.to_json_best_effort())
    command = [sys.executable, "-m", "jaxrl.export", f"--workdir={tmp_path / 'run'}"]
    done = subprocess.run([*command, f"--to={tmp_path / 'x'}"], capture_output=True, text=True)
    assert done.returncode == 0 and "v=0-10" in done.stdout, done.stderr
    found = ask(tmp_path / "x", policy.config)
    for name, x in params.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)
    with pytest.raises(ValueError, match="exists already"):
        export(str(tmp_path / "run"), str(tmp_path / "x"), tokenizer="", shard_bytes=10**9)
    with pytest.raises(ValueError, match="is no run: config.json is missing"):
        export(str(tmp_path), str(tmp_path / "y"), tokenizer="", shard_bytes=10**9)
