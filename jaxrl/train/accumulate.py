"""Cutting a take into micro-batches, scoring them one after another, and ADDING what they give.

The one reduction is here: ``(token_loss * weight).sum()``. Weights carry the denominators of the
whole update, so that losses, gradients and diagnostics of micro-batches are added, never averaged.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxrl.algorithms.contract import Algorithm, Lesson, Reading
from jaxrl.batch import Batch, Credit
from jaxrl.mesh import batch_sharding, spec
from jaxrl.train import routing
from jaxrl.train.routing import GuidedScorer, Loads, RoutingConfig
from jaxrl.train.state import STUDENT, Params, Scorer

# Names that no kernel gives: they have a slash.
ADVANTAGE = "credit/advantage"
ADVANTAGE_SQUARE = "credit/advantage_square"

Models = Mapping[str, Params]
Taken = tuple[Batch, Reading, Credit | None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tally:
    """A weighted mean and a peak in the making; those of disjoint parts are added and maxed."""

    total: Float[Array, ""]
    weight: Float[Array, ""]
    peak: Float[Array, ""]

    @property
    def mean(self) -> Float[Array, ""]:
        """0 where nothing counts."""
        return jnp.where(
            self.weight > 0, self.total / jnp.where(self.weight > 0, self.weight, 1), 0
        )

    @property
    def top(self) -> Float[Array, ""]:
        """The largest value that counts; 0 where nothing does."""
        return jnp.where(self.weight > 0, self.peak, 0)

    def only_if(self, counts: Array) -> "Tally":
        """The same, or one of nothing."""
        return jax.tree.map(lambda x, none: jnp.where(counts, x, none), self, nothing())


def nothing() -> Tally:
    """The tally that changes no other."""
    return Tally(jnp.zeros(()), jnp.zeros(()), jnp.full((), -jnp.inf))


def tally(x: Array, weight: Array) -> Tally:
    """Count ``x`` with the size of ``weight``; where that is 0, ``x`` may be anything."""
    size = jnp.abs(weight).astype(jnp.float32)
    x = jnp.where(size > 0, x.astype(jnp.float32), 0)
    return Tally((x * size).sum(), size.sum(), jnp.where(size > 0, x, -jnp.inf).max())


def combine(a: Mapping[str, Tally], b: Mapping[str, Tally]) -> dict[str, Tally]:
    """Tallies of two disjoint parts -> those of both."""
    return {
        name: Tally(
            a[name].total + b[name].total,
            a[name].weight + b[name].weight,
            jnp.maximum(a[name].peak, b[name].peak),
        )
        for name in a
    }


def sanitised(batch: Batch) -> Batch:
    """Zero what no valid token or rollout vouches for: garbage times a weight of 0 may be NaN."""
    valid_row = batch.valid[batch.rollout]

    def select(x: Array) -> Array:
        valid = batch.valid if x.shape[0] == batch.valid.shape[0] else valid_row
        return jnp.where(valid.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)

    return dataclasses.replace(
        batch,
        reward=select(batch.reward),
        sampler_logp=jnp.where(batch.acted, batch.sampler_logp, 0),
        facts={name: select(fact) for name, fact in batch.facts.items()},
    )


def cut(tree: Any, parts: int, rows: NamedSharding) -> Any:
    """Leading axis [n] -> [parts, n / parts], each part spread over the devices like ``rows``."""
    spread = NamedSharding(rows.mesh, PartitionSpec(None, *rows.spec))

    def one(x: Array) -> Array:
        return jax.lax.with_sharding_constraint(
            x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), spread
        )

    return jax.tree.map(one, tree)


def cut_taken(taken: Taken, parts: int, rows: NamedSharding) -> Taken:
    """``cut`` for what belongs together; each part counts its rollouts from 0."""
    batch, observed, credit = cut(taken, parts, rows)
    first = jnp.arange(parts, dtype=batch.rollout.dtype) * batch.valid.shape[1]
    return dataclasses.replace(batch, rollout=batch.rollout - first[:, None]), observed, credit


def _select(reading: Reading, batch: Batch) -> Reading:
    """A reading where there is a token to read, 0 elsewhere."""
    scored = (batch.segment > 0) & batch.valid[batch.rollout][:, None]
    return {
        name: jnp.where(scored.reshape(*scored.shape, *(1,) * (x.ndim - 2)), x, 0)
        for name, x in reading.items()
    }


def _tallies(diagnostics: Mapping[str, Array], batch: Batch, credit: Credit) -> dict[str, Tally]:
    """Diagnostics under the size of the loss's weights (that of a rollout: its tokens' together),
    and the advantage over action tokens.
    """
    size = jnp.abs(credit.weight)
    of_rollout = jnp.zeros(batch.valid.shape, size.dtype).at[batch.rollout].add(size.sum(-1))
    counted = {
        name: tally(jax.lax.stop_gradient(x), size if x.ndim == 2 else of_rollout)
        for name, x in diagnostics.items()
    }
    advantage = credit.advantage.astype(jnp.float32)
    return counted | {
        ADVANTAGE: tally(advantage, batch.acted),
        ADVANTAGE_SQUARE: tally(advantage**2, batch.acted),
    }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Balance:
    """Shares of the experts at the take's start, and what a token's balance counts in the loss."""

    share: Float[Array, "layer expert"]
    factor: Float[Array, ""]


@dataclasses.dataclass(frozen=True)
class Passes:
    """The two ways through the model, micro-batch after micro-batch: without and with a gradient.

    ``models`` maps who scores to all of its parameters; ``parts`` is the number of micro-batches.
    ``who`` learns, by the verbs ``read`` and ``loss`` of ``verbs``. With ``routing`` the student
    has experts, and both ways tell their loads.
    """

    policy: Scorer
    verbs: Algorithm | Lesson
    mesh: Mesh
    who: str
    routing: RoutingConfig | None = None

    @property
    def rows(self) -> NamedSharding:
        """Where rows and rollouts live."""
        return batch_sharding(self.mesh, self.policy.rules)

    def observe(
        self, algorithm: Algorithm, models: Models, batch: Batch, parts: int
    ) -> tuple[Reading, Loads | None]:
        """``algorithm.observe`` over the whole of ``batch``, nothing if it observes nobody; and
        the loads of a student with experts."""
        observers = algorithm.observers
        if self.routing is not None and (STUDENT, "plain") not in observers:
            observers = ((STUDENT, "plain"), *observers)
        if not observers:
            return {}, None
        observe = algorithm.observe if algorithm.observers else lambda logits, taken: {}

        def one(part: Batch) -> tuple[Reading, Loads | None]:
            reading, loads = self.score(models, part, observe, observers, None)
            return _select(reading, part), loads

        micros, _, _ = cut_taken((batch, {}, None), parts, self.rows)
        readings, loads = jax.lax.map(one, micros)
        joined = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), readings)
        joined = jax.lax.with_sharding_constraint(joined, self.rows)
        return jax.lax.stop_gradient((joined, jax.tree.map(lambda x: x.sum(0), loads)))

    def score(
        self, models: Models, batch: Batch, read: Any, scorers: Any, share: Array | None
    ) -> tuple[Reading, Loads | None]:
        """What the policy says of a micro-batch, and what its routers did."""
        if self.routing is None or (STUDENT, "plain") not in scorers:
            return routing.plain(self.policy.score(models, batch, read, scorers)), None
        guidance = routing.guidance(self.routing, batch, share)
        policy = cast(GuidedScorer, self.policy)
        reading = policy.score(models, batch, read, scorers, guidance)
        return routing.plain(reading), routing.told(self.routing, reading, batch)

    def loss(
        self, trainable: Params, models: Models, micro: Taken, balance: Balance | None
    ) -> tuple[Float[Array, ""], tuple[Float[Array, ""], dict[str, Tally], Loads | None]]:
        """The part of the update's loss that one micro-batch adds, differentiable by
        ``trainable``, which is laid over the learner in ``models``; beside it the same without the
        balance term."""
        batch, observed, credit = micro
        assert credit is not None
        fixed = {who: jax.lax.stop_gradient(params) for who, params in models.items()}
        models = {**fixed, self.who: {**fixed[self.who], **trainable}}
        share = None if balance is None else balance.share
        verbs = self.verbs
        reading, loads = self.score(models, batch, verbs.read, verbs.scorers, share)
        token_loss, diagnostics = verbs.loss(_select(reading, batch), batch, observed, credit)
        loss = objective = (token_loss * credit.weight).sum()
        if balance is not None and loads is not None:
            objective = loss + balance.factor * loads.balance
        return objective, (loss, _tallies(diagnostics, batch, credit), loads)

    def gradient(
        self, trainable: Params, models: Models, taken: Taken, parts: int, start: Loads | None
    ) -> tuple[Float[Array, ""], Params, dict[str, Tally], Loads | None]:
        """Loss of one update, its gradient by ``trainable`` (at least float32), tallies and loads;
        ``start`` are the loads of the take's start."""
        balance = self._balance(taken[0], start)

        def value(micro: Taken) -> tuple[Any, Params, dict[str, Tally]]:
            differentiate = jax.value_and_grad(self.loss, has_aux=True)
            (_, (loss, tallies, loads)), grads = differentiate(trainable, models, micro, balance)
            return (loss, jax.lax.stop_gradient(loads)), self._wide(grads), tallies

        def add(total: Any, micro: Taken) -> tuple[Any, None]:
            sums, grads, tallies = value(micro)
            grads = self._wide(jax.tree.map(jnp.add, total[1], grads))
            sums = jax.tree.map(jnp.add, total[0], sums)
            return (sums, grads, combine(total[2], tallies)), None

        micros = cut_taken(taken, parts, self.rows)
        shapes = jax.eval_shape(value, jax.tree.map(lambda x: x[0], micros))
        sums, grads = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[:2])
        first = sums, self._wide(grads), {name: nothing() for name in shapes[2]}
        ((loss, loads), grads, tallies), _ = jax.lax.scan(add, first, micros)
        return loss, grads, tallies, loads

    def _balance(self, batch: Batch, start: Loads | None) -> Balance | None:
        """The balance term of an update, if it is asked for."""
        if self.routing is None or not self.routing.balance_weight or start is None:
            return None
        tokens = jnp.maximum(routing.counted(batch).sum(), 1)
        return Balance(routing.shares(start), self.routing.balance_weight / tokens)

    def _wide(self, grads: Params) -> Params:
        """Gradients live where their parameters do: without saying so, the sum is replicated."""

        axes = self.policy.axes

        def one(name: str, x: Array) -> Array:
            entry = spec(axes[name], self.policy.rules) if name in axes else PartitionSpec()
            where = NamedSharding(self.mesh, entry)
            wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
            return jax.lax.with_sharding_constraint(wide, where)

        return {name: one(name, x) for name, x in grads.items()}
