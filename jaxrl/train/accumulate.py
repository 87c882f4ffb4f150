"""Cutting a take into micro-batches, scoring them one after another, and ADDING what they give.

The one reduction is here: ``weighted_sum`` of token losses. Weights carry the denominators of the
whole update, so that losses, gradients and diagnostics of micro-batches are added, never averaged.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxrl.algorithms.contract import Algorithm, Lesson, Reading
from jaxrl.batch import Batch, Credit
from jaxrl.mesh import batch_sharding, spec
from jaxrl.train import routing, spread
from jaxrl.train.routing import GuidedScorer, Loads, RoutingConfig
from jaxrl.train.state import STUDENT, Params, Scorer

# Names that no kernel gives: they have a slash.
ADVANTAGE = "credit/advantage"
ADVANTAGE_SQUARE = "credit/advantage_square"
RATIO = "ratio"  # what kernels call the new policy over the old one; its logarithm is spread

OBSERVED = "observed/"  # before the names of what is seen on the way
LOGP = "logp"  # what algorithms call the student's own log-probs, where they read them

Models = Mapping[str, Params]
Taken = tuple[Batch, Reading, Credit | None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tally:
    """A weighted mean and a peak in the making; those of disjoint parts are added and maxed."""

    total: Float[Array, ""]
    weight: Float[Array, ""]
    peak: Float[Array, ""]
    counts: Float[Array, " bin"] | None = None  # see spread.py; None: not asked for

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
        return jax.tree.map(lambda x, none: jnp.where(counts, x, none), self, nothing(self))


def weighted_sum(
    token_loss: Float[Array, "row token"], weight: Float[Array, "row token"]
) -> Float[Array, ""]:
    """sum of weight times loss over what has a weight other than 0; elsewhere the loss may be
    anything, and its gradient is 0.

    Selected after the product: XLA:CPU then writes down the product alone, where it would write
    down each factor of a product that is summed as it is.
    """
    return jnp.where(weight != 0, token_loss * weight, 0).sum()


def nothing(like: Tally) -> Tally:
    """The tally that changes no other."""
    counts = None if like.counts is None else jnp.zeros(like.counts.shape)
    return Tally(jnp.zeros(()), jnp.zeros(()), jnp.full((), -jnp.inf), counts)


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
            jax.tree.map(jnp.add, a[name].counts, b[name].counts),
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


def _tallies(
    diagnostics: Mapping[str, Array], batch: Batch, credit: Credit, spreads: bool
) -> dict[str, Tally]:
    """Diagnostics under the size of the loss's weights (that of a rollout: its tokens' together),
    and the advantage over action tokens. With ``spreads`` advantages and ratios are counted.
    """
    size = jnp.abs(credit.weight)
    of_rollout = jnp.zeros(batch.valid.shape, size.dtype).at[batch.rollout].add(size.sum(-1))
    counted = {
        name: tally(jax.lax.stop_gradient(x), size if x.ndim == 2 else of_rollout)
        for name, x in diagnostics.items()
    }
    advantage = credit.advantage.astype(jnp.float32)
    told = tally(advantage, batch.acted)
    if spreads:
        told = dataclasses.replace(told, counts=spread.counts(advantage, batch.acted))
    if spreads and RATIO in diagnostics:
        ratio = jax.lax.stop_gradient(diagnostics[RATIO])
        bins = spread.counts(jnp.log(ratio), (size if ratio.ndim == 2 else of_rollout) > 0)
        counted[RATIO] = dataclasses.replace(counted[RATIO], counts=bins)
    return counted | {
        ADVANTAGE: told,
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
    spreads: bool = False  # count advantages and ratios in bins
    observer: Algorithm | None = None  # what it observes is seen in the pass with a gradient

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
        joined = self._joined(readings)
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

    def read(self) -> tuple[Any, tuple[tuple[str, str], ...]]:
        """What the pass with a gradient reads, and of whom; with ``observer`` its part besides."""
        verbs, observer = self.verbs, self.observer
        if observer is None:
            return verbs.read, verbs.scorers

        def both(logits: Mapping[str, Array], taken: Array) -> Reading:
            still = observer.observe(jax.lax.stop_gradient(dict(logits)), taken)
            return {**verbs.read(logits, taken), **{OBSERVED + n: x for n, x in still.items()}}

        return both, tuple(dict.fromkeys((*verbs.scorers, *observer.observers)))

    def loss(
        self, trainable: Params, models: Models, micro: Taken, balance: Balance | None
    ) -> tuple[Float[Array, ""], tuple[Float[Array, ""], dict[str, Tally], Loads | None, Reading]]:
        """The part of the update's loss that one micro-batch adds, differentiable by
        ``trainable``, which is laid over the learner in ``models``; beside it the same without the
        balance term, what an ``observer`` saw, and the student's own log-probs if it reads them."""
        batch, observed, credit = micro
        assert credit is not None
        fixed = {who: jax.lax.stop_gradient(params) for who, params in models.items()}
        models = {**fixed, self.who: {**fixed[self.who], **trainable}}
        share = None if balance is None else balance.share
        reading, loads = self.score(models, batch, *self.read(), share)
        reading, seen = dict(_select(reading, batch)), {}
        if self.observer is not None:
            names = [name for name in reading if name.startswith(OBSERVED)]
            found = {name.removeprefix(OBSERVED): reading.pop(name) for name in names}
            observed = seen = jax.lax.stop_gradient(found)
        if self.who == STUDENT and LOGP in reading:
            seen = {**seen, LOGP: jax.lax.stop_gradient(reading[LOGP])}
        token_loss, diagnostics = self.verbs.loss(reading, batch, observed, credit)
        loss = objective = weighted_sum(token_loss, credit.weight)
        if balance is not None and loads is not None:
            objective = loss + balance.factor * loads.balance
        tallies = _tallies(diagnostics, batch, credit, self.spreads)
        return objective, (loss, tallies, loads, seen)

    def gradient(
        self, trainable: Params, models: Models, taken: Taken, parts: int, start: Loads | None
    ) -> tuple[Float[Array, ""], Params, dict[str, Tally], Loads | None, Reading]:
        """Loss of one update, its gradient by ``trainable`` (at least float32), tallies, loads, and
        what was seen on the way; ``start`` are the loads of the take's start."""
        balance = self._balance(taken[0], start)

        # Asked for its shapes, then scanned: traced once, and inline leaves no mark on the program.
        @functools.partial(jax.jit, inline=True)
        def value(micro: Taken) -> tuple[Any, Params, dict[str, Tally], Reading]:
            differentiate = jax.value_and_grad(self.loss, has_aux=True)
            (_, told), grads = differentiate(trainable, models, micro, balance)
            loss, tallies, loads, seen = told
            return (loss, jax.lax.stop_gradient(loads)), self._wide(grads), tallies, seen

        def add(total: Any, micro: Taken) -> tuple[Any, Reading]:
            sums, grads, tallies, seen = value(micro)
            grads = self._wide(jax.tree.map(jnp.add, total[1], grads))
            sums = jax.tree.map(jnp.add, total[0], sums)
            return (sums, grads, combine(total[2], tallies)), seen

        micros = cut_taken(taken, parts, self.rows)
        shapes = jax.eval_shape(value, jax.tree.map(lambda x: x[0], micros))
        sums, grads = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[:2])
        first = sums, self._wide(grads), {name: nothing(t) for name, t in shapes[2].items()}
        ((loss, loads), grads, tallies), seen = jax.lax.scan(add, first, micros)
        return loss, grads, tallies, loads, self._joined(seen)

    def _joined(self, readings: Reading) -> Reading:
        """Of micro-batches -> of all rows."""
        joined = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), readings)
        return jax.lax.with_sharding_constraint(joined, self.rows)

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
