"""Weights that a config names by a path: one of our own versions, or a published checkpoint."""

from collections.abc import Callable

import jax
from etils import epath

from jaxrl.model import pretrained, transformer
from jaxrl.model.adapters import is_adapter
from jaxrl.model.policy import Policy
from jaxrl.model.versions import check_weights, read_weights


def check(path: epath.PathLike, form: Policy, *, values: bool) -> None:
    """Refuse weights that ``read`` would refuse: what headers say, or each number of a published
    checkpoint if ``values``. Raises ValueError naming what does not fit."""
    if pretrained.is_published(path):
        pretrained.check_checkpoint(path, form.config, values=values)
    else:
        check_weights(path, form.shapes)


def read(
    path: epath.PathLike, form: Policy, seed: int, note: Callable[[str], None]
) -> dict[str, jax.Array]:
    """The parameters of a form, born in their shardings; adapters beside a published checkpoint are
    drawn anew. Raises ValueError naming what does not fit."""
    if not pretrained.is_published(path):
        return read_weights(path, form.shardings, shapes=form.shapes)[0]
    params = pretrained.import_checkpoint(path, form.config, form.shardings, note)
    return {**params, **_adapters(form, seed)}


def _adapters(form: Policy, seed: int) -> dict[str, jax.Array]:
    """New adapters; what is drawn for the kernels beside them is never computed."""
    names = [name for name in form.shapes if is_adapter(name)]
    if not names:
        return {}

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        drawn = transformer.initialise(form.config, key)
        return {name: drawn[name] for name in names}

    shardings = form.shardings
    placed = {name: shardings[name] for name in names} if shardings else None
    return jax.jit(draw, out_shardings=placed)(jax.random.key(seed))
