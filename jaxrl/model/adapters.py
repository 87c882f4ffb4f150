"""Low-rank adapters and the kernels that they are beside: one without the other."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl.model.form import ModelConfig, stacks


def merged(params: Mapping[str, Array], config: ModelConfig) -> dict[str, Array]:
    """``kernel + alpha / rank * adapter_in @ adapter_out`` for each kernel that has an adapter: the
    same model without adapters.

    Summed in float32, returned in the kernel's dtype. The parameters that are given stay as they
    are.
    """
    made = {name: x for name, x in params.items() if not is_adapter(name)}
    strength = config.adapter.alpha / max(1, config.adapter.rank)
    for name, inner in params.items():
        linear, _, last = name.rpartition("/")
        if last != "adapter_in":
            continue

        def add(kernel: Array, inner: Array, outer: Array) -> Array:
            rank = inner.shape[-1]
            low = inner.astype(jnp.float32).reshape(-1, rank)
            added = low @ outer.astype(jnp.float32).reshape(rank, -1)
            wide = kernel.astype(jnp.float32) + strength * added.reshape(kernel.shape)
            return wide.astype(kernel.dtype)

        stacked = name.partition("/")[0] in stacks(config)
        lay = jax.jit(jax.vmap(add) if stacked else add)
        kernel = f"{linear}/kernel"
        made[kernel] = lay(made[kernel], inner, params[f"{linear}/adapter_out"])
    return made


def without(config: ModelConfig) -> ModelConfig:
    """The form of the merged model."""
    return dataclasses.replace(config, adapter=dataclasses.replace(config.adapter, rank=0))


def is_adapter(name: str) -> bool:
    """Is this a parameter that an adapter adds? No published checkpoint holds any."""
    return name.rsplit("/", 1)[-1] in ("adapter_in", "adapter_out")
