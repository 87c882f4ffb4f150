"""Sections that describe models beside the student: what a phase replaces, and what is refused."""

import importlib
from typing import Any

import pytest
from ml_collections import ConfigDict

from jaxrl.train import settings

LATE = "late"


def config(**late: Any) -> Any:
    """Two phases; the second one overrides what is said."""
    made = importlib.import_module("configs.base").get_config("tiny")
    made.phases = {"order": ("early", LATE), "early": {}, LATE: late}
    return made


def last(made: Any) -> settings.Phase:
    return settings.phases(made)[-1]


def test_what_differs_lies_over_the_students_sections():
    made = config()
    made.scorers.teacher.model = ConfigDict({"width": 16, "heads": 1})
    made.scorers.value.optimizer = ConfigDict({"learning_rate": 0.5, "freeze": ("^embedding$",)})
    made.optimizer.freeze = ("head",)
    made.optimizer.rates = (("head", 2.0),)
    phase = last(made)
    teacher, value = phase.scorers.teacher, phase.scorers.value
    assert (teacher.model.width, teacher.model.heads) == (16, 1)
    assert teacher.model.layers == phase.model.layers and phase.model.width == 32
    assert value.optimizer.learning_rate == 0.5 and value.optimizer.b2 == phase.optimizer.b2
    assert value.optimizer.freeze == ("^embedding$",)
    novelty = phase.scorers.novelty.optimizer
    assert novelty.freeze == novelty.rates == ()  # the student's are of its own names
    assert phase.scorers.optimizer("value") is value.optimizer


def test_a_phase_replaces_open_mappings_whole_and_other_fields_one_by_one():
    made = config(
        scorers={
            "views": {"late": "{prompt}{response}"},
            "teacher": {"model": {"layers": 1}, "weights": "early"},
            "self": {"ema_rate": 0.5},
            "value": {"optimizer": {"learning_rate": 0.1}},
        }
    )
    made.scorers.views = ConfigDict({"early": "{response}"})
    made.scorers.teacher.model = ConfigDict({"width": 16})
    made.scorers.value.optimizer = ConfigDict({"b1": 0.5})
    made.phases.late.scorers.teacher.weights = "some/where"
    early, late = settings.phases(made)
    assert dict(early.scorers.views) == {"early": "{response}"}
    assert dict(late.scorers.views) == {"late": "{prompt}{response}"}
    assert (early.scorers.teacher.model.width, early.scorers.teacher.model.layers) == (16, 2)
    assert (late.scorers.teacher.model.width, late.scorers.teacher.model.layers) == (32, 1)
    assert (early.scorers.average.ema_rate, late.scorers.average.ema_rate) == (0.99, 0.5)
    assert (early.scorers.value.optimizer.b1, late.scorers.value.optimizer.b1) == (0.5, 0.9)
    assert late.scorers.teacher.tokenizer == early.scorers.teacher.tokenizer == ""
    assert late.scorers.novelty == early.scorers.novelty


REFUSED = {
    "rate of 1": ({"scorers.self.ema_rate": 1.0}, "scorers.self.ema_rate=1.0; allowed: between"),
    "rate of 0": ({"scorers.self.ema_rate": 0.0}, "scorers.self.ema_rate=0.0; allowed: between"),
    "hidden": ({"scorers.novelty.hidden": 0}, "scorers.novelty.hidden=0 is too small"),
    "view": ({"scorers.views": {"hint": "{prompt}"}}, "scorers.views.hint='{prompt}'; allowed"),
    "teacher's form": (
        {"scorers.teacher.model": {"heads": 3, "kv_heads": 2}},
        "scorers.teacher: model.heads=3 must be a multiple",
    ),
    "teacher's rate": (
        {"scorers.teacher.optimizer": {"learning_rate": -1.0}},
        "scorers.teacher: optimizer.learning_rate=-1.0; allowed: > 0",
    ),
    "value's rate": (
        {"scorers.value.optimizer": {"name": "adam"}},
        "scorers.value: optimizer.name='adam'; allowed: one of adamw",
    ),
    "unknown in a phase": (
        {"phases.late.scorers": {"selff": {"ema_rate": 0.5}}},
        "phases.late.scorers.selff is unknown; allowed: novelty, self",
    ),
    "unknown deeper in a phase": (
        {"phases.late.scorers": {"self": {"rate": 0.5}}},
        "phases.late.scorers.self.rate is unknown; allowed: ema_rate",
    ),
    "buckets": (
        {"train.view_token_buckets": (8, 4)},
        r"train.view_token_buckets=\(8, 4\); allowed: increasing",
    ),
    "feedback": ({"pool.max_feedback_tokens": -1}, "pool.max_feedback_tokens=-1 is too small"),
    "start": (
        {"phases.late.train": {"start": "later"}},
        "phases.late: train.start='later'; allowed: '', 'fresh', early, or a directory",
    ),
    "start from itself": (
        {"phases.late.train": {"start": "late"}},
        "phases.late: train.start='late'; allowed: '', 'fresh', early, or",
    ),
    "start of the first": (
        {"phases.early.train": {"start": "late"}},
        "phases.early: train.start='late'; allowed: '', 'fresh', or a directory",
    ),
    "teacher": (
        {"phases.late.scorers": {"teacher": {"weights": "earlier"}}},
        "phases.late: scorers.teacher.weights='earlier'; allowed: '', early, or a directory",
    ),
    "teacher's form and a phase's weights": (
        {"phases.late.scorers": {"teacher": {"weights": "early", "model": {"layers": 1}}}},
        "phases.late: scorers.teacher.model differs from model; allowed beside .*'early'",
    ),
}


