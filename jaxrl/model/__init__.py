"""The decoder: scoring and sampling. The only room that imports flax."""
