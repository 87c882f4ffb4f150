"""The gateway, asked over real HTTP by OpenAI's own client and by hand. The model is a script."""

import concurrent.futures
import threading
import time
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from jaxrl.pool.contract import Request
from jaxrl.pool.engines import EngineError, Sampled
from jaxrl.pool.gateway import Gateway
from jaxrl.pool.rollout import ACTION, FEEDBACK, INJECTED, PROMPT, Failure, StopReason, Version
from tests.pool.scripted import EOS, FIRST, Letters, Scripted, answer_of
from tests.pool.serving import EVALUATION_KEY, KEY, Stamping, ask, client_of, gateway, served

LETTERS = Letters()


@pytest.fixture
def place(tmp_path):
    with gateway(tmp_path, Scripted(answer_of)) as found:
        yield found


# -- ids in, ids out


def test_the_native_call_answers_the_tasks_prompt_with_ids_and_their_versions(place):
    token = place.lease("3+1=")
    told = place.post(f"/{token}/generate", {}).json()
    assert told["tokens"] == [*LETTERS.encode("4"), EOS] and told["text"] == "4"
    assert told["logp"] == [-0.5, -0.5] and told["version_index"] == [0, 0]
    assert told["versions"] == [[0, 0, "first"]] and told["stop_reason"] == "stop"
    by_key = place.post(
        "/generate",
        {"prompt": LETTERS.encode("8+1="), "max_new_tokens": 1},
        headers={"authorization": f"Bearer {token}"},
    )
    assert by_key.json()["stop_reason"] == "length" and by_key.json()["text"] == "9"


def test_an_attempt_becomes_the_rollout_that_a_local_pool_would_make(place):
    token = place.lease("3+1=")
    place.post(f"/{token}/generate", {})
    told = {"correct": True, "components": {"score": 1.0}, "feedback": "ok", "facts": {"a": [1]}}
    assert place.seal(token, **told) == {}
    (rollout,) = place.sealed(0)
    assert rollout.tokens.tolist() == [*LETTERS.encode("3+1=4"), EOS, *LETTERS.encode("ok")]
    assert rollout.kind.tolist() == [PROMPT] * 4 + [ACTION] * 2 + [FEEDBACK] * 2
    assert rollout.step.tolist() == [-1] * 4 + [0] * 4
    assert rollout.versions == (FIRST,) and rollout.version_index.tolist()[4:6] == [0, 0]
    assert (rollout.reward, rollout.correct, rollout.text) == (1.0, True, "4")
    assert rollout.facts["task_probability"] == 0.5 and rollout.facts["a"] == [1]
    (member,) = place.ledger.members(0)
    assert member.sealed.tokens == 2 and member.sealed.min_version == FIRST


# -- an unmodified agent


def test_two_turns_of_tools_train_what_the_model_wrote_alone(tmp_path):
    """The agent sends back what it was shown, and its tool's answer, spelt as its client does."""
    call = '<tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'
    generator = Scripted(lambda request: call if not request.call else "3")
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    with gateway(tmp_path, generator, max_new_tokens=128) as place:
        token = place.lease()
        client = client_of(place, token)
        messages: Any = [{"role": "user", "content": "1+2?"}]
        first = client.chat.completions.create(model="p", messages=messages, tools=tools)
        assert first.choices[0].finish_reason == "tool_calls"
        made: Any = (first.choices[0].message.tool_calls or [None])[0]
        assert made.type == "function" and made.function.name == "add"
        messages += [
            first.choices[0].message,
            {"role": "tool", "tool_call_id": made.id, "content": "three"},
        ]
        second = client.chat.completions.create(model="p", messages=messages, tools=tools)
        assert second.choices[0].message.content == "3"
        place.seal(token)
        (rollout,) = place.sealed(0)
    sampled = rollout.tokens[rollout.kind == ACTION].tolist()
    assert sampled == [*LETTERS.encode(call), EOS, *LETTERS.encode("3"), EOS]
    assert rollout.tokens[rollout.kind == FEEDBACK].tolist() == LETTERS.encode("three")
    assert rollout.step[rollout.kind == ACTION].tolist() == [0] * (len(call) + 1) + [1, 1]
    assert (rollout.logp[rollout.kind != ACTION] == 0).all()
    assert [request.call for request in generator.requests] == [0, 1]
    assert generator.requests[1].prompt == rollout.tokens[:-2].tolist()


