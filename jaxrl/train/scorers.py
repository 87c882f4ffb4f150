"""The config's section ``scorers``: the models besides the student."""

import dataclasses
from collections.abc import Mapping

from jaxrl.model.form import ModelConfig
from jaxrl.train import views
from jaxrl.train.checks import TOKENIZERS, at_least, named_tokenizer, one_of
from jaxrl.train.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class AverageConfig:
    """The student's moving average (``self``): p <- ema_rate p + (1 - ema_rate) student."""

    ema_rate: float

    def __post_init__(self) -> None:
        if not 0 < self.ema_rate < 1:
            raise ValueError(
                f"scorers.self.ema_rate={self.ema_rate!r}; allowed: between 0 and 1, of the old "
                "average (reference is the one that never moves)"
            )


@dataclasses.dataclass(frozen=True)
class TeacherConfig:
    """Another model: whose weights, of which form, and how it learns where it does."""

    weights: str
    base: str
    tokenizer: str
    model: ModelConfig
    optimizer: OptimizerConfig

    def __post_init__(self) -> None:
        one_of("scorers.teacher", self, "base", ("own", "student"))
        named_tokenizer("scorers.teacher", self, ("", *TOKENIZERS))


@dataclasses.dataclass(frozen=True)
class ValueConfig:
    """The model of the value of a state."""

    optimizer: OptimizerConfig


@dataclasses.dataclass(frozen=True)
class NoveltyConfig:
    """The random networks and those that guess them."""

    hidden: int
    optimizer: OptimizerConfig

    def __post_init__(self) -> None:
        at_least("scorers.novelty", self, "hidden")


@dataclasses.dataclass(frozen=True)
class ScorersConfig:
    """The models besides the student, and the contexts that they may see."""

    average: AverageConfig
    teacher: TeacherConfig
    value: ValueConfig
    novelty: NoveltyConfig
    views: Mapping[str, str]

    def __post_init__(self) -> None:
        views.check(self.views)

    def optimizer(self, who: str) -> OptimizerConfig:
        """Of a role that learns; ValueError for one that never does."""
        learners = {"teacher": self.teacher, "value": self.value, "novelty": self.novelty}
        if who not in learners:
            raise ValueError(f"{who!r} cannot learn; allowed: {', '.join(learners)}")
        return learners[who].optimizer
