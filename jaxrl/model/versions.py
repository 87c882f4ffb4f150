"""Weights on disk: a directory that holds one published version of flat parameters.

    model.safetensors   all tensors, keys are parameter names, in sorted order
    manifest.json       schema, epoch, step, digest (sha256 of model.safetensors), dtype and shape
    of each tensor, extra

A directory appears whole or not at all: it is written under a temporary name, synced, and renamed.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy
from etils import epath
from jaxtyping import Array

SCHEMA_VERSION = 1
TENSORS = "model.safetensors"
# The names of dtypes in the file; safetensors.numpy writes bfloat16 but cannot read it.
DTYPES = {"F32": np.dtype("float32"), "BF16": np.dtype(jax.numpy.bfloat16)}
MANIFEST = "manifest.json"


def write_weights(
    path: epath.PathLike,
    params: Mapping[str, Array],
    *,
    epoch: int,
    step: int,
    extra: Mapping[str, Any] | None = None,
) -> str:
    """Publish parameters as the directory ``path``; returns the digest. ``extra`` is JSON-able (a
    tokenizer's hash, ...).

    Writing the same bytes twice is harmless. Raises ValueError if ``path`` holds another version or
    other bytes: a version never changes its meaning.
    """
    final = epath.Path(path)
    host = {name: np.ascontiguousarray(jax.device_get(params[name])) for name in sorted(params)}
    payload = safetensors.numpy.save(host)
    digest = hashlib.sha256(payload).hexdigest()
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "epoch": epoch,
        "step": step,
        "digest": digest,
        "tensors": {
            name: {"dtype": str(x.dtype), "shape": list(x.shape)} for name, x in host.items()
        },
        "extra": dict(extra or {}),
    }
    if final.exists():
        held = read_manifest(final)
        same = all(held[field] == manifest[field] for field in ("epoch", "step", "digest"))
        if not same:
            stated = ", ".join(f"{field}={held[field]!r}" for field in ("epoch", "step", "digest"))
            raise ValueError(
                f"{final} already holds {stated}; "
                f"refused: epoch={epoch}, step={step}, digest={digest!r}"
            )
        return digest
    temporary = final.with_name(final.name + ".tmp")
    if temporary.exists():
        temporary.rmtree()
    temporary.mkdir(parents=True)
    (temporary / TENSORS).write_bytes(payload)
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    for held_file in (temporary / TENSORS, temporary / MANIFEST, temporary):
        sync(held_file)
    temporary.rename(final)
    sync(final.parent)
    return digest


def read_weights(
    path: epath.PathLike,
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
    *,
    shapes: Mapping[str, jax.ShapeDtypeStruct] | None = None,
) -> tuple[dict[str, Array], dict[str, Any]]:
    """(parameters, manifest), each parameter placed by its sharding if any are given.

    Raises ValueError if the directory is not a published version of this schema, if the bytes do
    not match the digest, or naming at once all tensors that are missing, surplus or of another
    shape or dtype than the manifest or ``shapes`` say.
    """
    final = epath.Path(path)
    manifest = read_manifest(final)
    payload = (final / TENSORS).read_bytes()
    digest = hashlib.sha256(payload).hexdigest()
    if digest != manifest["digest"]:
        raise ValueError(
            f"{final / TENSORS} has digest {digest!r}, its manifest says {manifest['digest']!r}"
        )
    host = _tensors(payload)
    found = {name: (tuple(x.shape), str(x.dtype)) for name, x in host.items()}
    stated = {name: (tuple(x["shape"]), x["dtype"]) for name, x in manifest["tensors"].items()}
    expected = {name: (tuple(x.shape), str(x.dtype)) for name, x in (shapes or {}).items()}
    faults = _differences(found, stated, "the manifest")
    if shapes is not None:
        faults += _differences(found, expected, "the model")
    if shardings is not None:
        faults += [f"no sharding for {name}" for name in sorted(set(found) - set(shardings))]
    if faults:
        raise ValueError(f"{final} does not fit: " + "; ".join(faults))
    if shardings is None:
        return {name: jax.numpy.asarray(x) for name, x in host.items()}, manifest
    return jax.device_put(host, {name: shardings[name] for name in host}), manifest


def check_weights(path: epath.PathLike, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Read a published version's manifest only. Raises ValueError if the directory is none, or
    naming at once all tensors that are not the model's."""
    stated = read_manifest(path)["tensors"]
    found = {name: (tuple(x["shape"]), x["dtype"]) for name, x in stated.items()}
    expected = {name: (tuple(x.shape), str(x.dtype)) for name, x in shapes.items()}
    if faults := _differences(found, expected, "the model"):
        raise ValueError(f"{path} does not fit: " + "; ".join(faults))


def _tensors(payload: bytes) -> dict[str, np.ndarray]:
    """The tensors of a file. Raises ValueError naming those of a dtype that no parameter has."""
    try:
        held = dict(safetensors.deserialize(payload))
    except safetensors.SafetensorError as error:
        raise ValueError(f"{TENSORS} is no safetensors file: {error}") from error
    odd = sorted(f"{name} ({x['dtype']})" for name, x in held.items() if x["dtype"] not in DTYPES)
    if odd:
        raise ValueError(f"tensors of a dtype not among {sorted(DTYPES)}: {', '.join(odd)}")
    return {
        name: np.frombuffer(x["data"], DTYPES[x["dtype"]]).reshape(x["shape"])
        for name, x in held.items()
    }


def _differences(found: Mapping[str, Any], expected: Mapping[str, Any], who: str) -> list[str]:
    """Every tensor on which two lists of (shape, dtype) disagree."""
    faults = [f"missing {name} of {who}" for name in sorted(set(expected) - set(found))]
    faults += [f"surplus {name}, not in {who}" for name in sorted(set(found) - set(expected))]
    for name in sorted(set(found) & set(expected)):
        if found[name] != expected[name]:
            faults.append(f"{name} is {found[name]}, {who} says {expected[name]}")
    return faults


def read_manifest(directory: epath.PathLike) -> dict[str, Any]:
    """The manifest of a published version. Raises ValueError if the directory is none, or one that
    we do not understand."""
    path = epath.Path(directory) / MANIFEST
    if not path.exists():
        raise ValueError(f"{directory} is not a published version: {MANIFEST} is missing")
    try:
        manifest = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    fields = {"schema_version", "epoch", "step", "digest", "tensors", "extra"}
    if not isinstance(manifest, dict) or set(manifest) != fields:
        raise ValueError(f"{path} must hold exactly {sorted(fields)}")
    if manifest["schema_version"] != SCHEMA_VERSION:
        raise ValueError(
            f"{path}: schema_version={manifest['schema_version']!r}; allowed: {SCHEMA_VERSION}"
        )
    for name, told in manifest["tensors"].items():
        if not isinstance(told, dict) or not {"shape", "dtype"} <= set(told):
            raise ValueError(f"{path}: tensor {name!r} is {told!r}; allowed: a shape and a dtype")
    return manifest


def sync(path: epath.Path) -> None:
    """Flush a file or directory to the disk; object stores are durable once written."""
    if "://" in os.fspath(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
