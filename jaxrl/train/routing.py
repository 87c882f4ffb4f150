"""What a mixture of experts adds to the step: routes that are replayed, the balance term, and how
the routers do.

    balance term = balance_weight * sum over counted tokens of routers.balance / counted tokens

A token counts if it is no padding and its rollout is valid. The experts' shares in the term are
those of the take's start, so that it is a sum over tokens like the loss, however it is cut into
micro-batches. It is no part of ``loss/total``.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl.batch import Batch
from jaxrl.kernels import routers
from jaxrl.model.form import ModelConfig, stacks
from jaxrl.model.policy import BALANCE, CHOSEN
from jaxrl.model.transformer import Guidance
from jaxrl.pool.rollout import ROUTES

Reading = Mapping[str, Array]
Metrics = dict[str, Array]

ROUTER = re.compile(r"(^|/)router/")  # in the names of a router's parameters
ORIGIN = "router_origin"  # the role that holds the routers of a phase's start


@dataclasses.dataclass(frozen=True)
class RoutingConfig:
    """How a student with ``experts`` experts is trained. Raises ValueError naming the field."""

    experts: int
    layers: tuple[int, ...]  # that have experts, in the order of recorded routes
    stacks: tuple[tuple[str, tuple[int, ...]], ...]  # of blocks, and the layers that each holds
    recorded: bool  # rollouts carry the sampler's routes
    replay: bool  # follow the recorded routes, with the gates of the current router
    balance_weight: float  # 0: no balance term

    def __post_init__(self) -> None:
        if self.replay and not self.recorded:
            raise ValueError("train.routes='replayed'; allowed: 'free' (no routes are recorded)")
        if not self.balance_weight >= 0:
            raise ValueError(f"train.balance_weight={self.balance_weight!r}; allowed: >= 0")

    @classmethod
    def of(cls, model: ModelConfig, **fields: Any) -> "RoutingConfig":
        """How a model of this form is trained: its layers, and the other fields as given."""
        layers, named = model.sparse_layers, tuple(stacks(model).items())
        return cls(experts=model.experts.count, layers=layers, stacks=named, **fields)

    @property
    def needs(self) -> tuple[str, ...]:
        """The facts that rollouts must carry."""
        return (ROUTES,) if self.recorded else ()


class GuidedScorer(Protocol):
    """What training asks of a policy with experts: as ``state.Scorer``, under guidance."""

    def score(
        self,
        params: Mapping[str, Mapping[str, Array]],
        batch: Batch,
        read: Any,
        scorers: Any,
        guidance: Guidance,
    ) -> Mapping[str, Array]:
        """What ``read`` says of each token, and what the student's routers did."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Loads:
    """Sums over counted tokens; those of micro-batches are added."""

    count: Float[Array, "layer expert"]  # routes that each expert got
    agreed: Float[Array, " layer"]  # over tokens with a record: routers.agreement with it
    recorded: Float[Array, " layer"]  # tokens with a record
    balance: Float[Array, ""]
    tokens: Float[Array, ""]


def counted(batch: Batch) -> Bool[Array, "row token"]:
    """Tokens whose routes count: no padding, of a valid rollout."""
    return (batch.segment > 0) & batch.valid[batch.rollout][:, None]


def recorded(batch: Batch) -> Int[Array, "row token layer k"] | None:
    """The sampler's routes, -1 where none was recorded; None if the batch holds none."""
    if ROUTES not in batch.facts:
        return None
    return jnp.where(counted(batch)[:, :, None, None], batch.facts[ROUTES].astype(jnp.int32), -1)


def guidance(config: RoutingConfig, batch: Batch, share: Array | None) -> Guidance:
    """What the student's sparse layers are told about a batch."""
    return Guidance(recorded(batch) if config.replay else None, share)


