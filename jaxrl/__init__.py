"""jaxrl: language-model agents trained from experience, in JAX."""
