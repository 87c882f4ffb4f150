"""Eight CPU devices, and absl's flags parsed, before anything else starts jax."""

import gc
import os
import pathlib
import tempfile

import jax
import pytest
from absl import flags

# Not through the environment: a process that a test starts sees the machine as a user does.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# The compiler has flags in the environment only, and reads them once, when devices are asked for.
# Much of a test is compilation of what runs for a millisecond, also in processes that it starts: no
# optimisation, and loops written as LLVM's code at once, not by way of MLIR (which is 2/5 of it).
# jax 0.12 has no other way.
_QUICK = "--xla_backend_optimization_level=0"
if jax.__version_info__ < (0, 11):
    _QUICK += " --xla_cpu_use_fusion_emitters=false"
# Two test processes with eight devices each starve one another: wait instead of aborting.
_FLAGS = f"{_QUICK} --xla_cpu_collective_call_terminate_timeout_seconds=900"
with pytest.MonkeyPatch.context() as environment:
    environment.setenv("XLA_FLAGS", _FLAGS, prepend=" ")
    jax.devices()

# grain's mp_prefetch raises UnparsedFlagAccessError outside of an absl app.
flags.FLAGS.mark_as_parsed()

# Runs that tests start share what they compile, and so do tests of both processes of pytest-xdist:
# much of a :tiny run is compilation, and most of that is the same in all of them. One folder for
# all, made by the process that starts the others, whose environment they have from birth.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _COMPILED = tempfile.TemporaryDirectory(prefix="jaxrl-tests-compiled-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _COMPILED.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ.setdefault("XLA_FLAGS", _QUICK)

# Compiled code is mapped into memory piece by piece, and a process may have 65530 pieces; the
# compiler crashes at the next one. So what earlier files compiled is let go before there are many.
MANY_MAPS = 10_000


def mapped() -> int:
    """Pieces of memory that this process has; 0 where nobody says."""
    maps = pathlib.Path("/proc/self/maps")
    return len(maps.read_bytes().splitlines()) if maps.exists() else 0


@pytest.fixture(autouse=True, scope="module")
def _room_for_compiled_code():
    yield
    if mapped() > MANY_MAPS:
        jax.clear_caches()
        gc.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: the last one of all keeps the other process waiting."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
