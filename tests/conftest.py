"""Eight CPU devices, and absl's flags parsed, before anything else starts jax."""

import jax
from absl import flags

# Not through the environment: a process that a test starts sees the machine as a user does.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# grain's mp_prefetch raises UnparsedFlagAccessError outside of an absl app.
flags.FLAGS.mark_as_parsed()
