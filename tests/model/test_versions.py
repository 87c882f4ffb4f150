import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.model.versions import MANIFEST, TENSORS, read_weights, write_weights

PARAMS = {
    "b/kernel": jnp.arange(6.0).reshape(2, 3),
    "a/scale": jnp.array([1.5, -2.25], jnp.bfloat16),
}


def test_what_is_read_is_what_was_written(tmp_path):
    digest = write_weights(tmp_path / "v=1-2", PARAMS, epoch=1, step=2, extra={"tokenizer": "x"})
    found, manifest = read_weights(tmp_path / "v=1-2")
    assert found.keys() == PARAMS.keys()
    for name, x in PARAMS.items():
        assert found[name].dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(x))
    assert (manifest["epoch"], manifest["step"], manifest["digest"]) == (1, 2, digest)
    assert manifest["extra"] == {"tokenizer": "x"}
    assert [path.name for path in tmp_path.iterdir()] == ["v=1-2"]  # no temporary is left


def test_one_changed_bit_of_one_weight_changes_the_digest(tmp_path):
    """case 37"""
    digest = write_weights(tmp_path / "v=0-1", PARAMS, epoch=0, step=1)
    same = write_weights(tmp_path / "v=0-2", dict(reversed(PARAMS.items())), epoch=0, step=2)
    moved = {**PARAMS, "b/kernel": PARAMS["b/kernel"].at[1, 2].set(5.0000005)}
    assert digest == same != write_weights(tmp_path / "v=0-3", moved, epoch=0, step=3)


def test_a_version_never_changes_its_meaning(tmp_path):
    digest = write_weights(tmp_path / "w", PARAMS, epoch=0, step=1)
    assert write_weights(tmp_path / "w", PARAMS, epoch=0, step=1) == digest
    with pytest.raises(ValueError, match="already holds epoch=0, step=1.*refused: epoch=0, step=2"):
        write_weights(tmp_path / "w", PARAMS, epoch=0, step=2)


def test_damaged_bytes_are_refused(tmp_path):
    write_weights(tmp_path / "w", PARAMS, epoch=0, step=1)
    payload = bytearray((tmp_path / "w" / TENSORS).read_bytes())
    payload[-1] ^= 1
    (tmp_path / "w" / TENSORS).write_bytes(bytes(payload))
    with pytest.raises(ValueError, match="digest"):
        read_weights(tmp_path / "w")


def test_a_half_written_directory_is_no_version_and_is_overwritten(tmp_path):
    (tmp_path / "w.tmp").mkdir()
    (tmp_path / "w.tmp" / "junk").write_text("x")
    write_weights(tmp_path / "w", PARAMS, epoch=0, step=1)
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == sorted([MANIFEST, TENSORS])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="manifest.json is missing"):
        read_weights(tmp_path / "empty")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda manifest: manifest | {"schema_version": 2}, "schema_version=2; allowed: 1"),
        (lambda manifest: {"step": 1}, "must hold exactly"),
        (lambda manifest: manifest | {"tensors": {"w": 3}}, "tensor 'w' is 3; allowed: a shape"),
    ],
)
def test_a_manifest_that_we_do_not_understand_is_refused(edit, words, tmp_path):
    write_weights(tmp_path / "w", PARAMS, epoch=0, step=1)
    path = tmp_path / "w" / MANIFEST
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=words):
        read_weights(tmp_path / "w")


def test_everything_that_does_not_fit_the_model_is_named_at_once(tmp_path):
    write_weights(tmp_path / "w", PARAMS, epoch=0, step=1)
    shapes = {
        "b/kernel": jax.ShapeDtypeStruct((3, 2), jnp.float32),
        "c/bias": jax.ShapeDtypeStruct((1,), jnp.float32),
    }
    with pytest.raises(ValueError) as error:
        read_weights(tmp_path / "w", shapes=shapes)
    for word in ("missing c/bias", "surplus a/scale", "b/kernel is ((2, 3)", "((3, 2)"):
        assert word in str(error.value), error.value
