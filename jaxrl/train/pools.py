"""The pool that a phase asks for, and what its rollouts are read and annotated by."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from jaxrl.algorithms import contract as algorithms
from jaxrl.model import policy, pretrained
from jaxrl.model.policy import Policy
from jaxrl.pool import filtering, recorded
from jaxrl.pool.characters import WIDTHS, train_characters
from jaxrl.pool.contract import Annotate, RolloutPool
from jaxrl.pool.local import LocalPool
from jaxrl.pool.permits import UNITS, Permits, permits_for
from jaxrl.pool.recorded import NoRecords, RecordedPool
from jaxrl.pool.rollout import Rollout
from jaxrl.pool.shards import of_shard
from jaxrl.pool.tokenizer import train_sentencepiece
from jaxrl.tasks.contract import TaskSource
from jaxrl.train import curriculum, hosts, starts
from jaxrl.train.loop import Books, Parts, Reader
from jaxrl.train.settings import Phase, TeacherConfig
from jaxrl.train.state import STUDENT
from jaxrl.train.text_teacher import annotator


def pool_folder(phase: Phase, root: epath.Path) -> epath.Path:
    """Where records go: a local disk if the config names one."""
    return epath.Path(phase.pool.local_dir) if phase.pool.local_dir else root / "pool"


def read_by(name: str, source: TaskSource, phase: Phase, folder: epath.Path) -> Reader:
    """The tokenizer of a name of the config: made from the text of the train split, or published,
    at a path with a /. ValueError naming the fields if that cannot be opened as they ask."""
    if "/" in name:
        from jaxrl.pool.published_tokenizer import PublishedTokenizer

        chat, system = phase.pool.chat, phase.pool.system
        try:
            return PublishedTokenizer(pretrained.locate(name), chat=chat, system=system)
        except ValueError as error:
            field = "pool" if name == phase.pool.tokenizer else "scorers.teacher"
            raise ValueError(
                f"{field}.tokenizer={name!r}, pool.chat={chat!r}, pool.system={system!r}: {error}"
            ) from error
    texts = [text for one in source.tasks("train") for text in (one.prompt, one.answer)]
    if name in WIDTHS:
        return train_characters(texts, WIDTHS[name])
    size = phase.pool.tokenizer_vocab_size
    return train_sentencepiece(texts, size, folder / "tokenizer.model")


def named_teacher(phase: Phase) -> TeacherConfig:
    """The teacher's section. ValueError if it names no weights, and is not to begin as the student
    over the student's base."""
    teacher = phase.scorers.teacher
    if not teacher.weights and teacher.base != STUDENT:
        raise ValueError(
            f"phases.{phase.name}: scorers.teacher.weights=''; algorithm "
            f"{phase.algorithm['name']!r} reads a teacher; allowed: an earlier phase, or a "
            "directory of weights"
        )
    return teacher


def stored(name: str, root: epath.Path) -> epath.Path:
    """Where weights are that a config names by an earlier phase or by their directory."""
    return pretrained.locate(name) if "/" in name else root / "phases" / name


def survived(phase: Phase, books: Books, folder: epath.Path, run_id: str) -> int:
    """Filter an earlier phase's records into ``folder/<phase>``; how many rollouts are left."""
    counts = filtering.distil(
        folder / phase.pool.path,
        folder / phase.name,
        run_id=run_id,
        limit=phase.pool.survivors,
        characters=phase.pool.loop_characters,
        repeats=phase.pool.loop_repeats,
    )
    stated = ", ".join(f"{name} {count}" for name, count in counts.items())
    books.progress.note(f"{phase.name} reads {phase.pool.path}: {stated}")
    return counts["kept"]


def text_reader(phase: Phase, parts: Parts, root: epath.Path) -> tuple[Policy, Reader] | None:
    """Form and tokenizer of a teacher that reads the responses' text, if an algorithm asks for
    one. ValueError naming the field that does not fit.
    """
    if "teacher_logp" not in algorithms.load(**phase.algorithm).needs:
        return None
    teacher, tokenizer = named_teacher(phase), parts.tokenizer
    if teacher.tokenizer:
        tokenizer = read_by(teacher.tokenizer, parts.source, phase, pool_folder(phase, root))
    if tokenizer.vocab_size > teacher.model.vocab_size:
        raise ValueError(
            f"phases.{phase.name}: scorers.teacher.model.vocab_size={teacher.model.vocab_size}; "
            f"allowed: >= {tokenizer.vocab_size}, of scorers.teacher.tokenizer="
            f"{teacher.tokenizer!r}"
        )
    if teacher.base == STUDENT:
        raise ValueError(
            f"phases.{phase.name}: scorers.teacher.base='student'; allowed: 'own' (algorithm "
            f"{phase.algorithm['name']!r} has the teacher read the text, as a model of its own)"
        )
    return policy.build(teacher.model, hosts.own_mesh(parts.mesh), parts.policy.rules), tokenizer


