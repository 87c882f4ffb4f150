"""What comes through the gateway is what was sampled: the trainer finds the same log-probs, each
token knows its weights, and only the model's own tokens are trained."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import openai
import optax
import pytest

from jaxrl.model.sampler import Sampler
from jaxrl.model.versions import write_weights
from jaxrl.pool.contract import Group, Request
from jaxrl.pool.dialogue import PlainDialogue, spoken
from jaxrl.pool.engines import Batching, Sampled
from jaxrl.pool.rollout import ACTION, FEEDBACK, Rollout, Version
from tests.model.tiny import logp, numpy_logp, rows, seeded
from tests.pool.scripted import EOS, Letters, Scripted
from tests.pool.serving import gateway
from tests.pool.test_conversation import Merges
from tests.train import toy
from tests.train.test_step import grpo

PIECES = ["ab", "bc", "abc", " a", "ca", "aa", "b ", "cab", "ac", "cc", "  ", "ba", "bca"]
ROOM, NEW = 40, 12


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A small policy and two versions of its weights."""
    folder = tmp_path_factory.mktemp("weights")
    policy, params = seeded()
    found = []
    for step, scale in enumerate((1.0, 0.5)):
        held = {name: x * scale if "mlp" in name else x for name, x in params.items()}
        path = str(folder / f"v=0-{step}")
        digest = write_weights(path, held, epoch=0, step=step)
        found.append((Version(0, step, digest), path, held))
    return policy, found


@pytest.fixture(scope="module")
def sampler(weights):
    """One for all tests: it compiles once."""
    policy, found = weights
    made = Sampler(
        policy,
        None,
        seed=3,
        slots=4,
        prompt_buckets=(ROOM,),
        max_new_tokens=NEW,
        samples_per_prompt=1,
        record_routes=False,
    )
    made.load(*found[0][:2])
    return made


def request(**changes: Any) -> Request:
    values: dict[str, Any] = dict(
        prompt=[3, 1, 4, 1, 5],
        group=7,
        sample=2,
        temperature=0.8,
        max_new_tokens=NEW,
        stop_ids=frozenset(),
    )
    return Request(**(values | changes))


def test_a_dialogue_of_the_real_sampler_scores_the_same_in_the_trainer(weights, sampler, tmp_path):
    policy, ((version, path, params), _) = weights
    tokenizer = Merges(PIECES)
    with gateway(
        tmp_path,
        sampler,
        tokenizer=tokenizer,
        version=version,
        path=path,
        max_new_tokens=6,
        max_prompt_tokens=ROOM,
    ) as place:
        token = place.lease(version=version, prompts=[tokenizer.encode("abc")])
        client = openai.OpenAI(base_url=f"{place.url}/{token}/v1", api_key="x", max_retries=0)
        messages: Any = [{"role": "user", "content": "abc"}]
        for more in ("b", "c a", None):
            answer = client.chat.completions.create(
                model="p", messages=messages, temperature=0.7 if more else 1.0
            )
            messages += [answer.choices[0].message, {"role": "user", "content": more}]
        assert place.seal(token) == {}
        (rollout,) = place.sealed(0)
    acted = rollout.kind == ACTION
    assert acted.sum() > 6 and set(rollout.step[acted]) == {0, 1, 2}
    assert not any("drift" in name for name in rollout.facts)
    batch = rows([rollout.tokens.astype(np.int32)], temperature=rollout.temperature[None])
    gap = np.abs(np.asarray(logp(policy, params, batch))[0] - rollout.logp)[acted]
    assert gap.mean() < 1e-6 and gap.max() < 1e-4


def test_a_conversations_calls_have_keys_of_their_own(sampler):
    first, again, later = sampler.generate([request(), request(), request(call=1)])
    assert first.tokens.tolist() == again.tokens.tolist() != later.tokens.tolist()


def test_an_answer_in_pieces_is_the_answer(weights, sampler):
    """Each piece reads prompt and answer again, and keeps the keys of its tokens."""
    version, path, _ = weights[1][0]

    async def run() -> list[Sampled]:
        answers = []
        for chunk in (0, 5):
            engine = Batching(sampler, chunk_tokens=chunk, room=ROOM)
            await engine.load(version, path)
            answers.append(await engine.generate(request()))
            await engine.close()
        return answers

    whole, pieces = asyncio.run(run())
    assert pieces.tokens == whole.tokens and len(whole.tokens) == NEW
    assert np.allclose(pieces.logp, whole.logp, atol=1e-5)


