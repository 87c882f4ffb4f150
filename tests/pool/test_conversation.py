"""Ids that were sampled stay what they are, however an agent sends its history back."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.pool.conversation import Call, Conversation, Plan
from jaxrl.pool.dialogue import (
    PlainDialogue,
    TemplateDialogue,
    answer_message,
    content_of,
    link,
    plain,
)
from jaxrl.pool.published_tokenizer import PublishedTokenizer
from jaxrl.pool.rollout import StopReason, Version
from tests.pool import templates
from tests.pool.checkpoints import byte_level, write
from tests.pool.scripted import EOS, Letters

ALPHABET = "abc "


class Merges:
    """Single letters, and random strings of them: nearly every text has several spellings, of which
    ``encode`` knows one."""

    eos_id = EOS
    stop_ids = frozenset({EOS})

    def __init__(self, merges: list[str]) -> None:
        self.pieces = [*ALPHABET, *merges]

    def encode(self, text: str) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            fits = [p for p, piece in enumerate(self.pieces) if text.startswith(piece, at)]
            best = max(fits, key=lambda place: len(self.pieces[place]))
            ids.append(best + 3)
            at += len(self.pieces[best])
        return ids

    def prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def question(self, ids: Any) -> str:
        return self.decode(ids)

    def decode(self, ids: Any) -> str:
        return "".join(self.pieces[token - 3] for token in ids if token > EOS)


def call_of(plan: Plan, conversation: Conversation, tokens: list[int], **changes: Any) -> Call:
    """An answer to a plan, by hand."""
    text = conversation._tokenizer.decode(tokens)
    values: dict[str, Any] = dict(
        index=len(conversation.calls),
        parent=plan.parent,
        context=plan.context,
        tokens=tokens,
        logp=[-0.5] * len(tokens),
        version_index=[0] * len(tokens),
        versions=[Version(0, 0, "first")],
        temperature=1.0,
        stop_reason=StopReason.STOP if tokens[-1:] == [EOS] else StopReason.LENGTH,
        text=text,
        chain=link(plan.chain, answer_message(text, "x")) if plan.chain else "",
        shown=plan.shown + text if plan.shown else "",
        tools=plan.tools,
        drift=plan.drift,
        request=f"request {len(conversation.calls)}",
        trainable=True,
    )
    return Call(**(values | changes))


texts = st.text(ALPHABET, min_size=1, max_size=6)
merges = st.lists(st.text(ALPHABET, min_size=2, max_size=3), min_size=1, max_size=8, unique=True)


@settings(max_examples=60, deadline=None)
@given(merges, st.lists(st.tuples(texts, st.integers(0, 2**32 - 1), st.booleans()), max_size=5))
def test_an_agent_that_echoes_text_goes_on_from_the_sampled_ids(pieces, turns):
    tokenizer = Merges(pieces)
    conversation = Conversation(tokenizer, PlainDialogue(tokenizer))
    messages: list[dict[str, Any]] = []
    expected: list[int] = []
    for said, seed, stops in turns:
        messages.append({"role": "user", "content": said})
        plan = conversation.plan_messages(messages, ())
        ended = expected[-1:] == [EOS] or not expected
        expected += ([] if ended else [EOS]) + tokenizer.encode(said)
        assert plan.prompt == expected and not plan.drift
        # Any spelling, as a model samples it: seldom the one that `encode` would give.
        drawn = np.random.default_rng(seed).integers(3, 3 + len(tokenizer.pieces), 4)
        sampled = [*map(int, drawn), *([EOS] if stops else [])]
        conversation.add(call_of(plan, conversation, sampled))
        expected += sampled
        messages.append(answer_message(tokenizer.decode(sampled), "x"))
    assert not conversation.drifts
    if turns:
        assert conversation.ids(len(turns) - 1) == expected
        assert conversation.leaves() == [len(turns) - 1]


def talk() -> tuple[Conversation, list[dict[str, Any]]]:
    """Two turns, the second one's answer known too."""
    conversation = Conversation(Letters(), PlainDialogue(Letters()))
    messages: list[dict[str, Any]] = []
    for said, answer in (("one", "1"), ("two", "2")):
        messages.append({"role": "user", "content": said})
        plan = conversation.plan_messages(messages, ())
        conversation.add(call_of(plan, conversation, [*Letters().encode(answer), EOS]))
        messages.append({"role": "assistant", "content": answer})
    return conversation, messages


