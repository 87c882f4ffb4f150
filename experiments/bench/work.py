"""The work that all take part in: a small dense model in Qwen3's form with seeded weights, a batch
of one GRPO update, what both cost by formula, and the way a process is told to do its turn.

Needs numpy alone, so that it imports in every peer's environment.

    forward    2 * (parameters of the blocks' kernels) a token, 4 * layers * heads * head_size for
               each pair of tokens that see one another, 2 * width * vocabulary a scored token
    step       three forward passes; nothing computed twice counts
"""

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

EPSILON, THETA = 1e-6, 1e6
PAD, STOP = 0, 1  # ids that no prompt and no answer has
RATE = 1e-6  # of AdamW, without weight decay, behind a clip at norm 1

GEMM, GEMMS = 2048, 3  # side of the floor's matrices, products of a turn

Run = Callable[[], Mapping[str, float] | None]


@dataclasses.dataclass(frozen=True)
class Size:
    """Of a model; queries have twice the heads of keys."""

    vocab: int
    layers: int = 4
    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_size: int = 32
    hidden: int = 768

    @property
    def kernels(self) -> int:
        """Parameters of the blocks' matrices."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_size * self.width
        return self.layers * (attention + 3 * self.width * self.hidden)

    def forward(self, tokens: int, scored: int) -> float:
        """FLOPs of one row."""
        pairs = tokens * (tokens + 1) / 2
        attended = 4 * self.layers * self.heads * self.head_size * pairs
        return 2 * self.kernels * tokens + attended + 2 * self.width * self.vocab * scored


SIZES = {"512": Size(512), "32k": Size(32_000), "152k": Size(151_936)}


def weights(size: Size, seed: int = 0) -> dict[str, np.ndarray]:
    """By published names and layouts, ``[out in]``; normal with deviation 0.02, norms at 1."""
    random = np.random.default_rng(seed)

    def drawn(*shape: int) -> np.ndarray:
        return 0.02 * random.standard_normal(shape, dtype=np.float32)

    def ones(count: int) -> np.ndarray:
        return np.ones(count, np.float32)

    width, queries = size.width, size.heads * size.head_size
    keys, named = size.kv_heads * size.head_size, {"embed_tokens": drawn(size.vocab, size.width)}
    named["norm"] = ones(width)
    for layer in range(size.layers):
        block = {
            "input_layernorm": ones(width),
            "post_attention_layernorm": ones(width),
            "self_attn.q_proj": drawn(queries, width),
            "self_attn.k_proj": drawn(keys, width),
            "self_attn.v_proj": drawn(keys, width),
            "self_attn.o_proj": drawn(width, queries),
            "self_attn.q_norm": ones(size.head_size),
            "self_attn.k_norm": ones(size.head_size),
            "mlp.gate_proj": drawn(size.hidden, width),
            "mlp.up_proj": drawn(size.hidden, width),
            "mlp.down_proj": drawn(width, size.hidden),
        }
        named |= {f"layers.{layer}.{name}": x for name, x in block.items()}
    return {f"model.{name}.weight": x for name, x in named.items()}


@dataclasses.dataclass(frozen=True)
class Take:
    """One group, on-policy: prompts ``[row prompt]`` padded in front, answers padded behind."""

    prompt: np.ndarray
    prompt_mask: np.ndarray
    answer: np.ndarray
    answer_mask: np.ndarray
    reward: np.ndarray

    @property
    def advantage(self) -> np.ndarray:
        """(reward - mean) / deviation, over n - 1."""
        return (self.reward - self.reward.mean()) / self.reward.std(ddof=1)


def take(size: Size, rows: int, tokens: int, prompt: int, ragged: bool, seed: int = 1) -> Take:
    """Random tokens, all of one length or of lengths from a quarter and an eighth up."""
    random = np.random.default_rng(seed)
    answer = tokens - prompt
    asked = random.integers(5, size.vocab, (rows, prompt)).astype(np.int32)
    said = random.integers(5, size.vocab, (rows, answer)).astype(np.int32)
    lengths = np.full((rows, 2), (prompt, answer))
    if ragged:
        lengths = random.integers((prompt // 4, answer // 8), (prompt + 1, answer + 1), (rows, 2))
    before = np.arange(prompt)[None] >= prompt - lengths[:, :1]
    after = np.arange(answer)[None] < lengths[:, 1:]
    reward = random.standard_normal(rows).astype(np.float32)
    return Take(
        np.where(before, asked, PAD), before * 1, np.where(after, said, PAD), after * 1, reward
    )


def head_arrays(given: argparse.Namespace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States [position width], table, taken ids, for whoever makes log-probs of them."""
    random, size = np.random.default_rng(0), SIZES[given.size]
    hidden = random.standard_normal((given.positions, size.width), dtype=np.float32)
    table = 0.02 * random.standard_normal((size.vocab, size.width), dtype=np.float32)
    return hidden, table, random.integers(0, size.vocab, given.positions).astype(np.int32)