class Waiting:
    """The sampler, which after its first piece waits until new weights are on their way."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.first = sampler, threading.Event()
        self.coming = threading.Event()

    def load(self, version: Version, path: str) -> None:
        self.sampler.load(version, path)

    def generate(self, requests):
        found = self.sampler.generate(requests)
        if not self.first.is_set():
            self.first.set()
            assert self.coming.wait(10)
        return found


def test_new_weights_in_the_middle_of_an_answer_are_stamped_at_the_right_token(weights, sampler):
    policy, ((old, old_path, old_params), (new, new_path, new_params)) = weights

    async def run() -> tuple[Sampled, Sampled]:
        held = Waiting(sampler)
        engine = Batching(held, chunk_tokens=5, room=ROOM)
        await engine.load(old, old_path)
        answer = asyncio.create_task(engine.generate(request()))
        await asyncio.to_thread(held.first.wait)
        load = asyncio.create_task(engine.load(new, new_path))
        await asyncio.sleep(0)
        held.coming.set()
        await load
        told = await answer
        same = await engine.generate(request(max_new_tokens=5))
        await engine.load(old, old_path)
        await engine.close()
        return told, same

    answer, same = asyncio.run(run())
    assert answer.versions == [old, new]
    assert answer.version_index == [0] * 5 + [1] * (NEW - 5)
    prompt = list(request().prompt)
    tokens = [*prompt, *answer.tokens]
    each = [numpy_logp(policy.config, params, tokens, 0.8) for params in (old_params, new_params)]
    expected = np.concatenate([each[0][5:10], each[1][10:]])
    assert np.abs(np.array(answer.logp) - expected).max() < 1e-4
    assert np.abs(each[0][10:] - each[1][10:]).max() > 1e-2  # else nothing would be shown
    # The same prompt again: nothing that the old weights computed is left of it.
    assert same.versions == [new]
    fresh = numpy_logp(policy.config, new_params, [*prompt, *same.tokens], 0.8)[5:]
    stale = numpy_logp(policy.config, old_params, [*prompt, *same.tokens], 0.8)[5:]
    assert np.abs(np.array(same.logp) - fresh).max() < 1e-4 < np.abs(same.logp - stale).max()


# -- only what the model wrote is trained


class Turns(PlainDialogue):
    """Messages with a header before the next answer, as chat templates have one."""

    def more(self, messages: Any, known: int, tools: Any) -> list[int]:
        said = [Letters().encode(f"{spoken(message)}>") for message in messages[known:]]
        return [EOS, *(token for ids in said for token in ids)]


TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def says(asked: Request) -> str:
    """Two samples that share no text: what one of them adds to the gradient, none takes away."""
    call = f'<tool_call>{{"name": "{"xy"[asked.sample]}", "arguments": {{}}}}</tool_call>'
    return ("so it is", "never")[asked.sample] if asked.call else call


def dialogue(folder: Any, told: str) -> list[Rollout]:
    """Two samples of a question with a tool, which answers the first one with ``told``."""
    with gateway(folder, Scripted(says), dialogue=Turns(Letters()), max_new_tokens=96) as place:
        place.open("1+2?", samples=2)
        rollouts = []
        for lease in place.work("lease", {"owner": "a", "most": 2}).json()["leases"]:
            token = lease["token"]
            client = openai.OpenAI(base_url=f"{place.url}/{token}/v1", api_key="x")
            messages: Any = [{"role": "user", "content": "1+2?"}]
            made = client.chat.completions.create(model="p", messages=messages, tools=TOOLS)
            said: Any = made.choices[0].message
            content = "other" if lease["sample"] else told
            tool = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": content}
            messages += [said, tool]
            client.chat.completions.create(model="p", messages=messages, tools=TOOLS)
            assert place.seal(token, reward=float(lease["sample"])) == {}
        for member in place.ledger.members(0):
            rollouts.append(place.spool.fetch(member.sealed)[0])
    return rollouts


def trainer() -> Callable[[list[Rollout]], dict[str, np.ndarray]]:
    """Rollouts -> the parameters after one step of plain gradient descent, the policy one of
    bigrams."""
    sgd, algorithm = optax.sgd(1.0), grpo()
    step = toy.step_of(algorithm, sgd, micro=2, size=2)

    def trained(rollouts: list[Rollout]) -> dict[str, np.ndarray]:
        batch = toy.batch_of([Group(0, "g", rollouts)], step_groups=1, size=2, buckets=(128,))
        state, metrics = step(toy.state_of(algorithm, sgd), batch)
        assert float(metrics["optim/grad_norm"]) > 0
        return jax.device_get(state.roles["student"].all)

    return trained


def test_changing_any_token_of_a_tool_leaves_the_gradient_unchanged(tmp_path, monkeypatch):
    """Of a policy that sees one token back: what remains of a tool's answer is what is trained on
    it, and that is nothing."""
    monkeypatch.setattr(toy, "VOCAB", 140)
    told, trained = "three", trainer()
    rollouts = dialogue(tmp_path, told)
    reference = trained(rollouts)
    first = rollouts[0]
    shown = np.flatnonzero(first.kind == FEEDBACK)
    assert first.tokens[shown].tolist() == Letters().encode(f"{told}>")
    wrote = [Letters().encode(says(request(sample=0, call=call))) for call in (0, 1)]
    assert first.tokens[first.kind == ACTION].tolist() == [*wrote[0], EOS, *wrote[1], EOS]

    def moved(other: Rollout) -> bool:
        after = trained([other, rollouts[1]])
        return any(not np.array_equal(after[name], reference[name]) for name in reference)

    for place in range(len(told)):
        changed = dialogue(tmp_path / str(place), told[:place] + "x" + told[place + 1 :])
        assert not moved(changed[0])
        assert np.array_equal(changed[1].tokens, rollouts[1].tokens)
    # What is trained does matter, and so does the header's sign, which the next answer follows.
    acted = np.flatnonzero(first.kind == ACTION)
    for place in (acted[3], acted[-2], shown[-1]):
        other = first.tokens.copy()
        other[place] = 9
        assert moved(with_tokens(first, other)), place


def with_tokens(rollout: Rollout, tokens: np.ndarray) -> Rollout:
    """A rollout of other ids."""
    return Rollout(**{**vars(rollout), "tokens": tokens.astype(np.uint32)})
