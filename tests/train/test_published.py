"""A run whose tokenizer is a published one: its parts, its prompts, and what is refused."""

import importlib
from typing import Any

import jax
import pytest

from jaxrl.mesh import make_mesh
from jaxrl.pool.published_tokenizer import PublishedTokenizer
from jaxrl.train import rounds, settings
from tests.pool import templates
from tests.pool.checkpoints import byte_level, write

CONFIG = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    one = make_mesh  # one device of the tests' eight
    monkeypatch.setattr(
        rounds.mesh, "make_mesh", lambda sizes, _=None: one(sizes, jax.devices()[:1])
    )
    return write(tmp_path / "checkpoint", byte_level(), config=CONFIG, template=templates.CHATML)


def phases_of(checkpoint: Any, vocab_size: int = 512, **pool: Any) -> list[settings.Phase]:
    config: Any = importlib.import_module("configs.grpo").get_config("tiny")
    config.phases = {"order": ("main",), "main": {}}
    config.model.vocab_size = vocab_size
    config.pool.update({"tokenizer": str(checkpoint), "chat": "template", **pool})
    return settings.phases(config)


def test_a_run_asks_as_the_published_template_does(checkpoint, tmp_path):
    phases = phases_of(checkpoint, system="Be brief.")
    parts = rounds.assemble(phases, tmp_path)
    assert isinstance(parts.tokenizer, PublishedTokenizer)
    text = parts.source.tasks("train")[0].prompt
    assert parts.tokenizer.decode(parts.tokenizer.prompt(text), "shown") == (
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert parts.tokenizer.stop_ids == {2, 4}
    assert rounds.identity(phases, parts.tokenizer)["tokenizer"] == parts.tokenizer.digest


def test_a_teacher_may_read_by_a_published_one(checkpoint, tmp_path):
    (phase,) = phases_of(checkpoint)
    parts = rounds.assemble([phase], tmp_path)
    reader = rounds.read_by(str(checkpoint / "tokenizer.json"), parts.source, phase, tmp_path)
    assert reader.prompt("1") == parts.tokenizer.prompt("1")
    with pytest.raises(ValueError, match="scorers.teacher.tokenizer='/nowhere'.*does not exist"):
        rounds.read_by("/nowhere", parts.source, phase, tmp_path)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"vocab_size": 64}, "model.vocab_size=64; allowed: >= "),
        ({"tokenizer": "package://nobody_s/x.gguf"}, "package 'nobody_s' is not installed"),
        ({"tokenizer": "no/where"}, "pool.tokenizer='no/where'.*it does not exist; allowed"),
        ({"spoiled": True}, "pool.chat='template'.*no chat_template.jinja"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(checkpoint, tmp_path, changed, match):
    if changed.pop("spoiled", False):
        (checkpoint / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=match):
        rounds.assemble(phases_of(checkpoint, **changed), tmp_path)
