"""Old routers come back, bit for bit, into weights whose rest stays; what does not fit is named."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.model.versions import read_weights, write_weights
from jaxrl.restore_router import restore, restored
from tests.model.forms import MIMO
from tests.model.tiny import logp, rows, seeded

TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6]]


def pair():
    """A sigmoid router's model (kernel and bias), and the same after everything moved."""
    policy, old = seeded(**MIMO)
    return policy, old, {name: x * 1.5 + 0.01 for name, x in old.items()}


def test_the_routers_are_the_old_ones_and_the_rest_is_the_new_one(tmp_path):
    policy, old, new = pair()
    write_weights(tmp_path / "old", old, epoch=0, step=3)
    write_weights(tmp_path / "new", new, epoch=1, step=20, extra={"tokenizer": "x"})
    digest, told = restore(
        str(tmp_path / "old"), str(tmp_path / "new"), str(tmp_path / "out"), pattern="router/"
    )
    found, manifest = read_weights(tmp_path / "out", shapes=policy.shapes)
    names = [name for name in new if "/router/" in name]
    assert len(names) == 4 and [each.name for each in told] == sorted(names)
    for name, x in found.items():
        np.testing.assert_array_equal(x, (old if name in names else new)[name])
    assert (manifest["epoch"], manifest["step"], manifest["digest"]) == (1, 20, digest)
    assert manifest["extra"]["tokenizer"] == "x"
    assert manifest["extra"]["restored"]["names"] == sorted(names)
    assert manifest["extra"]["restored"]["from"]["step"] == 3
    said = [np.asarray(logp(policy, params, rows(TOKENS))) for params in (found, new)]
    assert np.abs(said[0] - said[1]).max() > 1e-3


def test_how_far_a_router_had_moved_is_told_by_layer():
    old = {"s/mlp/router/kernel": jnp.array([[[3.0, 4.0]], [[0.0, 1.0]]]), "x": jnp.ones(2)}
    new = {"s/mlp/router/kernel": jnp.array([[[3.0, 4.5]], [[0.0, 3.0]]]), "x": jnp.zeros(2)}
    params, told = restored(old, new, "router/")
    assert [each.name for each in told] == ["s/mlp/router/kernel"]
    np.testing.assert_allclose(told[0].moved, (0.1, 2.0), rtol=1e-6)  # .5 of 5, 2 of 1
    np.testing.assert_array_equal(params["x"], 0)


def test_what_does_not_fit_is_named_at_once_and_nothing_is_written(tmp_path):
    name = "global_sparse_blocks/mlp/router/"
    _, old, new = pair()
    other = "local_sparse_blocks/mlp/router/kernel"
    faulty = {n: x for n, x in old.items() if n != f"{name}kernel"}
    faulty[f"{name}bias"] = jnp.zeros((1, 7))
    faulty[other] = faulty[other].at[0, 0, 0].set(jnp.nan)
    faulty["more/router/kernel"] = jnp.zeros((1, 2))
    write_weights(tmp_path / "old", faulty, epoch=0, step=0)
    write_weights(tmp_path / "new", new, epoch=0, step=1)
    with pytest.raises(ValueError) as refusal:
        restore(*(str(tmp_path / x) for x in ("old", "new", "out")), pattern="router/")
    for words in (
        f"{name}kernel is not in the older weights",
        "more/router/kernel is not in the newer weights",
        f"{name}bias was ((1, 7), 'float32'), is ((1, 4), 'float32')",
        f"{other} is not finite in the older weights",
    ):
        assert words in str(refusal.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [("routers/", "pattern='routers/' matches no parameter"), ("(", "no regular expression")],
)
def test_a_pattern_that_cannot_be_meant_is_refused(pattern, words):
    _, old, new = pair()
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        restored(old, new, pattern)


def test_no_version_is_overwritten(tmp_path):
    _, old, new = pair()
    for name, params, step in (("old", old, 0), ("new", new, 1)):
        write_weights(tmp_path / name, params, epoch=0, step=step)
    for to in ("old", "new"):
        with pytest.raises(ValueError, match="already holds"):
            restore(*(str(tmp_path / x) for x in ("old", "new", to)), pattern="router/")
    found, _ = read_weights(tmp_path / "new")
    np.testing.assert_array_equal(found["embedding"], new["embedding"])


def test_the_command_tells_what_it_did_or_why_not(tmp_path):
    _, old, new = pair()
    write_weights(tmp_path / "old", old, epoch=0, step=0)
    write_weights(tmp_path / "new", new, epoch=0, step=1)

    def call(to: str, *more: str) -> subprocess.CompletedProcess[str]:
        paths = {"from": "old", "into": "new", "to": to}
        words = [word for flag, x in paths.items() for word in (f"--{flag}", str(tmp_path / x))]
        command = [sys.executable, "-m", "jaxrl.restore_router", *words, *more]
        return subprocess.run(command, capture_output=True, text=True)

    done = call("out")
    assert done.returncode == 0, done.stderr
    assert "local_sparse_blocks/mlp/router/kernel: had moved by 0.5" in done.stdout
    refused = call("other", "--pattern", "nothing")
    assert refused.returncode == 1 and "matches no parameter" in refused.stderr
    assert "Traceback" not in refused.stderr and not (tmp_path / "other").exists()
