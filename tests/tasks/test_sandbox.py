"""The sandbox under attack: programs that spend, hide, flee, look where they must not, or lie."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxrl.tasks import sandbox as module
from jaxrl.tasks.sandbox import Cell, Limits, Sandbox, SandboxError, Status
from jaxrl.tasks.sandbox_guest import CALLS, literal

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine not in CALLS,
    reason="the sandbox is Linux's seccomp on x86_64 or aarch64",
)

LIMITS = Limits(cpu_s=0.5, wall_s=2.0, memory_bytes=2**27, output_bytes=1000, timeouts=2)


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(LIMITS, repeats=1, memory=1000) as opened:
        yield opened


def run(sandbox: Sandbox, body: str, calls=("()",)) -> list[Cell]:
    """Cells of a function of any arguments with this body."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return sandbox.run([f"def f(*x):\n{lines}"], "f", list(calls))[0]


def statuses(cells: list[Cell]) -> list[str]:
    return [cell.status.value for cell in cells]


def test_values_come_back_and_are_compared_outside(sandbox):
    program = "import math\ndef f(a, b=0):\n    return [a + b, {'k': math.floor(a)}, None]"
    one, two = sandbox.run([program], "f", ["(1, 2)", "(2.5,)"])[0]
    assert one == Cell(Status.RETURNED, "[3, {'k': 1}, None]")
    assert one.verdict("[3, {'k': 1}, None]") is Status.PASS
    assert one.verdict("[4, {'k': 1}, None]") is Status.FAIL
    assert two.text == "[2.5, {'k': 2}, None]"


def test_the_text_of_a_value_tells_its_types_and_not_its_order():
    assert literal({3, 1, 2}) == literal({2, 3, 1}) == "{1, 2, 3}"
    assert literal({"b": 1, "a": (2,)}) == "{'a': (2,), 'b': 1}"
    assert len({literal(x) for x in (1, 1.0, True, "1", [1], (1,), {1})}) == 7
    assert literal(set()) == "set()" and literal(()) == "()"
    for value in (object(), range(3), [lambda: 0]):
        with pytest.raises(TypeError):
            literal(value)


def test_errors_are_the_programs_own(sandbox):
    assert run(sandbox, "return 1 / 0") == [Cell(Status.ERROR, "ZeroDivisionError")]
    assert run(sandbox, "return undefined") == [Cell(Status.ERROR, "NameError")]
    assert run(sandbox, "return f()") == [Cell(Status.ERROR, "RecursionError")]
    assert run(sandbox, "return f") == [Cell(Status.ERROR, "TypeError")]
    assert sandbox.run(["def g(): return 1"], "f", ["()"])[0] == [Cell(Status.ERROR, "KeyError")]
    broken = sandbox.run(["def f(:", "f = \ud800", "\0"], "f", ["()", "(1,)"])
    assert {cell.status for row in broken for cell in row} == {Status.ERROR}


def test_a_loop_ends_and_the_calls_after_it_are_run(sandbox):
    body = "while x[0] == 1:\n    pass\nreturn x[0]"
    cells = run(sandbox, body, ["(0,)", "(1,)", "(2,)"])
    assert statuses(cells) == ["returned", "timeout", "returned"]
    # after two timeouts a program is given up
    cells = run(sandbox, body + " + 1", ["(1,)", "(1, 1)", "(2,)"])
    assert statuses(cells) == ["timeout", "timeout", "skipped"]


@pytest.mark.parametrize(
    "body",
    [
        "import time\ntime.sleep(60)",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "import re\nreturn bool(re.match('(a+)+$', 'a' * 40 + 'b'))",
        "return 10 ** 10 ** 8 % 7",
    ],
    ids=["sleep", "catches everything", "regular expression", "one long operation"],
)
def test_nothing_outlives_its_time(sandbox, body):
    began = time.monotonic()
    assert statuses(run(sandbox, body)) == ["timeout"]
    assert time.monotonic() - began < 20  # and not 60


@pytest.mark.parametrize(
    "body",
    [
        "return len('x' * 2**30)",
        "x = []\nwhile True: x.append(' ' * 2**20)",
        "return len([0] * 10**9)",
    ],
)
def test_memory_ends(sandbox, body):
    assert statuses(run(sandbox, body, ["()", "(1,)"])) == ["oom", "oom"]


def test_a_program_that_survives_its_memory_error_has_only_that_much(sandbox):
    body = "x = []\ntry:\n    while True: x.append(' ' * 2**20)\nexcept MemoryError: return len(x)"
    (cell,) = run(sandbox, body)
    assert 20 < int(cell.text) <= LIMITS.memory_bytes / 2**20


