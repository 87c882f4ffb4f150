"""Recorded rollouts as ATIF v1.7 JSON, for people and other tools. It is no training format.

    python -m jaxrl.trajectories --from WORKDIR_OR_RECORDS --to DIR [--run WORKDIR_OR_POOL]
        [--group N ...] [--most N]

``--from`` is a run, whose records lie where its config says (the embedded pool's with
``pool.record``, demonstrations, the remote pool's segments), or a folder or file of records;
``--run`` then names the run whose tokenizer makes texts of ids. Each attempt becomes
``DIR/run=<run id>/<group>-<sample>-<attempt>.json``; ``jaxrl.pool.atif`` says what stands in it.

A file appears whole or not at all, and one that is there is left as it is: started again, the
command goes on. It may be asked while the run goes on. A record that is damaged is named and
counted, the others are written. Attempts that only a journal knows, of which no outcome was sealed,
are counted (``unsealed``) and not written: they are under way or failed. The ledger is not read:
whether a group was trained on is not told.
"""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import re
import sys
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from absl import app, flags
from etils import epath

from jaxrl.pool import atif, spool
from jaxrl.pool.rollout import Rollout
from jaxrl.pool.segments import KEYS, OPEN

# A process of its own asks for one door only; the tests import several.
_FROM = flags.DEFINE_string(
    "from", None, "a run, a folder of records, or a file of them", allow_override=True
)
_TO = flags.DEFINE_string("to", None, "the directory to write to", allow_override=True)
_RUN = flags.DEFINE_string(
    "run",
    "",
    "whose tokenizer reads the ids, if --from is no run: a workdir, or the pool of a remote one; "
    "empty: none, and texts that only ids have are left out",
)
_GROUP = flags.DEFINE_multi_integer("group", [], "these groups alone; none: all", lower_bound=0)
_MOST = flags.DEFINE_integer("most", 0, "files to write this time; 0: no limit", lower_bound=0)

