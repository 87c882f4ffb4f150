"""Listing and running the runs of an experiment; ``jaxrl.launch`` is the door.

Every run is a process of its own: one that fails or is killed takes no other with it, and an
accelerator is free again when it ends. This process starts no jax.
"""

import concurrent.futures
import ctypes
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from etils import epath

from jaxrl import experiment
from jaxrl.experiment import Experiment, Run

LOG = "log.txt"  # in a run's folder, or a temporary one beside a bucket: what it said
RECORD = "run.json"  # in a run's folder: which run of what
TAIL = 12  # lines of a failed run's log that are shown
SELECTED = "JAXRL_RUN"  # tells the process of a run, as JSON, which one it is

# os.EX_TEMPFAIL: the run was told to stop and has saved; starting it again continues it.
PREEMPTED = 75


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the command line says."""

    experiment: str
    workdir: str
    tiny: bool
    jobs: int
    words: tuple[str, ...] = ()  # more of the command line, for the process of each run

    def load(self) -> Experiment:
        """The experiment; ValueError if the file does not hold one."""
        return experiment.load(self.experiment, small=self.tiny)

    def folder(self, run: Run) -> epath.Path:
        """Of a run."""
        return epath.Path(self.workdir) / run.name


def tell(asked: Asked) -> int:
    """Print a line for each run, with its state if there is a workdir. ValueError or TypeError
    naming the run and the field for the first that does not fit: nothing is started."""
    for index, run in enumerate(asked.load().runs):
        config = _checked(run, index)
        state = experiment.state(asked.folder(run), config.to_dict()) if asked.workdir else ""
        print("  ".join(filter(None, [f"{index:3d}", run.config, run.label or "(base)", state])))
    return 0


def _checked(run: Run, index: int) -> Any:
    try:
        return experiment.check(run)
    except (ValueError, TypeError) as error:
        raise type(error)(f"run {index} ({run.label}): {error}") from error


def run_one(asked: Asked, index: int, start: Callable[..., int]) -> int:
    """One run in this process by ``start(config, workdir, swept)``, unless it is finished.
    ValueError for an index that is not there."""
    runs = asked.load().runs
    if SELECTED in os.environ:  # a trial's, which no list holds
        held = json.loads(os.environ[SELECTED])
        run = Run(held["config"], _tuples(held["overrides"]), held["label"])
    elif not 0 <= index < len(runs):
        raise ValueError(f"--index {index}; allowed: 0 to {len(runs) - 1}")
    else:
        run = runs[index]
    config, folder = _checked(run, index), asked.folder(run)
    if experiment.state(folder, config.to_dict()) == "finished":
        print(f"{run.name} is finished: {folder / 'summary.json'}")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    record = {"experiment": asked.experiment, "index": index, **run.to_json()}
    (folder / RECORD).write_text(json.dumps(record, indent=2, default=str) + "\n")
    return start(config, str(folder), {"config": run.config, **run.overrides})


def _tuples(value: Any) -> Any:
    """JSON has lists where configs have tuples."""
    if isinstance(value, dict):
        return {name: _tuples(each) for name, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def run_all(asked: Asked) -> int:
    """Every run that is not finished; 0 if all are in the end, else the exit code of the first that
    is not."""
    runs = asked.load().runs
    for index, run in enumerate(runs):  # before the first starts: all fit
        experiment.state(asked.folder(run), _checked(run, index).to_dict())
    return _run_these(asked, runs)


def _run_these(asked: Asked, runs: Sequence[Run], *, selected: bool = False) -> int:
    """Runs of the sweep's list, or ``selected`` ones which it does not hold."""
    with (
        _Started() as started,
        concurrent.futures.ThreadPoolExecutor(asked.jobs) as threads,
    ):
        futures = [
            threads.submit(_process, asked, index, run, len(runs), selected, started)
            for index, run in enumerate(runs)
        ]
        codes = [future.result() for future in futures]
    failed = [code for code in codes if code]
    if failed:
        print(f"{len(failed)} of {len(runs)} runs are not finished; the same command continues")
    return PREEMPTED if started.stopped else failed[0] if failed else 0


class _Started:
    """Runs under way. SIGTERM goes on to them, each of which ends with a checkpoint, and none is
    started after it."""

    def __init__(self) -> None:
        self.stopped, self._lock = False, threading.Lock()
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGTERM, lambda *_: self._stop())
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def run(self, command: Sequence[str], **how: Any) -> int:
        """Its exit code; that of a run which was told to stop if it is not to start."""
        with self._lock:
            if self.stopped:
                return PREEMPTED
            process = subprocess.Popen(command, preexec_fn=_die_with_parent, **how)
            self._processes.append(process)
        return process.wait()

    def _stop(self) -> None:
        with self._lock:  # the thread that handles signals never holds it
            self.stopped = True
            for process in self._processes:
                if process.poll() is None:
                    process.terminate()


