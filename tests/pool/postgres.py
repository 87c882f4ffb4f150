"""A real PostgreSQL server of our own, in a folder, on a socket: for the tests of the ledger."""

import contextlib
import getpass
import os
import pathlib
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any


class NoServer(Exception):
    """There is no PostgreSQL here, or it would not start; says why."""


def _binary(name: str) -> str:
    """Debian keeps the server's programs off the path."""
    installed = sorted(pathlib.Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    path = str(installed[-1]) if installed else shutil.which(name)
    if not path:
        raise NoServer(f"{name} is not installed (Debian: postgresql)")
    return path


def _user() -> str:
    """PostgreSQL refuses root: whom to be instead."""
    if os.geteuid() != 0:
        return getpass.getuser()
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise NoServer("there is no user but root to run PostgreSQL")


@contextlib.contextmanager
def server(*, durable: bool = False) -> Iterator[str]:
    """The address of an empty server; ``durable`` ones wait for the disk. NoServer if none can be
    had."""
    initdb, postgres, ready = _binary("initdb"), _binary("postgres"), _binary("pg_isready")
    user = _user()
    other: dict[str, Any] = {"user": user} if os.geteuid() == 0 else {}
    # A socket's path may have a hundred characters: not those of a test's folder.
    folder = pathlib.Path(tempfile.mkdtemp(prefix="jaxrl-pg-"))
    try:
        if other:
            shutil.chown(folder, user)
        data, log = folder / "data", (folder / "log").open("w")
        made = subprocess.run(
            [initdb, "-D", str(data), "-A", "trust", "-U", "jaxrl", "--no-sync", "-E", "UTF8"],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **other,
        )  # fmt: skip
        if made.returncode:
            raise NoServer(f"initdb: {made.stderr.strip()}")
        options = ["-c", "listen_addresses=", "-k", str(folder), "-c", "max_connections=50"]
        options += [] if durable else ["-c", "fsync=off"]
        running = subprocess.Popen(
            [postgres, "-D", str(data), *options], cwd=folder, stdout=log, stderr=log, **other
        )
        try:
            asked = [ready, "-h", str(folder), "-U", "jaxrl", "-t", "1"]
            for _ in range(30):
                if subprocess.run(asked, stdout=subprocess.DEVNULL).returncode == 0:
                    break
                if running.poll() is not None:
                    raise NoServer(f"postgres ended: {(folder / 'log').read_text()[-500:]}")
            else:
                raise NoServer("postgres did not answer")
            yield f"postgresql://jaxrl@/postgres?host={folder}"
        finally:
            running.terminate()
            running.wait(30)
            log.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