def sameness(tokens: np.ndarray) -> dict[str, float]:
    """Of generated tokens: how many, and a number that differs where they do."""
    flat = tokens.astype(np.int64).reshape(-1)
    mixed = flat @ (np.arange(flat.size) % 9973 + 1)
    return {"tokens": flat.size, "hash": float(mixed % 2**31)}


def module(name: str) -> Any:
    """A package that another environment may lack."""
    return importlib.import_module(name)


def parser() -> argparse.ArgumentParser:
    """What a worker is told: the question, who answers it, and the size of the work."""
    asked = argparse.ArgumentParser()
    asked.add_argument("question", choices=("step", "generation", "mixed", "head", "floor"))
    asked.add_argument("who")
    asked.add_argument("--size", choices=tuple(SIZES), default="32k")
    asked.add_argument("--rows", type=int, default=8)
    asked.add_argument("--tokens", type=int, default=512, help="of a row, its prompt included")
    asked.add_argument("--prompt", type=int, default=128)
    asked.add_argument("--ragged", action="store_true")
    asked.add_argument("--lean", action="store_true", help="what takes least memory")
    asked.add_argument("--micro", type=int, default=0, help="rollouts of a micro-batch; 0: rows")
    asked.add_argument("--chunk", type=int, default=512, help="positions whose logits are alive")
    asked.add_argument("--remat", default="none", help="model.remat")
    asked.add_argument("--keep", action="store_true", help="logits: model.score_remat off")
    asked.add_argument("--new", type=int, default=256, help="tokens that are generated")
    asked.add_argument("--places", type=int, default=0, help="of the cache; 0: as many as needed")
    asked.add_argument("--count", type=int, default=512, help="sequences of a mixed lot")
    asked.add_argument("--slots", type=int, default=0, help="of the sampler; 0: rows")
    asked.add_argument("--greedy", action="store_true")
    asked.add_argument("--positions", type=int, default=3072, help="of the head")
    asked.add_argument("--gradient", action="store_true")
    return asked


def mixed(size: Size, count: int, prompt: int, new: int) -> list[tuple[np.ndarray, int]]:
    """Prompts of lengths up to ``prompt``, and how many tokens each is to get, up to ``new``."""
    random = np.random.default_rng(2)
    lengths = random.integers((prompt // 8, new // 8), (prompt + 1, new + 1), (count, 2))
    return [(random.integers(5, size.vocab, a).astype(np.int32), int(b)) for a, b in lengths]


def versions(*names: str) -> dict[str, str]:
    """Of what is installed."""
    found = {"python": sys.version.split()[0]}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _peak(*, forget: bool = False) -> float:
    """MiB that the process held at most since this was last forgotten."""
    with open("/proc/self/status") as status:
        held = next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))
    if forget:
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")
    return held


def serve(prepare: Callable[[], tuple[Run, dict[str, str]]]) -> None:
    """Prepare, run once, then once more for each line of stdin; a line of JSON for each on stdout.

    The run waits for what it computes, and may tell numbers to be compared between those who do the
    same work. Nothing else gets to stdout.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**line: Any) -> None:
        print(json.dumps(line, default=float), file=answers, flush=True)

    _peak(forget=True)
    run, found = prepare()

    def turn() -> dict[str, Any]:
        began = time.perf_counter(), time.process_time()
        told = run()
        wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
        return {"wall": wall, "cpu": cpu, "told": dict(told or {}), "peak": _peak(forget=True)}

    say(versions=found, **turn())
    for _ in sys.stdin:
        say(**turn())
