"""Untrusted Python programs, run so that they can hurt nobody and claim nothing. No jax here.

    with Sandbox(limits) as sandbox:
        cells = sandbox.run(["def f(a, b): return a + b"], "f", ["(1, 2)", "(3, 4)"])
        cells[0][1].verdict("7")  # Status.PASS

What is promised, by the kernel and on Linux alone (x86_64; aarch64 by the same list of system
calls, untried): a program opens no file, for reading or for writing, so it sees no hidden test and
leaves nothing behind; it makes no socket, no process and no thread; it signals nobody; its memory
and its time end; what it prints goes nowhere. ``Sandbox`` tries each of these when it starts and
refuses to run, naming what does not hold. Programs may import those modules of the standard library
that were loaded before (sandbox_guest.MODULES).

Nobody has to trust what a program says about its success: the process is given arguments and sends
back values, and whether a value is right is decided outside, by comparison with an answer that it
never sees. Leaving early, whatever the exit code, leaves calls without a value.
"""

import contextlib
import dataclasses
import enum
import hashlib
import json
import os
import pathlib
import select
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

from jaxrl.tasks.sandbox_guest import CALLS, CONFINED, ERROR, FRAME, MEMORY, RETURNED

GUEST = pathlib.Path(__file__).with_name("sandbox_guest.py")
PATIENCE_S = 30.0  # for the serving process, which is ours

# A program that tries what it must not, through the C library, and says whether it was refused.
PROBE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def refused(name, *words):
    ctypes.set_errno(0)
    return getattr(libc, name)(*words) == -1 and ctypes.get_errno() == 1
def f(what):
    if what == "read a file":
        return refused("open", b"/etc/hostname", 0)
    if what == "write a file":
        return refused("open", b"/tmp/written-by-a-sandboxed-program", 0o1101, 0o600)
    if what == "make a socket":
        return refused("socket", 2, 1, 0) and refused("socket", 1, 1, 0)
    if what == "start a process":
        return refused("unshare", 0) and refused("execve", b"/bin/true", None, None)
    if what == "fork":
        try:
            pid = os.fork()
        except OSError:
            return True
        os._exit(0) if pid == 0 else None
        return False
    if what == "signal another process":
        return refused("kill", os.getpid(), 0)
    if what == "take more memory":
        try:
            return not bytearray(MEMORY)
        except MemoryError:
            return True
