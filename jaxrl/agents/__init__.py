"""Agents improve what surrounds the weights: skills, memories, harnesses, graders. No jax here."""
