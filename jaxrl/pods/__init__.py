"""From a run to the machines of a pod: commands and manifests. No jax here."""
