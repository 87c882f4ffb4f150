"""Can this machine install jaxrl? ``python3 -m jaxrl.preflight`` answers before pip runs.

One dependency of the tasks (reasoning-gym's pycosat) has no wheels and is compiled, so a C compiler
and Python's headers are needed. Without this check pip would say so after hundreds of lines.
"""

# Standard library only; and an old Python must be able to read this file to be told that it is old.
from __future__ import annotations

import importlib.util
import pathlib
import shutil
import sys
import sysconfig
from collections.abc import Callable

OLDEST, NEWEST = (3, 11), (3, 13)


def lacking(
    version: tuple[int, ...],
    include: str,
    compilers: list[str],
    which: Callable[[str], str | None],
    has_module: Callable[[str], bool],
) -> list[str]:
    """One line for each thing that is missing, saying what to do; empty if the machine is ready.

    ``include`` is the folder of Python.h, ``compilers`` the names to look for with ``which``.
    """
    found = []
    if not OLDEST <= tuple(version[:2]) <= NEWEST:
        allowed = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
        found.append(f"Python {version[0]}.{version[1]} is not supported; allowed: {allowed}")
    if not any(which(name) for name in compilers):
        found.append(
            f"no C compiler ({', '.join(compilers)}); on Debian and Ubuntu: apt-get install gcc"
        )
    if not (pathlib.Path(include) / "Python.h").exists():
        found.append(f"no Python.h in {include}; on Debian and Ubuntu: apt-get install python3-dev")
    if not (has_module("venv") and has_module("ensurepip")):
        found.append("no venv with pip; on Debian and Ubuntu: apt-get install python3-venv")
    return found


def main() -> None:
    """Exit with 0 if ready, else print what is missing and exit with 1."""
    configured = (sysconfig.get_config_var("CC") or "cc").split()[0]
    found = lacking(
        tuple(sys.version_info[:2]),
        sysconfig.get_path("include"),
        list(dict.fromkeys([configured, "cc", "gcc", "clang"])),
        shutil.which,
        lambda name: importlib.util.find_spec(name) is not None,
    )
    if found:
        sys.exit("\n".join(f"jaxrl.preflight: {line}" for line in found))


if __name__ == "__main__":
    main()
