"""Where arrays live: mesh axes, the map from logical to mesh axes, and placing trees of arrays.

Axes are Auto, said explicitly: ``jax.make_mesh`` may default to Explicit, under which every formula
would have to name shardings. Parameters carry logical axis names; only this file knows what they
mean on a mesh.

    data     copies of the parameters, rows of the batch split
    fsdp     parameters split along their width, rows of the batch split too
    tensor   heads, inner width and vocabulary split
    expert   experts split, and rows of the batch: tokens go to their experts and back
    context  tokens of a row split; a token attends to keys and values gathered from all of them
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor", "expert", "context")

MeshAxes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rules:
    """Logical axis -> mesh axes, () being replicated. Raises ValueError for a mesh axis that does
    not exist.
    """

    rows: MeshAxes = ("data", "fsdp", "expert")  # rows of a batch, slots of the sampler
    tokens: MeshAxes = ("context",)  # of a row
    embed: MeshAxes = ("fsdp",)
    heads: MeshAxes = ("tensor",)
    kv_heads: MeshAxes = ("tensor",)
    head: MeshAxes = ()
    mlp: MeshAxes = ("tensor",)
    vocab: MeshAxes = ("tensor",)
    layers: MeshAxes = ()
    expert: MeshAxes = ("expert",)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            axes = self[field.name]
            if not set(axes) <= set(AXES) or len(set(axes)) < len(axes):
                raise ValueError(
                    f"rules.{field.name}={axes!r}: allowed are distinct axes of {AXES}"
                )

    def __getitem__(self, logical: str) -> MeshAxes:
        """Mesh axes of a logical axis. Raises ValueError naming the logical axes that exist."""
        known = {field.name: field for field in dataclasses.fields(self)}
        if logical not in known:
            raise ValueError(f"logical axis {logical!r} is unknown; allowed: {', '.join(known)}")
        return dataclasses.asdict(self)[logical]


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over all of ``devices`` (default: every device there is); axes that are not named have
    size 1.

    Raises ValueError for an unknown axis, a size below 1, or a product that is not the number of
    devices.
    """
    unknown = sorted(set(sizes) - set(AXES))
    if unknown:
        raise ValueError(f"mesh axes {unknown} are unknown; allowed: {AXES}")
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    for axis, size in zip(AXES, shape, strict=True):
        if size < 1:
            raise ValueError(f"mesh.{axis}={size} is not allowed: at least 1")
    devices = jax.devices() if devices is None else list(devices)
    if math.prod(shape) != len(devices):
        stated = ", ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, shape, strict=True))
        raise ValueError(
            f"{stated}: the product is {math.prod(shape)}, but {len(devices)} devices are given; "
            "they must be equal"
        )
    kinds = (AxisType.Auto,) * len(AXES)
    slices = len({device.slice_index for device in devices if hasattr(device, "slice_index")})
    if slices > 1:
        return Mesh(_over_slices(shape, slices, devices), AXES, axis_types=kinds)
    try:
        return jax.make_mesh(shape, AXES, axis_types=kinds, devices=devices)
    except NotImplementedError:  # an axis that takes a part of a slice's dimension
        laid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(laid, AXES, axis_types=kinds)