def spoiled(changes: dict[str, Any]) -> Any:
    made = config()
    for name, value in changes.items():
        *sections, field = name.split(".")
        section = made
        for part in sections:
            section = section[part]
        with section.ignore_type():
            section[field] = ConfigDict(value) if isinstance(value, dict) else value
    return made


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_value_is_named_with_its_field(case):
    changes, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        settings.phases(spoiled(changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scorers.dreams": 1}, r"scorers has \['dreams', .*allowed: exactly \['novelty'"),
        ({"scorers.self.dreams": 1}, "AverageConfig.*'dreams'"),
        ({"scorers.teacher.dreams": 1}, "TeacherConfig.*'dreams'"),
        ({"scorers.teacher.model": {"wide": 1}}, "scorers.teacher: ModelConfig.*'wide'"),
        ({"scorers.novelty.optimizer": {"rate": 1}}, "scorers.novelty: OptimizerConfig.*'rate'"),
    ],
)
def test_an_unused_field_is_an_error(changes, words):
    with pytest.raises(TypeError, match=words):
        settings.phases(spoiled(changes))


@pytest.mark.parametrize("name", ["fresh", "a/b"])
def test_a_phases_name_is_no_word_of_train_start(name):
    made = config()
    made.phases = {"order": ("early", name), "early": {}, name: {}}
    with pytest.raises(ValueError, match=f"phases.{name}: train.start could mean something else"):
        settings.phases(made)


@pytest.mark.parametrize("start", ["", "fresh", "early", "some/weights", "gs://bucket/weights"])
def test_where_a_phase_may_start(start):
    made = config(train={"start": start})
    assert last(made).train.start == start


@pytest.mark.parametrize("who", ["self", "reference", "student"])
def test_who_never_learns_has_no_optimizer(who):
    with pytest.raises(ValueError, match=f"'{who}' cannot learn; allowed: teacher, value, novelty"):
        last(config()).scorers.optimizer(who)


@pytest.mark.parametrize(
    ("pool", "match"),
    [
        ({"tokenizer": "runes"}, "pool.tokenizer='runes' .*or a published .*path with a /"),
        ({"chat": "on"}, "pool.chat='on' is unknown; allowed: off, template"),
        ({"chat": "template"}, "pool.chat='template' with pool.tokenizer='sentencepiece'"),
        ({"tokenizer": "a/b", "system": "Hi."}, "pool.system='Hi.' with pool.chat='off'"),
    ],
)
def test_a_chat_asks_for_a_published_tokenizer(pool, match):
    made = config()
    made.pool.update(pool)
    with pytest.raises(ValueError, match=match):
        settings.phases(made)


@pytest.mark.parametrize(
    "late", [{"tokenizer": "characters"}, {"tokenizer_vocab_size": 9}, {"system": "Hi."}]
)
def test_all_phases_read_alike(late):
    made = config(pool=late)
    made.pool.update({"tokenizer": "a/b", "chat": "template", "system": "Ho."})
    late = late | ({"chat": "off", "system": ""} if "tokenizer" in late else {})
    made.phases.late.pool.update(late)
    with pytest.raises(ValueError, match="phases.late: pool.* allowed: .*as in the first phase"):
        settings.phases(made)


def test_one_sampler_serves_all_phases():
    made = config(sampler={"record_routes": True})
    with pytest.raises(ValueError, match="phases.late: sampler.record_routes=True; allowed: False"):
        settings.phases(made)
