"""How a run is watched: what is measured, kept, written, and when it is stopped.

Nothing that was trained depends on these fields: they may change between a run and its
continuation.
"""

import dataclasses
import math
from collections.abc import Mapping

from jaxrl.train.checks import at_least


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """How held-out accuracy is measured."""

    every_steps: int
    prompts: int
    seen_prompts: int
    samples: int
    temperature: float

    def __post_init__(self) -> None:
        at_least("eval", self, "prompts", "samples")
        at_least("eval", self, "every_steps", "seen_prompts", least=0)
        if not self.temperature > 0:
            raise ValueError(
                f"eval.temperature={self.temperature!r}; allowed: > 0 "
                "(greedy accuracy is always reported beside)"
            )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """How often state is saved and how much is kept."""

    every_steps: int
    keep: int
    keep_every_steps: int
    keep_weights: int
    keep_best: bool

    def __post_init__(self) -> None:
        at_least("checkpoint", self, "every_steps", "keep", "keep_weights")
        at_least("checkpoint", self, "keep_every_steps", least=0)
        if self.keep_every_steps % self.every_steps:
            raise ValueError(
                f"checkpoint.keep_every_steps={self.keep_every_steps!r}; allowed: 0, or a multiple "
                f"of checkpoint.every_steps={self.every_steps!r}"
            )


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """How often curves and samples are written."""

    every_steps: int
    samples: int
    samples_every_steps: int
    device_flops: float

    def __post_init__(self) -> None:
        at_least("log", self, "every_steps", "samples_every_steps")
        at_least("log", self, "samples", "device_flops", least=0)


@dataclasses.dataclass(frozen=True)
class StopConfig:
    """When a phase ends before its last step: a curve beyond its bound, so many takes in a row."""

    entropy_below: float
    kl_above: float
    kl: str
    takes: int

    def __post_init__(self) -> None:
        at_least("train.stop", self, "takes")
        at_least("train.stop", self, "entropy_below", least=0)
        if not self.kl_above > 0:
            raise ValueError(f"train.stop.kl_above={self.kl_above!r}; allowed: > 0, inf for never")
        if self.kl_above < math.inf and not self.kl:
            raise ValueError(
                f"train.stop.kl='' beside train.stop.kl_above={self.kl_above!r}; allowed: the "
                "curve that is bounded, such as loss/anchor_kl_mean"
            )

    @property
    def bounds(self) -> dict[str, tuple[str, float, float]]:
        """(field, lowest, highest) that are allowed, by curve."""
        asked: dict[str, tuple[str, float, float]] = {}
        if self.entropy_below > 0:
            entropy = ("train.stop.entropy_below", self.entropy_below, math.inf)
            asked["loss/entropy_mean"] = entropy
        if self.kl_above < math.inf:
            asked[self.kl] = ("train.stop.kl_above", -math.inf, self.kl_above)
        return asked

    def beyond(self, numbers: Mapping[str, float]) -> str:
        """What is out of bounds in a take, "" for nothing; a take without an update says nothing.
        ValueError for a curve that this algorithm does not draw."""
        if not numbers["optim/updates"]:
            return ""
        for curve, (field, low, high) in self.bounds.items():
            if curve not in numbers:
                there = ", ".join(sorted(x for x in numbers if "entropy" in x or "kl_mean" in x))
                raise ValueError(
                    f"{field} asks for the curve {curve!r}, which this algorithm does not draw; "
                    f"allowed: {there or 'none here'}"
                )
            if not low <= numbers[curve] <= high:
                bound = low if numbers[curve] < low else high
                return f"{curve} is {numbers[curve]:.4g}, {field}={bound:g}"
        return ""
