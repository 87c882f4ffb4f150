"""A schedule of phases on the same weights: build the parts, resume, run, report."""

import dataclasses
import functools
import importlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from jaxrl import mesh
from jaxrl.algorithms import contract as algorithms
from jaxrl.model import policy, transformer
from jaxrl.model.adapters import is_adapter
from jaxrl.model.policy import Policy
from jaxrl.model.sampler import Sampler
from jaxrl.model.versions import write_weights
from jaxrl.train import hosts, loop, optimizer, report, roles, settings, starts
from jaxrl.train.checkpoint import Checkpoints, Restored
from jaxrl.train.loop import Books, Models, Parts, Reader
from jaxrl.train.metrics import Logger, Progress
from jaxrl.train.pools import (
    named_teacher,
    open_pool,
    permits_of,
    pool_folder,
    read_by,
    stored,
    text_reader,
)
from jaxrl.train.settings import STARTS, Phase
from jaxrl.train.state import STUDENT, TrainState, create, place, roles_of, shardings
from jaxrl.train.workdir import Workdir

# May differ between a run and its continuation: nothing that was trained depends on them.
FREE_SECTIONS = ("mesh", "eval", "checkpoint", "log")
FREE_POOL_FIELDS = (
    "local_dir",
    "watchdog_s",
    "record",
    "ledger",
    "lease_s",
    "max_attempts",
    "poll_s",
    "gateway",
    "launcher",
    "workers",
    "max_body_bytes",
)


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
        del fields["train"]["stop"]
        record[fields.pop("name")] = fields
    return record


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
    for each in phases:
        permits_of(each, source)  # refused now, and not a phase later
    with tempfile.TemporaryDirectory() as beside:  # the other processes make the same bytes
        where = epath.Path(beside) if hosts.crew().index else folder
        tokenizer = read_by(phase.pool.tokenizer, source, phase, where)
    if tokenizer.vocab_size > phase.model.vocab_size:
        raise ValueError(
            f"model.vocab_size={phase.model.vocab_size}; allowed: >= {tokenizer.vocab_size}, "
            "the tokenizer's"
        )
    models = build_models(phases)
    several = hosts.crew().count > 1
    generator = hosts.Shared(models.sampler) if several else models.sampler
    return Parts(models.mesh, models.policy, models.sampler, source, tokenizer, generator)


def build_models(phases: list[Phase], devices: Sequence[Any] | None = None) -> Models:
    """Mesh, policy and sampler on these devices (default: all there are), which need not be real:
    no array is made."""
    phase = phases[0]
    where = mesh.make_mesh(phase.mesh, devices)
    forms = roles.forms(phases)
    student = policy.build(phase.model, where, mesh.Rules(), forms, answers_only=True)
    own = hosts.own_mesh(where)
    rows, processes = mesh.ways(own, student.rules.rows), jax.process_count()
    slots = phase.sampler.slots
    if processes > 1:  # of all together
        slots = max(-(-slots // (processes * rows)), 1) * rows
    sampler = Sampler(
        student,
        own,
        seed=phase.seed,
        slots=slots,
        prompt_buckets=phase.sampler.prompt_buckets,
        max_new_tokens=phase.sampler.max_new_tokens,
        samples_per_prompt=max(each.pool.rollouts_per_group for each in phases),
        record_routes=phase.sampler.record_routes,
    )
    return Models(where, student, sampler)


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
        read_in=transformer.read_in(model.config),
    )


def needs_teacher(phase: Phase) -> bool:
    """Whether weights of a teacher are part of the state. ValueError if none are named."""
    return bool(roles.readers([phase], roles.TEACHER)) and bool(named_teacher(phase))


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
    if path.exists() and not jax.process_index():
        path.rmtree()  # of an attempt cut off before the next phase had a checkpoint
    student = hosts.gathered(state.roles[STUDENT].all)
    hosts.crew().lead(lambda: write_weights(path, student, epoch=0, step=int(state.step)))


def resume(phases: list[Phase], parts: Parts, checkpoints: Checkpoints) -> Restored | None:
    """The newest sound checkpoint, in the form of the phase that wrote it."""

    def form_at(step: int) -> TrainState:
        # A phase's last step is its own, not the next one's first.
        late = (phase for phase in phases if step <= phase.last_step)
        return form(next(late, phases[-1]), parts)

    return checkpoints.latest(form_at, expect={"identity": identity(phases, parts.tokenizer)})


def run(
    config: ConfigDict,
    workdir: str,
    *,
    swept: Mapping[str, Any] | None = None,
    profile: int = 0,
) -> dict[str, Any]:
    """Run a config in a workdir, or continue it there, and return what ``summary.json`` holds.
    ``swept`` are the fields in which the runs of a sweep differ; ``profile`` steps are traced.

    Raises ValueError or TypeError for a config that is refused, before anything is trained.
    """
    phases = settings.phases(config)
    root = epath.Path(workdir)
    root.mkdir(parents=True, exist_ok=True)
    with Workdir(root).locked():
        return _run(phases, root, config.to_dict(), swept or {}, profile)


def _run(
    phases: list[Phase],
    root: epath.Path,
    config: dict[str, Any],
    swept: Mapping[str, Any],
    profile: int,
) -> dict[str, Any]:
    """Check everything, open the books, run the schedule."""
    parts = assemble(phases, root)
    for phase in phases:
        loop.prepare(parts, phase)
        form(phase, parts)
    kept = phases[-1].checkpoint
    folder = root / "checkpoints"
    checkpoints = Checkpoints(folder, keep=kept.keep, keep_every=kept.keep_every_steps)
    restored = resume(phases, parts, checkpoints)
    for phase in () if restored else phases:  # a checkpoint holds what its phase has read
        check_stored(phase, parts, root)
    progress = Progress(phases[-1].last_step, hosts.stream())
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
        profile=profile,
        decode=parts.tokenizer.decode,
    )
    books.logger.hparams(swept, phases[-1].eval.samples)
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
        pool = hosts.Led(functools.partial(open_pool, phase, parts, books))
        try:
            if phase.name != current:
                student, note = state.roles[STUDENT].all, books.progress.note
                state = begin(phase, parts, books.workdir.root, student, note)
            elif restored:
                pool.restore(restored.host["pool"])
                pool.commit(restored.step - 1)  # a crash may have come between the two
            if phase is phases[-1]:
                before = measured_before(parts, books, phase, state)
            if phase.pool.kind != "recorded":
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
