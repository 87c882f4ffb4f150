"""A schedule of phases on the same weights: build the parts, resume, run, report."""

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from jaxrl import mesh
from jaxrl.algorithms import contract as algorithms
from jaxrl.model import policy, pretrained
from jaxrl.model.adapters import is_adapter
from jaxrl.model.policy import Policy
from jaxrl.model.sampler import Sampler
from jaxrl.model.versions import write_weights
from jaxrl.pool import filtering, recorded
from jaxrl.pool.characters import WIDTHS, train_characters
from jaxrl.pool.contract import Annotate, RolloutPool
from jaxrl.pool.local import LocalPool
from jaxrl.pool.published_tokenizer import PublishedTokenizer
from jaxrl.pool.recorded import NoRecords, RecordedPool
from jaxrl.pool.rollout import Rollout
from jaxrl.pool.shards import of_shard
from jaxrl.pool.tokenizer import train_sentencepiece
from jaxrl.tasks.contract import TaskSource
from jaxrl.train import curriculum, loop, optimizer, report, roles, settings, starts
from jaxrl.train.checkpoint import Checkpoints, Restored
from jaxrl.train.loop import Books, Models, Parts, Reader
from jaxrl.train.metrics import Logger, Progress
from jaxrl.train.settings import STARTS, Phase, TeacherConfig
from jaxrl.train.state import STUDENT, TrainState, create, place, roles_of, shardings
from jaxrl.train.text_teacher import annotator
from jaxrl.train.workdir import Workdir

# May differ between a run and its continuation: nothing that was trained depends on them.
FREE_SECTIONS = ("mesh", "eval", "checkpoint", "log")
FREE_POOL_FIELDS = ("local_dir", "watchdog_s", "record")


def identity(phases: list[Phase], tokenizer: Reader) -> dict[str, Any]:
    """What a continuation must share with the run that it continues. The last phase may grow."""
    record: dict[str, Any] = {"tokenizer": tokenizer.digest}
    for phase in phases:
        fields = dataclasses.asdict(phase)
        for section in FREE_SECTIONS:
            del fields[section]
        for field in FREE_POOL_FIELDS:
            del fields["pool"][field]
        if phase is phases[-1]:
            del fields["last_step"], fields["train"]["steps"]
        record[fields.pop("name")] = fields
    return record


def pool_folder(phase: Phase, root: epath.Path) -> epath.Path:
    """Where records go: a local disk if the config names one."""
    return epath.Path(phase.pool.local_dir) if phase.pool.local_dir else root / "pool"


def assemble(phases: list[Phase], root: epath.Path) -> Parts:
    """Task, tokenizer, mesh, policy and sampler: the same in all phases of a run.

    A tokenizer that is not published is trained on the train split's text, to the same bytes each
    time.
    """
    phase = phases[0]
    task, folder = phase.task, pool_folder(phase, root)
    source = importlib.import_module(task.source).Source(
        task.family,
        task.parameters,
        seed=task.seed,
        train_prompts=task.train_prompts,
        held_out_prompts=task.held_out_prompts,
        held_out_fraction=task.held_out_fraction,
    )
    tokenizer = read_by(phase.pool.tokenizer, source, phase, folder)
    if tokenizer.vocab_size > phase.model.vocab_size:
        raise ValueError(
            f"model.vocab_size={phase.model.vocab_size}; allowed: >= {tokenizer.vocab_size}, "
            "the tokenizer's"
        )
    models = build_models(phases)
    return Parts(models.mesh, models.policy, models.sampler, source, tokenizer)


def build_models(phases: list[Phase], devices: Sequence[Any] | None = None) -> Models:
    """Mesh, policy and sampler on these devices (default: all there are), which need not be real:
    no array is made."""
    phase = phases[0]
    where = mesh.make_mesh(phase.mesh, devices)
    student = policy.build(phase.model, where, mesh.Rules(), roles.forms(phases))
    sampler = Sampler(
        student,
        where,
        seed=phase.seed,
        slots=phase.sampler.slots,
        prompt_buckets=phase.sampler.prompt_buckets,
        max_new_tokens=phase.sampler.max_new_tokens,
        record_routes=phase.sampler.record_routes,
    )
    return Models(where, student, sampler)


def read_by(name: str, source: TaskSource, phase: Phase, folder: epath.Path) -> Reader:
    """The tokenizer of a name of the config: made from the text of the train split, or published,
    at a path with a /. ValueError naming the fields if that cannot be opened as they ask."""
    if "/" in name:
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


def fresh(phase: Phase, model: Policy, params: dict[str, jax.Array], teacher: Any) -> TrainState:
    """A phase's first state: these weights, new moments, a new copy or model for each role that is
    read. A phase with ``train.start="fresh"`` draws new weights in their place.
    """
    key = jax.random.fold_in(jax.random.key(phase.seed), phase.first_step)
    if phase.train.start == "fresh" and phase.first_step:
        params = model.init(key)
    return create(
        params,
        optimizer.build(phase.optimizer),
        freeze=optimizer.freezing(phase.optimizer, params),
        roles=roles_of(algorithms.load(**phase.algorithm)) | roles.beside(phase),
        key=key,
        step=phase.first_step,
        others=roles.build(phase, model, params, teacher, jax.random.fold_in(key, 1)),
    )


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


