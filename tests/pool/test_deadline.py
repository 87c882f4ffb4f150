"""A call that hangs: its process can still end, with the message and the exit code of its error."""

import subprocess
import sys

import pytest

# A process whose call ended or hangs, and that says whether what it had was taken down at its end.
ENDS = """
import atexit, time
from jaxrl.pool import deadline
atexit.register(lambda: print("taken down", flush=True))
print("begun")
try:
    deadline.within({seconds}, lambda: time.sleep({lasts}), "a call")
except RuntimeError as error:
    deadline.leave(str(error))
deadline.leave("it ended")
"""


@pytest.mark.parametrize(
    ("seconds", "lasts", "message", "said"),
    [
        (60, 0, "it ended", "begun\ntaken down\n"),
        (0.01, 600, "a call gave no answer within 0.01 s (pool.watchdog_s)", "begun\n"),
    ],
)
def test_a_process_ends_at_once_where_a_call_hangs(seconds, lasts, message, said):
    code = ENDS.format(seconds=seconds, lasts=lasts)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr.strip(), run.stdout) == (1, message, said)
