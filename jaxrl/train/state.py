"""TrainState: everything that the step carries from one take to the next, and nothing else."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, UInt32

from jaxrl.algorithms.contract import Algorithm, everyone
from jaxrl.batch import Batch
from jaxrl.mesh import Rules, spec
from jaxrl.train.optimizer import split

Params = dict[str, jax.Array]

STUDENT = "student"
REFERENCE = "reference"


class Scorer(Protocol):
    """What training asks of a policy; ``model/policy.py`` says what the words mean."""

    @property
    def axes(self) -> Mapping[str, tuple[str | None, ...]]:
        """Logical axes of each parameter."""
        ...

    @property
    def rules(self) -> Rules:
        """Logical axes -> mesh axes."""
        ...

    def score(
        self,
        params: Mapping[str, Params],
        batch: Batch,
        read: Callable[[Mapping[str, Array], Array], Mapping[str, Array]],
        scorers: Sequence[tuple[str, str]],
    ) -> Mapping[str, Array]:
        """What ``read`` says of each token, [row token ...]."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Role:
    """One model that takes part: the student, or one that only scores.

    ``params`` and ``frozen`` are disjoint flat trees, name -> array; moments exist for ``params``
    only, and only where the role is trained. A role with ``ema_rate`` r > 0 follows the student: p
    <- r p + (1 - r) student, after every update. ``shared`` names the parameters that the role has
    in common with the student, which leaves them frozen: they are held once, by the student.
    """

    params: Params
    frozen: Params
    opt_state: optax.OptState
    ema_rate: float = dataclasses.field(metadata={"static": True})
    shared: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def all(self) -> Params:
        """Trainable and frozen together: what a forward pass needs. ValueError for a role that
        shares some with the student, see ``models_of``."""
        if self.shared:
            raise ValueError(f"{len(self.shared)} parameters are the student's; ask models_of()")
        return self.beside({})

    def beside(self, base: Params) -> Params:
        """All parameters, those that are shared out of the student's frozen ones."""
        return {**self.params, **self.frozen, **{name: base[name] for name in self.shared}}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """``step`` counts takes, skipped ones too. ``key`` is raw key data (uint32), so that a
    checkpoint can hold it."""

    step: Int[Array, ""]
    key: UInt32[Array, " words"]
    roles: dict[str, Role]


def models_of(roles: Mapping[str, Role]) -> dict[str, Params]:
    """All parameters of each role, a shared one in each that reads it."""
    base = roles[STUDENT].frozen
    return {who: role.beside(base) for who, role in roles.items()}


def roles_of(algorithm: Algorithm) -> set[str]:
    """Names of the models that an algorithm reads, the student included."""
    return {STUDENT} | {who for who, _ in everyone(algorithm)}


def scorer(
    params: Mapping[str, jax.Array],
    *,
    tx: optax.GradientTransformation | None = None,
    freeze: Sequence[str] = (),
    ema_rate: float = 0.0,
    shared: Collection[str] = (),
) -> Role:
    """A role beside the student around a copy of ``params``: with moments if it has an optimizer,
    else one that only scores, following the student at ``ema_rate``. Of those in ``shared`` none is
    copied, or need be in ``params``. ValueError if the role would train one of them."""
    trainable, frozen = split({**dict.fromkeys(shared), **params}, freeze)
    if both := sorted(set(shared) & set(trainable)) if tx else []:
        raise ValueError(f"{both[0]} would be trained and shared; allowed: one of the two")
    trainable, frozen = (
        {name: jnp.copy(x) for name, x in tree.items() if name not in shared}
        for tree in (trainable, frozen)
    )
    state = tx.init(trainable) if tx else ()
    return Role(trainable, frozen, state, ema_rate, tuple(sorted(shared)))


def create(
    params: Mapping[str, jax.Array],
    tx: optax.GradientTransformation,
    *,
    freeze: Sequence[str],
    roles: Collection[str],
    key: jax.Array,
    step: int,
    others: Mapping[str, Role] | None = None,
    read_in: Mapping[str, Any] | None = None,
) -> TrainState:
    """A fresh state around ``params``: new moments, a copy of ``params`` as the reference if
    ``roles`` names it, and of ``others`` those that it names. What the student leaves frozen is not
    copied: the reference shares it. The rest of it is held in the dtypes of ``read_in``, by name.

    The state owns its arrays: all of them are copies, since the step donates its state and donating
    an array twice, or one that somebody else reads, is a hard error. ``key`` is a typed key. Raises
    ValueError for a role that is not there, and as ``optimizer.split`` does.
    """
    made = {STUDENT: scorer(params, tx=tx, freeze=freeze)}
    if REFERENCE in roles:
        known = {name: x.astype((read_in or {}).get(name, x.dtype)) for name, x in params.items()}
        made[REFERENCE] = scorer(known, shared=made[STUDENT].frozen)
    others = others or {}
    unknown = sorted(set(roles) - set(made) - set(others))
    if unknown:
        allowed = ", ".join([STUDENT, REFERENCE, *sorted(others)])
        raise ValueError(f"scorers {unknown} are not there; allowed: {allowed}")
    made |= {who: role for who, role in others.items() if who in roles}
    for who, role in made.items():
        if moving := sorted(set(role.shared) - set(made[STUDENT].frozen)):
            raise ValueError(
                f"{who} shares {moving} with the student; allowed: what the student leaves frozen"
            )
    return TrainState(jnp.asarray(step, jnp.int32), jnp.copy(jax.random.key_data(key)), made)


def shardings(state: TrainState, policy: Scorer, mesh: Mesh) -> TrainState:
    """A tree like ``state`` (arrays or shapes) of shardings: parameters and their moments by
    ``policy.axes``, the rest replicated.

    A moment is recognised by its place: a leaf under a parameter's name.
    """
    axes = policy.axes

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        del leaf
        name = path[-1].key if isinstance(path[-1], jax.tree_util.DictKey) else ""
        return NamedSharding(
            mesh, spec(axes[name], policy.rules) if name in axes else PartitionSpec()
        )

    return jax.tree_util.tree_map_with_path(sharding, state)


def place(state: TrainState, policy: Scorer, mesh: Mesh) -> TrainState:
    """Put a state where the step wants it; arrays that are there already are not copied."""
    return jax.device_put(state, shardings(state, policy, mesh))
