"""The forecast's door: what it refuses, what it finds, and one real compilation."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs import gvpo, meshes, models
from jaxrl import aot
from jaxrl.forecast import chips, search
from jaxrl.forecast.compiled import DoesNotFitError
from jaxrl.mesh import make_mesh
from jaxrl.model import transformer
from jaxrl.train import settings

ROOT = Path(__file__).parents[1]


def big(variant: str = "qwen3_8b") -> Any:
    return gvpo.get_config(variant)


def test_a_config_without_a_mesh_gets_one():
    given: Any = aot.meshed(big(), None, 64)
    assert dict(given.mesh) == {
        "data": 1,
        "fsdp": 32,
        "tensor": 2,
        "expert": 1,
        "context": 1,
    }
    stated = big()
    stated.mesh.fsdp = 8
    given = aot.meshed(stated, None, 64)
    assert given.mesh.fsdp == 8  # and is refused where it does not fit
    named: Any = aot.meshed(big(), meshes.get_config("v5p_2x2x4"), 16)
    assert named.mesh.fsdp == 16


def test_devices_that_no_mesh_uses_name_the_fields():
    with pytest.raises(ValueError, match=r"train.micro_rollouts=32 .*model.kv_heads=8; allowed"):
        aot.meshed(big(), None, 1024)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra 'aot'")
def test_only_the_data_axis_crosses_slices():
    devices = chips.devices_of(chips.read_slice("v5e:2x2*2"))
    laid = make_mesh({"data": 2, "fsdp": 4}, devices).devices.reshape(2, 4)
    assert [{device.slice_index for device in row} for row in laid] == [{0}, {1}]
    with pytest.raises(ValueError, match="mesh.data=1 over 2 slices; allowed: multiples of 2"):
        make_mesh({"fsdp": 8}, devices)


def test_an_unknown_mesh_or_model_is_refused():
    with pytest.raises(ValueError, match="mesh 'v5p_9x9x9' is unknown; allowed: .*v5p_4x4x4"):
        meshes.get_config("v5p_9x9x9")
    with pytest.raises(ValueError, match="'qwen3_9b' is unknown; allowed.*qwen3_8b"):
        gvpo.get_config("qwen3_9b")


@pytest.mark.parametrize("name", meshes.MESHES)
def test_a_named_mesh_uses_the_whole_slice(name):
    chip, shape, *_ = name.split("_")
    where = chips.read_slice(f"{chip}:{shape}")
    sizes: Any = meshes.get_config(name)
    assert math.prod(sizes.values()) == where.devices


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3_0_6b", 0.596), ("qwen3_8b", 8.19), ("qwen3_30b_a3b", 30.53), ("qwen3_32b", 32.76)],
)
def test_a_published_model_has_its_published_size(name, billions):
    assert name in models.NAMES
    phase = settings.phases(big(name))[-1]
    count = sum(math.prod(x.shape) for x in transformer.shapes(phase.model).values())
    assert count / 1e9 == pytest.approx(billions, abs=0.006)


def test_what_does_not_fit_is_read_from_the_compiler():
    first = DoesNotFitError(
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space "
        "hbm. Used 32.23G of 15.75G hbm. Exceeded hbm capacity by 16.48G."
    )
    assert (first.needed, first.available) == (32.23, 15.75)
    other = DoesNotFitError("... (512.00M) exceeds available HBM (0.50G)")
    assert (other.needed, other.available) == (0.5, 0.5)
    assert DoesNotFitError("no numbers").needed == 0


def test_the_search_ranks_what_divides_and_prefers_what_fits():
    phase = settings.phases(big())[-1]
    where = chips.read_slice("v5p:2x2x4")
    found = search.ranked(phase, where)
    assert all(one.fsdp * one.tensor * one.expert == 16 for one in found)
    assert all(32 % one.micro_rollouts == 0 and one.micro_rollouts % 8 == 0 for one in found)
    fit = [one.gib <= 95 for one in found]
    assert fit == sorted(fit, reverse=True)
    small = search.ranked(phase, chips.read_slice("v5e:2x2"))
    assert min(one.gib for one in small) > 16  # 20 bytes a parameter over 4 devices
    changed: Any = search.apply(big(), found[0])
    assert changed.mesh.fsdp == found[0].fsdp and changed.model.remat == found[0].remat
    with pytest.raises(ValueError, match=r"train.groups \* pool.rollouts_per_group=32"):
        search.ranked(phase, chips.read_slice("v5p:8x8x16"))


def run_aot(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jaxrl.aot", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
        capture_output=True,
        text=True,
    )


def test_a_bad_slice_ends_with_one_message():
    run = run_aot("--config", "configs/gvpo.py:tiny", "--slice", "v9:2x2")
    assert run.returncode == 1 and "'v9' is unknown; allowed" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: pip install -c constraints.txt -e '.[aot]'",
)
def test_a_small_run_compiles_for_a_real_slice(tmp_path):
    out = tmp_path / "record.json"
    run = run_aot(
        "--config",
        "configs/gvpo.py:tiny",
        "--slice",
        "v5e:2x2",
        "--config.mesh.fsdp=2",
        "--config.mesh.tensor=1",
        "--config.mesh.data=2",
        "--out",
        str(out),
    )
    assert run.returncode == 0, run.stderr
    assert "predicted step" in run.stdout and "sampler, decode" in run.stdout
    record = json.loads(out.read_text())
    assert record["mesh"] == {"data": 2, "fsdp": 2} and record["versions"]["libtpu"]
    step = record["step"]
    assert step["hbm_gib"]["fits"] and 0 < step["hbm_gib"]["peak"] < 1
    assert step["collectives"]["all-reduce"]["count"] > 0
    assert step["loops_of_unknown_length"] == 0
    # Matrix products that the compiler counts are those of the formula, but for what it fuses away.
    assert step["flops"]["compiler"] == pytest.approx(step["flops"]["executed"], rel=0.25)
    assert record["sampler"]["decode"]["loops_of_unknown_length"] == 1
    assert record["colocated"]["fits"]


WIDE = {"layers": 2, "heads": 8, "kv_heads": 8, "head_size": 128, "width": 1024, "hidden": 3072}


@pytest.mark.slow
@pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"),
    reason="libtpu is missing: pip install -c constraints.txt -e '.[aot]'",
)
def test_parameters_are_gathered_whole(tmp_path):
    """Wide enough for XLA to make rings of products' parts, if it is left to itself."""
    changes = {f"model.{name}": value for name, value in WIDE.items()}
    changes |= {"model.dtype": "bfloat16", "mesh.fsdp": 4, "mesh.data": 1, "mesh.tensor": 1}
    changes |= {"sampler.prompt_buckets": (256,), "sampler.max_new_tokens": 768}
    changes |= {"train.token_buckets": (1024,)}
    out = tmp_path / "record.json"
    fields = [f"--config.{name}={value}" for name, value in changes.items()]
    asked = ["--config", "configs/gvpo.py:tiny", "--slice", "v5e:2x2", "--nosampler"]
    run = run_aot(*asked, "--out", str(out), *fields)
    assert run.returncode == 0, run.stderr
    moved = {k: v["gib"] for k, v in json.loads(out.read_text())["step"]["collectives"].items()}
    assert moved["all-gather"] > 0.1 > 100 * moved.get("collective-permute", 0)