"""
PROBED = ("read a file", "write a file", "make a socket", "start a process", "fork")
PROBED += ("signal another process", "take more memory")


class SandboxError(RuntimeError):
    """The sandbox cannot keep what it promises here, or its own process is gone."""


class Status(enum.StrEnum):
    """What became of a program on a test."""

    RETURNED = "returned"  # a value, not yet compared
    PASS = "pass"
    FAIL = "fail"
    ERROR = "error"
    TIMEOUT = "timeout"
    OOM = "oom"
    UNSTABLE = "unstable"  # two executions differ
    SKIPPED = "skipped"  # not run: the program had used up its timeouts


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one program may use. Raises ValueError naming the field."""

    cpu_s: float  # processor time of a call
    wall_s: float  # of a call: ends one that sleeps
    memory_bytes: int  # address space of the process, the interpreter's some 30 MiB included
    output_bytes: int  # longest text of a value
    timeouts: int  # calls of a program that may run out of time; those after are skipped

    def __post_init__(self) -> None:
        for field, least in (
            ("cpu_s", 1e-3),
            ("wall_s", self.cpu_s),
            ("memory_bytes", 2**26),
            ("output_bytes", 1),
            ("timeouts", 1),
        ):
            if not vars(self)[field] >= least:
                raise ValueError(f"limits.{field}={vars(self)[field]!r}; allowed: >= {least}")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One program on one input."""

    status: Status
    text: str  # of the value that it returned, as sandbox_guest.literal writes it; of an error

    def verdict(self, expected: str) -> Status:
        """PASS if the value is the expected one, FAIL if it is another; what went wrong stays."""
        if self.status is not Status.RETURNED:
            return self.status
        return Status.PASS if self.text == expected else Status.FAIL


class _Over(Exception):
    """A call has used up its time."""


class _Gone(Exception):
    """The process ended, or sent what is no answer."""


class _Clock:
    """The time that one call of a process may take."""

    def __init__(self, pid: int, limits: Limits) -> None:
        self._clock = (~pid << 3) | 2  # the kernel's name for the processor time of a process
        self._limits = limits
        self.restart()

    def _cpu(self) -> float:
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # it has ended, which its channel will say
            return 0.0

    def restart(self) -> None:
        """The next call begins."""
        self._began, self._used = time.monotonic(), self._cpu()

    def wait(self, channel: socket.socket) -> None:
        """Until there is something to read. _Over when the time is up."""
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        while True:
            wall = self._limits.wall_s - (time.monotonic() - self._began)
            cpu = self._limits.cpu_s - (self._cpu() - self._used)
            if min(wall, cpu) <= 0:
                raise _Over
            if poll.poll(1 + int(1000 * min(wall, cpu))):
                return


class _Server:
    """The interpreter that forks. One job at a time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(PATIENCE_S)
        with theirs:
            self._process = subprocess.Popen(
                # As isolated as -I makes it (an empty environment, no user packages, no current
                # folder), which would also ignore the seed that makes hashes the same each time.
                [sys.executable, "-s", "-S", "-P", "-B", str(GUEST), str(theirs.fileno())],
                env={"PYTHONHASHSEED": "0"},
                cwd="/",
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        # The serving process ends when nobody holds the other end of its channel.
        self.close = weakref.finalize(self, _end, self._control, self._process)
        if self._told() != b"ready":
            raise SandboxError("the sandbox's interpreter does not start")

    def _told(self) -> bytes:
        try:
            return self._control.recv(64)
        except OSError as error:
            raise SandboxError(f"the sandbox's process does not answer: {error}") from error

    def run(self, program: str, entry: str, calls: Sequence[str]) -> list[Cell]:
        """A cell for each call, in order."""
        cells: list[Cell] = []
        timeouts = 0
        while len(cells) < len(calls):
            cells += self._attempt(program, entry, calls[len(cells) :])
            timeouts += cells[-1].status is Status.TIMEOUT
            if timeouts == self._limits.timeouts:
                cells += [Cell(Status.SKIPPED, "")] * (len(calls) - len(cells))
        return cells

    def _attempt(self, program: str, entry: str, calls: Sequence[str]) -> list[Cell]:
        """One process, from the first call to the last or to one that it did not survive."""
        limits = self._limits
        job = {
            "program": program,
            "entry": entry,
            "calls": list(calls),
            "memory_bytes": limits.memory_bytes,
            "cpu_s": 1 + int(limits.cpu_s * len(calls)),  # the kernel's own end, should we be slow
            "output_bytes": limits.output_bytes,
        }
        body = json.dumps(job).encode()
        with self._process_of(body) as (channel, clock):
            cells: list[Cell] = []
            try:
                while len(cells) < len(calls):
                    cells.append(self._cell(channel, clock))
                    clock.restart()
            except _Over:
                cells.append(Cell(Status.TIMEOUT, ""))
            except (_Gone, ConnectionError):
                cells.append(Cell(Status.ERROR, "the process ended"))
        return cells

    @contextlib.contextmanager
    def _process_of(self, job: bytes) -> Iterator[tuple[socket.socket, _Clock]]:
        """A confined process that has been sent its job, killed in the end."""
        ours, theirs = socket.socketpair()
        with ours:
            try:
                clock = _Clock(self._forked(theirs), self._limits)
                ours.settimeout(PATIENCE_S)
                self._start(ours, job)
                clock.restart()
                yield ours, clock
            finally:
                with contextlib.suppress(OSError):
                    self._control.send(b"end")
                    self._told()

    def _forked(self, channel: socket.socket) -> int:
        """Hand a channel to the serving process; the id of the process that it forked for it."""
        try:
            with channel:
                socket.send_fds(self._control, [b"job"], [channel.fileno()])
            return struct.unpack("<i", self._told())[0]
        except (OSError, struct.error) as error:
            raise SandboxError(f"the sandbox's process is gone: {error}") from error

    @staticmethod
    def _start(channel: socket.socket, job: bytes) -> None:
        """Send the job and hear that the process is confined: no line of the program has run yet,
        so this can be believed."""
        try:
            channel.sendall(struct.pack("<I", len(job)) + job)
            told, size = FRAME.unpack(channel.recv(FRAME.size, socket.MSG_WAITALL))
            text = channel.recv(size, socket.MSG_WAITALL).decode()
        except (OSError, struct.error) as error:
            raise SandboxError(f"the sandbox's process is gone: {error}") from error
        if told != CONFINED:
            raise SandboxError(f"a process cannot be confined on this machine: {text}")

    def _cell(self, channel: socket.socket, clock: _Clock) -> Cell:
        """One answer, whose form is not trusted either."""
        how, size = FRAME.unpack(self._bytes(channel, clock, FRAME.size))
        known = {RETURNED: Status.RETURNED, ERROR: Status.ERROR, MEMORY: Status.OOM}
        if how not in known or size > self._limits.output_bytes + 80:
            raise _Gone
        text = self._bytes(channel, clock, size).decode("ascii", "replace")
        return Cell(known[how], text)

    @staticmethod
    def _bytes(channel: socket.socket, clock: _Clock, size: int) -> bytes:
        data = b""
        while len(data) < size:
            clock.wait(channel)
            part = channel.recv(size - len(data))
            if not part:
                raise _Gone
            data += part
        return data


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Close the channel, which ends the serving process and whatever it has forked."""
    control.close()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Sandbox:
    """Runs programs on calls, each program in a process of its own, and remembers every cell.

    ``repeats`` executions of each call, 1 or 2: with two, the second goes in another process and in
    the opposite order, and a call on which they differ is UNSTABLE. At most ``memory`` cells are
    remembered, by the digests of program and call. SandboxError if a promise of the module cannot
    be kept here.
    """

    def __init__(self, limits: Limits, *, repeats: int, memory: int) -> None:
        if repeats not in (1, 2) or memory < 1:
            raise ValueError(f"repeats={repeats!r}, memory={memory!r}; allowed: 1 or 2, and >= 1")
        if sys.platform != "linux" or os.uname().machine not in CALLS:
            raise SandboxError(
                f"programs are confined by the filter of system calls of Linux on "
                f"{' or '.join(CALLS)}; this is {sys.platform} on {os.uname().machine}"
            )
        self._repeats, self._memory = repeats, memory
        self._turn = threading.Lock()
        self._known: dict[tuple[str, str, str], Cell] = {}
        self._server = _Server(limits)
        self.executed = 0  # calls, repeats not counted
        self._check(limits)

    def _check(self, limits: Limits) -> None:
        program = PROBE.replace("MEMORY", str(limits.memory_bytes))
        cells = self._server.run(program, "f", [repr((what,)) for what in PROBED])
        broken = [
            what for what, cell in zip(PROBED, cells, strict=True) if cell.verdict("True") != "pass"
        ]
        if broken:
            self.close()
            raise SandboxError(f"a sandboxed program can {', '.join(broken)} on this machine")

    def run(self, programs: Sequence[str], entry: str, calls: Sequence[str]) -> list[list[Cell]]:
        """[program][call]: what ``entry(*call)`` came to. A call is the text of a tuple of plain
        values. Threads take turns."""
        with self._turn:
            return [self._row(program, entry, calls) for program in programs]

    def _row(self, program: str, entry: str, calls: Sequence[str]) -> list[Cell]:
        digest = hashlib.sha256(program.encode("utf-8", "surrogatepass")).hexdigest()
        keys = {call: (digest, entry, call) for call in calls}
        new = [call for call, key in keys.items() if key not in self._known]
        found = dict(zip(new, self._server.run(program, entry, new), strict=True))
        ended = [
            call
            for call in reversed(new)
            if found[call].status not in (Status.TIMEOUT, Status.SKIPPED)
        ]
        if self._repeats == 2 and ended:
            again = self._server.run(program, entry, ended)
            for call, cell in zip(ended, again, strict=True):
                if cell != found[call]:
                    found[call] = Cell(Status.UNSTABLE, "")
        self.executed += len(new)
        row = [found[call] if call in found else self._known[keys[call]] for call in calls]
        for call, cell in found.items():
            if cell.status is not Status.SKIPPED:
                self._known[keys[call]] = cell
        while len(self._known) > self._memory:
            del self._known[next(iter(self._known))]
        return row

    def close(self) -> None:
        """End the sandbox's process."""
        self._server.close()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
