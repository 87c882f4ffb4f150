"""A run that starts from a published checkpoint, and what is refused before it starts."""

import dataclasses
import importlib
from typing import Any

import jax
import numpy as np
import pytest
from etils import epath
from safetensors.numpy import load_file, save_file

from jaxrl.model import pretrained
from jaxrl.model.adapters import is_adapter
from jaxrl.model.versions import write_weights
from jaxrl.train import rounds, settings, starts


def config(**model: Any) -> Any:
    """Two phases of the tiny config; the model differs by these."""
    made = importlib.import_module("configs.base").get_config("tiny")
    made.algorithm = {"name": "sft"}
    made.mesh.update(data=4, fsdp=2)
    made.model.update(model)
    made.phases = {"order": ("first", "later"), "first": {}, "later": {}}
    return made


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A published checkpoint of the tiny config's form, its parameters, and a folder."""
    root = epath.Path(tmp_path_factory.mktemp("published"))
    parts = rounds.assemble(settings.phases(config()), root)
    params = parts.policy.init(jax.random.key(5))
    pretrained.export_checkpoint(
        params,
        parts.policy.config,
        root / "checkpoint",
        positions=64,
        shard_bytes=20_000,
        tokenizer=None,
    )
    return root / "checkpoint", jax.device_get(params), root, parts


def started(phase, path):
    return dataclasses.replace(phase, train=dataclasses.replace(phase.train, start=str(path)))


def test_a_phase_starts_from_a_published_checkpoint_on_the_mesh(published):
    path, params, root, parts = published
    for phase in settings.phases(config()):
        rounds.check_stored(started(phase, path), parts, root)
        found = rounds.begin(started(phase, path), parts, root, None).roles["student"].all
        assert found.keys() == params.keys()
        for name, x in params.items():
            assert found[name].sharding == (parts.policy.shardings or {})[name]
            np.testing.assert_array_equal(found[name], x, err_msg=name)


def test_all_fields_that_differ_from_the_checkpoint_are_named_before_anything(published, tmp_path):
    path, _, root, _ = published
    made = config(hidden=96, rope_theta=5e5, tied_head=False)
    phases = settings.phases(made)
    parts = rounds.assemble(phases, tmp_path)
    with pytest.raises(ValueError) as error:
        rounds.check_stored(started(phases[0], path), parts, root)
    for words in (
        "phases.first: train.start: ",
        "model.hidden=96",
        "rope_theta",
        "tied_head=False",
    ):
        assert words in str(error.value), error.value


def test_the_form_of_a_checkpoint_fills_the_config(published, tmp_path):
    path, _, root, _ = published
    made = config(hidden=96, layers=7, rope_theta=5e5)
    made.model.update(pretrained.read_config(path))
    phases = settings.phases(made)
    rounds.check_stored(started(phases[0], path), rounds.assemble(phases, tmp_path), root)


def test_numbers_of_a_later_phase_are_looked_at_before_the_first_is_trained(published, tmp_path):
    path, _, root, parts = published
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    held = {name: x.copy() for name, x in load_file(shard).items()}
    name = sorted(held)[0]
    held[name].reshape(-1)[0] = np.inf
    save_file(held, shard)
    first, later = settings.phases(config())
    with pytest.raises(ValueError, match=f"phases.later: train.start: {name} holds NaN or infin"):
        rounds.check_stored(started(later, tmp_path), parts, root)
    with pytest.raises(ValueError, match=f"{name} holds NaN or infinity"):
        rounds.begin(started(first, tmp_path), parts, root, None)
    made = config()
    made.train.start = str(tmp_path)
    with pytest.raises(ValueError, match=f"{name} holds NaN or infinity"):
        rounds.run(made, str(tmp_path / "run"))
    assert not (tmp_path / "run" / "config.json").exists()  # nothing tells of a run that is none


def test_adapters_beside_a_checkpoint_are_new_and_change_nothing_yet(published, tmp_path):
    path, params, root, _ = published
    made = config(adapter={"rank": 2, "pattern": "attention"})
    phases = settings.phases(made)
    parts = rounds.assemble(phases, tmp_path)
    rounds.check_stored(started(phases[0], path), parts, root)
    found = rounds.begin(started(phases[0], path), parts, root, None).roles["student"].all
    own = {name for name in found if is_adapter(name)}
    assert len(own) == 8 and found.keys() == params.keys() | own
    for name in own:
        assert bool(np.asarray(found[name]).any()) == name.endswith("adapter_in"), name


def test_our_own_weights_that_are_not_finite_are_refused(published, tmp_path):
    parts = rounds.assemble(settings.phases(config()), epath.Path(tmp_path))
    params = parts.policy.init(jax.random.key(5))
    bad = params | {"norm/scale": params["norm/scale"].at[0].set(np.nan)}
    write_weights(tmp_path / "bad", bad, epoch=0, step=0)
    with pytest.raises(ValueError, match="bad: norm/scale; allowed: finite numbers only"):
        starts.read(tmp_path / "bad", parts.policy, 0, print)
