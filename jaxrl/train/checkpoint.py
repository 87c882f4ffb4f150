"""Checkpoints: everything the next step depends on, written whole, verified when read.

Layout: ``<directory>/<step>/`` holds what Orbax writes (``state`` and ``host``) and, written last,
``manifest.json``: it lists the SHA-256 of every file, so it is the commit marker and the proof in
one. A directory without it is half-written and ignored. A step that is saved again goes to
``<step>.1``, ``<step>.2``, ... and the older one is removed after the commit. We never rename a
directory, so a bucket serves as well as a disk.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

SCHEMA_VERSION = 1  # of the manifest, the names of the state's arrays and the host record

_NAME = re.compile(r"(\d+)(?:\.(\d+))?")
_MANIFEST = "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none of those that exist can be trusted."""


class _CorruptError(Exception):
    """A complete checkpoint whose files are not what was written."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """What was saved, as it was."""

    state: Any  # the template's structure and shardings
    host: dict[str, Any]
    step: int
    fallbacks: int  # newer checkpoints that were refused as corrupt


def _arrays(state: Any) -> dict[str, Any]:
    """``{"roles.student.params.blocks.query": leaf}``: one name an array, fit for a file name."""
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".").replace("/", ".")
        if name in named:
            raise ValueError(f"state has two arrays called {name!r}; allowed: distinct names")
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise ValueError(f"state {name!r} is a {type(leaf).__name__}; allowed: jax arrays")
        named[name] = leaf
    return named


def _shapes(arrays: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{x.dtype}[{','.join(map(str, x.shape))}]" for name, x in arrays.items()}


def _stored(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Those with elements: Orbax refuses arrays of size zero, which their shape restores."""
    return {name: x for name, x in arrays.items() if x.size}


