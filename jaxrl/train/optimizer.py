"""The optimizer section -> an optax chain; which parameters it never sees."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxrl.model.adapters import is_adapter, is_added
from jaxrl.train.rounding import ROUNDINGS, Moments, choose, in_bfloat16, onto_weights

NAMES = ("adamw", "sgd")
TRAINED = ("auto", "adapters", "base", "all")
MOMENTS = ("float32", "bfloat16")

LARGE, SKIPPED = 2**16, 16  # see ``preview``


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The fields of ``configs/base.py``'s ``optimizer``. Raises ValueError naming field, value and
    what is allowed."""

    name: str
    learning_rate: float
    warmup_updates: int
    decay_updates: int
    final_fraction: float
    b1: float
    b2: float
    epsilon: float
    weight_decay: float
    moments: str
    rounding: str
    clip_norm: float
    train: str
    freeze: tuple[str, ...]
    rates: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        for field, allowed, right in (
            ("name", f"one of {', '.join(NAMES)}", self.name in NAMES),
            ("learning_rate", "> 0", self.learning_rate > 0),
            ("warmup_updates", ">= 0", self.warmup_updates >= 0),
            ("decay_updates", ">= 0 (0: constant)", self.decay_updates >= 0),
            ("final_fraction", "0 .. 1", 0 <= self.final_fraction <= 1),
            ("b1", "0 <= b1 < 1", 0 <= self.b1 < 1),
            ("b2", "0 <= b2 < 1", 0 <= self.b2 < 1),
            ("epsilon", "> 0", self.epsilon > 0),
            ("weight_decay", ">= 0", self.weight_decay >= 0),
            ("moments", f"one of {', '.join(MOMENTS)}", self.moments in MOMENTS),
            ("rounding", f"one of {', '.join(ROUNDINGS)}", self.rounding in ROUNDINGS),
            ("clip_norm", "> 0", self.clip_norm > 0),
            ("train", f"one of {', '.join(TRAINED)}", self.train in TRAINED),
            ("freeze", "a sequence of regular expressions", not isinstance(self.freeze, str)),
            (
                "rates",
                "a sequence of pairs of a regular expression and a factor > 0",
                _are_rates(self.rates),
            ),
        ):
            if not right:
                raise ValueError(f"optimizer.{field}={self.__dict__[field]!r}; allowed: {allowed}")


def _are_rates(rates: Any) -> bool:
    def is_factor(number: Any) -> bool:
        return isinstance(number, int | float) and 0 < number < math.inf

    def is_pattern(pattern: Any) -> bool:
        try:
            return isinstance(pattern, str) and bool(re.compile(pattern))
        except re.error:
            return False

    return isinstance(rates, tuple | list) and all(
        isinstance(pair, tuple | list)
        and len(pair) == 2
        and is_pattern(pair[0])
        and is_factor(pair[1])
        for pair in rates
    )