def needs_teacher(phase: Phase) -> bool:
    """Whether weights of a teacher are part of the state. ValueError if none are named."""
    return bool(roles.readers([phase], roles.TEACHER)) and bool(named_teacher(phase))


def stored(name: str, root: epath.Path) -> epath.Path:
    """Where weights are that a config names by an earlier phase or by their directory."""
    return pretrained.locate(name) if "/" in name else root / "phases" / name


def check_stored(phase: Phase, parts: Parts, root: epath.Path) -> None:
    """ValueError for weights, named by the config, that do not fit: not a phase later."""
    over = phase.scorers.teacher.base == STUDENT
    named = {"train.start": (phase.train.start, parts.policy, False)}
    if needs_teacher(phase):
        form = parts.policy.form_of(roles.TEACHER)
        named["scorers.teacher.weights"] = (phase.scorers.teacher.weights, form, over)
    if phase.train.adapters:
        named["train.adapters"] = (phase.train.adapters, parts.policy, True)
    if reader := text_reader(phase, parts, root):
        named["scorers.teacher.weights"] = (phase.scorers.teacher.weights, reader[0], False)
    for field, (path, form, alone) in named.items():
        if "/" not in path:
            continue
        try:
            # What the first phase starts from is read at once, and its numbers are looked at then.
            starts.check(stored(path, root), form, values=phase.first_step > 0, alone=alone)
        except ValueError as error:
            raise ValueError(f"phases.{phase.name}: {field}: {error}") from error


def begin(
    phase: Phase,
    parts: Parts,
    root: epath.Path,
    previous: dict[str, jax.Array] | None,
    note: Callable[[str], None] = print,
) -> TrainState:
    """The first state, where the step wants it. ``previous`` is the student of the phase before."""
    student, params = parts.policy, previous
    if phase.train.start not in STARTS:
        params = starts.read(stored(phase.train.start, root), student, phase.seed, note)
    elif params is None:
        params = student.init(jax.random.key(phase.seed))
    if phase.train.adapters:
        path = stored(phase.train.adapters, root)
        params = {**params, **starts.adapters_over(params, path, student, phase.seed, note)}
    teacher = read_teacher(phase, student, root, params, note) if needs_teacher(phase) else None
    return place(fresh(phase, student, params, teacher), student, parts.mesh)


def read_teacher(
    phase: Phase,
    student: Policy,
    root: epath.Path,
    params: dict[str, jax.Array],
    note: Callable[[str], None],
) -> dict[str, jax.Array]:
    """The teacher's weights; over the student's base, which are ``params``, its adapters only."""
    form, section = student.form_of(roles.TEACHER), phase.scorers.teacher
    if section.base != STUDENT:
        return starts.read(stored(section.weights, root), form, phase.seed, note)
    if not section.weights:
        return {name: params[name] for name in form.shapes if is_adapter(name)}
    try:
        path = stored(section.weights, root)
        return starts.adapters_over(params, path, form, phase.seed, note)
    except ValueError as error:
        raise ValueError(f"phases.{phase.name}: scorers.teacher.weights: {error}") from error


def form(phase: Phase, parts: Models) -> TrainState:
    """What ``begin`` would make, as shapes, dtypes and shardings."""
    teacher = parts.policy.form_of(roles.TEACHER).shapes if needs_teacher(phase) else None
    state = jax.eval_shape(
        lambda params, teacher: fresh(phase, parts.policy, params, teacher),
        parts.policy.shapes,
        teacher,
    )
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        state,
        shardings(state, parts.policy, parts.mesh),
    )


def keep_weights(phase: Phase, phases: list[Phase], root: epath.Path, state: TrainState) -> None:
    """Keep a phase's last student where a later phase starts from it or learns from it."""
    names = {later.train.start for later in phases}
    names |= {later.scorers.teacher.weights for later in phases}
    if phase.name not in names:
        return
    path = stored(phase.name, root)
    if path.exists():  # of an attempt that was cut off before the next phase had a checkpoint
        path.rmtree()
    write_weights(path, state.roles[STUDENT].all, epoch=0, step=int(state.step))


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
    return policy.build(teacher.model, parts.mesh, parts.policy.rules), tokenizer


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
    pool = LocalPool(
        parts.sampler,
        parts.tokenizer,
        parts.source,
        run_id=f"{phase.name}-{digest}",
        shard=shard,
        seed=phase.seed,
        rollouts_per_group=phase.pool.rollouts_per_group,
        temperature=phase.sampler.temperature,
        max_new_tokens=phase.sampler.max_new_tokens,
        max_prompt_tokens=max(phase.sampler.prompt_buckets),
        keep=algorithm.keep,
        annotate=together(annotations),
        max_refills=phase.pool.max_refills,
        max_feedback_tokens=phase.pool.max_feedback_tokens,
        reward=phase.task.reward,
        record_dir=folder / phase.name if phase.pool.record else None,
        watchdog_s=phase.pool.watchdog_s,
    )
    return curriculum.Steered(pool, moving) if moving else pool


