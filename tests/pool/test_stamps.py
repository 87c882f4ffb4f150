"""What a gateway makes of an engine's answers and versions: nothing is made up, nothing mixed."""

import asyncio
import dataclasses
import json
from typing import Any

import httpx2
import openai
import pytest

from jaxrl.pool.engines import EngineError
from jaxrl.pool.gateway import follow
from jaxrl.pool.order import Bell
from jaxrl.pool.rollout import ACTION, INJECTED, StopReason, Version
from tests.pool.hands import Hands, remote_pool
from tests.pool.scripted import EOS, FIRST, Letters, Sums
from tests.pool.serving import Stamping, ask, client_of, gateway

LETTERS = Letters()


TAMPERED = {
    "no stamp": {"versions": []},
    "a stamp beyond the table": {"version_index": [0, 1]},
    "an older one": {"versions": [Version(0, -1, "before")]},
    "an older epoch": {"versions": [Version(-1, 9, "before")]},
    "fewer log-probs": {"logp": [-0.5]},
    "no ids": {"tokens": [], "logp": [], "version_index": []},
    "a log-prob above 0": {"logp": [0.5, -0.5]},
    "no number": {"logp": [float("nan"), -0.5]},
}


@pytest.mark.parametrize("case", TAMPERED)
def test_an_answer_that_is_not_whole_or_not_stamped_is_refused(case, tmp_path):
    with gateway(tmp_path, Stamping(**TAMPERED[case])) as place:
        token = place.lease()
        with pytest.raises(openai.InternalServerError):
            ask(client_of(place, token), "1+1=")
        assert place.spool.calls("x") == []
        assert place.work("state", {"token": token}).json()["calls"] == 0
        counts = place.ledger.counts()
    if "stamp" in case or "older" in case:
        assert counts["refused_stamp"] == 1
    elif "log-prob" not in case and "number" not in case:
        assert counts["rejected_ragged"] == 1


def test_a_sample_waits_for_weights_that_are_young_enough(tmp_path):
    with gateway(tmp_path, Stamping(), version=None, wait_s=0.1) as place:
        token = place.lease(version=Version(0, 3, "third"))
        assert httpx2.get(place.url + "/health").status_code == 503
        answer = place.post(f"/{token}/generate", {})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        place.attempts.engine.version = Version(0, 2, "second")  # pyright: ignore
        assert place.post(f"/{token}/generate", {}).status_code == 503
        place.attempts.engine.version = Version(0, 3, "third")  # pyright: ignore
        assert place.post(f"/{token}/generate", {}).status_code == 200
        assert httpx2.get(place.url + "/health").status_code == 200


def test_a_server_that_tells_no_ids_gives_text_and_no_training(tmp_path):
    untold: dict[str, Any] = {"tokens": [], "logp": [], "version_index": [], "trainable": False}
    with gateway(tmp_path, Stamping(**untold, text="two")) as place:
        token = place.lease()
        assert ask(client_of(place, token), "1+1=").choices[0].message.content == "two"
        place.seal(token)
        (rollout,) = place.sealed(0)
    assert rollout.facts["trainable"] is False and not (rollout.kind == ACTION).any()
    assert rollout.tokens[rollout.kind == INJECTED].tolist() == LETTERS.encode("two")


def test_an_answer_without_ids_voids_its_group_and_is_kept(tmp_path):
    def untold(lease) -> dict | None:
        return {"facts": {"trainable": False}} if lease.group == 0 and lease.sample else None

    pool = remote_pool(tmp_path)
    pool.publish(FIRST, "w")
    with Hands(tmp_path, Sums(8), trouble=untold):
        groups, manifest = pool.take(2, 0)
    assert [group.id for group in groups] == [1, 2] and manifest.counts["void_untrainable"] == 1
    assert len(list((tmp_path / "spool").rglob("*.rollouts"))) == 6  # for evaluation, or SFT


def test_published_weights_are_taken_and_acknowledged_and_bad_ones_tried_again(tmp_path):
    class Picky(Stamping):
        tries = 0

        async def load(self, version: Version, path: str) -> None:
            self.tries += 1
            if self.tries == 2:
                raise EngineError("the digest does not match")
            await super().load(version, path)

    def announce(version: Version) -> None:
        told = {**dataclasses.asdict(version), "path": "somewhere"}
        (tmp_path / "half").write_text(json.dumps(told))
        (tmp_path / "half").replace(tmp_path / "current.json")

    async def run() -> list[Any]:
        engine, acks = Picky(), []
        following = asyncio.create_task(follow(engine, Bell(), tmp_path, "engine", 0.01))
        for step in range(2):
            await asyncio.sleep(0.05)
            version = Version(0, step, "digest")
            announce(version)
            while engine.version != version:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            acks.append(json.loads((tmp_path / "acks" / "engine.json").read_text()))
        following.cancel()
        return [engine.tries, *acks]

    told = [{"epoch": 0, "step": step, "digest": "digest"} for step in range(2)]
    assert asyncio.run(run()) == [3, *told]


def test_every_id_that_ends_an_answer_ends_it_and_is_trained(tmp_path):
    """Case 4: several terminators, and an answer that is one and nothing else."""

    class Ends(Letters):
        stop_ids = frozenset({1, EOS})

    for number, tokens in enumerate(([53, 1], [EOS])):
        said: dict[str, Any] = {"tokens": tokens, "logp": [-0.5] * len(tokens)}
        said["version_index"] = [0] * len(tokens)
        with gateway(tmp_path / str(number), Stamping(**said), tokenizer=Ends()) as place:
            token = place.lease()
            assert place.post(f"/{token}/generate", {}).json()["stop_reason"] == "stop"
            place.seal(token)
            (rollout,) = place.sealed(0)
        assert rollout.tokens[rollout.kind == ACTION].tolist() == tokens
        assert rollout.stop_reason is StopReason.STOP