SIDES = {"head_size": 128, "width": 256, "hidden": 256, "dtype": "bfloat16"}
EXPERTS = {"experts.count": 8, "experts.per_token": 2, "experts.hidden": 128}
KERNEL = re.compile(r'%([\w\-]+?)[.\d]* = .*custom_call_target="tpu_custom_call"')


@pytest.mark.slow
@pytest.mark.skipif(
    not (importlib.util.find_spec("libtpu") and importlib.util.find_spec("tokamax")),
    reason="libtpu or tokamax is missing: pip install -c constraints.txt -e '.[aot,tokamax]'",
)
@pytest.mark.parametrize(
    ("form", "expert", "parts"),
    [
        ({}, 1, ("splash_mha_fwd", "splash_mha_dkv")),
        (EXPERTS, 2, ("splash_mha_fwd", "splash_mha_dkv", "gmm", "tgmm")),
    ],
    ids=["dense", "experts"],
)
def test_a_step_has_tokamax_kernels_and_its_twin_has_none(tmp_path, form, expert, parts):
    """XLA's own kernel for ``ragged_dot`` is a kernel too, under a name of its own."""
    names = {}
    for kernels in ("tokamax", "xla"):
        asked = {**SIDES, **form, "kernels": kernels}
        run = run_aot(
            *("--config", "configs/gvpo.py:tiny", "--slice", "v5e:2x2"),
            *(f"--config.model.{name}={value}" for name, value in asked.items()),
            f"--config.mesh.expert={expert}",
            f"--config.mesh.fsdp={4 // expert}",
            "--config.sampler.prompt_buckets=(128,)",
            "--config.train.token_buckets=(256,)",
            f"--sampler={kernels == 'tokamax'}",
            *("--keep_text", str(tmp_path / kernels), "--out", str(tmp_path / f"{kernels}.json")),
        )
        assert run.returncode == 0, run.stderr
        names[kernels] = set(KERNEL.findall((tmp_path / kernels / "step.hlo").read_text()))
    for part in parts:
        assert any(part in name for name in names["tokamax"]), names
    assert not any("ragged-dot" in name for name in names["tokamax"])
    assert {name.split("-")[0] for name in names["xla"]} <= ({"ragged"} if form else set())
    record = json.loads((tmp_path / "tokamax.json").read_text())
    assert record["step"]["flops"]["of_kernels"] > 0
    assert record["sampler"]["decode"]["hbm_gib"]["fits"]