def test_an_edited_answer_begins_a_branch_behind_what_is_still_known():
    conversation, messages = talk()
    messages[3] = {"role": "assistant", "content": "two!"}
    plan = conversation.plan_messages([*messages, {"role": "user", "content": "three"}], ())
    assert plan.drift == "rewrite" and plan.parent == 0
    spelt = Letters().encode
    assert plan.context == [*spelt("two"), *spelt("two!"), EOS, *spelt("three")]
    conversation.add(call_of(plan, conversation, [5, EOS]))
    assert conversation.drifts == {"rewrite": 1}
    assert conversation.leaves() == [2, 1]
    assert [call.index for call in conversation.path(2)] == [0, 2]


def test_an_edited_question_before_a_known_answer_is_a_rewrite_too():
    conversation, messages = talk()
    messages[0] = {"role": "user", "content": "One"}
    plan = conversation.plan_messages([*messages, {"role": "user", "content": "three"}], ())
    assert (plan.parent, plan.drift) == (-1, "rewrite")


def test_a_conversation_of_its_own_is_no_drift():
    conversation, _ = talk()
    plan = conversation.plan_messages([{"role": "user", "content": "another agent"}], ())
    assert (plan.parent, plan.drift) == (-1, "")


def test_other_tools_are_another_template():
    conversation, messages = talk()
    asked = [*messages, {"role": "user", "content": "three"}]
    plan = conversation.plan_messages(asked, [{"type": "function", "function": {"name": "f"}}])
    assert (plan.parent, plan.drift) == (-1, "retemplate")


def test_texts_and_ids_go_on_from_the_longest_known_beginning():
    conversation = Conversation(Letters(), PlainDialogue(Letters()))
    plan = conversation.plan_text("1+1=")
    conversation.add(call_of(plan, conversation, [*Letters().encode("2"), EOS]))
    more = conversation.plan_text("1+1=2 and 2+2=")
    assert (more.parent, more.context) == (0, Letters().encode(" and 2+2="))
    assert more.prompt[: len(conversation.ids(0))] == conversation.ids(0)  # with the terminator
    assert conversation.plan_ids([*conversation.ids(0), 9]).context == [9]
    assert conversation.plan_text("1+1=").parent == -1  # the same question again


def test_ids_that_spell_a_known_text_otherwise_are_counted():
    tokenizer = Merges(["ab", "abc"])
    conversation = Conversation(tokenizer, PlainDialogue(tokenizer))
    sampled = [tokenizer.pieces.index(piece) + 3 for piece in ("ab", "c")]
    conversation.add(call_of(conversation.plan_ids([3]), conversation, sampled))
    respelt = [3, *tokenizer.encode("abc"), *tokenizer.encode(" a")]
    plan = conversation.plan_ids(respelt)
    assert (plan.parent, plan.drift, plan.prompt) == (-1, "retokenise", respelt)


def test_the_journal_holds_a_call_bit_for_bit():
    conversation, _ = talk()
    logp = [float(np.float32(-0.1)), float(np.float32(-1e-30))]
    plan = conversation.plan_ids([1, 2])
    call = call_of(plan, conversation, [7, EOS], logp=logp, temperature=0.7)
    data = call.encode()
    assert b"\n" not in data and Call.decode(data) == call
    with pytest.raises(ValueError, match="no call"):
        Call.decode(b"{}")
    again = Conversation(Letters(), PlainDialogue(Letters()))
    for one in conversation.calls:
        again.add(Call.decode(one.encode()))
    assert again.leaves() == conversation.leaves() and again.ids(1) == conversation.ids(1)


def test_tool_calls_are_the_same_however_their_arguments_are_spelt():
    text = 'Let me see.<tool_call>{"name": "f", "arguments": {"b": 1, "a": "x"}}</tool_call>'
    answer = answer_message(text, "x")
    assert answer["content"] == "Let me see."
    (call,) = answer["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": "x", "b": 1}
    respelt = {
        "role": "assistant",
        "content": [{"type": "text", "text": "Let me see."}],
        "tool_calls": [
            {
                "id": "another",
                "type": "function",
                "function": {"name": "f", "arguments": '{ "b":1,"a":"x" }'},
            }
        ],
    }
    assert link("", answer) == link("", respelt)
    respelt["tool_calls"][0]["function"]["arguments"] = '{"b": 2}'
    assert link("", answer) != link("", respelt)


@pytest.mark.parametrize(
    "text", ["<tool_call>{broken</tool_call>", "<tool_call>{}</tool_call>", "no call"]
)
def test_what_is_no_call_stays_text(text):
    assert answer_message(text, "x") == {"role": "assistant", "content": text}


def test_messages_that_cannot_be_read_are_refused():
    with pytest.raises(ValueError, match="role='robot'"):
        plain({"role": "robot", "content": ""})
    with pytest.raises(ValueError, match="content part"):
        content_of({"content": [{"type": "image_url"}]})
    with pytest.raises(ValueError, match="one to be answered"):
        conversation, messages = talk()
        conversation.plan_messages(messages, ())


# -- published templates


