"""Bodies that no client of ours sends: refused as the sender's fault, and nothing changes."""

import httpx2
import pytest

from tests.pool.scripted import Letters, Scripted, answer_of
from tests.pool.serving import KEY, gateway

DEEP = b"[" * 20_000 + b"]" * 20_000
EDGE = b"[" * 1_015 + b"]" * 1_015  # can be read, and not be written again
LONG = b"9" * 400
VERBS = ("lease", "heartbeat", "generate", "state", "seal", "fail")

# Of any call: what is no JSON object at all.
NOTHING = [b"{", b"[1]", b"null", b'"a"', b"1", b"\xff\xfe{}", b"{}{}", b'{"a":' + DEEP + b"}"]

# By call, with the token of a lease at T.
WRONG = {
    "lease": [
        b'{"most": 1}',
        b'{"owner": "a", "most": 1e400}',
        b'{"owner": "a", "most": -1e400}',
        b'{"owner": "a", "most": NaN}',
        b'{"owner": "a", "most": []}',
        b'{"owner": "a", "wait_s": NaN}',
        b'{"owner": "a", "wait_s": 1e400}',
        b'{"owner": "a", "wait_s": {}}',
    ],
    "heartbeat": [b"{}", b'{"tokens": 3}', b'{"tokens": [[1]]}', b'{"tokens": [{"a": 1}]}'],
    "generate": [b"{}", b'{"tokens": null}', b'{"tokens": ["T", "T"]}', b'{"tokens": 7}'],
    "state": [b"{}", b'{"token": ["T"]}', b'{"token": "\\ud800"}', b'{"token": null}'],
    "seal": [b"{}", b'{"attempts": 5}', b'{"attempts": null}'],
    "fail": [b"{}", b'{"token": "T"}', b'{"attempts": 5}'],
}
CALLS = [(verb, body) for verb in VERBS for body in (*NOTHING, *WRONG[verb])]