def schedule(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate of update n = 0, 1, ...

    ``learning_rate * (n + 1) / warmup_updates`` while that is below ``learning_rate``; then, if
    ``decay_updates`` is not 0, a half cosine from ``learning_rate`` to ``final_fraction *
    learning_rate`` over that many updates; constant afterwards.
    """
    warm, decay = config.warmup_updates, config.decay_updates

    def rate(count: Any) -> jax.Array:
        rise = jnp.minimum((count + 1) / max(warm, 1), 1.0)
        done = jnp.clip((count - warm) / max(decay, 1), 0.0, 1.0) if decay else 0.0
        fall = config.final_fraction + (1 - config.final_fraction) * 0.5 * (
            1 + jnp.cos(jnp.pi * done)
        )
        return jnp.asarray(config.learning_rate * rise * fall, jnp.float32)

    return rate


class RateState(NamedTuple):
    """Updates made, and the learning rate of the last one (of the first, before it)."""

    updates_made: Int[Array, ""]
    learning_rate: Float[Array, ""]


def scale_by_rate(rate: optax.Schedule) -> optax.GradientTransformation:
    """Multiply by ``-rate(count)``, keeping the number where ``train/step.py`` can report it."""

    def init(params: optax.Params) -> RateState:
        del params
        count = jnp.zeros((), jnp.int32)
        return RateState(count, jnp.asarray(rate(count)))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        del params
        assert isinstance(state, RateState)
        now = jnp.asarray(rate(state.updates_made))
        return jax.tree.map(lambda g: -now * g, updates), RateState(state.updates_made + 1, now)

    return optax.GradientTransformation(init, update)


def clip_by_norm(limit: float) -> optax.GradientTransformationExtraArgs:
    """Multiply by min(1, limit / norm of all of them together); ``norm`` where that is known.

    What ``optax.clip_by_global_norm`` does, as one factor: that is computed on the way by whoever
    reads a gradient, where a choice between two arrays is written down and read again.
    """

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        norm: jax.Array | None = None,
        **others: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del params, others
        norm = optax.tree.norm(updates) if norm is None else norm
        factor = limit / jnp.maximum(norm, limit)
        return jax.tree.map(lambda g: g * factor, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def scale_by_adam(b1: float, b2: float, epsilon: float) -> optax.GradientTransformationExtraArgs:
    """``optax.scale_by_adam``, with a state that stays as it is where ``made`` is false.

        m <- b1 m + (1 - b1) g    v <- b2 v + (1 - b2) g^2
        m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + epsilon)

    The change is made of the moments that are kept, and reads those. Were they chosen afterwards
    it would compute them once more, and the old ones would be read twice.
    """

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        made: jax.Array | bool = True,
        **others: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del params, others
        assert isinstance(state, Moments)
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, b2, 2)
        kept = Moments(*choose(made, (count, mu, nu), tuple(state)))
        changes = jax.tree.map(
            lambda m, v: m / (jnp.sqrt(v) + epsilon),
            optax.tree.bias_correction(kept.mu, b1, count),
            optax.tree.bias_correction(kept.nu, b2, count),
        )
        return changes, kept

    def init(params: optax.Params) -> Moments:
        zeros = optax.tree.zeros_like
        return Moments(jnp.zeros((), jnp.int32), zeros(params), zeros(params))

    return optax.GradientTransformationExtraArgs(init, update)


def _decayed(params: optax.Params) -> Any:
    def one(path: tuple[Any, ...], _: Any) -> bool:
        return not jax.tree_util.keystr(path, simple=True).endswith("router/bias")

    return jax.tree_util.tree_map_with_path(one, params)


def _first(rates: Sequence[tuple[str, float]], name: str) -> int | None:
    """Which of ``rates`` is the first that is found in the name."""
    return next((i for i, (pattern, _) in enumerate(rates) if re.search(pattern, name)), None)


def scale_by_name(rates: Sequence[tuple[str, float]]) -> optax.GradientTransformation:
    """Multiply the update of a parameter by the factor of the first pattern that is found in its
    name; 1 if none is."""

    def one(path: tuple[Any, ...], change: Any) -> Any:
        i = _first(rates, jax.tree_util.keystr(path, simple=True))
        return change if i is None else change * rates[i][1]

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(one, updates))


def build(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """Clip by global norm, then AdamW or plain SGD, then the schedule, then ``rates``; what comes
    of it moves the weights as ``rounding`` says.

    ``weight_decay`` is decoupled: it is added after the moments and scaled by the learning rate,
    for both; so a factor of ``rates`` scales it too. A sigmoid router's bias is not decayed: its
    gradient is 0, and the published value is the balance of the experts' loads. ``update`` may be
    told whether the update will be ``made``, see ``scale_by_adam``, and the gradient's ``norm``.
    """
    moments = (
        scale_by_adam(config.b1, config.b2, config.epsilon)
        if config.name == "adamw"
        else optax.identity()
    )
    if config.moments == "bfloat16":
        moments = in_bfloat16(moments)
    chain = optax.chain(
        clip_by_norm(config.clip_norm),
        moments,
        optax.add_decayed_weights(config.weight_decay, mask=_decayed),
        scale_by_rate(schedule(config)),
        *([scale_by_name(config.rates)] if config.rates else []),
    )
    return onto_weights(chain, config.rounding)


def preview(
    tx: optax.GradientTransformation,
    grads: Mapping[str, jax.Array],
    state: optax.OptState,
    params: Mapping[str, jax.Array],
    norm: jax.Array,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """What an update of ``build`` is about to do: the norm of the changes, and the share of
    parameters that they change at all. Of arrays of more than ``LARGE`` numbers every
    ``SKIPPED``-th row stands for all; ``norm`` is that of the whole gradient.

    A share near 0 says that steps are below half a unit in the last place: masters too narrow.
    Looked at beforehand and in part because of XLA:CPU, whose kernels write one array: it writes
    all changes down to sum them, and copies all parameters to compare them later. On two cores that
    took a tenth of a step of experts (``experiments.bench.experts --step``).
    """
    few, few_grads, few_state = (jax.tree.map(_some, tree) for tree in (params, grads, state))
    whole_tx = optax.with_extra_args_support(tx)
    changes: Any = whole_tx.update(few_grads, few_state, few, norm=norm)[0]
    after: Any = optax.apply_updates(few, changes)
    square, moved = jnp.zeros(()), jnp.zeros(())
    for name, whole in params.items():
        change, shown = changes[name].astype(jnp.float32), few[name]
        stands = whole.size / shown.size
        square += stands * (change * change).sum()
        # In float32: there are more parameters than an int32 counts.
        moved += stands * (after[name] != shown).sum(dtype=jnp.float32)
    return jnp.sqrt(square), moved / float(sum(x.size for x in params.values()))


def _some(x: jax.Array) -> jax.Array:
    """Every ``SKIPPED``-th row of an array with more than ``LARGE`` numbers, along the longest axis
    but the last: in memory what lies beside a number is read with it. From the middle of the first
    so many, as neither end is typical."""
    if x.size <= LARGE or x.ndim < 2:
        return x
    axis = max(range(x.ndim - 1), key=lambda i: x.shape[i])
    every = math.gcd(x.shape[axis], SKIPPED)
    return jax.lax.slice_in_dim(x, every // 2, None, every, axis)


def freezing(config: OptimizerConfig, names: Iterable[str]) -> tuple[str, ...]:
    """What a model of these parameters leaves as it is, as patterns for ``split``: all that
    ``train`` leaves out, and ``freeze``.

    "adapters" are the low-rank factors and the output of a value, "base" is all but the factors;
    "auto" is "adapters" where there are any, else "all". Raises ValueError if there are no adapters
    to train, ``freeze`` leaves none of what ``train`` says, or one of ``rates`` changes nothing of
    what is left.
    """
    names = sorted(names)
    factors = [name for name in names if is_adapter(name)]
    train = config.train if config.train != "auto" else "adapters" if factors else "all"
    if train == "adapters" and not factors:
        raise ValueError(
            "optimizer.train='adapters'; allowed: 'auto', 'base', 'all' (no linear "
            "has an adapter, see model.adapter)"
        )
    left = {
        "adapters": [name for name in names if is_added(name)],
        "base": [name for name in names if not is_adapter(name)],
        "all": names,
    }[train]
    moved = [name for name in left if not any(re.search(p, name) for p in config.freeze)]
    if not moved:
        raise ValueError(
            f"optimizer.freeze={tuple(config.freeze)!r} freezes every parameter that "
            f"optimizer.train={config.train!r} trains ({', '.join(left[:4])}, ...); allowed: some "
            "are left to train"
        )
    used = {_first(config.rates, name) for name in moved}
    for i, (pattern, _) in enumerate(config.rates):
        if i not in used:
            raise ValueError(
                f"optimizer.rates: {pattern!r} is the first to match no parameter that is trained; "
                f"there are, among others: {', '.join(moved[:8])}"
            )
    still = sorted(set(names) - set(left))
    return (*(f"^{re.escape(name)}$" for name in still), *config.freeze)


def split(
    params: Mapping[str, Any], freeze: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(trainable, frozen): a parameter is frozen when any of the regular expressions is found in
    its name.

    The two are separate trees, so that frozen parameters get no gradient, no moments and no update.
    Raises ValueError for a pattern that is found in no name, and when nothing is left to train.
    """
    for pattern in freeze:
        if not any(re.search(pattern, name) for name in params):
            some = ", ".join(sorted(params)[:8])
            raise ValueError(
                f"optimizer.freeze: {pattern!r} matches no parameter; there are, among others: "
                f"{some}"
            )
    frozen = {name: x for name, x in params.items() if any(re.search(p, name) for p in freeze)}
    if len(frozen) == len(params):
        raise ValueError(
            f"optimizer.freeze={tuple(freeze)!r} freezes every parameter; allowed: some are left "
            "to train"
        )
    return {name: x for name, x in params.items() if name not in frozen}, frozen
