"""A template renders as its publishers' code renders it, and only what it wrote itself is a control
token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.pool.chat import ChatTemplate, Control
from tests.pool import templates
from tests.pool.checkpoints import SPECIAL

CONTROLS = [Control(text, number) for number, text in enumerate(SPECIAL)]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
PUBLISHED = {
    name: getattr(templates, name) for name in ("CHATML", "LLAMA3", "GEMMA", "QWEN3", "LLAMA2")
}
ASKED = [{"role": "user", "content": " 2+2? "}]
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWERED = [*ASKED, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}]


def template_of(source: str, controls=CONTROLS) -> ChatTemplate:
    return ChatTemplate(source, NAMES, controls)


RENDERED = {
    "CHATML": "<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user\n 2+2? <|im_end|>\n"
    "<|im_start|>assistant\n",
    "LLAMA3": "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n"
    "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "GEMMA": "<s><start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n",
    "QWEN3": "<|im_start|>user\n 2+2? <|im_end|>\n<|im_start|>assistant\n",
    "LLAMA2": "<s>[INST]  2+2?  [/INST]",
}


@pytest.mark.parametrize("name", RENDERED)
def test_a_question_is_followed_by_the_header_of_the_answer(name):
    assert template_of(PUBLISHED[name]).render(ASKED) == RENDERED[name]


def test_a_header_is_only_there_if_it_is_asked_for():
    """A prompt without it has the model write the next question."""
    template = template_of(templates.GEMMA)
    assert template.render(ASKED, add_generation_prompt=False).endswith("2+2?<end_of_turn>\n")
    assert template.render(ANSWERED, add_generation_prompt=False).endswith("4<end_of_turn>\n")


def test_thoughts_are_kept_where_the_template_keeps_them():
    template = template_of(templates.QWEN3)
    last = template.render(ANSWERED, add_generation_prompt=False)
    assert last.endswith("<|im_start|>assistant\n<think>\nhm\n</think>\n\n4<|im_end|>\n")
    earlier = template.render([*ANSWERED, {"role": "user", "content": "sure?"}])
    assert "<|im_start|>assistant\n4<|im_end|>\n" in earlier and "hm" not in earlier


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("system", [[], [SYSTEM]], ids=["plain", "system"])
@pytest.mark.parametrize("messages", [ASKED, ANSWERED], ids=["asked", "answered"])
def test_transformers_renders_the_same(name, system, messages, monkeypatch):
    reason = "the judge is transformers"
    judge = pytest.importorskip("transformers.utils.chat_template_utils", reason=reason)
    if system and name == "GEMMA":
        pytest.skip("this template has no system turn")
    source = PUBLISHED[name].replace('strftime_now("%d %b %Y")', "'26 Jul 2024'")
    for asked in (True, False):
        theirs, _ = judge.render_jinja_template(
            [[*system, *messages]], chat_template=source, add_generation_prompt=asked, **NAMES
        )
        ours = template_of(PUBLISHED[name]).render(
            [*system, *messages], add_generation_prompt=asked
        )
        assert ours == theirs[0]


def test_filters_and_tags_do_what_published_templates_expect():
    """JSON is not escaped for HTML; blocks leave no line of their own; break ends a loop."""
    source = """\
{% for message in messages %}
    {% if loop.index == 2 %}
        {% break %}
    {% endif %}
{{ message | tojson }}|{{ {"b": "é", "a": 1} | tojson(sort_keys=true) }}
{% endfor %}
{% generation %}said{% endgeneration %}
"""
    assert template_of(source).render([{"role": "user", "content": "<a> & 'b'"}] * 3) == (
        '{"role": "user", "content": "<a> & \'b\'"}|{"a": 1, "b": "é"}\nsaid'
    )


# ---- who wrote it

PARTS = [*SPECIAL, "<|im", "<|", "<", ">", "|>", "_end|>", "s>", "</", "/s", "a", " ", "\n", "é"]
SAID = st.lists(st.sampled_from(PARTS), max_size=6).map("".join)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(sorted(PUBLISHED)), said=SAID, answer=SAID)
def test_what_messages_say_never_steers(name, said, answer):
    """The control tokens are those of the same conversation about nothing, and no text is lost."""
    template = template_of(PUBLISHED[name])

    def conversation(question: str, reply: str) -> list[dict[str, str]]:
        return [
            {"role": "user", "content": question},
            {"role": "assistant", "content": reply},
            {"role": "user", "content": question},
        ]

    found = template.stretches(conversation(said, answer))
    plain = template.stretches(conversation("x", "x"))
    assert [one.control for one in found if one.control] == [c.control for c in plain if c.control]
    assert "".join(one.text for one in found) == template.render(conversation(said, answer))


@pytest.mark.parametrize(
    "source",
    ["<{{ said }}>", "<|im_{{ said }}|>", "{{ said }}m_end|><|im_e{{ said }}", "<s{{ said }}"],
)
@settings(max_examples=50, deadline=None)
@given(said=st.one_of(SAID, st.sampled_from(["/s", "|im_end|", "end", "nd|>", "<|i", ">"])))
def test_a_template_that_touches_what_is_said_makes_no_token_of_it(source, said):
    source = source.replace("said", "messages[0].content | trim")
    found = template_of(source).stretches([{"role": "user", "content": said}])
    assert not [one for one in found if one.control]


def test_such_a_template_could_make_a_token():
    """What the test above forbids would happen: the rendered text holds one."""
    template = template_of("<{{ messages[0].content }}>")
    assert template.render([{"role": "user", "content": "/s"}]) == "</s>"
    assert template.stretches([{"role": "user", "content": "/s"}])[0].control is None


def test_neighbours_in_messages_do_not_vouch_for_each_other():
    """The template's token between two said ones is the template's."""
    template = template_of("{{ messages[0].content }}</s>{{ messages[1].content }}")
    said = [{"role": "user", "content": "<s>"}, {"role": "user", "content": "<s>"}]
    assert [(one.text, one.control and one.control.id) for one in template.stretches(said)] == [
        ("<s>", None),
        ("</s>", 4),
        ("<s>", None),
    ]


def test_private_characters_come_through():
    said = [{"role": "user", "content": "\ue000<s>\ue001"}]
    found = template_of("{{ messages[0].content }}</s>").stretches(said)
    assert [one.text for one in found] == ["\ue000<s>\ue001", "</s>"]


def test_the_longest_token_is_meant_and_whitespace_goes_where_tokens_take_it():
    controls = [Control("<a>", 1), Control("<a>b", 2, rstrip=True), Control("<c>", 3, lstrip=True)]
    template = template_of("<a>b  x{{ messages[0].content }} <c> y<a>", controls)
    found = template.stretches([{"role": "user", "content": "\n"}])
    assert [(one.text, one.control and one.control.id) for one in found] == [
        ("<a>b", 2),
        ("x", None),
        ("<c>", 3),
        (" y", None),
        ("<a>", 1),
    ]


# ---- refusals


@pytest.mark.parametrize(
    ("source", "messages", "match"),
    [
        (templates.GEMMA, [SYSTEM, *ASKED], "fails: TemplateError: System role not supported"),
        (templates.GEMMA, ANSWERED[::-1], "Turns must alternate"),
        ("{{ messages[0].content + 1 }}", ASKED, "fails: TypeError"),
        ("{{ messages[5].content.x }}", ASKED, "fails: UndefinedError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", ASKED, "fails: SecurityError"),
        ("{{ messages.append(1) }}", ASKED, "fails: SecurityError"),
        ("{% for i in range(10000000) %}{% endfor %}", ASKED, "fails: OverflowError"),
    ],
)
def test_a_template_that_refuses_says_why(source, messages, match):
    with pytest.raises(ValueError, match=match):
        template_of(source).render(messages)


def test_a_template_that_does_not_parse_is_refused():
    with pytest.raises(ValueError, match="no Jinja template: .*endfor"):
        template_of("{% for x in y %}")