# Attempts in a seal: each refused by itself.
ATTEMPTS = [
    b"3",
    b"null",
    b"[]",
    b"{}",
    b'{"token": "T"}',
    b'{"token": "T", "reward": "high"}',
    b'{"token": "T", "reward": 1e400}',
    b'{"token": "T", "reward": ' + LONG + b"}",
    b'{"token": "T", "reward": [1]}',
    b'{"token": "T", "reward": 1, "components": 3}',
    b'{"token": "T", "reward": 1, "components": {"a": 1e400}}',
    b'{"token": "T", "reward": 1, "components": {"a": ' + LONG + b"}}",
    b'{"token": "T", "reward": 1, "facts": {"a": ' + EDGE + b"}}",
    b'{"token": "T", "reward": "1"}',
    b'{"token": "T", "reward": true}',
    b'{"token": "T", "reward": 1, "correct": "false"}',
    b'{"token": "T", "reward": 1, "correct": 1}',
    b'{"token": "T", "reward": 1, "feedback": ["a"]}',
    b'{"token": "T", "reward": 1, "failure": "sad"}',
    b'{"token": "T", "reward": 1, "stop_reason": 3}',
    b'{"token": "T", "reward": 1, "facts": {"a": 1e400}}',
]
PROMPTS = [
    b'{"prompt": [1e400]}',
    b'{"prompt": [1.5]}',
    b'{"prompt": [true]}',
    b'{"prompt": [-1]}',
    b'{"prompt": [4294967296]}',
    b'{"prompt": [' + LONG + b"]}",
    b'{"prompt": "1+1=", "x": ' + EDGE + b"}",
    b'{"prompt": {"a": 1}}',
    b'{"prompt": [[1]]}',
]
IDS = str(Letters().prompt("1+1=")).encode()
NATIVE = [
    b'{"prompt": ' + IDS + b', "max_new_tokens": 1e400}',
    b'{"prompt": ' + IDS + b', "max_new_tokens": NaN}',
    b'{"prompt": ' + IDS + b', "max_new_tokens": -1}',
    b'{"prompt": ' + IDS + b', "max_new_tokens": "3"}',
    b'{"prompt": ' + IDS + b', "temperature": 0}',
    b'{"prompt": ' + IDS + b', "temperature": 1e400}',
    b'{"prompt": ' + IDS + b', "temperature": "hot"}',
    b'{"prompt": ' + IDS + b', "stop_ids": [1e400]}',
    b'{"prompt": ' + IDS + b', "stop_ids": 3}',
    b'{"prompt": ' + IDS + b', "stop_ids": [-1]}',
    b'{"prompt": ' + IDS + b', "stop_ids": [' + LONG + b"]}",
]
TEXTS = [
    b'{"prompt": "1+1=", "max_tokens": 1e400}',
    b'{"prompt": "1+1=", "max_tokens": NaN}',
    b'{"prompt": "1+1=", "max_tokens": -1}',
    b'{"prompt": "1+1=", "n": 2}',
    b'{"prompt": "1+1=", "stop": 3}',
]
CHATS = [
    b'{"messages": 3}',
    b'{"messages": []}',
    b'{"messages": [{"role": "user", "content": ' + EDGE + b"}]}",
    b'{"messages": [3]}',
    b'{"messages": [{"role": "user"}]}',
    b'{"messages": [{"role": "user", "content": 3}]}',
    b'{"messages": [{"role": "user", "content": "1"}], "max_tokens": 1e400}',
    b'{"messages": [{"role": "user", "content": "1"}], "max_tokens": []}',
    b'{"messages": [{"role": "user", "content": "1"}], "stop": 3}',
    b'{"messages": [{"role": "user", "content": "1"}], "n": 1e400}',
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with gateway(tmp_path_factory.mktemp("gateway"), Scripted(answer_of)) as found:
        yield found


def sent(place, path, body):
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx2.post(place.url + path, content=body, headers=headers, timeout=30)


def untouched(place, token):
    """The lease can still be used and sealed, as if nothing had been said."""
    assert sent(place, f"/{token}/generate", b"{}").status_code == 200
    assert place.seal(token) == {}


def refused(answer):
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["error"]["message"]


def test_calls_of_workers(place):
    token = place.lease()
    for verb, body in CALLS:
        refused(sent(place, f"/work/{verb}", body.replace(b"T", token.encode())))
    untouched(place, token)


def test_what_is_refused_extends_no_lease_beside_it(place):
    token = place.lease()
    before = place.ledger.find(token).expires
    refused(sent(place, "/work/heartbeat", b'{"tokens": ["' + token.encode() + b'", 5]}'))
    assert place.ledger.find(token).expires == before
    untouched(place, token)


def test_attempts_in_a_seal(place):
    token = place.lease()
    assert sent(place, f"/{token}/generate", b"{}").status_code == 200
    for one in ATTEMPTS:
        body = b'{"attempts": [' + one.replace(b"T", token.encode()) + b"]}"
        answer = sent(place, "/work/seal", body)
        assert answer.status_code == 200, (one, answer.text)
        (result,) = answer.json()["results"]
        assert 400 <= result["status"] < 500 and result["error"], (one, result)
    assert place.seal(token) == {}


@pytest.mark.parametrize(
    ("path", "bodies"),
    [
        ("generate", (*NOTHING, *PROMPTS, b'{"prompt": ["1"]}', *NATIVE)),
        ("v1/chat/completions", (*NOTHING, *CHATS)),
        ("v1/completions", (*NOTHING, *PROMPTS, *TEXTS)),
    ],
)
def test_calls_of_agents(path, bodies, place):
    token = place.lease()
    for body in bodies:
        refused(sent(place, f"/{token}/{path}", body))
    untouched(place, token)


def test_what_other_writers_of_json_send_is_taken(place):
    token = place.lease().encode()
    spaced = b' \n{ "tokens" :\t[ "' + token + b'" ] , "x": 1.0000000000000000000001 }\r\n'
    assert sent(place, "/work/generate", spaced).json()["answers"][0]["text"]
    escaped = b'{"attempts": [{"token": "' + b"".join(b"\\u%04x" % c for c in token)
    twice = escaped + b'", "reward": 7, "reward": 1, "facts": {"a": "\\ud83d\\ude00"}}]}'
    assert sent(place, "/work/seal", twice).json() == {"results": [{}]}