def text_teacher(phase: Phase, parts: Parts, root: epath.Path) -> Annotate | None:
    """What such a teacher says of the responses of a pool."""
    reader = text_reader(phase, parts, root)
    if reader is None:
        return None
    form, tokenizer = reader
    params = starts.read(stored(phase.scorers.teacher.weights, root), form, phase.seed, print)
    return annotator(form, params, own=parts.tokenizer, other=tokenizer)


def together(annotations: list[Annotate]) -> Annotate | None:
    """The facts of all of them; None of none."""
    if not annotations:
        return None

    def annotate(rollouts: Sequence[Rollout]) -> list[Mapping[str, Any]]:
        told = [one(rollouts) for one in annotations]
        return [
            {k: v for facts in each for k, v in facts.items()} for each in zip(*told, strict=True)
        ]

    return annotate


def permits_of(phase: Phase, source: TaskSource) -> Permits:
    """What a phase's attempts need a permit for. ValueError naming the field for a limit on what no
    verdict of the source needs."""
    limits = {unit: phase.pool.__dict__[unit] for unit in UNITS}
    return permits_for(limits, source) if any(limits.values()) else Permits()


def open_pool(phase: Phase, parts: Parts, books: Books) -> RolloutPool:
    """The pool that a phase asks for. Its records name the run by what makes it this run."""
    folder = pool_folder(phase, books.workdir.root)
    digest = hashlib.blake2b(json.dumps(books.identity).encode(), digest_size=8).hexdigest()
    if phase.pool.kind == "recorded":
        path = epath.Path(phase.pool.path) if phase.pool.path else folder / "demonstrations"
        if phase.pool.path and "/" not in phase.pool.path:  # written anew, as demonstrations are
            path = folder / phase.name
            if not survived(phase, books, folder, f"{phase.pool.path}-{digest}"):
                return NoRecords(f"nothing of {phase.pool.path} survived")
        if not phase.pool.path:  # written anew at each start: the same records, whatever lay there
            counts = recorded.demonstrate(
                parts.source,
                parts.tokenizer,
                path,
                run_id=f"demonstrations-{digest}",
                limit=phase.pool.demonstrations or None,
                max_tokens=max(phase.train.token_buckets),
            )
            stated = ", ".join(f"{name} {count}" for name, count in counts.items())
            books.progress.note(f"demonstrations: {stated}")
        return RecordedPool(
            path,
            seed=phase.seed,
            rollouts_per_group=phase.pool.rollouts_per_group,
            epochs=phase.pool.epochs,
            keep=algorithms.load(**phase.algorithm).keep,
            max_refills=phase.pool.max_refills,
        )
    algorithm = algorithms.load(**phase.algorithm)
    shard = (phase.pool.shard, phase.pool.shards)
    tasks = of_shard(parts.source.tasks("train"), shard)
    moving = curriculum.build(phase.train.curriculum, tasks, algorithm)
    teacher = text_teacher(phase, parts, books.workdir.root)
    annotations = ([moving.annotate] if moving else []) + ([teacher] if teacher else [])
    run_id, annotate = f"{phase.name}-{digest}", together(annotations)
    if phase.pool.kind == "remote":
        from jaxrl.train.remotes import open_remote

        return open_remote(phase, parts, folder, run_id, keep=algorithm.keep, annotate=annotate)
    pool = LocalPool(
        parts.generator,
        parts.tokenizer,
        parts.source,
        run_id=run_id,
        shard=shard,
        seed=phase.seed,
        rollouts_per_group=phase.pool.rollouts_per_group,
        temperature=phase.sampler.temperature,
        max_new_tokens=phase.sampler.max_new_tokens,
        max_prompt_tokens=max(phase.sampler.prompt_buckets),
        keep=algorithm.keep,
        annotate=annotate,
        max_refills=phase.pool.max_refills,
        max_feedback_tokens=phase.pool.max_feedback_tokens,
        reward=phase.task.reward,
        record_dir=folder / phase.name if phase.pool.record else None,
        watchdog_s=phase.pool.watchdog_s,
    )
    return curriculum.Steered(pool, moving) if moving else pool
