"""The inside of the sandbox: an interpreter that forks one confined process for each program.

Run by jaxrl/tasks/sandbox.py as a script of its own; it imports the standard library alone and
knows no expected answer. The serving process never reads a program or a result: the forked process
gets both ends of its own channel to the outside.
"""

import ast
import ctypes
import gc
import importlib
import json
import os
import platform
import random
import resource
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

# What programs may import: loaded here, because no file can be opened once a process is confined.
MODULES = (
    "abc array bisect calendar cmath collections collections.abc contextlib copy dataclasses "
    "datetime decimal encodings.ascii encodings.latin_1 enum fractions functools heapq io "
    "itertools json math numbers operator random re statistics string struct textwrap time types "
    "typing unicodedata _strptime"
).split()

FRAME = struct.Struct("<BI")  # what is told, and how many bytes of text follow
RETURNED, ERROR, MEMORY, CONFINED, LOOSE = range(5)

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, FILTER = 1, 22, 38, 2
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
NOBODY = 65534

# Machine -> (audit architecture, the system calls that a confined process may make): memory, time,
# locks, signals of its own, writing to what is open, and its end. Whatever is not named fails with
# EPERM: opening files, sockets, new processes and threads, signals to others, new limits.
CALLS = {
    "x86_64": (
        0xC000003E,
        (1, 3, 9, 10, 11, 12, 13, 14, 15, 24, 25, 28, 35, 39, 60, 96, 98, 131, 186, 202, 219)
        + (228, 230, 231),
    ),
    "aarch64": (
        0xC00000B7,
        (57, 64, 93, 94, 98, 101, 113, 115, 124, 128, 132, 134, 135, 139, 165, 169, 172, 178)
        + (214, 215, 216, 222, 226, 233),
    ),
}


def literal(value: Any) -> str:
    """The text of a value made of plain types, the same for equal values; TypeError for any other.

    Types count: 1, 1.0 and True are three values, as are a list and a tuple. Sets and dicts are
    sorted by the text of their members.
    """
    kind = type(value)
    if kind in (int, float, complex, bool, str, bytes, type(None)):
        return repr(value)
    if kind in (list, tuple):
        parts = ", ".join(literal(part) for part in value)
        if kind is list:
            return f"[{parts}]"
        return f"({parts},)" if value else "()"
    if kind in (set, frozenset):
        return "{" + ", ".join(sorted(literal(part) for part in value)) + "}" if value else "set()"
    if kind is dict:
        pairs = sorted(f"{literal(key)}: {literal(part)}" for key, part in value.items())
        return "{" + ", ".join(pairs) + "}"
    raise TypeError(f"a {kind.__name__} is no plain value")


def _filter(architecture: int, allowed: tuple[int, ...]) -> bytes:
    """Instructions of a seccomp filter that knows these system calls of this architecture only."""

    def instruction(code: int, number: int, then: int = 0, otherwise: int = 0) -> bytes:
        return struct.pack("HBBI", code, then, otherwise, number)

    load, equal, answer = 0x20, 0x15, 0x06
    kill, refuse, allow = 0x80000000, 0x00050001, 0x7FFF0000  # refuse: errno 1, EPERM
    parts = [instruction(load, 4), instruction(equal, architecture, 1), instruction(answer, kill)]
    parts += [instruction(load, 0)]
    for place, number in enumerate(allowed):
        parts += [instruction(equal, number, len(allowed) - place)]
    return b"".join([*parts, instruction(answer, refuse), instruction(answer, allow)])


def _prctl(*words: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    padded = [ctypes.c_ulong(word) if isinstance(word, int) else word for word in words]
    padded += [ctypes.c_ulong(0)] * (5 - len(padded))
    if libc.prctl(*padded) != 0:
        raise OSError(ctypes.get_errno(), f"prctl{words[:2]} was refused")


def confine(memory_bytes: int, cpu_s: int) -> None:
    """Take from this process, for good, all that a program may not do. OSError if it cannot be."""
    for kind, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(kind, (most, most))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    code = _filter(*CALLS[platform.machine()])
    held = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(held))
    _prctl(PR_SET_SECCOMP, FILTER, ctypes.create_string_buffer(program, len(program)))


def attempt(code: Any, entry: str, call: str, most: int) -> tuple[int, str]:
    """Run the program anew and call its function: how that ended, and the value's text or an
    error's name."""
    random.seed(0)
    try:
        names: dict[str, Any] = {"__name__": "program"}
        exec(code, names)
        text = literal(names[entry](*ast.literal_eval(call)))
    except MemoryError:
        return MEMORY, ""
    except BaseException as error:  # of the program, whatever it raises
        return ERROR, type(error).__name__[:80]
    if len(text) > most:
        return ERROR, "output too long"
    return RETURNED, text


def work(channel: socket.socket) -> NoReturn:
    """Read one job from the channel, be confined, say so, answer call after call, end."""

    def tell(what: int, text: str) -> None:
        body = text.encode("ascii", "backslashreplace")
        os.write(channel.fileno(), FRAME.pack(what, len(body)) + body)

    try:
        size = struct.unpack("<I", channel.recv(4, socket.MSG_WAITALL))[0]
        job = json.loads(channel.recv(size, socket.MSG_WAITALL))
        confine(job["memory_bytes"], job["cpu_s"])
    except Exception as error:
        tell(LOOSE, repr(error))
        os._exit(1)
    tell(CONFINED, "")
    try:
        code = compile(job["program"], "program", "exec")
        broken = None
    except MemoryError:
        code, broken = None, (MEMORY, "")
    except BaseException as error:  # of the program: its text is no Python
        code, broken = None, (ERROR, type(error).__name__)
    for call in job["calls"]:
        tell(*(broken or attempt(code, job["entry"], call, job["output_bytes"])))
    os._exit(0)


def serve(control: socket.socket) -> None:
    """Fork a process for each channel that arrives; end it, and wait for it, when told to."""
    # A network of its own, without a device, where the kernel gives one: a second wall behind the
    # filter, which knows no socket.
    own = CLONE_NEWNET if os.geteuid() == 0 else CLONE_NEWUSER | CLONE_NEWNET
    ctypes.CDLL(None, use_errno=True).unshare(own)
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()  # the forked processes share these pages
    control.send(b"ready")
    while True:
        message, handles, _, _ = socket.recv_fds(control, 16, 1)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            channel = socket.socket(fileno=handles[0])
            control.close()
            os.closerange(3, handles[0])
            os.closerange(handles[0] + 1, 256)
            work(channel)
        os.close(handles[0])
        control.send(struct.pack("<i", pid))
        told = control.recv(16)  # the process is over, or is to be: nothing, if the outside is gone
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        if not told:
            return
        control.send(struct.pack("<i", status))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
