"""Rollouts as documents of ATIF: nothing is lost, ids and log-probs bit for bit, and two judges."""

import copy
import importlib.util
import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.pool import atif
from jaxrl.pool.published_tokenizer import PublishedTokenizer
from jaxrl.pool.rollout import (
    ACTION,
    FEEDBACK,
    INJECTED,
    NOT_SAMPLED,
    PROMPT,
    TYPES,
    Failure,
    Rollout,
    Version,
)
from tests.pool import templates
from tests.pool.atif_schema import SCHEMA, check, pieces, rebuilt
from tests.pool.checkpoints import byte_level, write
from tests.pool.samples import rollouts, same, sample
from tests.pool.scripted import EOS, Letters, Scripted
from tests.pool.serving import ask, client_of, gateway

AGENT = {"name": "jaxrl", "version": "0"}
LETTERS = atif.Reader(Letters(), "")


def told(branches: Sequence[Rollout], reader: atif.Reader | None = LETTERS) -> dict[str, Any]:
    """The document as a file has it, and checked."""
    found = json.loads(json.dumps(atif.document(branches, AGENT, reader), allow_nan=False))
    check(found)
    return found


@settings(deadline=None)
@given(st.lists(rollouts().filter(lambda one: len(one.tokens)), min_size=1, max_size=3))
def test_a_record_can_be_made_again_of_its_document(branches):
    named = [one for one in branches if not {"branch", "branches"} & set(one.facts)]
    numbered = [
        Rollout(**(vars(one) | {"facts": {**one.facts, "branch": place, "branches": len(named)}}))
        for place, one in enumerate(named)
    ]
    if not numbered:
        return
    for reader in (None, atif.Reader(Chars(), "")):
        document = told(numbered, reader)
        for one, made in zip(numbered, [document, *document.get(SUBS, ())], strict=True):
            assert same(rebuilt(made), one)
            sampled = [o["loss_eligible"] for _, o, _ in pieces(made) if "loss_eligible" in o]
            assert any(sampled) == bool((one.kind == ACTION).any())


SUBS = "subagent_trajectories"


class Chars(Letters):
    """Any id has a text."""

    def decode(self, ids):
        return "".join(chr(97 + token % 26) for token in ids)


# -- through the gateway


def talks(folder) -> list[list[Rollout]]:
    """Attempts of agents over real HTTP: tools, branches, no verdict."""
    call = '<tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'
    said = iter([f"See: {call}", "3", "one", "two", "three", "four", "5"])
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    with gateway(folder, Scripted(lambda request: next(said)), max_new_tokens=128) as place:
        token = place.lease()
        client = client_of(place, token)
        messages: Any = [{"role": "user", "content": "1+2?"}]
        first = client.chat.completions.create(model="p", messages=messages, tools=tools)
        made: Any = first.choices[0].message
        messages += [
            made,
            {"role": "tool", "tool_call_id": made.tool_calls[0].id, "content": "it is 3"},
        ]
        client.chat.completions.create(model="p", messages=messages, tools=tools)
        place.seal(token, correct=True, components={"score": 1.0}, feedback="right")
        token = place.lease()
        client = client_of(place, token)
        ask(client, "q")
        ask(client, "q", "one", "left")
        ask(client, "q", "one", "right")
        ask(client, "other")
        place.seal(token, reward=0.25)
        token = place.lease()
        ask(client_of(place, token), "q")
        place.seal(token, reward=None, failure="judge")
        return [place.sealed(group) for group in range(3)]


@pytest.fixture(scope="module")
def attempts(tmp_path_factory):
    return talks(tmp_path_factory.mktemp("pool"))