def _process(
    asked: Asked, index: int, run: Run, total: int, selected: bool, started: _Started
) -> int:
    """A run as a process of its own, which dies with this one. Returns its exit code."""
    folder, where = asked.folder(run), f"[{index + 1}/{total}] {run.label or run.name}"
    if (state := experiment.state(folder)) == "finished":
        print(f"{where}: finished before", flush=True)
        return 0
    print(f"{where}: {state}", flush=True)
    words = ["--experiment", asked.experiment, "--index", str(index), "--workdir", asked.workdir]
    words += [*asked.words, *(["--tiny"] if asked.tiny else [])]
    environment = os.environ | ({SELECTED: json.dumps(run.to_json())} if selected else {})
    # Runs of a sweep compile much the same. Whoever has set a cache keeps it.
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(epath.Path(asked.workdir) / "compiled"))
    log = Path(tempfile.gettempdir() if "://" in asked.workdir else asked.workdir, run.name, LOG)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        code = started.run(
            [sys.executable, "-m", "jaxrl.launch", *words],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    if code:
        lines = log.read_text(errors="replace").splitlines()[-TAIL:]
        print("\n".join([f"{where}: ended with {code}; {log} ends:", *lines]), flush=True)
        return code
    print(f"{where}: {_result(folder)}", flush=True)
    return 0


def _die_with_parent() -> None:
    """A run whose sweep was killed would hold its workdir, and the accelerator, against the next
    attempt. Linux only; elsewhere it goes on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _result(folder: epath.Path) -> str:
    after = json.loads((folder / "summary.json").read_text())["held_out"]["after"]
    k = after["k"]
    return f"finished, held-out avg@{k} {100 * after[f'avg_at_{k}']:.1f} %"


def goal_of(summary: dict[str, Any], goal: str) -> float:
    """A dotted field of a summary. ValueError naming the fields that there are."""
    at: Any = summary
    for name in goal.split("."):
        if not isinstance(at, dict) or name not in at:
            there = sorted(at) if isinstance(at, dict) else at
            raise ValueError(f"GOAL={goal!r}: {name!r} is not in summary.json; allowed: {there}")
        at = at[name]
    return float(at)


def run_search(asked: Asked, trials: int) -> int:
    """Let Optuna choose the overrides of so many trials, finished ones counted. Its record is
    ``search.log`` in the workdir; a trial that was broken off is asked for again. A trial whose run
    fails counts as failed. ImportError without Optuna."""
    try:
        import optuna
    except ImportError as error:
        raise ImportError(f"{error}: pip install -e '.[search]'") from error
    from optuna.storages import journal

    held = asked.load()
    if held.search is None:
        raise ValueError(f"{asked.experiment} has no search(trial); allowed: --list, --all")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    Path(asked.workdir).mkdir(parents=True, exist_ok=True)
    backend = journal.JournalFileBackend(str(Path(asked.workdir, "search.log")))
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(backend),
        study_name=Path(asked.experiment).stem,
        sampler=optuna.samplers.TPESampler(seed=0),
        direction="maximize",
        load_if_exists=True,
    )
    State = optuna.trial.TrialState
    for trial in study.get_trials(states=(State.RUNNING,)):  # its process is gone
        study.tell(trial.number, state=State.FAIL)
        study.enqueue_trial(trial.params)
    for _ in range(trials - len(study.get_trials(states=(State.COMPLETE,)))):
        trial = study.ask()
        runs = experiment.runs_of(held, held.search(trial), small=asked.tiny)
        for run in runs:
            _checked(run, trial.number)
        if _run_these(asked, runs, selected=True):
            study.tell(trial, state=State.FAIL)
            continue
        summaries = [json.loads((asked.folder(run) / "summary.json").read_text()) for run in runs]
        value = statistics.mean(goal_of(summary, held.goal) for summary in summaries)
        study.tell(trial, value)
        print(f"trial {trial.number}: {held.goal} {value:.4g} with {trial.params}", flush=True)
    done = study.get_trials(states=(State.COMPLETE,))
    if done:
        print(f"best: {study.best_value:.4g} with {study.best_params}")
    return 0 if len(done) >= trials else 1