@pytest.mark.parametrize("text", ["", "a" * 40, 'x<tool_call>{"name": "f"}</tool_call>'])
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_stream_is_the_answer_in_pieces(text, kind, tmp_path):
    with gateway(tmp_path, Scripted(lambda request: text)) as place:
        whole, streamed = (client_of(place, place.lease()) for _ in range(2))
        usage: Any = {"stream": True, "stream_options": {"include_usage": True}}
        if kind == "text":
            one = whole.completions.create(model="p", prompt="q", logprobs=0)
            pieces = list(streamed.completions.create(model="p", prompt="q", logprobs=0, **usage))
            assert "".join(p.choices[0].text for p in pieces if p.choices) == one.choices[0].text
        else:
            one = ask(whole, "q", logprobs=True)
            pieces = list(ask(streamed, "q", logprobs=True, **usage))
            deltas = [piece.choices[0].delta for piece in pieces if piece.choices]
            said = "".join(delta.content or "" for delta in deltas)
            assert said == (one.choices[0].message.content or "")
            calls = [tool for delta in deltas for tool in delta.tool_calls or ()]
            wanted = one.choices[0].message.tool_calls or []
            assert [c.function.name for c in calls] == [c.function.name for c in wanted]
    last = [piece for piece in pieces if piece.choices][-1].choices[0]
    assert last.finish_reason == one.choices[0].finish_reason
    told: Any = [choice.logprobs for choice in (last, one.choices[0])]
    assert told[0].model_dump() == told[1].model_dump()
    assert pieces[-1].usage == one.usage
    assert one.usage is not None and one.usage.completion_tokens == len(text) + 1


def test_stop_texts_and_limits_end_an_answer_where_they_should(tmp_path):
    with gateway(tmp_path, Scripted(lambda request: "one. two. three.")) as place:
        token = place.lease()
        client = client_of(place, token)
        stopped = ask(client, "q", stop=[" th", ". "]).choices[0]
        assert (stopped.message.content, stopped.finish_reason) == ("one", "stop")
        cut = ask(client, "q", max_tokens=5).choices[0]
        assert (cut.message.content, cut.finish_reason) == ("one. ", "length")
        place.seal(token)
        branches = place.sealed(0)
    # The newest branch is trained, up to the token that completed the stop text, and no further.
    spelt = [row.tokens[row.kind == ACTION].tolist() for row in branches]
    assert spelt == [LETTERS.encode("one. "), LETTERS.encode("one. ")]
    assert branches[0].stop_reason is StopReason.LENGTH


def test_a_text_agent_that_appends_to_what_it_got_keeps_the_ids(place):
    token = place.lease()
    client = client_of(place, token)
    first = client.completions.create(model="p", prompt="1+1=").choices[0].text
    client.completions.create(model="p", prompt=f"1+1={first}\n2+1=")
    place.seal(token)
    (rollout,) = place.sealed(0)
    assert rollout.kind.tolist() == [PROMPT] * 4 + [ACTION] * 2 + [FEEDBACK] * 5 + [ACTION] * 2


def test_edited_history_is_a_branch_and_is_counted(place):
    token = place.lease()
    client = client_of(place, token)
    ask(client, "1+1=")
    ask(client, "1+1=", "two", "2+1=")
    place.seal(token)
    trained, other = place.sealed(0)
    assert LETTERS.decode(trained.tokens[trained.kind == PROMPT]) == "1+1=two2+1="
    assert trained.facts["drift_rewrite"] == 1 and other.facts["branch"] == 1
    assert place.ledger.counts()["drift_rewrite"] == 1