def _target(x: Any) -> jax.ShapeDtypeStruct:
    sharding = x.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _sha256(path: epath.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _digests(root: epath.Path, names: list[str]) -> dict[str, str]:
    with concurrent.futures.ThreadPoolExecutor() as threads:
        return dict(zip(names, threads.map(lambda name: _sha256(root / name), names), strict=True))


def _files(root: epath.Path) -> list[str]:
    return sorted(
        str((folder / name).relative_to(root)) for folder, _, names in root.walk() for name in names
    )


def _sealed(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True)
    seal = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({"sha256": seal, "body": body}, sort_keys=True)


def _write_manifest(root: epath.Path, body: Mapping[str, Any]) -> None:
    """The commit: the manifest appears whole, after all that it lists."""
    temporary = root / (_MANIFEST + ".tmp")
    with temporary.open("w") as file:
        file.write(_sealed(body))
        file.flush()
        if "://" not in os.fspath(root):  # a bucket has no file number; its writes are whole anyway
            os.fsync(file.fileno())
    temporary.replace(root / _MANIFEST)


def _read_manifest(root: epath.Path) -> dict[str, Any]:
    text = (root / _MANIFEST).read_bytes()
    try:
        body = json.loads(text)["body"]
    except (ValueError, KeyError, TypeError) as error:
        raise _CorruptError(f"{_MANIFEST} cannot be read ({error})") from error
    if _sealed(body).encode() != text:
        raise _CorruptError(f"{_MANIFEST} does not match its own digest")
    return body


def _verify(root: epath.Path, body: Mapping[str, Any]) -> None:
    missing = [name for name in body["files"] if not (root / name).exists()]
    if missing:
        raise _CorruptError(f"missing {missing[0]} ({len(missing)} of {len(body['files'])} files)")
    found = _digests(root, sorted(body["files"]))
    changed = [name for name, digest in found.items() if digest != body["files"][name]]
    if changed:
        raise _CorruptError(f"changed {changed[0]} ({len(changed)} of {len(found)} files)")


def differences(saved: Any, wanted: Any, name: str) -> list[str]:
    """Dotted fields in which two JSON records differ, with both values, in ``wanted``'s order."""
    if not (isinstance(saved, Mapping) and isinstance(wanted, Mapping)):
        return [] if saved == wanted else [f"{name}: saved {saved!r}, wanted {wanted!r}"]
    found = []
    for key in [*wanted, *(key for key in saved if key not in wanted)]:
        field = f"{name}.{key}" if name else str(key)
        if key not in saved:
            found.append(f"{field}: not in the checkpoint")
        elif key not in wanted:
            found.append(f"{field}: only in the checkpoint")
        else:
            found += differences(saved[key], wanted[key], field)
    return found


def _refuse(root: epath.Path, fields: list[str]) -> None:
    if fields:
        shown = "; ".join(fields[:8]) + (f"; and {len(fields) - 8} more" if fields[8:] else "")
        raise ValueError(f"checkpoint incompatible: {root}: {shown}")


def _from_first_process(numbers: list[int]) -> list[int]:
    """Process 0's numbers, on every process: a decision about files is taken once."""
    if jax.process_count() == 1:
        return numbers
    return [int(x) for x in multihost_utils.broadcast_one_to_all(np.array(numbers, np.int32))]


def _anywhere(flag: bool) -> bool:
    """Whether it holds on any process; also the point that all have reached."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


class Checkpoints:
    """The checkpoints of one run. Every process calls every method (Orbax's writes are collective).

    directory: a folder or a bucket.  keep: how many complete checkpoints stay, the newest; >= 1.
    keep_every: those at multiples of so many steps stay too; 0: none.
    """

    def __init__(self, directory: epath.PathLike, *, keep: int, keep_every: int = 0):
        if keep < 1:
            raise ValueError(f"checkpoint.keep={keep!r}; allowed: >= 1")
        self.directory = epath.Path(directory).absolute()  # Orbax refuses relative paths
        self.keep, self.keep_every = keep, keep_every
        self.bytes = 0  # size of the newest checkpoint written by this process
        # OCDBT: a dozen files whatever the number of arrays. Float noise does not compress.
        state = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)
        self._orbax = ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(state=state, host=ocp.JsonCheckpointHandler())
        )

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first; if they are sound shows when read."""
        return [step for step, _ in self._complete()]

    def save(self, step: int, state: Any, host: Mapping[str, Any]) -> None:
        """Write state and host record; on return they are complete on disk, or an error was raised.

        state: a pytree of jax arrays on any mesh.  host: JSON-able; tuples come back as lists.
        Afterwards checkpoints beyond ``keep`` are removed, and those past ``step``: they belong to
        a lineage that was abandoned. Raises ValueError or TypeError for a state or host record that
        cannot be saved, CheckpointError when storage refuses (full disk): then nothing half-written
        stays and the earlier checkpoints are untouched.
        """
        arrays = _arrays(state)
        json.dumps(host)  # before anything is written
        previous = self.steps()
        root = self.directory / self._free_name(step)
        error = None
        try:
            self._write(root, step, arrays, host)
        except Exception as caught:  # storage raises what it likes: OSError, ValueError, ...
            error = caught
        if _anywhere(error is not None):
            self._discard(root)
            intact = "there is no earlier one"
            if previous:
                intact = f"the checkpoint at step {previous[-1]} is intact"
            raise CheckpointError(
                f"step {step} could not be written to {root}: {_reason(error)}; {intact}"
            ) from error
        if jax.process_index() == 0:
            self._retain(step)

    def latest(
        self, template: Callable[[int], Any], *, expect: Mapping[str, Any] | None = None
    ) -> Restored | None:
        """The newest sound checkpoint, or None where there is none at all.

        template: the checkpoint's step -> the state's structure then, with shapes, dtypes and
        shardings (jax.ShapeDtypeStruct or arrays); the mesh may differ from the one that saved.
        expect: fields that the host record must hold, compared to any depth. A corrupt checkpoint
        is warned about by name and counted in ``fallbacks``, and the one before is read. Raises
        CheckpointError if all are corrupt, and ValueError «checkpoint incompatible» naming the
        fields if the newest sound one has a newer schema, other arrays, or not what is expected.
        """
        chosen, step, attempt, fallbacks = _from_first_process(self._choose())
        if not chosen:
            if fallbacks:
                raise CheckpointError(
                    f"all {fallbacks} checkpoints in {self.directory} are corrupt; "
                    "move them away to start from the beginning"
                )
            return None
        root = self.directory / _name(step, attempt)
        body = _read_manifest(root)
        if body["schema_version"] > SCHEMA_VERSION:
            _refuse(
                root,
                [f"schema_version: saved {body['schema_version']}, known up to {SCHEMA_VERSION}"],
            )
        structure = template(step)
        arrays = _arrays(structure)
        host = self._orbax.restore(root, args=ocp.args.Composite(host=ocp.args.JsonRestore())).host
        wanted = json.loads(json.dumps(expect or {}))
        fields = differences({key: host[key] for key in wanted if key in host}, wanted, "")
        _refuse(root, fields + differences(body["arrays"], _shapes(arrays), ""))
        state = self._read(root, arrays)
        leaves = [state[name] for name in arrays]
        treedef = jax.tree_util.tree_structure(structure)
        return Restored(jax.tree_util.tree_unflatten(treedef, leaves), host, step, fallbacks)

    def close(self) -> None:
        """Release Orbax's threads."""
        self._orbax.close()

    def _complete(self) -> list[tuple[int, int]]:
        """(step, attempt) of each directory that has a manifest, oldest first."""
        if not self.directory.exists():
            return []
        named = [(path, _NAME.fullmatch(path.name)) for path in self.directory.iterdir()]
        return sorted(
            (int(name[1]), int(name[2] or 0))
            for path, name in named
            if name and (path / _MANIFEST).exists()
        )

    def _free_name(self, step: int) -> str:
        """Not that of a complete checkpoint: it stays until its successor is complete."""
        attempts = [attempt for at, attempt in self._complete() if at == step]
        return _name(step, *_from_first_process([max(attempts) + 1 if attempts else 0]))

    def _write(
        self, root: epath.Path, step: int, arrays: dict[str, Any], host: Mapping[str, Any]
    ) -> None:
        if jax.process_index() == 0:
            self._discard(root)  # what a killed process left there
            self.directory.mkdir(parents=True, exist_ok=True)
        _anywhere(False)  # no process writes into a directory that is still being cleared
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(_stored(arrays)), host=ocp.args.JsonSave(dict(host))
        )
        self._orbax.save(root, args=items)
        if jax.process_index() == 0:
            names = _files(root)
            body = {
                "schema_version": SCHEMA_VERSION,
                "step": step,
                "arrays": _shapes(arrays),
                "files": _digests(root, names),
            }
            self.bytes = sum((root / name).stat().length for name in names)
            _write_manifest(root, body)

    def _read(self, root: epath.Path, arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
        targets = {name: _target(x) for name, x in arrays.items()}
        stored = _stored(targets)
        items = ocp.args.Composite(
            state=ocp.args.PyTreeRestore(
                item=stored, restore_args=ocp.checkpoint_utils.construct_restore_args(stored)
            )
        )
        read = self._orbax.restore(root, args=items)
        empty = {
            name: jax.numpy.zeros(x.shape, x.dtype, device=x.sharding)
            for name, x in targets.items()
            if name not in stored
        }
        return {**read.state, **empty}

    def _choose(self) -> list[int]:
        """[1, step, attempt, corrupt ones passed over], or [0, 0, 0, corrupt ones]."""
        corrupt = 0
        if jax.process_index() == 0:
            for step, attempt in reversed(self._complete()):
                root = self.directory / _name(step, attempt)
                try:
                    _verify(root, _read_manifest(root))
                    return [1, step, attempt, corrupt]
                except _CorruptError as error:
                    corrupt += 1
                    warnings.warn(
                        f"checkpoint {root} is corrupt and passed over: {error}",
                        RuntimeWarning,
                        stacklevel=3,
                    )
        return [0, 0, 0, corrupt]

    def _retain(self, step: int) -> None:
        complete = self._complete()
        newest = {
            at: attempt for at, attempt in complete if at <= step
        }  # last attempt of each step
        kept = set(sorted(newest.items())[-self.keep :])
        if self.keep_every:
            kept |= {(at, n) for at, n in newest.items() if at % self.keep_every == 0}
        for at, attempt in complete:
            if (at, attempt) not in kept:
                self._discard(self.directory / _name(at, attempt))

    def _discard(self, root: epath.Path) -> None:
        """Remove a checkpoint and Orbax's temporary siblings.

        The manifest goes first, so that a kill in between leaves no corrupt one.
        """
        if not self.directory.exists():
            return
        (root / _MANIFEST).unlink(missing_ok=True)
        for path in self.directory.iterdir():
            if path.name == root.name or path.name.startswith(root.name + ".orbax-checkpoint-tmp"):
                path.rmtree(missing_ok=True)


def _name(step: int, attempt: int) -> str:
    return f"{step}.{attempt}" if attempt else str(step)


def _reason(error: BaseException | None) -> str:
    """Both ends of the first line: storage libraries put what failed first and why last, or leave
    why to a number of the operating system's."""
    if error is None:
        return "another process failed"
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    shown = line if len(line) <= 240 else f"{line[:100]} ... {line[-120:]}"
    code = re.search(r"os_error_code='(\d+)'", line)
    if code and (why := os.strerror(int(code[1]))) not in shown:
        shown += f" ({why})"
    return f"{type(error).__name__}: {shown}"