def resume(phases: list[Phase], parts: Parts, checkpoints: Checkpoints) -> Restored | None:
    """The newest sound checkpoint, in the form of the phase that wrote it."""

    def form_at(step: int) -> TrainState:
        # A phase's last step is its own, not the next one's first.
        late = (phase for phase in phases if step <= phase.last_step)
        return form(next(late, phases[-1]), parts)

    return checkpoints.latest(form_at, expect={"identity": identity(phases, parts.tokenizer)})


def run(config: ConfigDict, workdir: str) -> dict[str, Any]:
    """Run a config in a workdir, or continue it there, and return what ``summary.json`` holds.

    Raises ValueError or TypeError for a config that is refused, before anything is trained.
    """
    phases = settings.phases(config)
    root = epath.Path(workdir)
    root.mkdir(parents=True, exist_ok=True)
    with Workdir(root).locked():
        return _run(phases, root, config.to_dict())


def _run(phases: list[Phase], root: epath.Path, config: dict[str, Any]) -> dict[str, Any]:
    """Check everything, open the books, run the schedule."""
    parts = assemble(phases, root)
    for phase in phases:
        loop.prepare(parts, phase)
        form(phase, parts)
    checkpoints = Checkpoints(root / "checkpoints", keep=phases[-1].checkpoint.keep)
    restored = resume(phases, parts, checkpoints)
    for phase in () if restored else phases:  # a checkpoint holds what its phase has read
        check_stored(phase, parts, root)
    progress = Progress(phases[-1].last_step)
    # Before the workdir says anything: the numbers of a published start are looked at here.
    state = restored.state if restored else begin(phases[0], parts, root, None, progress.note)
    report.write_start(root, config)
    books = Books(
        workdir=Workdir(root),
        checkpoints=checkpoints,
        logger=Logger(root, start_step=restored.step if restored else 0),
        progress=progress,
        identity=identity(phases, parts.tokenizer),
        prompts={task.key: task.prompt for task in parts.source.tasks("train")},
    )
    books.open(restored)
    try:
        return _schedule(phases, parts, books, state, restored)
    finally:
        books.close()


def _schedule(
    phases: list[Phase], parts: Parts, books: Books, state: TrainState, restored: Restored | None
) -> dict[str, Any]:
    """Run the phases that are left, measure before and after the last, report."""
    names = [phase.name for phase in phases]
    current = restored.host["phase"] if restored else names[0]
    before: dict[str, Any] = {}
    for phase in phases[names.index(current) :]:
        pool = open_pool(phase, parts, books)
        try:
            if phase.name != current:
                student, note = state.roles[STUDENT].all, books.progress.note
                state = begin(phase, parts, books.workdir.root, student, note)
            elif restored:
                pool.restore(restored.host["pool"])
                pool.commit(restored.step - 1)  # a crash may have come between the two
            if phase is phases[-1]:
                before = measured_before(parts, books, phase, state)
            if phase.pool.kind == "local":
                pool.publish(*loop.publish(books, phase, state))
            state = loop.train(parts, books, phase, state, pool)
            keep_weights(phase, phases, books.workdir.root, state)
        finally:
            pool.close()
    after = loop.measure(parts, books, phases[-1], state)
    outcome = report.Outcome(
        before=report.HeldOut.of(before),
        after=report.HeldOut.of(after),
        steps=int(state.step),
        accounts=books.accounts,
        compilations={**books.compilations, **parts.sampler.compilations},
        seed=phases[-1].seed,
        seen=tuple(report.HeldOut.of(x["seen"]) for x in (before, after) if "seen" in x),
    )
    books.logger.flush()  # the picture is drawn from what is on disk
    return report.finish(books.workdir.root, outcome, {p.name: p.first_step for p in phases})


def measured_before(parts: Parts, books: Books, phase: Phase, state: TrainState) -> dict[str, Any]:
    """Held-out accuracy at a phase's start, which a continued run can only read back."""
    if int(state.step) == phase.first_step:
        return loop.measure(parts, books, phase, state)
    result = books.workdir.read_eval(phase.first_step)
    if result is None:
        raise ValueError(
            f"{books.workdir.root}/eval/{phase.first_step}.json is missing: the accuracy before "
            f"phase {phase.name!r} cannot be measured at step {int(state.step)}"
        )
    changed = loop.differs(result, phase)
    if changed:
        raise ValueError(
            f"{'; '.join(changed)}: the accuracy before phase {phase.name!r} cannot be measured "
            f"again at step {int(state.step)}; allowed: what it was measured with"
        )
    return result