def test_a_call_that_branches_share_is_an_action_once(place):
    token = place.lease()
    client = client_of(place, token)
    ask(client, "1+1=")
    for number in (4, 5):
        ask(client, "1+1=", "2", f"{number}+1=")
    place.seal(token)
    trained, other = place.sealed(0)
    assert trained.kind.tolist()[4:6] == [ACTION] * 2
    assert other.kind.tolist()[4:6] == [INJECTED] * 2 and other.logp[4] == 0
    counted = sum(int((row.kind == ACTION).sum()) for row in (trained, other))
    assert counted == 3 * 2


REFUSED = {
    "greedy": ({"temperature": 0}, "temperature=0; allowed: > 0"),
    "nucleus": ({"top_p": 0.9}, "top_p=0.9; allowed: 1"),
    "several": ({"n": 2}, "n=2; allowed: 1"),
    "forced": ({"tool_choice": "required"}, "tool_choice='required'"),
    "format": ({"response_format": {"type": "json_object"}}, "response_format="),
    "penalty": ({"presence_penalty": 1.0}, "presence_penalty=1.0"),
    "no room": ({"max_tokens": -1}, "max_tokens=-1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_change_the_distribution_is_refused(case, place):
    settings, message = REFUSED[case]
    with pytest.raises(openai.BadRequestError, match=message):
        ask(client_of(place, place.lease()), "1+1=", **settings)


def test_an_overlong_prompt_is_told_as_openai_tells_it(tmp_path):
    with gateway(tmp_path, Scripted(answer_of), max_prompt_tokens=8) as place:
        token = place.lease()
        with pytest.raises(openai.BadRequestError) as raised:
            ask(client_of(place, token), "1000000+1=")
        assert raised.value.code == "context_length_exceeded"
        assert place.work("state", {"token": token}).json()["full"]


# -- evaluation


def visitor(place) -> openai.OpenAI:
    """Any client of OpenAI's: it knows the gateway's URL and the evaluation key."""
    return openai.OpenAI(base_url=f"{place.url}/v1", api_key=EVALUATION_KEY, max_retries=0)


def test_an_evaluation_asks_without_a_sample_and_nothing_of_it_is_kept(tmp_path):
    generator = Scripted(answer_of)
    with gateway(tmp_path, generator) as place:
        client = visitor(place)
        assert ask(client, "3+1=", temperature=0).choices[0].message.content == "4"
        assert client.completions.create(model="p", prompt="8+1=").choices[0].text == "9"
        assert len(list(client.models.list())) == 1
        headers = {"authorization": f"Bearer {KEY}"}
        told = httpx2.get(f"{place.url}/counts", headers=headers).json()
        assert told["gateway"]["visits"] == 2 and "calls" not in told["gateway"]
        assert not any(path.is_file() for path in (tmp_path / "spool").rglob("*"))
        assert place.work("lease", {"owner": "test", "most": 1}).json() == {"leases": []}
        with pytest.raises(openai.BadRequestError, match="top_p"):
            ask(client, "3+1=", top_p=0.5)
    assert [request.temperature for request in generator.requests] == [0, 1.0]
    assert [request.call for request in generator.requests] == [0, 0]


def test_a_seed_draws_again_for_an_evaluation_and_changes_nothing_for_a_sample(tmp_path):
    generator = Scripted(answer_of)
    with gateway(tmp_path, generator) as place:
        for seed in (5, 5, 6, -7, None, None):
            ask(visitor(place), "3+1=", seed=seed)
        visits = [request.group for request in generator.requests]
        assert visits[0] == visits[1] and len(set(visits)) == 5
        assert all(2**29 <= group < 2**30 for group in visits)
        ask(client_of(place, place.lease()), "3+1=", seed=5)
        assert generator.requests[-1].group == 0
        with pytest.raises(openai.BadRequestError, match="seed='x'; allowed: a number"):
            ask(visitor(place), "3+1=", seed="x")


def test_an_evaluation_waits_for_weights_and_answers_of_the_newest(tmp_path):
    with gateway(tmp_path, Stamping(), version=None, wait_s=0.05) as place:
        with pytest.raises(openai.InternalServerError, match="no engine has acknowledged"):
            ask(visitor(place), "3+1=")


def test_the_evaluation_key_opens_no_other_door(place):
    for verb in ("lease", "seal", "fail", "heartbeat", "generate", "state"):
        assert place.work(verb, {}, key=EVALUATION_KEY).status_code == 401
    headers = {"authorization": f"Bearer {EVALUATION_KEY}"}
    for path in ("/counts", "/work/run"):
        assert httpx2.get(place.url + path, headers=headers).status_code == 401
    for key in ("x", KEY, EVALUATION_KEY[:-1]):
        sent = {"authorization": f"Bearer {key}"}
        assert place.post("/v1/completions", {"prompt": "1+1="}, headers=sent).status_code == 401
    made: Any = {"max_body_bytes": 1, "run": {}}
    for keys in (("", "b"), ("a", ""), ("a", "a")):
        named = dict(zip(("key", "evaluation_key"), keys, strict=True))
        with pytest.raises(ValueError, match="allowed: two different ones"):
            Gateway(place.attempts, LETTERS, **named, **made)


# -- who may do what


def test_without_a_token_nothing_is_served_or_accepted(place):
    token = place.lease()
    bad = client_of(place, "nobody")
    with pytest.raises(openai.AuthenticationError):
        ask(bad, "1+1=")
    with pytest.raises(openai.AuthenticationError):
        bad.models.list()
    assert client_of(place, token).models.list().data[0].id == "policy"
    for path in ("/v1/chat/completions", "/generate", "/nobody/generate"):
        assert place.post(path, {}).status_code == 401
    for verb in ("lease", "heartbeat", "generate", "state", "seal", "fail"):
        assert place.work(verb, {}, key="wrong").status_code == 401
    for path in ("/counts", "/work/run"):
        assert httpx2.get(place.url + path).status_code == 401
    assert place.seal("nobody")["code"] == "invalid_api_key"
    assert len(token) >= 32


def test_a_token_ends_with_its_attempt(place):
    token = place.lease()
    ask(client_of(place, token), "1+1=")
    assert place.seal(token) == {} and place.seal(token)["code"] == "sealed"
    with pytest.raises(openai.PermissionDeniedError, match="sealed"):
        ask(client_of(place, token), "1+1=")
    assert place.work("heartbeat", {"tokens": [token]}).json() == {"refused": ["sealed"]}


def test_a_restarted_trainer_fences_agents_and_their_seals(place):
    token = place.lease()
    ask(client_of(place, token), "1+1=")
    place.ledger.begin_epoch()
    with pytest.raises(openai.PermissionDeniedError, match="fenced"):
        ask(client_of(place, token), "1+1=")
    assert place.seal(token)["code"] == "fenced"
    assert place.ledger.members(0) == []
    assert not list(place.spool.root.rglob("*.rollouts"))  # and no file is left of it


@pytest.mark.parametrize("extra", [{"reward": float("nan")}, {"failure": "infra"}, {"facts": 3}])
def test_a_seal_that_says_nonsense_is_refused_and_changes_nothing(extra, place):
    token = place.lease()
    ask(client_of(place, token), "1+1=")
    told = f'{{"attempts": [{{"token": "{token}", "reward": NaN}}]}}'
    if "reward" in extra:
        headers = {"authorization": f"Bearer {KEY}"}
        answer = httpx2.post(f"{place.url}/work/seal", content=told, headers=headers).json()
        (result,) = answer["results"]
    else:
        result = place.seal(token, **extra)
    assert result["status"] == 400
    assert place.seal(token) == {}  # and the attempt can still be sealed


def test_an_attempt_without_a_call_cannot_be_sealed(place):
    assert "made no call" in place.seal(place.lease())["error"]


def test_bodies_are_limited_and_what_is_no_json_is_refused(place):
    token = place.lease()
    answer = place.post(f"/{token}/generate", {"prompt": [1] * 2**16})
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
    assert httpx2.post(f"{place.url}/{token}/generate", content=b"{").status_code == 400
    assert httpx2.post(f"{place.url}/{token}/generate", content=b"[1]").status_code == 400


# -- when things break


class Held:
    """A scripted model that answers when it is told to."""

    def __init__(self) -> None:
        self.inner, self.go, self.asked = Scripted(answer_of), threading.Event(), 0

    def load(self, version: Version, path: str) -> None:
        self.inner.load(version, path)

    def generate(self, requests):
        self.asked += len(requests)
        assert self.go.wait(10)
        return self.inner.generate(requests)


def test_over_the_limit_agents_are_told_when_to_come_again(tmp_path):
    model = Held()
    with (
        gateway(tmp_path, model, under_way=1) as place,
        concurrent.futures.ThreadPoolExecutor() as t,
    ):
        tokens = [place.lease() for _ in range(2)]
        first = t.submit(ask, client_of(place, tokens[0]), "1+1=")
        while not model.asked:
            time.sleep(0.005)
        with pytest.raises(openai.RateLimitError) as raised:
            ask(client_of(place, tokens[1]), "1+1=")
        assert raised.value.response.headers["retry-after"] == "1"
        patient = t.submit(ask, client_of(place, tokens[1], max_retries=3), "1+1=")
        model.go.set()
        for answer in (first, patient):
            assert answer.result().choices[0].message.content == "2"


class Cutting:
    """The application behind a connection that breaks in the middle of its first answer."""

    def __init__(self, app: Any) -> None:
        self.app, self.cut = app, threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def half(message: Any) -> None:
            if message["type"] == "http.response.body" and not self.cut.is_set():
                self.cut.set()
                await send({**message, "body": message["body"][:9], "more_body": True})
                raise ConnectionResetError("cut by the test")
            await send(message)

        await self.app(scope, receive, half if scope["type"] == "http" else send)


def test_a_gateway_that_dies_in_the_middle_of_an_answer_gives_the_same_one_again(tmp_path):
    """What was sampled is in the spool before it is sent: the client's second try gets it from a
    gateway that never saw the first, and nothing is sampled twice."""
    generator = Scripted(lambda request: f"answer {request.call}")
    with gateway(tmp_path, generator) as place:
        token = place.lease()
        ask(client_of(place, token), "4+1=")
        app = Cutting(
            Gateway(
                place.attempts,
                LETTERS,
                key=KEY,
                evaluation_key=EVALUATION_KEY,
                max_body_bytes=2**16,
                run={},
            ).app()
        )
        with served(app) as url:
            client = openai.OpenAI(base_url=f"{url}/{token}/v1", api_key="x", max_retries=0)
            with pytest.raises(openai.APIConnectionError):
                ask(client, "4+1=", "answer 0", "1+1=")
        assert app.cut.is_set()
    assert len(generator.requests) == 2
    with gateway(tmp_path, generator) as place:
        headers = {"x-stainless-retry-count": "1"}
        again = ask(client_of(place, token), "4+1=", "answer 0", "1+1=", extra_headers=headers)
        assert again.choices[0].message.content == "answer 1"
        assert len(generator.requests) == 2
        third = ask(client_of(place, token), "4+1=", "answer 0", "1+1=", "answer 1", "7+1=")
        assert third.choices[0].message.content == "answer 2"
        assert place.seal(token) == {}
        (rollout,) = place.sealed(0)
    assert LETTERS.decode(rollout.tokens[rollout.kind == ACTION]) == "answer 0answer 1answer 2"
    assert [request.call for request in generator.requests] == [0, 1, 2]


def test_a_full_disk_is_infrastructure_and_nothing_is_half_kept(place, monkeypatch):
    token = place.lease()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(place.spool, "append", full)
        answer = place.post(f"/{token}/generate", {})
    assert answer.status_code == 507 and answer.json()["error"]["code"] == "storage"
    assert place.work("state", {"token": token}).json()["calls"] == 0
    assert place.post(f"/{token}/generate", {}).status_code == 200
    with monkeypatch.context() as patch:
        patch.setattr(place.spool, "seal", full)
        assert place.seal(token)["status"] == 507
    assert place.seal(token) == {}


def test_an_engine_that_fails_is_infrastructure(tmp_path):
    class Broken(Stamping):
        async def generate(self, request: Request) -> Sampled:
            raise EngineError("the server is gone")

    with gateway(tmp_path, Broken()) as place:
        group = place.open()
        for _ in range(3):
            (lease,) = place.work("lease", {"owner": "a", "most": 1}).json()["leases"]
            assert place.post(f"/{lease['token']}/generate", {}).status_code == 503
            told = {"token": lease["token"], "failure": "infra", "reason": "503"}
            assert place.work("fail", {"attempts": [told]}).json() == {"results": [{}]}
        assert place.ledger.voided(0)[0].id == group  # out of attempts, and never a reward of 0
        assert place.ledger.counts()["slots_sealed"] == 0


def test_a_batch_of_tasks_is_answered_together(tmp_path):
    generator = Scripted(answer_of)
    with gateway(tmp_path, generator) as place:
        for number in range(6):
            place.open(f"{number}+1=")
        leases = place.work("lease", {"owner": "a", "most": 8}).json()["leases"]
        tokens = [one["token"] for one in sorted(leases, key=lambda one: one["group"])]
        assert len(tokens) == 6
        told = place.work("generate", {"tokens": [*tokens, "nobody"]}).json()["answers"]
        assert [answer.get("text") for answer in told] == [*"123456", None]
        assert told[-1]["status"] == 401
        assert place.engine.counts()["batches"] < 6  # most wait for one another
        again = place.work("generate", {"tokens": tokens, "again": True}).json()["answers"]
        assert again == told[:-1] and len(generator.requests) == 6
        seals = [{"token": token, "reward": None, "failure": "judge"} for token in tokens]
        assert place.work("seal", {"attempts": seals}).json() == {"results": [{}] * 6}
        assert place.sealed(3)[0].failure is Failure.JUDGE


def test_a_seal_that_is_refused_does_not_hinder_those_beside_it(place):
    """One request, one segment: what another attempt has won is left out of it."""
    for number in range(3):
        place.open(f"{number}+1=")
    leases = place.work("lease", {"owner": "a", "most": 8}).json()["leases"]
    tokens = [lease["token"] for lease in leases]
    place.work("generate", {"tokens": tokens})
    assert place.seal(tokens[1]) == {}
    told = [{"token": token, "reward": 1.0} for token in [*tokens, tokens[0], "nobody"]]
    told.append({"token": tokens[2], "reward": 1.0, "failure": "infra"})
    results = place.work("seal", {"attempts": told}).json()["results"]
    codes = [result.get("code", result.get("status")) for result in results]
    assert codes == [None, "sealed", None, "sealed", "invalid_api_key", "sealed"]
    sealed = [place.ledger.members(group)[0].sealed for group in range(3)]
    assert sealed[0].segment == sealed[2].segment != sealed[1].segment
    assert [place.sealed(group)[0].text for group in range(3)] == ["1", "2", "3"]
    files = list(place.spool.root.rglob("*.rollouts"))
    assert len(files) == 2 and not list(place.spool.root.rglob("*.calls"))


def test_the_gateway_counts_its_own_time(place):
    ask(client_of(place, place.lease()), "1+1=")
    told = httpx2.get(place.url + "/counts", headers={"authorization": f"Bearer {KEY}"}).json()
    assert told["gateway"]["calls"] == 1 and 0 < told["gateway"]["own_s"] < 5
    assert told["ledger"]["slots_running"] == 1
    assert np.isfinite(told["gateway"]["own_s"])
