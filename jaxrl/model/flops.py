"""FLOPs of one position in one forward pass, by formula, from a model's form.

A multiplication and an addition are two FLOPs; what is elementwise is left out. A position of a row
of T tokens costs

    trunk      2 x (numbers of its kernels, experts' x per_token / count)
    attention  2 x (keys it sees) x heads x (head_size + value_size);  keys seen: (T + 1) / 2, or
               fewer on local layers
    head       2 x vocabulary x width

The backward pass costs the same twice: for what flows to the inputs, and for the kernels' own
gradients.
"""

import dataclasses
import math

from jaxrl.model import transformer
from jaxrl.model.form import ModelConfig

SILENT = ("scale", "bias", "sink")  # parameters that multiply no matrix


@dataclasses.dataclass(frozen=True)
class Position:
    """FLOPs of one position in one forward pass."""

    trunk: float
    attention: float
    head: float

    @property
    def all(self) -> float:
        """Together."""
        return self.trunk + self.attention + self.head

    def __add__(self, other: "Position") -> "Position":
        return Position(
            self.trunk + other.trunk,
            self.attention + other.attention,
            self.head + other.head,
        )

    def scaled(self, trunk: float, attention: float, head: float) -> "Position":
        """Each part so many times."""
        return Position(trunk * self.trunk, attention * self.attention, head * self.head)


NOTHING = Position(0.0, 0.0, 0.0)


def _active(name: str, numbers: int, config: ModelConfig) -> float:
    """Numbers of a parameter that one token is multiplied with."""
    last = name.split("/")[-1]
    if last in SILENT:
        return 0.0
    experts = config.experts
    return numbers * experts.per_token / experts.count if routed(name, config) else float(numbers)


def routed(name: str, config: ModelConfig) -> bool:
    """Whether a parameter is all experts' own, of which a token goes through a few."""
    kinds = ("gate", "up", "down")
    return config.experts.count > 0 and "/mlp/" in name and name.split("/")[-1] in kinds


def kernels(config: ModelConfig) -> dict[str, float]:
    """Numbers that a position is multiplied with in the trunk, by parameter."""
    head = {*transformer.head_names(config), "embedding"}
    numbers = {name: math.prod(x.shape) for name, x in transformer.shapes(config).items()}
    return {name: _active(name, n, config) for name, n in numbers.items() if name not in head}


def keys_seen(config: ModelConfig, layer: int, tokens: int) -> float:
    """Mean over a row's positions of the keys that a query of this layer sees."""
    window = min(config.window, tokens) if config.is_local(layer) else tokens
    short = window * (window + 1) / 2  # the first positions see fewer
    return (short + (tokens - window) * window) / tokens


def forward(config: ModelConfig, tokens: int) -> Position:
    """One position of a row of so many tokens."""
    wide = config.heads * (config.head_size + config.value_width)
    seen = sum(keys_seen(config, layer, tokens) for layer in range(config.layers))
    outputs = config.outputs or config.vocab_size
    return Position(
        trunk=2 * sum(kernels(config).values()),
        attention=2 * seen * wide,
        head=2 * config.width * outputs,
    )
