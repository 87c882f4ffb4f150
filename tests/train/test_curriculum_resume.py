"""A run whose tasks are drawn by a curriculum, cut off and begun again: the same, bit for bit."""

import json
import shutil
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from configs import praxis
from jaxrl.train import rounds

STEPS, CUT = 4, 2

# Universes that first weights solve unequally often: every second, third or fifth response.
SOURCE = """
from jaxrl.tasks import graphs
from jaxrl.tasks.contract import Verdict

EACH = {"1": 2, "2": 3, "3": 5}

class Source(graphs.Source):
    def verify(self, task, response):
        right = sum(map(ord, response)) % EACH[task.source[-1]] == 0
        return Verdict(score=float(right), correct=right, components={})
"""


@pytest.fixture
def config(tmp_path, monkeypatch) -> Any:
    """Three universes of short questions, moved as far as a take may move them."""
    (tmp_path / "fractions_of.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    made: Any = praxis.get_config("tiny")
    made.task.source = "fractions_of"
    made.algorithm.consistency_cap = 50.0
    digits = {"min_terms": 2, "max_terms": 2, "min_digits": 1}
    made.task.parameters = {
        f"chain_sum:{n}": digits | {"max_digits": n, "min_digits": n} for n in (1, 2, 3)
    }
    made.model.vocab_size = made.pool.tokenizer_vocab_size = 64
    made.sampler.update(prompt_buckets=(32,), max_new_tokens=4)
    made.train.update(token_buckets=(36,), steps=STEPS)
    made.train.curriculum.update(move="bounded", kappa=0.2, rules=("likeliest", "unlikeliest"))
    made.phases = {"order": ("main",), "main": {}}
    made.mesh.data = jax.device_count()
    made.checkpoint.update(every_steps=1, keep=20)
    return made


def ending(workdir):
    items = ocp.args.Composite(state=ocp.args.PyTreeRestore(), host=ocp.args.JsonRestore())
    handler = ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(), host=ocp.JsonCheckpointHandler()
    )
    read = ocp.Checkpointer(handler).restore(workdir / "checkpoints" / str(STEPS), args=items)
    return {name: np.asarray(x).tobytes() for name, x in read.state.items()}, read.host


@pytest.mark.slow
def test_the_samplers_state_resumes_with_the_weights(config, tmp_path):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    rounds.run(config, str(unbroken))
    state, host = ending(unbroken)
    moved = host["pool"]["curriculum"]
    assert moved["ledger"]["moves"] == STEPS and moved["ledger"]["broken"] == 0
    assert len(set(moved["log_q"])) > 1 and len(set(moved["score"])) > 1
    shutil.copytree(unbroken, broken)
    (broken / "summary.json").unlink()
    for checkpoint in (broken / "checkpoints").iterdir():
        if int(checkpoint.name) > CUT:
            shutil.rmtree(checkpoint)
    rounds.run(config, str(broken))
    again, again_host = ending(broken)
    assert again == state
    assert json.dumps(again_host["pool"]) == json.dumps(host["pool"])
    assert again_host["consumed"] == host["consumed"]
