"""Rollouts from outside the trainer. No jax here."""
