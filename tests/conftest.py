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
# Much of a test is compilation of what runs for a millisecond; started processes optimise as for a
# user. Two test processes with eight devices each starve one another: wait instead of aborting.
_FLAGS = (
    "--xla_backend_optimization_level=1 --xla_cpu_collective_call_terminate_timeout_seconds=900"
)
with pytest.MonkeyPatch.context() as environment:
    environment.setenv("XLA_FLAGS", _FLAGS, prepend=" ")
    jax.devices()

# grain's mp_prefetch raises UnparsedFlagAccessError outside of an absl app.
flags.FLAGS.mark_as_parsed()

# Runs that tests start share what they compile: most of a :tiny run is compilation, and most of
# that is the same in all of them. jax has read the environment before this.
_COMPILED = tempfile.TemporaryDirectory(prefix="jaxrl-tests-compiled-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _COMPILED.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

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
