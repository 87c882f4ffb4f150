"""Which tasks a pool draws next, and what rules say of the answers: what moves from take to take.

The universes are the task sources of the train split (Reasoning Gym families, say). After each take
the curriculum learns from the rewards of its groups, by universe, and moves the probabilities it
hands to the pool. Formulas: jaxrl/kernels/drift.py; the learner's part: jaxrl/algorithms/praxis.py.

The paper's sampler is rewarded with the loss after the learner's step. Here that is what the next
take measures: its rollouts come from those weights, and only then does q move.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxrl.algorithms.contract import Algorithm
from jaxrl.kernels import drift
from jaxrl.pool.contract import Group, Manifest, Question, RolloutPool
from jaxrl.pool.rollout import ACTION, Rollout, Version

# A program that maps a group's answers to one of them, without seeing a reward: its place.
Rule = Callable[[Sequence[Rollout]], int]

LOSS_BOUND = 1.0  # of 1 - reward
UNRULED = {"consistency_weight": 0.0, "consistency_cap": 1.0}  # of algorithms without rules

# Its loop would be compiled anew at each call.
_bounded_move = jax.jit(drift.bounded_move, static_argnames="kappa")


def log_prob(rollout: Rollout) -> float:
    """The sampler's log-prob of the whole response, nats."""
    return float(rollout.logp[rollout.kind == ACTION].sum(dtype=np.float64))


def _length(rollout: Rollout) -> int:
    return int((rollout.kind == ACTION).sum())


def _by(*keys: Callable[[Rollout, Counter[str]], float]) -> Rule:
    """The rollout that is largest by the first key, then by the next ...; the first of equals."""

    def pick(rollouts: Sequence[Rollout]) -> int:
        votes = Counter(rollout.text for rollout in rollouts)
        worth = [tuple(key(rollout, votes) for key in keys) for rollout in rollouts]
        return worth.index(max(worth))

    return pick


RULES: Mapping[str, Rule] = {
    "likeliest": _by(lambda r, _: log_prob(r)),  # the model's own answer: the rule that copies
    "majority": _by(lambda r, votes: votes[r.text], lambda r, _: log_prob(r)),
    "rarest": _by(lambda r, votes: -votes[r.text], lambda r, _: log_prob(r)),
    "shortest": _by(lambda r, _: -_length(r), lambda r, _: log_prob(r)),
    "longest": _by(lambda r, _: _length(r), lambda r, _: log_prob(r)),
    "unlikeliest": _by(lambda r, _: -log_prob(r)),
}


@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
    """How the sampler and the archive move. Raises ValueError naming a field out of range."""

    move: str  # "off": tasks in the pool's own order; "fixed": q stays; "bounded": q moves
    signal: str  # what q is drawn to: "loss", or "progress" of it since it was last seen
    stay: float  # > 0, of KL(q', q) against the signal
    home: float  # >= 0, of KL(q', uniform)
    kappa: float  # nats, >= 0: most that KL(q', q) may be in a take
    rules: tuple[str, ...]  # of RULES
    archive_rate: float  # >= 0, of a take's utility on a rule's score; 0 freezes the archive
    sharpness: float  # >= 0, of the scores in the weights
    harm: float  # >= 0, of turning a right answer wrong

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        finite = {
            name: 0 <= vars(self)[name] < math.inf
            for name in ("home", "kappa", "archive_rate", "sharpness", "harm")
        }
        bad = {name: (good, ">= 0") for name, good in finite.items()} | {
            "move": (self.move in ("off", "fixed", "bounded"), "off, fixed, bounded"),
            "signal": (self.signal in ("loss", "progress"), "loss, progress"),
            "stay": (0 < self.stay < math.inf, "> 0"),
            "rules": (
                set(self.rules) <= set(RULES) and len(set(self.rules)) == len(self.rules),
                f"each once of {', '.join(RULES)}",
            ),
        }
        for name, (good, allowed) in bad.items():
            if not good:
                raise ValueError(
                    f"train.curriculum.{name}={vars(self)[name]!r}; allowed: {allowed}"
                )