def _over_slices(shape: tuple[int, ...], slices: int, devices: Sequence[Any]) -> Any:
    """Devices of several slices, joined by the slower network: only ``data`` goes across, as what
    it moves (gradients, once an update) does not grow with the tokens. ValueError where it does not
    divide."""
    data, *inner = shape
    if data % slices:
        raise ValueError(f"mesh.data={data} over {slices} slices; allowed: multiples of {slices}")
    across = (slices, *(1 for _ in inner))
    within = (data // slices, *inner)
    return mesh_utils.create_hybrid_device_mesh(
        within, across, devices, allow_split_physical_axes=True
    )


def spec(logical: tuple[str | None, ...], rules: Rules) -> PartitionSpec:
    """Logical axes of an array -> PartitionSpec. Raises ValueError if two of its axes claim one
    mesh axis.
    """
    entries = [rules[name] if name is not None else () for name in logical]
    claimed = [axis for entry in entries for axis in entry]
    twice = sorted({axis for axis in claimed if claimed.count(axis) > 1})
    if twice:
        raise ValueError(f"logical axes {logical} claim mesh axes {twice} more than once")
    return PartitionSpec(
        *(entry if len(entry) > 1 else (entry[0] if entry else None) for entry in entries)
    )


def ways(mesh: Mesh | None, axes: MeshAxes) -> int:
    """Into how many parts ``axes`` split an array; 1 without a mesh."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in axes)


def require_divisible(field: str, value: int, mesh: Mesh | None, axes: MeshAxes) -> None:
    """Raise ValueError naming the field, its value and what is allowed, if ``axes`` do not divide
    it.
    """
    parts = ways(mesh, axes)
    if value % parts:
        below, above = value // parts * parts, (value // parts + 1) * parts
        nearest = f"{below} or {above}" if below else f"{above}"
        named = " * ".join(f"mesh.{axis}" for axis in axes)
        raise ValueError(
            f"{field}={value} must be a multiple of {named} = {parts}; nearest allowed: {nearest}"
        )


def batch_sharding(mesh: Mesh, rules: Rules | None = None) -> NamedSharding:
    """Sharding of arrays whose first axis is rows or rollouts: split over ``data`` and ``fsdp``."""
    return NamedSharding(mesh, spec(("rows",), rules or Rules()))


def per_device(
    function: Callable[..., jax.Array],
    mesh: Mesh,
    rules: Rules,
    inputs: Sequence[tuple[str | None, ...]],
    output: tuple[str | None, ...],
    *,
    checked: bool,
) -> Callable[..., jax.Array]:
    """``function`` run by each device on its part of the arrays, for what the partitioner cannot
    split: arrays in and out lie as their logical axes say, and collectives are the function's own.

    Every array comes in as one that may differ along each mesh axis that splits any of them, as
    loops and custom gradients want it; of an array that is the same along an axis, the gradients
    are summed over that axis. With ``checked`` off jax does not follow along which axes arrays
    differ, for kernels that do not tell; gradients are the same.
    """
    axes = [{axis for name in logical if name for axis in rules[name]} for logical in inputs]
    split = set().union(*axes)

    def varying(*arrays: jax.Array) -> jax.Array:
        cast = []
        for array, own in zip(arrays, axes, strict=True):
            missing = tuple(axis for axis in AXES if axis in split - own)
            cast.append(jax.lax.pcast(array, missing, to="varying") if missing else array)
        return function(*cast)

    return jax.shard_map(
        varying if checked else function,
        mesh=mesh,
        in_specs=tuple(spec(logical, rules) for logical in inputs),
        out_specs=spec(output, rules),
        check_vma=checked,
    )


def over_rows(function: Callable[..., Any], mesh: Mesh | None, rules: Rules) -> Callable[..., Any]:
    """``function(by_rows, whole)`` run by the devices on their own rows: of each array in the tree
    ``by_rows`` and in the result the first axes are rows and tokens, those in ``whole`` come in
    complete along the axes that split these. Other axes are left to the partitioner.

    What loops inside ``function`` read of ``whole`` is gathered once, not in each turn, and its
    gradient is summed over the devices once, at the end.
    """
    axes = (*rules.rows, *rules.tokens)
    if ways(mesh, axes) == 1:
        return function
    assert mesh is not None
    split = spec(("rows", "tokens"), rules)
    alone = {axis for axis in AXES if mesh.shape[axis] == 1}  # nothing to leave to the partitioner
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(split, PartitionSpec()),
        out_specs=split,
        axis_names=set(axes) | alone,
        check_vma=False,
    )


def compiler_options(mesh: Mesh) -> dict[str, bool] | None:
    """How XLA is to compile a step for this mesh, beside its defaults; None for nothing.

    TPUs, where no product is split over ``tensor``: parameters that lie split over ``fsdp`` are
    gathered whole. By default XLA cuts products with them into as many parts as there are devices
    and passes parts around, in a ring: on v5e 2x2 (0.6B, 8 x 2048) a fifth more cycles and a
    seventh more temporaries, on v5p 2x2x4 (8B) a third, a quarter, and 2.7 x the traffic to HBM.
    Where ``tensor`` splits products it is left to XLA, which made no rings for 32B on 1024 chips.
    """
    if mesh.devices.flat[0].platform != "tpu" or mesh.shape["tensor"] > 1:
        return None
    names = ("all_gather", "reduce_scatter")
    return {f"xla_tpu_enable_windowed_einsum_for_{name}": False for name in names}


def place(tree: Any, mesh: Mesh, specs: Any) -> Any:
    """Put a tree of arrays on the mesh; ``specs`` is one PartitionSpec for all or a tree like
    ``tree``.

    Raises ValueError naming the leaf if an axis of it does not divide by its mesh axes.
    """
    if isinstance(specs, PartitionSpec):
        one = specs
        specs = jax.tree.map(lambda _: one, tree)

    def put(path: Any, leaf: Any, entry: PartitionSpec) -> jax.Array:
        for axis, names in enumerate(entry):
            if names is not None:
                axes = (names,) if isinstance(names, str) else tuple(names)
                require_divisible(
                    f"{jax.tree_util.keystr(path)}.shape[{axis}]", leaf.shape[axis], mesh, axes
                )
        return jax.device_put(leaf, NamedSharding(mesh, entry))

    return jax.tree_util.tree_map_with_path(put, tree, specs)
