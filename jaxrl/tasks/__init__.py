"""Prompts and their verifiers, one file a source. No jax here."""
