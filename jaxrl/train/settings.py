"""Every config section as a frozen dataclass: ConfigDict stops here, and so do bad numbers.

An unknown or missing field is a ``TypeError`` from the dataclass itself; a bad value is a
``ValueError`` naming section, field, value and what is allowed.
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from ml_collections import ConfigDict

from jaxrl.model import form
from jaxrl.model.form import ModelConfig
from jaxrl.pool.characters import WIDTHS
from jaxrl.train import views
from jaxrl.train.curriculum import CurriculumConfig
from jaxrl.train.optimizer import OptimizerConfig
from jaxrl.train.packing import PackingConfig

STUDENT = "student"

# Words of train.start that name no phase: go on with what is there, and begin anew.
STARTS = ("", "fresh")

TOKENIZERS = ("sentencepiece", *WIDTHS)  # made from the task's text

# A phase trains the same weights on the same questions on the same devices as the others.
SHARED = ("seed", "model", "mesh", "task")


def _positive(section: str, record: Any, *fields: str, least: float = 1) -> None:
    for field in fields:
        value = record.__dict__[field]
        if not value >= least:
            raise ValueError(f"{section}.{field}={value!r} is too small; allowed: >= {least}")


def _one_of(section: str, record: Any, field: str, allowed: tuple[str, ...]) -> None:
    value = record.__dict__[field]
    if value not in allowed:
        raise ValueError(f"{section}.{field}={value!r} is unknown; allowed: {', '.join(allowed)}")


def _tokenizer(section: str, record: Any, made: tuple[str, ...]) -> None:
    value = record.tokenizer
    if value not in made and "/" not in value:
        raise ValueError(
            f"{section}.tokenizer={value!r} is unknown; allowed: {', '.join(made)}, or a published "
            "tokenizer (a path with a /)"
        )


def _ladder(section: str, record: Any, field: str) -> None:
    value = record.__dict__[field]
    if not value or list(value) != sorted(set(value)) or value[0] < 1:
        raise ValueError(f"{section}.{field}={value!r}; allowed: increasing positive lengths")


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """Which questions, how they are split, and which score is the reward."""

    source: str
    family: str
    parameters: Mapping[str, Any]
    seed: int
    train_prompts: int
    held_out_prompts: int
    held_out_fraction: float
    reward: Literal["exact", "score"]

    def __post_init__(self) -> None:
        _positive("task", self, "train_prompts", "held_out_prompts")
        _one_of("task", self, "reward", ("exact", "score"))
        if not 0 < self.held_out_fraction < 1:
            raise ValueError(
                f"task.held_out_fraction={self.held_out_fraction!r}; allowed: between 0 and 1"
            )


@dataclasses.dataclass(frozen=True)
class PoolConfig:
    """Where rollouts come from and how they are counted."""

    kind: str
    path: str
    survivors: int
    loop_characters: int
    loop_repeats: int
    shard: int
    shards: int
    local_dir: str
    rollouts_per_group: int
    demonstrations: int
    epochs: int
    publish_every_steps: int
    max_refills: int
    max_feedback_tokens: int
    record: bool
    tokenizer: str
    tokenizer_vocab_size: int
    chat: Literal["off", "template"]
    system: str
    watchdog_s: float

    def __post_init__(self) -> None:
        _one_of("pool", self, "kind", ("local", "recorded"))
        _tokenizer("pool", self, TOKENIZERS)
        _one_of("pool", self, "chat", ("off", "template"))
        if self.chat == "template" and "/" not in self.tokenizer:
            raise ValueError(
                f"pool.chat='template' with pool.tokenizer={self.tokenizer!r}; allowed: 'off', or "
                "a published tokenizer (a path with a /)"
            )
        if self.system and self.chat == "off":
            raise ValueError(
                f"pool.system={self.system!r} with pool.chat='off'; allowed: '', or "
                "pool.chat='template'"
            )
        _positive("pool", self, "rollouts_per_group", "tokenizer_vocab_size")
        counts = ("demonstrations", "epochs", "publish_every_steps", "max_refills")
        _positive("pool", self, *counts, "max_feedback_tokens", least=0)
        _positive("pool", self, "survivors", "loop_characters", "shards")
        _positive("pool", self, "loop_repeats", least=2)
        if not 0 <= self.shard < self.shards:
            raise ValueError(f"pool.shard={self.shard!r}; allowed: 0 to {self.shards - 1}")
        _positive("pool", self, "watchdog_s", least=1e-3)
        if self.kind == "local" and self.publish_every_steps != 1:
            raise ValueError(
                f"pool.publish_every_steps={self.publish_every_steps!r}; allowed with "
                "pool.kind='local': 1 (a synchronous pool samples from the newest weights)"
            )


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """How responses are drawn."""

    temperature: float
    max_new_tokens: int
    prompt_buckets: tuple[int, ...]
    slots: int
    record_routes: bool

    def __post_init__(self) -> None:
        _positive("sampler", self, "max_new_tokens", "slots")
        _ladder("sampler", self, "prompt_buckets")
        if not self.temperature > 0:
            raise ValueError(
                f"sampler.temperature={self.temperature!r}; allowed: > 0 "
                "(greedy samples are refused for training)"
            )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How many groups a step takes and how the step is cut."""

    steps: int
    groups: int
    epochs: int
    minibatches: int
    micro_rollouts: int
    token_buckets: tuple[int, ...]
    view_token_buckets: tuple[int, ...]
    packing: PackingConfig
    start: str
    adapters: str
    routes: str
    balance_weight: float
    curriculum: CurriculumConfig

    def __post_init__(self) -> None:
        _positive("train", self, "steps", "groups", "epochs", "minibatches", "micro_rollouts")
        _ladder("train", self, "token_buckets")
        _one_of("train", self, "routes", ("free", "replayed"))
        if self.adapters and "/" not in self.adapters:
            raise ValueError(
                f"train.adapters={self.adapters!r}; allowed: '', or a directory of adapters (a "
                "path with a /)"
            )
        if not self.balance_weight >= 0:
            raise ValueError(f"train.balance_weight={self.balance_weight!r}; allowed: >= 0")
        if self.view_token_buckets:
            _ladder("train", self, "view_token_buckets")


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
        _one_of("scorers.teacher", self, "base", ("own", "student"))
        _tokenizer("scorers.teacher", self, ("", *TOKENIZERS))


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
        _positive("scorers.novelty", self, "hidden")


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


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """How held-out accuracy is measured."""

    every_steps: int
    prompts: int
    seen_prompts: int
    samples: int
    temperature: float

    def __post_init__(self) -> None:
        _positive("eval", self, "prompts", "samples")
        _positive("eval", self, "every_steps", "seen_prompts", least=0)
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
    keep_weights: int

    def __post_init__(self) -> None:
        _positive("checkpoint", self, "every_steps", "keep", "keep_weights")


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """How often curves and samples are written."""

    every_steps: int
    samples: int
    samples_every_steps: int

    def __post_init__(self) -> None:
        _positive("log", self, "every_steps", "samples_every_steps")
        _positive("log", self, "samples", least=0)


