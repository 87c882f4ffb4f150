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
from jaxrl.train.checks import TOKENIZERS, admission, at_least, ladder, named_tokenizer, one_of
from jaxrl.train.curriculum import CurriculumConfig
from jaxrl.train.optimizer import OptimizerConfig
from jaxrl.train.packing import PackingConfig
from jaxrl.train.scorers import (
    AverageConfig,
    NoveltyConfig,
    ScorersConfig,
    TeacherConfig,
    ValueConfig,
)
from jaxrl.train.watch import CheckpointConfig, EvalConfig, LogConfig, StopConfig

STUDENT = "student"

# Words of train.start that name no phase: go on with what is there, and begin anew.
STARTS = ("", "fresh")


# What generates for a remote pool, before a colon and URLs: all but the first are servers.
ENGINES = ("sampler", "serve", "vllm", "sglang")

# A phase trains the same weights on the same questions on the same devices as the others.
SHARED = ("seed", "model", "mesh", "task")


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
        at_least("task", self, "train_prompts", "held_out_prompts")
        one_of("task", self, "reward", ("exact", "score"))
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
    ledger: str
    staleness: int
    over_age: Literal["drop", "wait", "continue"]
    lease_s: float
    max_attempts: int
    min_group: int
    poll_s: float
    gateway: str
    engine: str
    chunk_tokens: int
    launcher: Literal["subprocess", "ray", "none"]
    workers: int
    harness: str
    max_body_bytes: int
    admission: Literal["auto", "aimd", "fixed"]
    under_way: int
    judge_calls: int
    sandboxes: int
    spool_bytes: int
    usage_marks: tuple[float, float, float]
    quotas: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        one_of("pool", self, "kind", ("local", "recorded", "remote"))
        named_tokenizer("pool", self, TOKENIZERS)
        one_of("pool", self, "chat", ("off", "template"))
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
        at_least("pool", self, "rollouts_per_group", "tokenizer_vocab_size")
        counts = ("demonstrations", "epochs", "publish_every_steps", "max_refills")
        at_least("pool", self, *counts, "max_feedback_tokens", least=0)
        at_least("pool", self, "survivors", "loop_characters", "shards")
        at_least("pool", self, "loop_repeats", least=2)
        if not 0 <= self.shard < self.shards:
            raise ValueError(f"pool.shard={self.shard!r}; allowed: 0 to {self.shards - 1}")
        at_least("pool", self, "watchdog_s", least=1e-3)
        if self.kind == "local" and self.publish_every_steps != 1:
            raise ValueError(
                f"pool.publish_every_steps={self.publish_every_steps!r}; allowed with "
                "pool.kind='local': 1 (a synchronous pool samples from the newest weights)"
            )
        self._check_remote()

    def _check_remote(self) -> None:
        """What a pool of other processes is asked for."""
        one_of("pool", self, "over_age", ("drop", "wait", "continue"))
        one_of("pool", self, "launcher", ("subprocess", "ray", "none"))
        at_least("pool", self, "staleness", "min_group", "workers", "chunk_tokens", least=0)
        at_least("pool", self, "max_attempts", "max_body_bytes")
        at_least("pool", self, "lease_s", "poll_s", least=1e-3)
        if self.ledger != "sqlite" and not self.ledger.startswith("postgresql://"):
            raise ValueError(f"pool.ledger={self.ledger!r}; allowed: 'sqlite', or postgresql://...")
        admission(self)
        kind, _, urls = self.engine.partition(":")
        if kind not in ENGINES or bool(urls) != (kind != "sampler"):
            raise ValueError(
                f"pool.engine={self.engine!r}; allowed: 'sampler', or serve:, vllm: or sglang: "
                "before the URLs of its servers"
            )
        if self.min_group > self.rollouts_per_group:
            raise ValueError(
                f"pool.min_group={self.min_group!r}; allowed: 0 (all) to "
                f"pool.rollouts_per_group={self.rollouts_per_group}"
            )
        every = self.publish_every_steps
        if self.kind == "remote" and not 1 <= every <= self.staleness + 1:
            raise ValueError(
                f"pool.publish_every_steps={every!r}; allowed with pool.kind='remote': 1 to "
                f"pool.staleness + 1 = {self.staleness + 1} (else no sample is young enough)"
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
        at_least("sampler", self, "max_new_tokens", "slots")
        ladder("sampler", self, "prompt_buckets")
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
    stop: StopConfig

    def __post_init__(self) -> None:
        at_least("train", self, "steps", "groups", "epochs", "minibatches", "micro_rollouts")
        ladder("train", self, "token_buckets")
        one_of("train", self, "routes", ("free", "replayed"))
        if self.adapters and "/" not in self.adapters:
            raise ValueError(
                f"train.adapters={self.adapters!r}; allowed: '', or a directory of adapters (a "
                "path with a /)"
            )
        if not self.balance_weight >= 0:
            raise ValueError(f"train.balance_weight={self.balance_weight!r}; allowed: >= 0")
        if self.view_token_buckets:
            ladder("train", self, "view_token_buckets")


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


def _refuse_split_tokens(sections: dict[str, Any], train: TrainConfig) -> None:
    """ValueError where ``mesh.context`` cannot split the rows that are asked for."""
    parts = sections["mesh"]["context"]
    if parts == 1:
        return
    if train.packing.on:
        raise ValueError(
            f"train.packing.rows={train.packing.rows!r} with mesh.context={parts}; allowed: "
            "'plain' (bins are not split)"
        )
    for field in ("token_buckets", "view_token_buckets"):
        for tokens in sections["train"][field]:
            if tokens % parts:
                raise ValueError(
                    f"train.{field}={sections['train'][field]!r}; allowed: multiples of "
                    f"mesh.context={parts}"
                )


def _refuse_packed_kernels(sections: dict[str, Any], train: TrainConfig) -> None:
    """ValueError where an attention kernel is asked for by name, and rows share prompts."""
    kernels = sections["model"]["kernels"]
    if train.packing.on and kernels in ("splash", "tokamax"):
        raise ValueError(
            f"model.kernels={kernels!r} with train.packing.rows={train.packing.rows!r}; allowed: "
            "'auto', 'xla', or train.packing.rows='plain' (no kernel attends to a shared prompt)"
        )


def _phase(name: str, sections: dict[str, Any], first_step: int) -> Phase:
    moving = CurriculumConfig(**sections["train"]["curriculum"])
    packing = PackingConfig(**sections["train"]["packing"])
    stop = StopConfig(**sections["train"]["stop"])
    nested = {"curriculum": moving, "packing": packing, "stop": stop}
    train = TrainConfig(**{**sections["train"], **nested})
    if moving.move != "off" and sections["pool"]["kind"] != "local":
        raise ValueError(
            f"phases.{name}: train.curriculum.move={moving.move!r} with "
            f"pool.kind={sections['pool']['kind']!r}; allowed: 'off', or pool.kind='local'"
        )
    _refuse_split_tokens(sections, train)
    _refuse_packed_kernels(sections, train)
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


def read(record: Mapping[str, Any]) -> ConfigDict:
    """A config from a run's config.json, where JSON has lists for its tuples."""

    def tuples(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: tuples(each) for name, each in value.items()}
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    return ConfigDict(tuples(record))


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