def published(folder: pathlib.Path, template: str) -> PublishedTokenizer:
    config = {"eos_token": "<|endoftext|>", "bos_token": "<s>"}
    write(folder, byte_level(), config=config, template=template)
    return PublishedTokenizer(folder, chat="template", system="")


@pytest.mark.parametrize("name", ["CHATML", "LLAMA3", "GEMMA", "QWEN3", "LLAMA2"])
def test_a_template_goes_on_behind_the_sampled_ids(name, tmp_path):
    """What is put behind an answer is what the template puts there, with the separator of the turn
    and without a second end of it."""
    tokenizer = published(tmp_path, vars(templates)[name])
    conversation = Conversation(tokenizer, TemplateDialogue(tokenizer))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 1 + 1?"}]
    first = conversation.plan_messages(messages, ())
    assert first.prompt == tokenizer.chat_ids(messages)
    letters = [token for sign in "What is" for token in tokenizer.encode(sign)]
    assert letters != tokenizer.encode("What is")  # a spelling that the tokenizer does not choose
    conversation.add(call_of(first, conversation, [*letters, tokenizer.eos_id]))
    messages += [
        {"role": "assistant", "content": "What is"},
        {"role": "user", "content": "2 + 2? <|im_end|>"},
    ]
    plan = conversation.plan_messages(messages, ())
    known = [*first.prompt, *letters, tokenizer.eos_id]
    assert plan.prompt[: len(known)] == known
    rendered = tokenizer.chat_ids(messages)
    assert plan.prompt.count(tokenizer.eos_id) == rendered.count(tokenizer.eos_id)
    shown, whole = (tokenizer.decode(ids, "shown") for ids in (plan.prompt, rendered))
    assert shown == whole.replace(" What is <|endoftext|>", "What is<|endoftext|>")  # Llama 2


def test_an_answer_that_was_cut_off_gets_its_end_from_the_template(tmp_path):
    tokenizer = published(tmp_path, templates.CHATML)
    conversation = Conversation(tokenizer, TemplateDialogue(tokenizer))
    messages = [{"role": "user", "content": "1"}]
    conversation.add(call_of(conversation.plan_messages(messages, ()), conversation, [300]))
    said = tokenizer.decode([300])
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "2"}]
    plan = conversation.plan_messages(messages, ())
    assert plan.context[0] == tokenizer.eos_id
    assert tokenizer.decode(plan.prompt, "shown") == tokenizer.decode(
        tokenizer.chat_ids(messages), "shown"
    )


def test_thoughts_that_a_template_would_drop_stay_as_they_were_sampled(tmp_path):
    tokenizer = published(tmp_path, templates.QWEN3)
    conversation = Conversation(tokenizer, TemplateDialogue(tokenizer))
    messages = [{"role": "user", "content": "1"}]
    thought = tokenizer.encode("<think>\nhm\n</think>\n\n4")
    plan = conversation.plan_messages(messages, ())
    conversation.add(call_of(plan, conversation, [*thought, tokenizer.eos_id]))
    said = tokenizer.decode(thought)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "2"}]
    assert "hm" not in tokenizer.decode(tokenizer.chat_ids(messages), "shown")
    plan = conversation.plan_messages(messages, ())
    assert plan.parent == 0 and not plan.drift
    assert plan.prompt[: len(conversation.ids(0))] == conversation.ids(0)


TOOLS = """\
{%- if tools %}
{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + call.function.arguments | tojson + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


def test_a_template_sees_tools_and_their_calls_and_what_they_say_is_no_control(tmp_path):
    tokenizer = published(tmp_path, TOOLS)
    tools = [{"type": "function", "function": {"name": "add", "description": "<|im_end|>"}}]
    end = tokenizer.eos_id
    conversation = Conversation(tokenizer, TemplateDialogue(tokenizer))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1 + 1"}]
    plan = conversation.plan_messages(messages, tools)
    assert plan.prompt.count(end) == 2  # of two turns; the tool's description is text
    assert "add" in tokenizer.decode(plan.prompt, "shown")
    said = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    conversation.add(call_of(plan, conversation, [*tokenizer.encode(said), end]))
    messages += [answer_message(said, "x"), {"role": "tool", "content": "2 <|im_end|>"}]
    more = conversation.plan_messages(messages, tools)
    assert (more.parent, more.drift) == (0, "")
    assert more.context.count(end) == 1  # the tool's turn
    assert tokenizer.decode(more.context, "shown").startswith("\n<|im_start|>tool\n2 ")
    # Rendered anew, as after an edit: the calls are shown by the template.
    whole = tokenizer.decode(tokenizer.chat_ids(list(map(plain, messages)), tools=tools), "shown")
    assert '<tool_call>add{"a": 1}</tool_call>' in whole
