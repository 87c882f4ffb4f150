"""The claim's actor: weights behind a gateway process, asked over HTTP. No part is a stand-in."""

import contextlib

import jax
import pytest

from experiments.claims import harness_model
from jaxrl.agents.cross import ROLES
from jaxrl.pool.characters import CharacterTokenizer


def test_the_gateway_reads_characters_as_the_trainer_does():
    (task,) = harness_model.Source("", {}).tasks("train")
    assert CharacterTokenizer(set(task.prompt), 1).digest == harness_model.TOKENIZER.digest


@pytest.mark.slow
def test_the_weights_that_a_payload_names_answer_through_the_gateway():
    """The same key draws the same answers from the same weights, and others from others."""

    def asked(port: harness_model.Port, weights: str) -> list[str]:
        payload = {"prompt": "q05", "weights": weights}
        keys = [f"episode/{number}" for number in range(8)]
        replies = [port.call("actor", payload, ROLES["actor"].schema, key) for key in keys]
        assert {reply.model for reply in replies} == {weights}
        return [reply.content["text"] for reply in replies]

    with contextlib.closing(harness_model.Port({}, 0)) as port:
        for number, name in enumerate(("one", "other")):
            port.add(name, harness_model.policy().init(jax.random.key(number)))
        first, second, again = asked(port, "one"), asked(port, "other"), asked(port, "one")
        assert first == again and len(set(first)) > 1
        assert sum(a != b for a, b in zip(first, second, strict=True)) > 4
        assert port.services.counts()["visits"] == 24
    assert not port.folder.exists()