def test_two_turns_of_tools(attempts):
    (rollout,) = attempts[0]
    document = told([rollout])
    user, asked, last = document["steps"]
    assert (user["source"], user["message"]) == ("user", "1+2?")
    (made,) = asked["tool_calls"]
    assert asked["source"] == "agent" and asked["message"] == "See:"
    assert (made["function_name"], made["arguments"]) == ("add", {"a": 1, "b": 2})
    (result,) = asked["observation"]["results"]
    assert result["content"] == "it is 3" and result["source_call_id"] == made["tool_call_id"]
    (closing,) = last["observation"]["results"]
    assert (last["message"], closing["content"]) == ("3", "right")
    assert "source_call_id" not in closing
    # The tokens that are trained, and which of all they are.
    sampled = [step["metrics"] for step in (asked, last)]
    ids = [token for one in sampled for token in one["completion_token_ids"]]
    logp = [value for one in sampled for value in one["logprobs"]]
    assert ids == rollout.tokens[rollout.kind == ACTION].tolist()
    assert np.array(logp, np.float32).tobytes() == rollout.logp[rollout.kind == ACTION].tobytes()
    mask = [own["kind"] == "action" for ids, own, _ in pieces(document) for _ in ids]
    assert mask == (rollout.kind == ACTION).tolist()
    assert [one["extra"]["version_index"] for one in sampled] == [
        [0] * len(one["logprobs"]) for one in sampled
    ]
    assert document["agent"] == AGENT | {"model_name": "v=0-0"}
    assert document["extra"]["reward"] == 1.0 and document["extra"]["failure"] == "none"
    assert document["extra"]["reward_components"] == {"score": 1.0}
    assert same(rebuilt(document), rollout)


def test_branches_are_whole_trajectories_and_a_shared_call_is_trained_once(attempts):
    trained, *others = attempts[1]
    document = told([trained, *others])
    branches = [document, *document[SUBS]]
    texts = [[step["message"] for step in one["steps"]] for one in branches]
    assert texts == [["other", "four"], ["q", "one", "right", "three"], ["q", "one", "left", "two"]]
    assert [one["extra"]["trained_branch"] for one in branches] == [True, False, False]
    assert len({one["session_id"] for one in branches}) == 1
    assert len({one["trajectory_id"] for one in branches}) == 3
    copied = branches[2]["steps"][1]
    assert copied["is_copied_context"] and "logprobs" not in copied["metrics"]
    assert copied["extra"] == {"kind": "injected", "step": 0, "loss_eligible": False}
    assert branches[1]["steps"][1]["extra"]["loss_eligible"]
    for one, rollout in zip(branches, attempts[1], strict=True):
        assert same(rebuilt(one), rollout)
    assert told([trained, others[1]])["notes"] == "2 of 3 branches could be read"


def test_no_reward_is_invented(attempts):
    document = told(attempts[2])
    assert document["extra"]["reward"] is None and document["extra"]["failure"] == "judge"
    for failure in Failure:
        if failure not in (Failure.NONE, Failure.POLICY_TIMEOUT):
            extra = told([sample(reward=None, failure=failure)])["extra"]
            assert (extra["reward"], extra["failure"]) == (None, failure.value)


# -- one by hand


def test_what_no_policy_sampled_has_no_log_probs():
    shown = sample(
        version_index=np.full(4, NOT_SAMPLED, np.uint16),
        logp=np.zeros(4, np.float32),
        temperature=np.ones(4, np.float32),
        versions=(),
        facts={"demonstration": True},
    )
    _, step = told([shown])["steps"]
    assert set(step["metrics"]) == {
        *("prompt_tokens", "completion_tokens"),
        *("prompt_token_ids", "completion_token_ids"),
    }
    assert "llm_call_count" not in step and step["extra"]["loss_eligible"]


def test_several_versions_stand_at_their_steps_and_tokens():
    kind = np.array([PROMPT, ACTION, FEEDBACK, ACTION, ACTION, INJECTED], np.uint8)
    changed = sample(
        tokens=np.array(Letters().encode("abcdef"), np.uint32),
        kind=kind,
        step=np.array([-1, 0, 0, 1, 1, 2], np.int32),
        logp=np.array([0, -1, 0, -0.1, -3e-7, 0], np.float32),
        version_index=np.array([NOT_SAMPLED, 0, NOT_SAMPLED, 0, 1, NOT_SAMPLED], np.uint16),
        temperature=np.array([1, 0.7, 1, 0.7, 0.7, 1], np.float32),
        versions=(Version(0, 3, "a"), Version(1, 2, "b")),
        facts={"nan": np.array([np.nan, np.inf, 0.5], np.float32)},
    )
    document = told([changed])
    steps = document["steps"]
    assert [step["source"] for step in steps] == ["user", "agent", "user", "agent", "agent"]
    assert [step["message"] for step in steps] == ["a", "b", "c", "de", "f"]
    assert [step.get("model_name") for step in steps] == [None, "v=0-3", None, None, None]
    assert "model_name" not in document["agent"]
    assert steps[3]["metrics"]["extra"]["version_index"] == [0, 1]
    assert steps[3]["metrics"]["logprobs"] == changed.logp[3:5].tolist()
    assert "is_copied_context" not in steps[4] and "llm_call_count" not in steps[4]
    assert document["extra"]["facts"]["nan"]["array"] == ["NaN", "Infinity", 0.5]
    again = rebuilt(document).facts["nan"]
    assert again.tobytes() == changed.facts["nan"].tobytes()


