"""Our train step, lowered for whoever compiles those of several trainers for the same TPU slice.

``tpu_train_step(model, mesh, rows, tokens)``: RLOO without an extra forward pass (no sampler
correction, one update), as the peers' step has none; ``mesh`` gives devices and the sizes of
``fsdp`` and ``tensor``. The model's name is one of configs/models.py, with - and . for _.
"""

from typing import Any

from jax.sharding import Mesh

from configs import rloo
from jaxrl.forecast import chips, compiled
from jaxrl.train import loop, rounds, settings


def tpu_train_step(model_name: str, mesh: Mesh, rows: int, tokens: int) -> Any:
    """jax.stages.Lowered of the whole step."""
    config: Any = rloo.get_config(model_name.replace("-", "_").replace(".", "_"))
    fsdp, tensor = mesh.devices.shape
    config.mesh.update(fsdp=fsdp, tensor=tensor)
    config.algorithm.mismatch_cap = float("inf")
    config.pool.rollouts_per_group = 4
    config.train.update(
        groups=rows // 4, minibatches=1, micro_rollouts=rows, token_buckets=(tokens,)
    )
    config.sampler.update(prompt_buckets=(tokens // 4,), max_new_tokens=tokens - tokens // 4)
    phases = settings.phases(config)
    models = rounds.build_models(phases, list(mesh.devices.flat))
    _, step = loop.prepare(models, phases[-1])
    where = chips.read_slice("v5e:2x2")  # lowering does not look at it
    return compiled.lowered_step(compiled.Built(phases[-1], where, models, step))[0]
