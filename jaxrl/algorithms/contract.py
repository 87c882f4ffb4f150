"""What an algorithm is, and ``load(name)``: the file name is the registry.

An algorithm is a plain frozen dataclass (hashable: a static argument of the jitted step). Its
fields are the method's numbers; ``scorers``, ``coupled`` and their like are class attributes
without annotation, or properties. Its verbs, all of which must be there:

    observe(logits, taken)                  no gradient, before the updates of a take (or each one)
    credit(batch, observed)                 no gradient, sees the whole take
    read(logits, taken)                     differentiable, sees the vocabulary in chunks
    loss(reading, batch, observed, credit)  differentiable, sees one micro-batch
    keep(rewards, facts)                    on the host, sees one finished group

What ``read`` returns is differentiated unless it is stopped: an entropy bonus needs no more than
its term in ``loss``. Diagnostics are arrays [row token] or [rollout]; the curves are their means
and peaks under the size of the credit's weights.

With ``refresh = "update"`` observe and credit see the rollouts of one update. ``observed`` then
holds what observe returned, read anew with the weights at the start of that update, and the same
names under ``start/`` as they were at the start of the take: an anchor that must not move is
``observed["start/logp"]``. With ``refresh = "take"`` there is no ``start/``: everything was read at
the start of the take.

``logits`` maps a scorer to its logits at the same positions, already divided by the sampling
temperature: ``"student"`` for ("student", "plain"), else ``"who/view"``. Who scores: ``student``;
``reference``, a frozen copy of the phase's first student; ``self``, the student's moving average;
``teacher``, another model; ``value``, one output a position, not divided by the temperature: the
value of the state before the token; ``novelty``, an output for each of its networks, the same at
all tokens of a rollout. A view is a template of ``config.scorers.views``, or ``plain``: the rollout
as it was; where ``batch.held(view)`` is false the logits are finite and mean nothing. Of a packed
batch a common prompt's tokens are not read: a reading is 0 there.

Other roles that learn from the same take are ``lessons``: each has its own scorers, credit and
loss, and trains after the student; what it changes is seen by nobody before the next take.
"""

import dataclasses
import importlib
import pkgutil
import typing
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl.batch import Batch, Credit

Logits = Mapping[str, Float[Array, "position vocab"]]
Reading = Mapping[str, Array]
Diagnostics = Mapping[str, Array]


@runtime_checkable
class Lesson(Protocol):
    """How a role beside the student learns from a take; see ``Algorithm`` for the verbs."""

    @property
    def scorers(self) -> tuple[tuple[str, str], ...]:
        """(who, view) that `read` sees; the role that learns first."""
        ...

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """Advantage and weight of each token; no gradient."""
        ...

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """What the loss needs of each taken token, [position] each; differentiated."""
        ...

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """Loss of each token under the credit's weight; its gradient moves this role alone."""
        ...


@runtime_checkable  # so that the tests' type hook can look at it
class Algorithm(Protocol):
    """The contract between an algorithm and ``train/step.py``."""

    @property
    def scorers(self) -> tuple[tuple[str, str], ...]:
        """(who, view) that `read` sees; ("student", "plain") first."""
        ...

    @property
    def observers(self) -> tuple[tuple[str, str], ...]:
        """(who, view) that `observe` sees; () means no such pass."""
        ...

    @property
    def refresh(self) -> str:
        """How often observe and credit run: "take", or "update" (of that update's whole groups)."""
        ...

    @property
    def coupled(self) -> bool:
        """The loss mixes rollouts of a group: a micro-batch must hold whole groups."""
        ...

    @property
    def lessons(self) -> tuple[tuple[str, Lesson], ...]:
        """Other roles that are trained on the same take, in order; () for none."""
        ...

    @property
    def needs(self) -> tuple[str, ...]:
        """Facts that the rollouts must carry, numbers or arrays of one shape; collate names what
        lacks. Those for each token have names that begin with ``token_``."""
        ...

    def observe(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """What the observers tell of each taken token, [position] each; no gradient."""
        ...

    def credit(self, batch: Batch, observed: Reading) -> Credit:
        """Advantage and weight of each token; no gradient."""
        ...

    def read(self, logits: Logits, taken: Int[Array, " position"]) -> Reading:
        """What the loss needs of each taken token, [position] each; differentiated."""
        ...

    def loss(
        self, reading: Reading, batch: Batch, observed: Reading, credit: Credit
    ) -> tuple[Float[Array, "row token"], Diagnostics]:
        """Loss of each token, minimised under the credit's weight, and arrays for the curves."""
        ...

    def keep(self, rewards: np.ndarray, facts: Mapping[str, Any]) -> bool:
        """Host predicate on a finished group (dynamic sampling); what it refuses is refilled."""
        ...


def names() -> list[str]:
    """Algorithms that exist: one file each beside this one."""
    package = importlib.import_module("jaxrl.algorithms")
    return sorted(
        module.name
        for module in pkgutil.iter_modules(package.__path__)
        if module.name != "contract"
    )


def load(name: str, **parameters: Any) -> Algorithm:
    """Build ``jaxrl/algorithms/<name>.py``'s ``Algorithm``.

    A mapping given for a field that is a dataclass becomes that dataclass. Raises ValueError naming
    the algorithms that exist if there is no such file; TypeError naming the field if a parameter is
    missing or unknown, or no mapping where a dataclass is wanted.
    """
    if name not in names():
        raise ValueError(f"algorithm.name={name!r} is unknown; allowed: {', '.join(names())}")
    kind = importlib.import_module(f"jaxrl.algorithms.{name}").Algorithm
    return _build(f"algorithm {name!r}", kind, parameters)


def _build(what: str, kind: Any, parameters: Mapping[str, Any]) -> Any:
    fields = [field.name for field in dataclasses.fields(kind)]
    unknown = sorted(set(parameters) - set(fields))
    missing = sorted(set(fields) - set(parameters))
    if unknown or missing:
        raise TypeError(f"{what} takes {fields}; unknown: {unknown}; missing: {missing}")
    types = typing.get_type_hints(kind)
    built = {}
    for field, value in parameters.items():
        wanted: Any = types[field]
        nested = dataclasses.is_dataclass(wanted) and type(value) is not wanted
        if nested and not isinstance(value, Mapping):
            raise TypeError(f"{what}.{field}={value!r}; allowed: a mapping of its fields")
        built[field] = _build(f"{what}.{field}", wanted, value) if nested else value
    return kind(**built)


def everyone(algorithm: Algorithm) -> tuple[tuple[str, str], ...]:
    """Every (who, view) that a method reads anywhere: its own and its lessons'."""
    pairs = [*algorithm.scorers, *algorithm.observers]
    for who, lesson in algorithm.lessons:
        pairs += [(who, "plain"), *lesson.scorers]
    return tuple(dict.fromkeys(pairs))