ESCAPES = {
    "reads a file": "return open('/etc/hostname').read()",
    "reads the file of its parent": f"return open({str(Path(__file__))!r}).read()",
    "reads its own memory by file": "return open('/proc/self/mem', 'rb').read(1)",
    "reads by descriptor": "import os\nreturn [os.read(n, 1) for n in range(3)]",
    "lists a folder": "import os\nreturn os.listdir('/')",
    "writes a file": "open('/tmp/written-by-a-sandboxed-program', 'w').write('x')",
    "writes beside itself": "open('x', 'w').write('x')",
    "makes a folder": "import os\nos.mkdir('/tmp/written-by-a-sandboxed-program')",
    "removes a file": f"import os\nos.remove({str(Path(__file__))!r})",
    "connects": "import socket\nsocket.create_connection(('127.0.0.1', 9))",
    "talks to a neighbour": "import socket\nsocket.socketpair()",
    "forks": "import os\nos.fork()",
    "forks for ever": "import os\nwhile True: os.fork()",
    "starts a shell": "import os\nos.posix_spawn('/bin/sh', ['sh'], {})",
    "becomes a shell": "import os\nos.execv('/bin/sh', ['sh'])",
    "starts a thread": "import _thread\n_thread.start_new_thread(print, ())",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)",
    "kills its group": "import os\nos.killpg(0, 9)",
    "lifts its limits": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (60, 60))",
    "becomes root": "import os\nos.setuid(0)",
    "asks for randomness": "import os\nreturn os.urandom(1)",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_is_touched_outside(sandbox, name):
    (cell,) = run(sandbox, ESCAPES[name])
    assert cell.status is Status.ERROR and "process ended" not in cell.text, cell
    assert not os.path.exists("/tmp/written-by-a-sandboxed-program")
    assert run(sandbox, "return 1")[0].text == "1"  # the sandbox stands


def test_the_network_is_out_of_reach_of_raw_system_calls_too(sandbox):
    body = """import ctypes
libc = ctypes.CDLL(None, use_errno=True)
made = [libc.syscall(n, 2, 1, 0) for n in (41, 53, 288, 425)]
return made, ctypes.get_errno()"""
    assert run(sandbox, body)[0].text == "([-1, -1, -1, -1], 1,)"


def test_other_architectures_calls_are_no_way_around_the_filter(sandbox):
    # x32 numbers carry a bit that the list does not know
    body = "import ctypes\nreturn ctypes.CDLL(None).syscall(0x40000000 + 41, 2, 1, 0)"
    assert run(sandbox, body)[0].text == "-1"


def test_a_flood_of_output_goes_nowhere(sandbox):
    body = """import sys
for _ in range(100):
    print('x' * 10**5)
    sys.stderr.write('y' * 10**5)
return 1"""
    assert run(sandbox, body) == [Cell(Status.RETURNED, "1")]
    assert run(sandbox, "return 'x' * 10**6") == [Cell(Status.ERROR, "output too long")]
    assert run(sandbox, "return 10 ** 5000")[0].status is Status.ERROR


def send_all(words: str) -> str:
    """Write to every descriptor there is, then leave."""
    return f"""import os
for n in range(3, 256):
    try: os.write(n, {words})
    except OSError: pass
os._exit(0)"""


LIES = {
    "leaves in peace": "import os\nos._exit(0)",
    "leaves by exit": "exit(0)",
    "leaves by SystemExit": "raise SystemExit(0)",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "overflows its stack": "import sys\nsys.setrecursionlimit(10**9)\nreturn f()",
    "prints a verdict": "print('pass'); print('returned')\nraise ValueError",
    "answers without form": send_all("b'PASS' * 100"),
    "claims a long answer": send_all(r"b'\0\xff\xff\xff\x7f'"),
    "claims that nothing confines it": send_all(r"b'\4\0\0\0\0'"),
    "answers in drops": "import os, time\nfor n in range(3, 256):\n    try:\n"
    "        while os.write(n, b'\\0'): time.sleep(0.2)\n    except OSError: pass",
}


@pytest.mark.parametrize("name", LIES)
def test_success_cannot_be_claimed(sandbox, name):
    """There is no verdict to forge: whatever a program sends is a value, compared outside."""
    cells = run(sandbox, LIES[name], ["()", "(1,)"])
    assert all(cell.verdict("1") not in (Status.PASS, Status.RETURNED) for cell in cells), cells
    assert run(sandbox, "return 1")[0].verdict("1") is Status.PASS