def told(config: RoutingConfig, reading: Reading, batch: Batch) -> Loads:
    """The sums of one scored micro-batch. What is replayed is what loads the experts; agreement is
    that of the routers' own choice."""
    chosen, mask = reading[CHOSEN], counted(batch)
    record = recorded(batch)
    layers = chosen.shape[2]

    def by_layer(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(-1, *x.shape[2:]), 1, 0)  # [layer token k]

    flat, own = mask.reshape(-1), by_layer(chosen)
    nothing = jnp.full_like(own, -1)
    record = nothing if record is None else by_layer(record)
    known = jax.vmap(routers.routed)(record) & flat
    used = jnp.where(known[..., None], record, own) if config.replay else own
    agreed = jax.vmap(routers.agreement)(own, record)
    count = jax.vmap(lambda routes: routers.load(routes, flat, experts=config.experts))(used)
    assert count.shape == (layers, config.experts)
    return Loads(
        count=count,
        agreed=jnp.where(known, agreed, 0).sum(-1),
        recorded=known.sum(-1).astype(jnp.float32),
        balance=jnp.where(mask, reading[BALANCE], 0).sum(),
        tokens=mask.sum().astype(jnp.float32),
    )


def shares(loads: Loads) -> Float[Array, "layer expert"]:
    """The part of all routes that went to each expert."""
    return routers.load_share(loads.count)


def plain(reading: Reading) -> dict[str, Array]:
    """A reading without what was told of the routers."""
    return {name: x for name, x in reading.items() if name not in (CHOSEN, BALANCE)}


def metrics(config: RoutingConfig, start: Loads, trained: Loads) -> Metrics:
    """Curves: ``router/...`` over all layers (the worst of them), ``router/layer_<i>/...`` of each.

    ``start`` was seen at the take's start: ``agreement`` with the sampler. ``trained`` in the
    updates: loads, and ``drift`` = 1 - agreement of the moving routers with the record. Both are
    there only if routes are recorded, ``balance`` only if it is in the loss.
    """
    of_layer = {
        "max_share": (routers.max_share(trained.count), jnp.max),
        "entropy": (routers.normalised_entropy(trained.count), jnp.min),
        "cv": (routers.load_cv(trained.count), jnp.max),
        "peak": (routers.load_peak(trained.count), jnp.max),
        "cold": (routers.cold_share(trained.count), jnp.max),
    }
    made: Metrics = {}
    if config.recorded:
        known = trained.recorded > 0
        drift = jnp.where(known, 1 - _over(trained.agreed, trained.recorded), 0)
        of_layer["agreement"] = (_over(start.agreed, start.recorded), jnp.min)
        of_layer["drift"] = (drift, jnp.max)
        made["router/recorded_tokens"] = start.recorded.max()
    if config.balance_weight:
        made["router/balance"] = _over(trained.balance, trained.tokens)
    for name, (values, worst) in of_layer.items():
        made[f"router/{name}"] = worst(values)
        for place, layer in enumerate(config.layers):
            made[f"router/layer_{layer:02d}/{name}"] = values[place]
    return made


def _over(total: Array, count: Array) -> Array:
    return total / jnp.where(count > 0, count, 1)


def distance(
    config: RoutingConfig, origin: Mapping[str, Array], params: Mapping[str, Array]
) -> Metrics:
    """``|w - w0| / |w0|`` of each layer's router parameters from the phase's start:
    ``router/layer_<i>/distance_kernel``."""
    made: Metrics = {}
    for name, first in origin.items():
        wide = first.astype(jnp.float32)
        apart = (params[name].astype(jnp.float32) - wide).reshape(wide.shape[0], -1)
        size = jnp.linalg.norm(wide.reshape(wide.shape[0], -1), axis=-1)
        far = jnp.linalg.norm(apart, axis=-1) / jnp.where(size > 0, size, 1)
        stack, what = name.split("/")[0], name.split("/")[-1]
        for place, layer in enumerate(dict(config.stacks)[stack]):
            made[f"router/layer_{layer:02d}/distance_{what}"] = far[place]
    return made


def refuse_pointless_balance(config: RoutingConfig, frozen: Sequence[str]) -> None:
    """ValueError for a balance term beside frozen routers: its only way left would be through the
    hidden states, which is not what anybody asks for."""
    kernels = [name for name in frozen if ROUTER.search(name) and name.endswith("kernel")]
    if config.balance_weight and kernels:
        raise ValueError(
            f"train.balance_weight={config.balance_weight!r} beside frozen routers "
            f"({', '.join(kernels)}); allowed: 0"
        )
