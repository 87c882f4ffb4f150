"""A teacher of another tokenizer and form, as it comes from another run, reads a run's texts."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from etils import epath

from jaxrl.mesh import make_mesh
from jaxrl.model.versions import write_weights
from jaxrl.train import pools, rounds, settings
from jaxrl.train.settings import Phase
from tests.train.toy import rollout

TEACHER = {"vocab_size": 1200, "layers": 1, "width": 16, "heads": 1, "hidden": 32}


def phase_of(weights: str, **teacher: Any) -> list[Phase]:
    config: Any = importlib.import_module("configs.gvpo_distill").get_config("tiny")
    config.phases = {"order": ("main",), "main": {}}
    config.scorers.teacher.model.update(TEACHER | teacher.pop("model", {}))
    config.scorers.teacher.update({"weights": weights, "tokenizer": "character_pairs"} | teacher)
    return settings.phases(config)


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    root = epath.Path(tmp_path_factory.mktemp("text_teacher"))
    patch = pytest.MonkeyPatch()  # one device of the tests' eight
    patch.setattr(
        rounds.mesh, "make_mesh", lambda sizes, _=None: make_mesh(sizes, jax.devices()[:1])
    )
    phases = phase_of(str(root / "weights"))
    yield root, phases[0], rounds.assemble(phases, root)
    patch.undo()


def test_it_scores_the_text_in_its_own_tokens(desk):
    root, phase, parts = desk
    reader = rounds.text_reader(phase, parts, root)
    assert reader is not None
    form, tokenizer = reader
    assert tokenizer.vocab_size > parts.tokenizer.vocab_size
    params = form.init(jax.random.key(3))
    write_weights(root / "weights", params, epoch=0, step=0)
    rounds.check_stored(phase, parts, root)
    annotate = pools.text_teacher(phase, parts, root)
    assert annotate is not None
    question = parts.source.tasks("train")[0]
    own = parts.tokenizer.encode(question.prompt)
    said = [*parts.tokenizer.encode(question.answer), parts.tokenizer.eos_id]
    told = annotate([rollout(1, 0, own, said, 1.0), rollout(1, 1, own, [1, 2], 0.0)])
    theirs = tokenizer.encode(question.answer)
    assert told[0]["text_length"] == len(question.answer) and told[0]["text_usable"] == 1
    assert len(theirs) < len(question.answer) or len(question.answer) == 1
    # by hand: the log-prob of each of the teacher's tokens after the ones before it
    ids = jnp.array([[*tokenizer.encode(question.prompt), *theirs, tokenizer.eos_id]])
    place = jnp.arange(ids.shape[1])[None]
    hidden = form.hidden(params, ids, place, jnp.ones_like(ids))
    logp = jax.nn.log_softmax(form.logits(params, hidden[0]))
    first = ids.shape[1] - len(theirs) - 1
    expected = sum(float(logp[j - 1, int(ids[0, j])]) for j in range(first, ids.shape[1]))
    assert told[0]["teacher_logp"] == pytest.approx(expected, rel=1e-5)
    assert told[1] == {"teacher_logp": 0.0, "text_length": 0, "text_usable": 0}  # an unknown id


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": ""}, "scorers.teacher.weights=''.*'gvpo_distill'"),
        ({"weights": "/nowhere/x"}, "scorers.teacher.weights: .*manifest.json is missing"),
        ({"model": {"vocab_size": 8}}, "scorers.teacher.model.vocab_size=8; allowed: >= "),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_trained(change, words, desk):
    root, _, parts = desk
    phase = phase_of(**{"weights": str(root / "weights"), **change})[0]
    with pytest.raises(ValueError, match=words):
        rounds.check_stored(phase, parts, root)


def test_a_tokenizer_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="scorers.teacher.tokenizer='runes' .*character_pairs"):
        phase_of("x/y", tokenizer="runes")
