"""The heap of the C library, from which XLA on CPU takes what a program sets aside, at every call.

Left alone, glibc asks the system for each large array anew and gives it back: a step that sets
aside a gigabyte touches as many fresh pages, a fifth of its time where the vocabulary is large.
Only glibc can be asked for anything else; on other systems nothing is done.
"""

import ctypes
import importlib.util
import os
import platform

ARENA_MAX, MMAP_THRESHOLD, TRIM_THRESHOLD = -8, -3, -1  # names of mallopt(3)
NEVER = 2**31 - 1
ACCELERATORS = ("libtpu", "jax_plugins")  # modules that bring JAX other devices


def keep() -> None:
    """What is freed stays with this process, in one heap, for the next call, if the processors are
    the devices; ``hand_back`` makes it smaller. Of threads that are yet to start: to be called
    before JAX looks for its devices.
    """
    asked = os.environ.get("JAX_PLATFORMS", "")
    alone = not any(importlib.util.find_spec(name) for name in ACCELERATORS)
    if _glibc() and (asked == "cpu" or not asked and alone):
        for name, value in ((ARENA_MAX, 1), (MMAP_THRESHOLD, NEVER), (TRIM_THRESHOLD, NEVER)):
            ctypes.CDLL(None).mallopt(name, value)


def hand_back() -> None:
    """Give the system the pages of all that is free: of a train step's compilation more than the
    step itself needs on a small machine."""
    if _glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
