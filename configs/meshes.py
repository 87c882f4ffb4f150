"""Named meshes of pod slices: devices on each axis. Their product is the slice's devices.

--mesh configs/meshes.py:NAME of jaxrl.aot puts one in the place of the config's mesh. In a run,
--config.mesh.fsdp=... says the same.
"""

from ml_collections import ConfigDict

# The slice, and where it matters what is trained on it. A dense model is split along fsdp as long
# as each device keeps a row of its own: what fsdp moves does not grow with the tokens of a device,
# what tensor moves does. Each axis takes whole dimensions of the slice, whose rings it then uses.
MESHES: dict[str, dict[str, int]] = {
    "v5e_2x2": {"fsdp": 4},
    "v5e_4x4": {"fsdp": 16},
    "v5e_16x16": {"fsdp": 256},
    "v5p_2x2x1": {"fsdp": 4},
    "v5p_2x2x4": {"fsdp": 16},
    "v5p_4x4x4": {"fsdp": 16, "tensor": 4},
    "v5p_8x8x8": {"fsdp": 64, "tensor": 8},
    "v5p_8x8x16": {"fsdp": 128, "tensor": 8},
    "v6e_8x8": {"fsdp": 64},
    "v6e_8x8_experts": {"fsdp": 8, "expert": 8},
    "v6e_16x16": {"fsdp": 256},
    "tpu7x_2x2x2": {"fsdp": 16},
    "tpu7x_4x4x4": {"fsdp": 64, "tensor": 2},
}


def get_config(name: str) -> ConfigDict:
    """The mesh of this name; axes that it does not name are 1. ValueError for an unknown one."""
    if name not in MESHES:
        raise ValueError(f"mesh {name!r} is unknown; allowed: {', '.join(MESHES)}")
    axes = {"data": 1, "fsdp": 1, "tensor": 1, "expert": 1, "context": 1}
    return ConfigDict({**axes, **MESHES[name]})