NOTE_S = 5.0  # seconds between two lines of progress


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run says of its records: where they are, how they are read, whose they are."""

    folders: Sequence[pathlib.Path]
    reader: atif.Reader | None
    harnesses: Mapping[str, str]  # pool.harness of each phase

    def agent(self, run_id: str) -> dict[str, Any]:
        """Name and version of the agent of a record: the function that ``pool.harness`` names,
        whose version nobody states, or jaxrl itself, which asked once."""
        if harness := self.harnesses.get(_phase(run_id)):
            return {"name": harness, "version": "unknown"}
        return {"name": "jaxrl", "version": importlib.metadata.version("jaxrl")}


@dataclasses.dataclass
class Told:
    """What became of everything that was found: counts, and what is wrong with what."""

    counts: Counter[str] = dataclasses.field(
        default_factory=lambda: Counter(dict.fromkeys(("written", "present"), 0))
    )
    faults: list[str] = dataclasses.field(default_factory=list)

    def fault(self, name: str, what: str) -> None:
        """Count and name what could not be exported."""
        self.counts[name] += 1
        self.faults.append(f"{name}: {what}")

    def __str__(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in self.counts.items())


def run_of(path: str) -> Run:
    """A run by its workdir, or by the pool of a remote one. ValueError for another folder, and for
    a tokenizer that is not there."""
    root = epath.Path(path)
    if (root / "config.json").exists():
        phases = _phases(root)
        folders = list(dict.fromkeys(one["folder"] for one in phases))
        held, names = phases[-1], {one["name"]: one["pool"]["harness"] for one in phases}
    elif (root / "pool.json").exists():
        from jaxrl.serve import read_run

        held = read_run(pathlib.Path(root))
        held["folder"] = os.fspath(root)  # wherever it is now
        folders = [held["folder"]]
        names = {_phase(held["run_id"]): held["pool"]["harness"]}
    else:
        raise ValueError(
            f"{root} is no run: config.json is missing, and pool.json of a remote pool"
        )
    pool = held["pool"]
    system = pool["system"] if pool["chat"] == "template" else ""
    return Run([pathlib.Path(one) for one in folders], _reader(held, system), names)


def _phase(run_id: str) -> str:
    """The phase in the name that its records have for the run: the rest is a digest."""
    return run_id.rpartition("-")[0]


def _phases(root: epath.Path) -> list[dict[str, Any]]:
    """The phases of a run, as far as records go."""
    from jaxrl.train import settings

    phases = settings.phases(settings.read(json.loads((root / "config.json").read_text())))
    return [
        {
            "name": phase.name,
            "folder": phase.pool.local_dir or os.fspath(root / "pool"),
            "pool": dataclasses.asdict(phase.pool),
            "task": dataclasses.asdict(phase.task),
        }
        for phase in phases
    ]


def _reader(held: Mapping[str, Any], system: str) -> atif.Reader:
    from jaxrl.gateway import tokenizer_of

    try:
        return atif.Reader(tokenizer_of(dict(held)), system)
    except OSError as error:
        raise ValueError(
            f"the tokenizer of the run cannot be read: {error}; allowed: --from a folder of "
            "records, without --run"
        ) from error


def export(
    source: str,
    to: str,
    *,
    run: str = "",
    groups: Container[int] = (),
    most: int = 0,
    note: Callable[[str], None] = print,
) -> Told:
    """Write the attempts that are found at ``source`` to ``to``, at most ``most`` new files (0: no
    limit), of these ``groups`` alone (empty: of all).

    Counts: ``written``; ``present`` (there already); and what was left out: ``not_asked`` (of other
    groups), ``repeated`` (recorded again: the first counts), ``empty`` (no token), ``damaged``
    (records), ``unreadable`` (files), ``unsealed`` (attempts). ``without_text`` attempts were
    written, but lack text for want of a tokenizer. ValueError where nothing was recorded.
    """
    root = epath.Path(source)
    if root.is_dir() and ((root / "config.json").exists() or (root / "pool.json").exists()):
        if run:
            raise ValueError(f"--run={run!r} beside --from={source!r}, a run; allowed: one of them")
        read = run_of(source)
    else:
        read = run_of(run) if run else Run([], None, {})
        read = dataclasses.replace(read, folders=[pathlib.Path(source)])
    files = _files(read.folders)
    told, goal, noted = Told(), epath.Path(to), time.monotonic()
    seen, sealed = set[tuple[str, str]](), set[tuple[pathlib.Path, str]]()
    for place, file in enumerate(files):
        for branches in _attempts(file, told):
            first = branches[0]
            key = first.run_id, atif.name_of(first)
            sealed.add((file.parent.parent, key[1]))
            if key in seen:
                told.counts["repeated"] += 1
                continue
            seen.add(key)
            if groups and first.group_id not in groups:
                told.counts["not_asked"] += 1
                continue
            _export(branches, read, _goal(goal, *key), told)
            if time.monotonic() - noted > NOTE_S:
                noted = time.monotonic()
                note(f"file {place + 1} of {len(files)}: {told}")
            if most and told.counts["written"] >= most:
                note(f"--most={most} reached in file {place + 1} of {len(files)}")
                return told
    if unsealed := _journalled(read.folders) - sealed:
        told.counts["unsealed"] = len(unsealed)
    return told


def _files(folders: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    files: list[pathlib.Path] = []
    for path in folders:
        files += sorted(path.glob("**/*" + spool.SUFFIX)) if path.is_dir() else [path]
    if not (files := [file for file in files if file.exists()]):
        raise ValueError(
            f"{', '.join(map(str, folders))}: no rollouts (*{spool.SUFFIX}); allowed: a run that "
            "records (pool.record), or a place with such files"
        )
    return files


def _attempts(path: pathlib.Path, told: Told) -> Iterator[list[Rollout]]:
    """The attempts of a file: of each its branches, which stand one after the other."""
    held: list[Rollout] = []
    try:
        for _, found in spool.walk(path):
            if isinstance(found, spool.Damage):
                told.fault("damaged", str(found))
                continue
            if held and not (
                found.idempotency_key == held[0].idempotency_key
                and atif.branch_of(found) > atif.branch_of(held[-1])
            ):
                yield held
                held = []
            held.append(found)
    except (spool.RecordError, OSError) as error:  # of another kind, newer, or gone since
        told.fault("unreadable", str(error))
    if held:
        yield held


def _goal(to: epath.Path, run_id: str, name: str) -> epath.Path:
    """Where an attempt is written; whatever a run is called, this is one folder below ``to``."""
    return to / f"run={urllib.parse.quote(run_id, safe='')}" / f"{name}.json"


def _export(branches: Sequence[Rollout], read: Run, path: epath.Path, told: Told) -> None:
    if path.exists():
        told.counts["present"] += 1
        return
    first = branches[0]
    if not all(len(one.tokens) for one in branches):
        told.fault("empty", f"{first.run_id}/{atif.name_of(first)} has no token")
        return
    made = atif.document(branches, read.agent(first.run_id), read.reader)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(path.name + ".tmp")
    half.write_text(json.dumps(made, allow_nan=False) + "\n")
    half.replace(path)
    told.counts["written"] += 1
    if read.reader is None:
        told.counts["without_text"] += 1


def _journalled(folders: Sequence[pathlib.Path]) -> set[tuple[pathlib.Path, str]]:
    """Spool and group-sample-attempt of all that journals hold calls of."""
    found: set[tuple[pathlib.Path, str]] = set()
    for path in folders:
        for journal in path.glob(f"**/{OPEN}/*.calls") if path.is_dir() else ():
            with journal.open("rb") as lines:
                heads = [line.partition(b" ")[0].decode("ascii", "replace") for line in lines]
            for keys in heads:
                if KEYS.fullmatch(keys):
                    named = (re.match(r"\d+-\d+-\d+(?=-)", key) for key in keys.split(","))
                    found |= {(journal.parent.parent, name[0]) for name in named if name}
    return found


def main(argv: list[str]) -> None:
    """Export. What was refused ends with one message and exit code 1."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    try:
        told = export(
            str(_FROM.value),
            str(_TO.value),
            run=_RUN.value,
            groups=frozenset(_GROUP.value),
            most=_MOST.value,
            note=lambda line: print(line, flush=True),
        )
    except (ValueError, TypeError, KeyError, ImportError, OSError) as error:
        sys.exit(f"jaxrl.trajectories: {type(error).__name__}: {error}")
    for fault in told.faults:
        print(fault, file=sys.stderr)
    print(f"{_TO.value}: {told}")


if __name__ == "__main__":
    flags.mark_flags_as_required(["from", "to"])
    app.run(main)