@dataclasses.dataclass(frozen=True)
class Phase:
    """One resolved phase of a run: the steps ``first_step .. last_step - 1`` of the whole."""

    name: str
    first_step: int
    last_step: int
    seed: int
    model: ModelConfig
    mesh: Mapping[str, int]
    task: TaskConfig
    pool: PoolConfig
    sampler: SamplerConfig
    algorithm: Mapping[str, Any]
    scorers: ScorersConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    log: LogConfig


_OWN = {"name", "first_step", "last_step"}  # what is resolved, not written in a config
SECTIONS = [field.name for field in dataclasses.fields(Phase) if field.name not in _OWN]


def _is_open(where: str, key: str) -> bool:
    """Mappings whose fields base.py does not list: an override replaces them as a whole."""
    differing = ".scorers." in where and key in ("model", "optimizer")
    return differing or key in ("algorithm", "parameters", "views")


def _overridden(base: dict[str, Any], override: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``base`` with the fields of ``override``; a field that base lacks is an error."""
    merged = copy.deepcopy(base)
    for key, value in override.items():
        if key not in base:
            raise ValueError(f"{where}.{key} is unknown; allowed: {', '.join(sorted(base))}")
        if isinstance(value, Mapping) and not _is_open(where, key):
            merged[key] = _overridden(base[key], value, f"{where}.{key}")
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _differing(section: str, kind: Any, base: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
    """A section like ``base``, whose errors name the one that says what differs."""
    try:
        return kind({**base, **own})
    except (TypeError, ValueError) as error:
        raise type(error)(f"{section}: {error}") from error


def _optimizer(fields: Mapping[str, Any]) -> OptimizerConfig:
    return OptimizerConfig(**fields)


def _scorers(sections: Mapping[str, Any]) -> ScorersConfig:
    """The models besides the student: their ``model`` and ``optimizer`` say what differs."""
    fields = sections["scorers"]
    known = {"self", "teacher", "value", "novelty", "views"}
    if set(fields) != known:
        raise TypeError(f"scorers has {sorted(fields)}; allowed: exactly {sorted(known)}")

    def optimizer(who: str) -> OptimizerConfig:
        own = {"freeze": (), "rates": (), "train": "auto", **fields[who]["optimizer"]}
        return _differing(f"scorers.{who}", _optimizer, sections["optimizer"], own)

    teacher = fields["teacher"]
    model = _differing("scorers.teacher", form.read, sections["model"], teacher["model"])
    return ScorersConfig(
        average=AverageConfig(**fields["self"]),
        teacher=TeacherConfig(**{**teacher, "model": model, "optimizer": optimizer("teacher")}),
        value=ValueConfig(**{**fields["value"], "optimizer": optimizer("value")}),
        novelty=NoveltyConfig(**{**fields["novelty"], "optimizer": optimizer("novelty")}),
        views=fields["views"],
    )


def _refer(resolved: list[Phase], phase: Phase) -> None:
    """Check that weights of other phases are those of earlier ones, and that they fit."""
    earlier = [other.name for other in resolved]
    teacher = phase.scorers.teacher
    named = {
        "train.start": (phase.train.start, STARTS),
        "scorers.teacher.weights": (teacher.weights, ("",)),
    }
    for field, (value, words) in named.items():
        if value not in words and value not in earlier and "/" not in value:
            allowed = [repr(word) for word in words] + earlier
            raise ValueError(
                f"phases.{phase.name}: {field}={value!r}; allowed: {', '.join(allowed)}, or a "
                "directory of weights (a path with a /)"
            )
    _alike(phase, teacher.weights in earlier)


def _alike(phase: Phase, of_student: bool) -> None:
    """Check that a teacher whose weights or base are a student's has a student's form. Adapters may
    differ where they are not a student's: new ones over weights that have none, others over its
    base, or none over it."""
    teacher, model = phase.scorers.teacher, phase.model
    over = teacher.base == STUDENT
    if over:
        differing = not teacher.model.adapter.rank if not teacher.weights else not of_student
    else:
        differing = not model.adapter.rank
    same_base = dataclasses.replace(teacher.model, adapter=model.adapter) == model
    if (over or of_student) and not (same_base and (differing or teacher.model == model)):
        beside = "base='student'" if over else f"weights={teacher.weights!r}"
        raise ValueError(
            f"phases.{phase.name}: scorers.teacher.model differs from model; allowed beside "
            f"scorers.teacher.{beside}: a student's form (its adapters may differ where they are "
            "not read from a student's weights)"
        )


def _reread(resolved: list[Phase], phase: Phase) -> None:
    """Check that records of other phases are those of an earlier one that keeps them."""
    path, where = phase.pool.path, f"phases.{phase.name}: pool.path={phase.pool.path!r}"
    if not path or "/" in path:
        return
    found = [other for other in resolved if other.name == path]
    if not found:
        earlier = ", ".join(other.name for other in resolved) or "no phase comes earlier"
        raise ValueError(f"{where}; allowed: '', {earlier}, or a directory of records (with a /)")
    kept = found[0].pool
    if phase.pool.kind != "recorded" or kept.kind != "local" or not kept.record:
        raise ValueError(
            f"{where} with pool.kind={phase.pool.kind!r}; allowed: pool.kind='recorded', and a "
            f"phase with pool.kind='local' and pool.record=True (is: {kept.kind!r}, {kept.record})"
        )
    if kept.local_dir != phase.pool.local_dir:
        raise ValueError(f"{where}: pool.local_dir differs; allowed: {kept.local_dir!r}")


def _read_alike(resolved: list[Phase], phase: Phase) -> None:
    """Check that a phase reads and asks as the first one does: its parts serve all phases."""
    for field in ("tokenizer", "tokenizer_vocab_size", "chat", "system"):
        value, first = (one.pool.__dict__[field] for one in (phase, [*resolved, phase][0]))
        if value != first:
            raise ValueError(
                f"phases.{phase.name}: pool.{field}={value!r}; allowed: {first!r}, as in the "
                "first phase"
            )
    for field in ("max_new_tokens", "prompt_buckets", "slots", "record_routes"):
        value, first = (one.sampler.__dict__[field] for one in (phase, [*resolved, phase][0]))
        if value != first:
            raise ValueError(
                f"phases.{phase.name}: sampler.{field}={value!r}; allowed: {first!r}, as in the "
                "first phase (one sampler serves all)"
            )


def _phase(name: str, sections: dict[str, Any], first_step: int) -> Phase:
    moving = CurriculumConfig(**sections["train"]["curriculum"])
    packing = PackingConfig(**sections["train"]["packing"])
    train = TrainConfig(**{**sections["train"], "curriculum": moving, "packing": packing})
    if moving.move != "off" and sections["pool"]["kind"] != "local":
        raise ValueError(
            f"phases.{name}: train.curriculum.move={moving.move!r} with "
            f"pool.kind={sections['pool']['kind']!r}; allowed: 'off', or pool.kind='local'"
        )
    if sections["mesh"]["context"] != 1:
        value = sections["mesh"]["context"]
        raise ValueError(f"mesh.context={value!r}; allowed: 1 (rows are not split)")
    if sections["mesh"]["expert"] != 1 and not sections["model"]["experts"]["count"]:
        raise ValueError(
            f"mesh.expert={sections['mesh']['expert']!r}; allowed: 1 (model.experts.count=0: a "
            "dense model has no experts to split)"
        )
    return Phase(
        name=name,
        first_step=first_step,
        last_step=first_step + train.steps,
        seed=sections["seed"],
        model=form.read(sections["model"]),
        mesh=sections["mesh"],
        task=TaskConfig(**sections["task"]),
        pool=PoolConfig(**sections["pool"]),
        sampler=SamplerConfig(**sections["sampler"]),
        algorithm=sections["algorithm"],
        scorers=_scorers(sections),
        optimizer=OptimizerConfig(**sections["optimizer"]),
        train=train,
        eval=EvalConfig(**sections["eval"]),
        checkpoint=CheckpointConfig(**sections["checkpoint"]),
        log=LogConfig(**sections["log"]),
    )


def phases(config: ConfigDict) -> list[Phase]:
    """Unpack a config into its phases, in order.

    Each phase takes the top-level sections with ``phases.<name>`` laid over them. Raises ValueError
    or TypeError naming the section, the field, the value and what is allowed.
    """
    sections = config.to_dict()
    table = sections.pop("phases")
    if unknown := sorted(set(sections) - set(SECTIONS)):
        raise ValueError(f"config.{unknown[0]} is unknown; allowed: {', '.join(SECTIONS)}, phases")
    order = table.pop("order")
    if not order or len(set(order)) != len(order) or set(order) != set(table):
        raise ValueError(
            f"phases.order={order!r}; allowed: each of phases' entries {sorted(table)} exactly once"
        )
    if confusing := [name for name in order if name in STARTS or "/" in name]:
        raise ValueError(
            f"phases.{confusing[0]}: train.start could mean something else; allowed: names "
            "without a /, and not 'fresh'"
        )
    resolved: list[Phase] = []
    for name in order:
        for shared in SHARED:
            if shared in table[name]:
                raise ValueError(
                    f"phases.{name}.{shared}: {', '.join(SHARED)} are the same in all phases"
                )
        merged = _overridden(sections, table[name], f"phases.{name}")
        phase = _phase(name, merged, resolved[-1].last_step if resolved else 0)
        _refer(resolved, phase)
        _reread(resolved, phase)
        _read_alike(resolved, phase)
        resolved.append(phase)
    return resolved