class Curriculum:
    """The sampler's log q and the archive's scores, and the ledger of how far they drifted.

    ``tasks`` counts the train split's tasks of each universe. Deterministic, and ``restore`` of a
    ``state`` goes on bit for bit.
    """

    def __init__(
        self,
        config: CurriculumConfig,
        tasks: Mapping[str, int],
        *,
        consistency_weight: float,
        consistency_cap: float,
    ) -> None:
        self.config = config
        self.universes = sorted(tasks)
        self._tasks = dict(tasks)
        self._weight, self._cap = consistency_weight, consistency_cap
        self._everywhere = jnp.ones(len(self.universes), bool)
        self._log_base = drift.renormalised(jnp.zeros(len(self.universes)), self._everywhere)
        self._log_q = self._log_base
        self._score = jnp.zeros(len(config.rules))
        self._lost: dict[str, float] = {}  # 1 - reward of each universe when it was last seen
        self._gap: dict[str, list[float]] = {}  # the same of each rule's consistency
        self.ledger: dict[str, float] = {
            "moves": 0,
            "kl": 0.0,
            "drift": 0.0,
            "bound": 0.0,
            "tight_bound": 0.0,
            "broken": 0,
        }

    @property
    def probabilities(self) -> dict[str, float]:
        """q of each universe."""
        return dict(zip(self.universes, np.exp(np.asarray(self._log_q, float)), strict=True))

    @property
    def weights(self) -> Array:
        """w of each rule; [] if there is none."""
        return drift.archive_weights(self._score, sharpness=self.config.sharpness)

    def annotate(self, rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
        """Facts of a group's rollouts: ``endorsement`` = k sum_j w_j 1[rule j picks it], and the
        ``base_probability`` of their task.
        """
        share = np.zeros(len(rollouts))
        for rule, weight in zip(self.config.rules, np.asarray(self.weights, float), strict=True):
            share[RULES[rule](rollouts)] += weight * len(rollouts)
        base = 1 / (len(self.universes) * self._tasks[rollouts[0].source])
        return [{"endorsement": float(e), "base_probability": base} for e in share]

    def learn(self, groups: Sequence[Group]) -> dict[str, float]:
        """Move by what a take tells; numbers for the curves. A take without a group moves nothing.

        Universes that the take did not reach keep the loss last seen there; those never seen count
        as the mean of the others.
        """
        if not groups:
            return self._curves({})
        before, log_q, weight = dict(self._lost), self._log_q, self.weights
        for universe, members in self._by_universe(groups).items():
            rewards = [r.reward for group in members for r in group.rollouts]
            gained = np.clip(np.mean(np.asarray(rewards, float)), 0, LOSS_BOUND)
            self._lost[universe] = float(LOSS_BOUND - gained)
            self._gap[universe] = np.mean([self._gaps(g.rollouts) for g in members], 0).tolist()
        self._score = self._score + self.config.archive_rate * self._utility(groups)
        gain = self._filled(self._lost) + self._weight * self._gaps_of_all() @ self.weights
        if self.config.signal == "progress":
            known = {u: before[u] - lost for u, lost in self._lost.items() if u in before}
            gain = self._filled(known) if known else jnp.zeros_like(gain)
        if self.config.move == "bounded":
            numbers = {"stay": self.config.stay, "home": self.config.home}
            target = drift.tilted(log_q, self._log_base, gain, self._everywhere, **numbers)
            self._log_q = _bounded_move(log_q, target, self._everywhere, kappa=self.config.kappa)
        return self._curves(self._enter(log_q, weight))

    def state(self) -> dict[str, Any]:
        """JSON-able; float32 numbers survive it unchanged."""
        return {
            "universes": self.universes,
            "rules": list(self.config.rules),
            "log_q": np.asarray(self._log_q, float).tolist(),
            "score": np.asarray(self._score, float).tolist(),
            "lost": dict(self._lost),
            "gap": {universe: list(gap) for universe, gap in self._gap.items()},
            "ledger": dict(self.ledger),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. ValueError naming the field if it is of other universes or rules."""
        mine = {"universes": self.universes, "rules": list(self.config.rules)}
        for field, value in mine.items():
            if list(state[field]) != value:
                raise ValueError(f"curriculum state has {field}={state[field]!r}; allowed: {value}")
        self._log_q = jnp.asarray(state["log_q"], self._log_q.dtype)
        self._score = jnp.asarray(state["score"], self._score.dtype)
        self._lost = dict(state["lost"])
        self._gap = {universe: list(gap) for universe, gap in state["gap"].items()}
        self.ledger = dict(state["ledger"])

    # -- what a take tells

    def _by_universe(self, groups: Sequence[Group]) -> dict[str, list[Group]]:
        found: dict[str, list[Group]] = {}
        for group in groups:
            found.setdefault(group.rollouts[0].source, []).append(group)
        return found

    def _gaps(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """D_j of each rule for one group, in [0, 1]."""
        picked = [log_prob(rollouts[RULES[rule](rollouts)]) for rule in self.config.rules]
        return np.asarray(drift.clipped_consistency(jnp.asarray(picked), cap=self._cap), float)

    def _utility(self, groups: Sequence[Group]) -> Array:
        """F - harm B of each rule; the model's own answer is its likeliest."""
        rules = [RULES[name] for name in self.config.rules]
        right = [[g.rollouts[rule(g.rollouts)].correct for rule in rules] for g in groups]
        model = [g.rollouts[RULES["likeliest"](g.rollouts)].correct for g in groups]
        return drift.rule_utility(
            jnp.asarray(right, bool).reshape(len(groups), len(rules)),
            jnp.asarray(model, bool),
            jnp.ones(len(groups), bool),
            harm=self.config.harm,
        )

    def _filled(self, known: Mapping[str, float]) -> Array:
        """[universe], with the mean of what is known where nothing is."""
        mean = float(np.mean(list(known.values())))
        return jnp.asarray([known[u] if u in known else mean for u in self.universes])

    def _gaps_of_all(self) -> Array:
        """[universe rule], filled in the same way."""
        mean = np.mean(list(self._gap.values()), 0)
        rows = [self._gap[u] if u in self._gap else mean for u in self.universes]
        return jnp.asarray(np.reshape(rows, (len(rows), len(self.config.rules))), jnp.float32)

    # -- the ledger

    def _enter(self, log_q: Array, weight: Array) -> dict[str, float]:
        """How far this take's move went, and how far Theorem 5.4 lets it go."""
        pairs = (self._log_q, log_q, self.weights, weight, self._everywhere)
        pairs = tuple(x[None] for x in pairs)
        numbers = {"loss_bound": LOSS_BOUND, "consistency_weight": self._weight}
        lost, gaps = self._filled(self._lost), self._weight * self._gaps_of_all()
        after = (jnp.exp(self._log_q) * (lost + gaps @ self.weights)).sum()
        entry = {
            "kl": drift.relative_entropy(pairs[0], pairs[1], pairs[4])[0],
            "drift": jnp.abs(after - (jnp.exp(log_q) * (lost + gaps @ weight)).sum()),
            "bound": drift.drift_bound(*pairs, **numbers)[0],
            "tight_bound": drift.tight_drift_bound(*pairs, **numbers)[0],
        }
        told = {name: float(x) for name, x in entry.items()}
        for name, value in told.items():
            self.ledger[name] += value
        self.ledger["moves"] += 1
        self.ledger["broken"] += told["drift"] > told["bound"] + 1e-6  # rounding of the sums
        return told

    def _curves(self, entry: Mapping[str, float]) -> dict[str, float]:
        rules = zip(self.config.rules, np.asarray(self.weights, float), strict=True)
        told = (
            dict(entry)
            | {"bounds_broken": self.ledger["broken"]}
            | {f"q.{universe}": p for universe, p in self.probabilities.items()}
            | {f"lost.{universe}": lost for universe, lost in self._lost.items()}
            | {f"rule.{rule}": weight for rule, weight in rules}
        )
        # Names of curves: no slash, no colon.
        return {"curriculum." + re.sub(r"[^\w.-]", ".", n): float(x) for n, x in told.items()}


def build(
    config: CurriculumConfig, tasks: Sequence[Question], algorithm: Algorithm
) -> Curriculum | None:
    """The curriculum of a phase over its train split; None if none is asked for. How much the
    rules' picks are trained, and up to which surprise, are the algorithm's fields, if it has them.
    """
    if config.move == "off":
        return None
    fields = {name: x for name, x in vars(algorithm).items() if name in UNRULED}
    counts = Counter(task.source for task in tasks)
    return Curriculum(config, counts, **{**UNRULED, **fields})


class Steered:
    """A RolloutPool whose universes a curriculum weighs: told before each take, taught after it.

    Its state is part of the pool's, so that both go on from the same take; its curves are among the
    manifest's counts.
    """

    def __init__(self, pool: RolloutPool, curriculum: Curriculum) -> None:
        self._pool, self._curriculum = pool, curriculum

    def take(self, n: int, step: int) -> tuple[list[Group], Manifest]:
        """The pool's groups, drawn with the probabilities of now."""
        self._pool.weigh(self._curriculum.probabilities)
        groups, manifest = self._pool.take(n, step)
        counts = {**manifest.counts, **self._curriculum.learn(groups)}
        return groups, dataclasses.replace(manifest, counts=counts)

    def commit(self, step: int) -> None:
        """The pool's."""
        self._pool.commit(step)

    def state(self) -> dict[str, Any]:
        """Of both."""
        return {"pool": self._pool.state(), "curriculum": self._curriculum.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Of both."""
        self._pool.restore(state["pool"])
        self._curriculum.restore(state["curriculum"])

    def publish(self, version: Version, path: str) -> None:
        """The pool's."""
        self._pool.publish(version, path)

    def weigh(self, probabilities: Mapping[str, float]) -> None:
        """ValueError: a curriculum does."""
        raise ValueError(f"probabilities={dict(probabilities)}; allowed: those of the curriculum")

    def close(self) -> None:
        """The pool's."""
        self._pool.close()
