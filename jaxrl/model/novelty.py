"""Random networks and the networks that guess their output, one pair for each layer of a trunk.

    error[row layer] = mean over dimensions of (target(x) - predictor(x))^2

Both are three linear layers with ReLU between them, drawn alike; the target stays as it was drawn,
the predictor is trained to guess it, so the error is large where it has seen little. ``x`` is the
mean of a layer's hidden states over a response, read without its prompt. Source: random network
distillation, arXiv 1810.12894, as ExpDis applies it to the layers of a language model.

Parameters are flat by name and stacked over layers: ``target/0/kernel`` [layer input output]. Those
under ``target/`` are never trained.
"""

import itertools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

FROZEN = "target/"  # of the parameters' names
NETWORKS = ("target", "predictor")
LINEAR = 3  # layers of a network


def depths(layers: int) -> tuple[int, ...]:
    """After how many of a trunk's blocks the hidden states are read: a quarter, a half and three
    quarters, rounded down. 0 is the embedding; equal depths stay, so that there are always three.
    """
    return tuple(quarter * layers // 4 for quarter in (1, 2, 3))


def shapes(*, layers: int, width: int, hidden: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape of each parameter, by name: ``width`` features in, ``hidden`` units in the networks."""
    sizes = (width, *[hidden] * LINEAR)
    return {
        f"{network}/{i}/{name}": jax.ShapeDtypeStruct(shape, jnp.float32)
        for network in NETWORKS
        for i, (inner, outer) in enumerate(itertools.pairwise(sizes))
        for name, shape in (("kernel", (layers, inner, outer)), ("bias", (layers, outer)))
    }


def init(key: Array, *, layers: int, width: int, hidden: int) -> dict[str, Array]:
    """Parameters from a typed key: kernels uniform in +-sqrt(6 / (input + output)), biases 0.

    A new key at the start of a phase makes everything new again.
    """
    params = {}
    for i, (name, form) in enumerate(shapes(layers=layers, width=width, hidden=hidden).items()):
        bound = (6 / sum(form.shape[1:])) ** 0.5 if name.endswith("kernel") else 0.0
        params[name] = jax.random.uniform(
            jax.random.fold_in(key, i), form.shape, form.dtype, -bound, bound
        )
    return params


def pooled(
    states: Float[Array, "row token width"], mask: Bool[Array, "row token"]
) -> Float[Array, "row width"]:
    """Mean of the hidden states over a row's counted tokens, in float32; 0 where none counts."""
    wide = states.astype(jnp.promote_types(states.dtype, jnp.float32))
    total = jnp.where(mask[:, :, None], wide, 0).sum(1)
    return total / jnp.maximum(mask.sum(1), 1)[:, None]


def error(
    params: Mapping[str, Array], features: Float[Array, "row layer width"]
) -> Float[Array, "row layer"]:
    """Mean squared error of the predictor, for each layer; differentiable by the predictor alone.

    No gradient flows into the features, hence none into the policy that made them.
    """
    features = jax.lax.stop_gradient(features)
    target, predicted = (_forward(params, network, features) for network in NETWORKS)
    return ((jax.lax.stop_gradient(target) - predicted) ** 2).mean(-1)


def _forward(
    params: Mapping[str, Array], network: str, x: Float[Array, "row layer width"]
) -> Float[Array, "row layer output"]:
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    for i in range(LINEAR):
        kernel, bias = params[f"{network}/{i}/kernel"], params[f"{network}/{i}/bias"]
        x = jnp.einsum("rli,lio->rlo", x if i == 0 else jax.nn.relu(x), kernel) + bias
    return x
