"""Low-rank adapters and the base that they are beside: merged into it, or saved without it.

Adapters saved alone are a published version (see ``versions.py``) of the factors only, whose
manifest says in ``extra`` what they are and which base they were trained beside, by ``digest``.
"""

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jaxtyping import Array

from jaxrl.model import transformer
from jaxrl.model.form import ModelConfig, stacks
from jaxrl.model.versions import read_manifest, read_weights, write_weights


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


def is_added(name: str) -> bool:
    """Is this a parameter that no base holds: an adapter's, or the output of a value?"""
    return is_adapter(name) or name.startswith("output/")


def refuse_misfits(
    section: str, config: ModelConfig, shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> None:
    """Raises ValueError, naming the field of ``section``, for adapters that no linear gets, and for
    a rank above the smaller side of a kernel: it adds nothing that the kernel cannot be."""
    adapter = config.adapter
    if not adapter.rank:
        return
    found = [name for name in shapes if name.endswith("adapter_in")]
    if not found:
        kernels = (name for name in shapes if name.endswith("/kernel") and "router" not in name)
        linears = {"/".join(name.split("/")[-3:-1]) for name in kernels}
        raise ValueError(
            f"{section}.adapter.pattern={adapter.pattern!r} is found in no linear; allowed: one "
            f"that is found in some of {', '.join(sorted(linears))}"
        )
    for name in found:
        linear, _, _ = name.rpartition("/")
        layers = 1 if name.partition("/")[0] in stacks(config) else 0
        ways_in = shapes[name].shape[layers:-1]
        ways_out = shapes[f"{linear}/adapter_out"].shape[layers + 1 :]
        widest = min(math.prod(ways_in), math.prod(ways_out))
        if adapter.rank > widest:
            raise ValueError(
                f"{section}.adapter.rank={adapter.rank}; allowed beside {linear}/kernel: at most "
                f"{widest}, its smaller side"
            )


def digest(params: Mapping[str, Array]) -> str:
    """SHA-256 of a base: of name, dtype, shape and bytes of each parameter that is no adapter's."""
    told = hashlib.sha256()
    for name in sorted(name for name in params if not is_adapter(name)):
        x = np.ascontiguousarray(jax.device_get(params[name]))
        told.update(f"{name} {x.dtype} {x.shape}\n".encode())
        told.update(x.reshape(-1).view(np.uint8).data)
    return told.hexdigest()


def write_alone(
    path: epath.PathLike,
    params: Mapping[str, Array],
    config: ModelConfig,
    *,
    epoch: int,
    step: int,
) -> str:
    """Save the adapters among ``params`` without their base; returns the version's digest.

    Raises ValueError if there are none, and as ``write_weights`` does.
    """
    own = {name: x for name, x in params.items() if is_adapter(name)}
    if not own:
        raise ValueError("model.adapter.rank=0: there are no adapters to save; allowed: above 0")
    extra = {"base": digest(params), "adapter": dataclasses.asdict(config.adapter)}
    return write_weights(path, own, epoch=epoch, step=step, extra=extra)


def are_alone(path: epath.PathLike) -> bool:
    """Does a published version hold adapters without a base? ValueError if it is none."""
    return "base" in read_manifest(path)["extra"]


def check_alone(path: epath.PathLike, config: ModelConfig) -> None:
    """Read the manifest of adapters saved alone. Raises ValueError if they are not, or naming the
    fields of ``model.adapter`` that they were not trained with."""
    extra: dict[str, Any] = read_manifest(path)["extra"]
    own, saved = dataclasses.asdict(config.adapter), extra.get("adapter")
    if "base" not in extra or not isinstance(saved, dict):
        raise ValueError(f"{path} holds no adapters alone; allowed: what export --adapters writes")
    faults = [
        f"model.adapter.{field}={value!r}, saved: {saved.get(field)!r}"
        for field, value in own.items()
        if value != saved.get(field)
    ]
    if faults:
        raise ValueError(f"{path} does not fit: " + "; ".join(faults))


def read_alone(
    path: epath.PathLike,
    base: Mapping[str, Array],
    config: ModelConfig,
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
) -> dict[str, Array]:
    """Adapters that were saved alone, for the base that they were trained beside.

    ``base`` are parameters of the model, with or without adapters. Raises ValueError if the
    adapters were saved beside another base, and as ``check_alone`` and ``read_weights`` do.
    """
    check_alone(path, config)
    saved, found = read_manifest(path)["extra"]["base"], digest(base)
    if saved != found:
        raise ValueError(
            f"{path} does not fit: its adapters are of the base with digest {saved!r}, not of "
            f"this one, {found!r}"
        )
    shapes = {name: x for name, x in transformer.shapes(config).items() if is_adapter(name)}
    return read_weights(path, shardings, shapes=shapes)[0]
