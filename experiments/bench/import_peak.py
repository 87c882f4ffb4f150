"""Time and peak host memory of importing one published checkpoint, in a process of its own.

    python -m experiments.bench.import_peak CHECKPOINT

prints one JSON object; bytes are resident memory beyond what the process had before the import.
Linux only: the peak is the kernel's.
"""

import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from configs import base
from jaxrl.mesh import Rules
from jaxrl.model import pretrained
from jaxrl.model.policy import build


def resident(field: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (the most since it was reset)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def measure(path: str) -> dict[str, float]:
    """Import a checkpoint and say what it took."""
    own = base.get_config("tiny").to_dict()["model"]
    policy = build(pretrained.model_config(path, own), None, Rules())
    policy.shapes  # noqa: B018 - cached; the model's trace is not the import's
    jax.block_until_ready(jax.jit(lambda x: x.T @ x)(jnp.ones((64, 64))))  # the compiler is loaded
    Path("/proc/self/clear_refs").write_text("5")
    before, start = resident("VmRSS"), time.perf_counter()
    params = pretrained.import_checkpoint(path, policy.config, policy.shardings, lambda text: None)
    jax.block_until_ready(params)
    seconds = time.perf_counter() - start
    files = [file.stat().st_size for file in Path(path).glob("*.safetensors")]
    return {
        "peak_bytes": resident("VmHWM") - before,
        "placed_bytes": sum(x.nbytes for x in params.values()),
        "largest_shard_bytes": max(files),
        "checkpoint_bytes": sum(files),
        "seconds": seconds,
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
