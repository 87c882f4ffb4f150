"""Eight CPU devices, and absl's flags parsed, before anything else starts jax."""

import os
import tempfile

import jax
from absl import flags

# Not through the environment: a process that a test starts sees the machine as a user does.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# grain's mp_prefetch raises UnparsedFlagAccessError outside of an absl app.
flags.FLAGS.mark_as_parsed()

# Runs that tests start share what they compile: most of a :tiny run is compilation, and most of
# that is the same in all of them. jax has read the environment before this.
_COMPILED = tempfile.TemporaryDirectory(prefix="jaxrl-tests-compiled-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _COMPILED.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
