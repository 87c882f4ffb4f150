"""What an engine says of its load, and how a server's Prometheus text is read. No jax here.

vLLM tells ``vllm:kv_cache_usage_perc`` (``vllm:gpu_cache_usage_perc`` before 0.12),
``vllm:num_requests_waiting`` and ``vllm:num_preemptions_total``, a sample for each of its engines.
SGLang, started with ``--enable-metrics``, tells ``sglang:token_usage``, ``sglang:num_queue_reqs``
and ``sglang:num_retracted_requests_total``: to be retracted is to be preempted.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# A sample: a name, labels (whose values are quoted and may hold anything), a value, and perhaps a
# time. https://prometheus.io/docs/instrumenting/exposition_formats
SAMPLE = re.compile(
    r'([a-zA-Z_:][\w:]*)[ \t]*(?:\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\})?[ \t]+(\S+)(?:[ \t]+-?[\d.]+)?',
    re.ASCII,
)


class Pressure(NamedTuple):
    """The load of one server."""

    usage: float  # of its KV cache, 0 to 1; of several engines the fullest one
    waiting: int  # requests that it has not begun
    preempted: int  # requests that it put back since it was started


class Names(NamedTuple):
    """What a kind of server calls its numbers; older names after newer ones."""

    usage: Sequence[str]
    waiting: str
    preempted: str


VLLM = Names(
    ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
)
SGLANG = Names(
    ("sglang:token_usage",), "sglang:num_queue_reqs", "sglang:num_retracted_requests_total"
)


def samples(text: str, names: Sequence[str]) -> dict[str, list[float]]:
    """The finite values of the samples that have one of these names, whatever their labels."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        sample = SAMPLE.fullmatch(line.strip())
        if sample is None or sample[1] not in names:
            continue
        try:
            value = float(sample[2])
        except ValueError:
            continue
        if math.isfinite(value):
            found.setdefault(sample[1], []).append(value)
    return found


def read_metrics(text: str, names: Names) -> Pressure | None:
    """The load that a server's metrics tell; None where usage or queue are not among them. A
    counter that is not there has not counted anything yet."""
    found = samples(text, [*names.usage, names.waiting, names.preempted])
    usage = next((found[name] for name in names.usage if name in found), None)
    waiting = found.get(names.waiting)
    if usage is None or waiting is None:
        return None
    preempted = found.get(names.preempted, [])
    return Pressure(max(usage), int(sum(waiting)), int(sum(preempted)))


def write_pressure(told: Pressure) -> dict[str, float]:
    """As JSON values."""
    return told._asdict()


def read_pressure(told: Mapping[str, float]) -> Pressure:
    """The inverse of ``write_pressure``. KeyError, TypeError or ValueError for anything else."""
    usage = float(told["usage"])
    if not 0 <= usage <= 1:
        raise ValueError(f"usage={usage}; allowed: 0 to 1")
    return Pressure(usage, int(told["waiting"]), int(told["preempted"]))