def test_the_runs_system_message_is_a_step(tmp_path):
    write(tmp_path, byte_level(), config={"eos_token": "<|im_end|>"}, template=templates.CHATML)
    tokenizer = PublishedTokenizer(tmp_path, chat="template", system="Be brief.")
    prompt = tokenizer.prompt("1 + 1")
    answer = [*tokenizer.encode("2"), tokenizer.eos_id]
    sizes = [len(prompt), len(answer)]

    def asked(ids):
        return sample(
            tokens=np.array([*ids, *answer], np.uint32),
            kind=np.repeat([PROMPT, ACTION], sizes).astype(np.uint8),
            step=np.repeat([-1, 0], sizes).astype(np.int32),
            logp=np.repeat([0, -0.5], sizes).astype(np.float32),
            version_index=np.repeat([NOT_SAMPLED, 0], sizes).astype(np.uint16),
            temperature=np.ones(sum(sizes), np.float32),
            text="2",
        )

    reader = atif.Reader(tokenizer, "Be brief.")
    document = told([asked(prompt)], reader)
    assert [(step["source"], step["message"]) for step in document["steps"]] == [
        ("system", "Be brief."),
        ("user", "1 + 1"),
        ("agent", "2"),
    ]
    assert same(rebuilt(document), asked(prompt))
    other = told([asked([*prompt[:-1], EOS])], reader)  # no question that the template made
    assert [step["source"] for step in other["steps"]] == ["user", "agent"]


def test_arguments_that_are_no_object_are_kept_beside_it():
    text = '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'
    (call,) = told([sample(text=text)])["steps"][1]["tool_calls"]
    assert call["arguments"] == {} and call["extra"] == {"arguments": [1]}


def test_without_a_tokenizer_only_the_records_own_text_is_told(attempts):
    steps = told(attempts[0], None)["steps"]
    assert [step["message"] for step in steps] == [""] * 4  # whether tools were called is text too
    assert [step["message"] for step in told([sample(text="7")], None)["steps"]] == ["", "7"]


def test_a_rollout_without_tokens_is_refused():
    nothing = {name: np.zeros(0, dtype) for name, dtype in TYPES.items()}
    with pytest.raises(ValueError, match="r/7-1-0 branch 0 has no token"):
        atif.document([sample(**nothing)], AGENT, None)


# -- the judges


def test_harbors_own_models_read_them(attempts):
    harbor = pytest.importorskip("harbor.models.trajectories")
    for branches in [*attempts, [sample()], [sample(reward=None, failure=Failure.INFRA)]]:
        document = told(branches)
        read = harbor.Trajectory.model_validate(document).model_dump(
            mode="json", exclude_unset=True
        )
        assert read == document


SPOILT = {
    "another version": lambda d: d.update(schema_version="ATIF-v9"),
    "no steps": lambda d: d.update(steps=[]),
    "an unknown field": lambda d: d.update(reward=1.0),
    "a step that is not the next": lambda d: d["steps"][1].update(step_id=3),
    "metrics of a user": lambda d: d["steps"][0].update(metrics={}),
    "a result of no call": lambda d: d["steps"][1]["observation"]["results"][0].update(
        source_call_id="call_9"
    ),
    "an id that is no number": lambda d: d["steps"][1]["metrics"].update(prompt_token_ids=["x"]),
    "metrics without a model": lambda d: d["steps"][1].update(llm_call_count=0),
    "an agent without a version": lambda d: d["agent"].pop("version"),
    "a branch without a name": lambda d: d.update(
        subagent_trajectories=[{k: v for k, v in d.items() if k != "trajectory_id"}]
    ),
}


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("what", SPOILT)
def test_both_judges_can_refuse(what, attempts):
    document = copy.deepcopy(told(attempts[0]))
    SPOILT[what](document)
    with pytest.raises((jsonschema.ValidationError, AssertionError)):
        check(document)
    if importlib.util.find_spec("harbor") is not None:
        harbor = importlib.import_module("harbor.models.trajectories")
        with pytest.raises(ValueError, match="validation error"):
            harbor.Trajectory.model_validate(document)
