"""What is freed stays for the next call, and goes back to the system when it is asked to."""

import json
import platform
import subprocess
import sys

import pytest

SIZE = 200 * 2**20
PROGRAM = f"""
import json, resource, sys
from jaxrl.train import heap

def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def held(): return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
def use():
    before = faults()
    b"x" * {SIZE}
    return faults() - before

if sys.argv[1] == "keep":
    heap.keep()
use()
again = use()
before = held()
heap.hand_back()
print(json.dumps([again * resource.getpagesize(), before - held()]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be asked")
@pytest.mark.parametrize("how", ["keep", "leave"])
def test_an_array_of_the_size_of_one_before_needs_no_fresh_pages(how):
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        capture_output=True,
        text=True,
        check=True,
        env={"JAX_PLATFORMS": "cpu"},
    )
    fresh, given_back = json.loads(ran.stdout)
    if how == "keep":
        assert fresh < 0.01 * SIZE and given_back > 0.9 * SIZE
    else:
        assert fresh > 0.9 * SIZE and given_back < 0.1 * SIZE