def test_a_program_knows_no_expected_answer(sandbox):
    """Nothing of another program, of its values or of an expected answer is in its memory."""
    secret = "SECRET" + "9" * 40
    assert run(sandbox, f"return {secret!r}")[0].verdict(literal(secret)) is Status.PASS
    body = """import gc, sys
found = [o for o in gc.get_objects() if isinstance(o, (str, dict, list))]
texts = [repr(v) for o in found if isinstance(o, dict) for v in o.values() if type(v) is str]
return any('SECRET' + '9' * 39 in text for text in texts)"""
    assert run(sandbox, body)[0].text == "False"


def test_a_call_does_not_see_what_the_one_before_left(sandbox):
    program = "seen = []\ndef f(x):\n    seen.append(x)\n    return len(seen)"
    cells = sandbox.run([program], "f", ["(1,)", "(2,)", "(3,)"])[0]
    assert [cell.text for cell in cells] == ["1", "1", "1"]


def test_executions_repeat_themselves(sandbox):
    body = "import random\nreturn hash('text'), list({'a', 'b', 'c', 'd'}), random.random()"
    first = run(sandbox, body)
    with Sandbox(LIMITS, repeats=2, memory=10) as other:
        assert run(other, body) == first
        cells = run(other, "import time\nreturn time.perf_counter_ns()", ["()", "(1,)"])
        assert statuses(cells) == ["unstable", "unstable"]
        # what depends on the calls before it differs too: the second execution goes backwards
        program = """import math
def f(x):
    math.seen = getattr(math, 'seen', 0) + 1
    return math.seen"""
        cells = other.run([program], "f", ["(1,)", "(2,)", "(3,)"])[0]
        assert statuses(cells) == ["unstable", "returned", "unstable"]


def test_cells_are_remembered(sandbox):
    with Sandbox(LIMITS, repeats=1, memory=3) as other:
        program = "def f(x): return x + 1"
        first = other.run([program, program], "f", ["(1,)", "(2,)", "(1,)"])
        assert [[cell.text for cell in row] for row in first] == [["2", "3", "2"]] * 2
        assert other.executed == 2
        other.run([program], "f", ["(2,)", "(3,)", "(4,)"])
        assert other.executed == 4
        other.run([program], "f", ["(1,)"])  # forgotten: three are remembered
        assert other.executed == 5


def test_threads_take_turns(sandbox):
    found: dict[int, str] = {}

    def one(n: int) -> None:
        found[n] = run(sandbox, f"return {n} + x[0]", ["(1,)"])[0].text

    threads = [threading.Thread(target=one, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: str(n + 1) for n in range(8)}


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_everything_ends_with_the_process_that_asked_for_it():
    text = (
        "from jaxrl.tasks.sandbox import *\n"
        "limits = Limits(cpu_s=60.0, wall_s=60.0, memory_bytes=2**28, output_bytes=9, timeouts=1)\n"
        "sandbox = Sandbox(limits, repeats=1, memory=1)\n"
        "print('ready', flush=True)\n"
        "sandbox.run(['def f():\\n while True: pass'], 'f', ['()'])\n"
    )
    asked = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert asked.stdout is not None and asked.stdout.readline() == "ready\n"
    (server,) = children(asked.pid)
    deadline = time.monotonic() + 20
    while not (forked := children(server)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(forked) == 1
    asked.send_signal(signal.SIGKILL)
    asked.wait()
    asked.stdout.close()
    while any(map(alive, (server, *forked))) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(alive, (server, *forked)))


def test_a_sandbox_that_is_gone_says_so():
    opened = Sandbox(LIMITS, repeats=1, memory=1)
    os.kill(opened._server._process.pid, signal.SIGKILL)
    opened._server._process.wait()
    with pytest.raises(SandboxError):
        opened.run(["def f(): return 1"], "f", ["()"])
    opened.close()


def test_a_promise_that_does_not_hold_is_named(monkeypatch):
    leaky = module.PROBE.replace('return refused("open", b"/etc/hostname", 0)', "return False")
    monkeypatch.setattr(module, "PROBE", leaky)
    with pytest.raises(SandboxError, match="can read a file on this machine"):
        Sandbox(LIMITS, repeats=1, memory=1)


def test_another_system_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match="Linux on x86_64 or aarch64; this is darwin"):
        Sandbox(LIMITS, repeats=1, memory=1)


@pytest.mark.parametrize(
    "change", [{"cpu_s": 0}, {"wall_s": 0.1}, {"memory_bytes": 1}, {"output_bytes": 0}]
)
def test_bad_limits_are_named(change):
    with pytest.raises(ValueError, match=f"limits.{next(iter(change))}="):
        Limits(**vars(LIMITS) | change)
