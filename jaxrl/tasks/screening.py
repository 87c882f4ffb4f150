"""Which tasks are worth training on: CodeMidas' gates, each from evidence to a reason. No jax.

A task has a starting state with a hole, a reference that fills it, and hidden tests. In the order
of their cost:

    fail_first   the starting state fails the hidden tests, every time
    reference    starting state and reference pass them, every time
    leaks        nothing of the reference can be reached from inside
    audit        reviewers find nothing wrong with the tests
    stable       the same submission gets the same verdict again
    spread       of the screening rollouts some pass and some fail

``spread`` speaks of a policy and not of the task alone: one that no rollout solved waits in a retry
pool for a better policy, one that all solved is dropped as too easy. A task of true rate p survives
n rollouts with ``survival(p, n)``: for n = 8 one of p = 0.02 does in 15 of 100, so hard tasks that
are sound are lost without the retry pool. And a verifier that errs makes solved tasks look mixed,
hence ``stable``, which the paper does not have. Source: arXiv 2609.22068, sections 3 and 4.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What was seen of one task. Verdicts are of the hidden tests, true: all pass; each from a
    clean run of its own, with the same seeds."""

    stripped: Sequence[bool]  # of the starting state
    restored: Sequence[bool]  # with the reference
    leaks: Sequence[str]  # where content of the reference could be reached
    faults: Sequence[str]  # what reviewers found wrong
    attempts: Sequence[Sequence[bool]]  # of each screening rollout's submission, graded repeatedly


@dataclasses.dataclass(frozen=True)
class Demands:
    """How much evidence is asked for. Raises ValueError naming the field."""

    stripped_runs: int  # 2 in the source
    restored_runs: int  # 4
    rollouts: int  # screening rollouts
    gradings: int  # of each submission; 1: stability is not looked at

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < (2 if name == "rollouts" else 1):
                raise ValueError(f"demands.{name}={value!r}; allowed: 1 or more, 2 rollouts")


Gate = Callable[[Evidence, Demands], str]


def _asked(what: str, found: int, least: int) -> None:
    if found < least:
        raise ValueError(f"{found} {what}; allowed: at least {least}")


def fail_first(evidence: Evidence, demands: Demands) -> str:
    """ "" if the starting state fails every time."""
    _asked("runs of the starting state", len(evidence.stripped), demands.stripped_runs)
    if not any(evidence.stripped):
        return ""
    return "solved from the start" if all(evidence.stripped) else "flaky"


def reference(evidence: Evidence, demands: Demands) -> str:
    """ "" if the reference passes every time. A test that fails by chance in one of two runs gets
    through four with probability 1/16, one that fails in one of ten with 0.66."""
    _asked("runs of the reference", len(evidence.restored), demands.restored_runs)
    if all(evidence.restored):
        return ""
    return "flaky" if any(evidence.restored) else "impossible"


def leaks(evidence: Evidence, demands: Demands) -> str:
    """ "" if nothing of the reference can be reached."""
    return "leak" if evidence.leaks else ""


def audit(evidence: Evidence, demands: Demands) -> str:
    """ "" if reviewers found nothing."""
    return "faulty" if evidence.faults else ""


def stable(evidence: Evidence, demands: Demands) -> str:
    """ "" if every submission gets one verdict."""
    for verdicts in evidence.attempts:
        _asked("gradings of a submission", len(verdicts), demands.gradings)
    return "flaky" if any(len({*verdicts}) > 1 for verdicts in evidence.attempts) else ""


def spread(evidence: Evidence, demands: Demands) -> str:
    """ "" if of the screening rollouts some pass and some fail; the first grading counts."""
    _asked("screening rollouts", len(evidence.attempts), demands.rollouts)
    passed = [verdicts[0] for verdicts in evidence.attempts]
    if mixed(np.asarray(passed, float)):
        return ""
    return "too easy" if passed[0] else "unsolved"


GATES: Mapping[str, Gate] = {
    gate.__name__: gate for gate in (fail_first, reference, leaks, audit, stable, spread)
}
RETRIED = ("spread", "unsolved")


def mixed(rewards: np.ndarray) -> bool:
    """Whether the finite rewards of a group differ: the filter on rollouts in training (``keep`` of
    an algorithm with dynamic sampling) and, over screening rollouts, on tasks."""
    finite = rewards[np.isfinite(rewards)]
    return finite.size > 0 and bool(np.ptp(finite) > 0)


def survival(rate: float, rollouts: int) -> float:
    """1 - p^n - (1 - p)^n: the chance that a task that is solved at this rate passes ``spread``."""
    return 1 - rate**rollouts - (1 - rate) ** rollouts


@dataclasses.dataclass(frozen=True)
class Screening:
    """What became of every task, by key; in = kept + retried + dropped."""

    kept: Sequence[str]
    retried: Sequence[str]  # to be screened again with a better policy
    dropped: Mapping[str, tuple[str, str]]  # key: gate, reason
    log: Sequence[tuple[str, str, str]]  # (key, gate, reason, "" where it passed), in order

    @property
    def counts(self) -> dict[str, int]:
        """Tasks by what became of them: kept, retried, and «gate: reason» of the dropped."""
        reasons = Counter(f"{gate}: {reason}" for gate, reason in self.dropped.values())
        return {"kept": len(self.kept), "retried": len(self.retried), **reasons}


def screen(
    evidence: Mapping[str, Evidence], demands: Demands, gates: Iterable[str] = tuple(GATES)
) -> Screening:
    """Run the gates in order on each task, up to the first that it fails.

    Another order keeps the same tasks; it changes costs, and which of several reasons a task is
    dropped for. A task that only ``spread`` refuses, as unsolved, waits for a better policy.
    """
    order = [(name, GATES[name]) for name in gates]
    kept, retried, log = [], [], []
    dropped: dict[str, tuple[str, str]] = {}
    for key, seen in evidence.items():
        failures = []
        for name, gate in order:
            reason = gate(seen, demands)
            log.append((key, name, reason))
            if not reason:
                continue
            failures.append((name, reason))
            if failures[0] != RETRIED:
                break
        if not failures:
            kept.append(key)
        elif failures == [RETRIED]:
            retried.append(key)
        else:
            dropped[key] = failures[-1]
    return Screening(kept, retried, dropped, log)


def rescreen(
    screening: Screening,
    attempts: Mapping[str, Sequence[Sequence[bool]]],
    evidence: Mapping[str, Evidence],
    demands: Demands,
) -> Screening:
    """Screen the retry pool again, with the submissions of a better policy in place of the old
    ones. Tasks without new attempts go on waiting; nothing else is looked at anew."""
    asked = [key for key in screening.retried if key in attempts]
    again = screen(
        {key: dataclasses.replace(evidence[key], attempts=attempts[key]) for key in asked}, demands
    )
    waiting = [key for key in screening.retried if key not in attempts]
    return Screening(
        kept=[*screening.kept, *again.kept],
        retried=[*waiting, *again.retried],
        dropped={**screening.dropped, **again.dropped},
        log=[*screening.log, *again.log],
    )
