"""Weights that a config names by a path: one of our own versions, a published checkpoint, or
adapters saved alone."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from etils import epath

from jaxrl.model import adapters, pretrained, transformer
from jaxrl.model.adapters import is_adapter
from jaxrl.model.policy import Policy
from jaxrl.model.versions import check_weights, read_manifest, read_weights

Params = Mapping[str, jax.Array]


def check(path: epath.PathLike, form: Policy, *, values: bool, alone: bool) -> None:
    """Refuse weights that ``read`` would refuse: what headers say, or each number of a published
    checkpoint if ``values``; they may be adapters saved without their base if ``alone``. Raises
    ValueError naming what does not fit."""
    if pretrained.is_published(path):
        pretrained.check_checkpoint(path, form.config, values=values)
    elif alone and adapters.are_alone(path):
        adapters.check_alone(path, form.config)
    else:
        check_weights(path, _held(path, form))


def read(
    path: epath.PathLike, form: Policy, seed: int, note: Callable[[str], None]
) -> dict[str, jax.Array]:
    """The parameters of a form, born in their shardings; adapters beside weights that have none are
    drawn anew. Raises ValueError naming what does not fit."""
    if pretrained.is_published(path):
        params = pretrained.import_checkpoint(path, form.config, form.shardings, note)
    else:
        params = read_weights(path, form.shardings, shapes=_held(path, form))[0]
        _refuse_nonfinite(path, params)
    return params if params.keys() == form.shapes.keys() else {**params, **_adapters(form, seed)}


def _held(path: epath.PathLike, form: Policy) -> dict[str, jax.ShapeDtypeStruct]:
    """What a version of our own must hold: all of a form, or all but the adapters."""
    if any(is_adapter(name) for name in read_manifest(path)["tensors"]):
        return form.shapes
    return {name: x for name, x in form.shapes.items() if not is_adapter(name)}


def adapters_over(
    base: Params, path: epath.PathLike, form: Policy, seed: int, note: Callable[[str], None]
) -> dict[str, jax.Array]:
    """The adapters of weights whose base is ``base`` bit for bit, saved with or without it. Raises
    ValueError naming what does not fit, or is another base."""
    if not pretrained.is_published(path) and adapters.are_alone(path):
        return adapters.read_alone(path, base, form.config, form.shardings)
    found = read(path, form, seed, note)
    held = {name: x for name, x in found.items() if not is_adapter(name)}
    own = {name: base[name] for name in held}
    same = jax.jit(lambda a, b: {name: (a[name] == b[name]).all() for name in a})(held, own)
    if other := sorted(name for name, equal in jax.device_get(same).items() if not equal):
        raise ValueError(
            f"{path}: its base differs from the student's in {', '.join(other[:4])} ({len(other)} "
            f"of {len(held)}); allowed: weights that were trained with optimizer.train='adapters' "
            "from the student's base"
        )
    return {name: x for name, x in found.items() if is_adapter(name)}


def _refuse_nonfinite(path: epath.PathLike, params: Params) -> None:
    """A published checkpoint is looked through while it is read; our own versions here."""
    look = jax.jit(lambda params: jax.tree.map(lambda x: jnp.isfinite(x).all(), params))
    finite = jax.device_get(look(dict(params)))
    if bad := sorted(name for name, good in finite.items() if not good):
        raise ValueError(f"{path}: {', '.join(bad)}; allowed: finite numbers only")


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
