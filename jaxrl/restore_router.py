"""Older routers in newer weights: is it the routers that a run was lost by?

    python -m jaxrl.restore_router --from DIR_OLD --into DIR_NEW --to DIR_OUT [--pattern router/]

The directories are published versions (``jaxrl/model/versions.py``). DIR_OUT gets the parameters of
DIR_NEW, but those in whose names the regular expression is found as they are in DIR_OLD; it appears
whole or not at all, and can be loaded wherever DIR_NEW can. What was replaced is told, with how far
each layer had moved: ``|new - old| / |old|``.
"""

import dataclasses
import re
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from absl import app, flags


def _define_flags() -> None:
    """Only for the command: importing the functions defines no flag that another command has."""
    flags.DEFINE_string("from", None, "the version whose routers are wanted")
    flags.DEFINE_string("into", None, "the version that has all the rest")
    flags.DEFINE_string("to", None, "the directory to write")
    flags.DEFINE_string("pattern", "router/", "regular expression searched in parameter names")
    flags.mark_flags_as_required(["from", "into", "to"])


@dataclasses.dataclass(frozen=True)
class Replaced:
    """A parameter that was put back, and ``|new - old| / |old|`` of each layer."""

    name: str
    moved: tuple[float, ...]


def restored(
    old: Mapping[str, jax.Array], new: Mapping[str, jax.Array], pattern: str
) -> tuple[dict[str, jax.Array], list[Replaced]]:
    """The parameters ``new``, but those that ``pattern`` is found in as they are in ``old``.

    The rest of ``old`` is not looked at. Raises ValueError for a pattern that is no regular
    expression or is found in no name, and naming at once all parameters that are on one side only,
    of another shape or type, or not finite in ``old``.
    """
    try:
        found = re.compile(pattern).search
    except re.error as error:
        raise ValueError(f"pattern={pattern!r} is no regular expression: {error}") from error
    ours, theirs = ({name for name in params if found(name)} for params in (new, old))
    if not ours:
        some = ", ".join(sorted(new)[:8])
        raise ValueError(
            f"pattern={pattern!r} matches no parameter of the newer weights; there are, among "
            f"others: {some}"
        )
    faults = [f"{name} is not in the older weights" for name in sorted(ours - theirs)]
    faults += [f"{name} is not in the newer weights" for name in sorted(theirs - ours)]
    for name in sorted(ours & theirs):
        was, now = ((x.shape, str(x.dtype)) for x in (old[name], new[name]))
        if was != now:
            faults.append(f"{name} was {was}, is {now}")
        elif not np.isfinite(np.asarray(old[name], np.float32)).all():
            faults.append(f"{name} is not finite in the older weights")
    if faults:
        raise ValueError("the routers do not fit: " + "; ".join(faults))
    told = [Replaced(name, _moved(old[name], new[name])) for name in sorted(ours)]
    return {name: old[name] if name in ours else x for name, x in new.items()}, told


def _moved(old: jax.Array, new: jax.Array) -> tuple[float, ...]:
    """Of each layer, the first axis."""
    was, now = (np.asarray(x, np.float32).reshape(x.shape[0], -1) for x in (old, new))
    size = np.linalg.norm(was, axis=1)
    far = np.linalg.norm(now - was, axis=1) / np.where(size > 0, size, 1)
    return tuple(float(x) for x in far)


def restore(source: str, into: str, to: str, *, pattern: str) -> tuple[str, list[Replaced]]:
    """Write the version; returns its digest, and what was replaced. It keeps epoch and step of
    ``into``; its manifest's ``extra`` says what was put back, and from where.

    Raises ValueError as ``restored``, ``read_weights`` and ``write_weights`` do.
    """
    from jaxrl.model.versions import read_weights, write_weights

    old, was = read_weights(source)
    new, now = read_weights(into)
    params, told = restored(old, new, pattern)

    def version(manifest: Mapping[str, Any]) -> dict[str, Any]:
        return {field: manifest[field] for field in ("epoch", "step", "digest")}

    back = {"pattern": pattern, "names": [each.name for each in told]}
    extra = now["extra"] | {"restored": back | {"from": version(was), "into": version(now)}}
    digest = write_weights(to, params, epoch=now["epoch"], step=now["step"], extra=extra)
    return digest, told


def main(argv: list[str]) -> None:
    """Restore. What was refused ends with one message and exit code 1."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    given = flags.FLAGS.flag_values_dict()
    source, into, to = (given[name] for name in ("from", "into", "to"))
    try:
        digest, told = restore(source, into, to, pattern=given["pattern"])
    except (ValueError, TypeError, KeyError, OSError) as error:
        sys.exit(f"jaxrl.restore_router: {type(error).__name__}: {error}")
    for each in told:
        far = ", ".join(f"{x:.4g}" for x in each.moved)
        print(f"{each.name}: had moved by {far} (|new - old| / |old|, by layer)")
    print(f"{to} is {into} with {len(told)} parameters of {source}: {digest}")


if __name__ == "__main__":
    _define_flags()
    app.run(main)
