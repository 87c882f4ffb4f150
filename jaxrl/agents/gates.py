"""Gates: what evidence lets a candidate in. Each is a pure function of a table of evidence.

A gate is judged by how often it lets in what is no better than what stands: ``null_rate`` exchanges
the labels inside the very evidence that a decision was taken on (which arm is new, which score is
whose), which is what a candidate equal to the incumbent would have looked like, and counts the
acceptances. What ships by chance one time in four says little when it ships.

Evidence and parameters are JSON, so that any decision can be taken again from its file.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import stdtr

from jaxrl.agents.grading import length_premium, order_gap
from jaxrl.agents.journal import Json, canonical, draws
from jaxrl.evaluate import Interval, interval
from jaxrl.tasks import screening

Evidence = Mapping[str, Any]
Parameters = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Decision:
    """A gate's word: in or not, and why."""

    accepted: bool
    reason: str


def _ship(accepted: bool, reason: str) -> Decision:
    return Decision(bool(accepted), reason)


def paired_sign(evidence: Evidence, parameters: Parameters) -> Decision:
    """No prompt lost and at least ``min_won`` won, where a prompt is won (lost) if the new arm won
    (lost) more than half of its contexts. Designer-RSI's gate, there with min_won = 1.

    ``evidence["prompts"]``: for each prompt {"contexts": [1 new won, -1 lost, 0 tied, ...], ...}.
    """
    won = lost = 0
    for prompt in evidence["prompts"]:
        contexts = prompt["contexts"]
        won += 2 * contexts.count(1) > len(contexts)
        lost += 2 * contexts.count(-1) > len(contexts)
    reason = f"{won} won, {lost} lost of {len(evidence['prompts'])} prompts"
    return _ship(not lost and won >= parameters["min_won"], reason)


def ungated(evidence: Evidence, parameters: Parameters) -> Decision:
    """Lets everything in: what a gate is compared with."""
    return _ship(True, "no gate")


def strict_improvement(evidence: Evidence, parameters: Parameters) -> Decision:
    """The mean of ``new`` is above that of ``old``, same tasks. SkillOpt's gate."""
    gain = float(np.mean(evidence["new"]) - np.mean(evidence["old"]))
    return _ship(gain > 0, f"gain {gain:+.4f} on {len(evidence['new'])} tasks")


def survival(evidence: Evidence, parameters: Parameters) -> Decision:
    """``candidate`` is among the best ``keep`` by mean score; who comes earlier in ``order``
    (parents first) wins a tie. GraphSkillEvo's survival.

    ``evidence["scores"]``: {member: [score of each validation task]}.
    """
    order, scores = evidence["order"], evidence["scores"]
    means = {member: float(np.mean(scores[member])) for member in order}
    ranked = sorted(order, key=lambda member: -means[member])  # stable: ties keep the order
    place = ranked.index(evidence["candidate"])
    reason = f"place {place + 1} of {len(order)}, mean {means[evidence['candidate']]:.4f}"
    return _ship(place < parameters["keep"], reason)


def calibrated_mean(evidence: Evidence, parameters: Parameters) -> Decision:
    """The gain over the *re-measured* incumbent is above ``noise``, half the width that an A/A
    comparison has. Harness Evolution's gate. ``old`` and ``new`` as in ``strict_improvement``."""
    gain = float(np.mean(evidence["new"]) - np.mean(evidence["old"]))
    return _ship(gain > parameters["noise"], f"gain {gain:+.4f}, noise {parameters['noise']:.4f}")


def predictive_t(evidence: Evidence, parameters: Parameters) -> Decision:
    """What was predicted tells what came: at least ``min_dates`` dates, mean correlation above 0 by
    a one-sided t test at ``level``, and a predicted gain above 0. MemTrial's trust gate.

    ``evidence``: {"dates": [{"predicted": [...], "realised": [...]}, ...], "gain": float}.
    """
    found = [_correlation(d["predicted"], d["realised"]) for d in evidence["dates"]]
    if len(found) < max(parameters["min_dates"], 2):
        return _ship(False, f"{len(found)} dates, {parameters['min_dates']} needed")
    error = float(np.std(found, ddof=1)) / len(found) ** 0.5
    t = float(np.mean(found)) / max(error, 1e-12)
    p = float(stdtr(len(found) - 1, -t))
    reason = f"mean correlation {np.mean(found):+.3f}, p {p:.3g}, gain {evidence['gain']:+.4f}"
    return _ship(p < parameters["level"] and evidence["gain"] > 0, reason)


def below_zero(evidence: Evidence, parameters: Parameters) -> Decision:
    """Is a mean below 0 by ``margin`` standard errors? What it accepts is pruned. ArenaFlow's rule
    with margin 0; 1.645 leaves alone what may as well be above.

    ``evidence``: {"readings": [...], "prior": [count, mean]}; the prior moves the mean, not the
    error.
    """
    readings, (count, prior) = evidence["readings"], evidence["prior"]
    mean = float(np.sum(readings) + count * prior) / (len(readings) + count)
    error = float(np.std(readings, ddof=1)) / len(readings) ** 0.5 if len(readings) > 1 else np.inf
    bound = mean + (parameters["margin"] * error if parameters["margin"] else 0.0)
    return _ship(bound < 0, f"mean {mean:+.3f} of {len(readings)}, upper bound {bound:+.3f}")


def funnel(evidence: Evidence, parameters: Parameters) -> Decision:
    """A task passes all gates of jaxrl/tasks/screening.py. CodeMidas' funnel.

    ``evidence``: the fields of ``screening.Evidence``; ``parameters["demands"]``: those of
    ``Demands``. Gates after the first that fails need no evidence.
    """
    demands = screening.Demands(**parameters["demands"])
    found = screening.screen({"": screening.Evidence(**evidence)}, demands)
    last = next(reason for _, _, reason in reversed(found.log))
    waits = " (waits for a better policy)" if found.retried else ""
    return _ship(bool(found.kept), (last or "every gate passed") + waits)


def grader_controls(evidence: Evidence, parameters: Parameters) -> Decision:
    """A grader's grades hardly move with the order in which it reads, and hardly with words that
    say nothing: mean |difference| at most ``most_order_gap``, |mean difference| at most
    ``most_length_premium``. MiMo's graders.

    ``evidence``: {"orders": for each group [grades by place, one list for each order], "twins":
    [[grade of a rollout, of the same padded], ...] for each group}.
    """
    gap = float(np.mean([order_gap(rows[0], rows[-1]) for rows in evidence["orders"]]))
    plain, padded = zip(*[pair for rows in evidence["twins"] for pair in rows], strict=True)
    premium = length_premium(plain, padded)
    fine = gap <= parameters["most_order_gap"] and abs(premium) <= parameters["most_length_premium"]
    return _ship(fine, f"order moves grades by {gap:.3f}, padding by {premium:+.3f}")


def cited(evidence: Evidence, parameters: Parameters) -> Decision:
    """Every citation of a tree holds: its step lies inside its node's span and its quote stands
    there, byte by byte; what closes an issue is later than it; what is done cites something, and
    with ``own_evidence`` a parent something outside of its children. DENSE's check of evidence.

    ``evidence``: {"observations": [text of each step], "nodes": [{"id", "first", "last", "state",
    "children", "evidence": [citation], "issues": [{citation..., "closed": citation or None}]}]}.
    """
    spans = {node["id"]: range(node["first"], node["last"] + 1) for node in evidence["nodes"]}
    count = 0
    for node in evidence["nodes"]:
        if node["last"] >= len(evidence["observations"]):
            return _ship(False, f"node {node['id']} ends at {node['last']}, which is no step")
        where, inner = f"node {node['id']}", [spans[child] for child in node["children"]]
        closures = [(issue, issue["closed"]) for issue in node["issues"] if issue["closed"]]
        for one in [*node["evidence"], *node["issues"], *(by for _, by in closures)]:
            count += 1
            if fault := _misquoted(one, spans[node["id"]], evidence["observations"]):
                return _ship(False, f"{where}: {fault}")
        for issue, by in closures:
            if by["step"] <= issue["step"]:
                return _ship(False, f"{where}: issue {issue['step']} is closed by {by['step']}")
        if node["state"] == "done":
            steps = [one["step"] for one in node["evidence"]]
            own = [step for step in steps if not any(step in span for span in inner)]
            if not (own if parameters["own_evidence"] else steps):
                return _ship(False, f"{where} is done without evidence of its own")
    return _ship(True, f"{count} citations hold")


def _misquoted(one: Evidence, span: range, observations: Sequence[str]) -> str:
    """What is wrong with a citation; "" if it holds."""
    step = int(one["step"])
    if step not in span or not 0 <= step < len(observations):
        return f"step {step} is not in {span.start} .. {span.stop - 1}"
    held = observations[step].encode()[one["start"] : one["end"]]
    if not held or held != one["quote"].encode():
        return f"step {step} does not hold what is quoted of it"
    return ""


def _correlation(one: list[float], other: list[float]) -> float:
    """Pearson's; 0 where a side does not vary."""
    a, b = np.asarray(one, float), np.asarray(other, float)
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / scale if scale else 0.0


def _flip_contexts(evidence: Evidence, chance: np.random.Generator) -> Evidence:
    """Who was new in a context is a coin; ties stay ties."""
    rows = [prompt["contexts"] for prompt in evidence["prompts"]]
    coins = iter(chance.integers(0, 2, sum(map(len, rows))).tolist())
    return {"prompts": [{"contexts": [-c if next(coins) else c for c in row]} for row in rows]}


def _swap_tasks(evidence: Evidence, chance: np.random.Generator) -> Evidence:
    """Which of a task's two scores is the new one's is a coin."""
    old, new = np.asarray(evidence["old"], float), np.asarray(evidence["new"], float)
    swap = chance.random(len(old)) < 0.5
    return {"old": np.where(swap, new, old), "new": np.where(swap, old, new)}


def _shuffle_members(evidence: Evidence, chance: np.random.Generator) -> Evidence:
    """On each task, whose score is whose is a lot."""
    table = np.asarray([evidence["scores"][member] for member in evidence["order"]], float)
    table = chance.permuted(table, axis=0)
    scores = dict(zip(evidence["order"], table, strict=True))
    return {**evidence, "scores": scores}


def _shuffle_predictions(evidence: Evidence, chance: np.random.Generator) -> Evidence:
    """On each date, which prediction belongs to what is a lot."""
    dates = [
        {"predicted": chance.permutation(d["predicted"]), "realised": d["realised"]}
        for d in evidence["dates"]
    ]
    return {"dates": dates, "gain": evidence["gain"]}


def _flip_readings(evidence: Evidence, chance: np.random.Generator) -> Evidence:
    """The sign of each reading is a coin: what it is about is worth 0."""
    signs = chance.integers(0, 2, len(evidence["readings"])) * 2 - 1
    return {"readings": signs * evidence["readings"], "prior": [0, 0.0]}


def _deal_grades(evidence: Evidence, chance: np.random.Generator) -> Evidence:
    """In each order the grades are dealt out anew: a grader that does not look."""
    orders = [[chance.permutation(row).tolist() for row in rows] for rows in evidence["orders"]]
    return {**evidence, "orders": orders}


def _deal_verdicts(evidence: Evidence, chance: np.random.Generator) -> Evidence:
    """All verdicts are dealt out anew: a verifier that does not look at what it is given."""
    rows = [evidence["stripped"], evidence["restored"], *evidence["attempts"]]
    dealt = iter(chance.permutation([verdict for row in rows for verdict in row]).tolist())
    stripped, restored, *attempts = [[next(dealt) for _ in row] for row in rows]
    return {**evidence, "stripped": stripped, "restored": restored, "attempts": attempts}


def _shuffle_observations(evidence: Evidence, chance: np.random.Generator) -> Evidence:
    """What was seen in which step is a lot: citations by chance."""
    shuffled = chance.permutation(np.array(evidence["observations"], object)).tolist()
    return {**evidence, "observations": shuffled}


Rule = Callable[[Evidence, Parameters], Decision]
Null = Callable[[Evidence, np.random.Generator], Evidence]

GATES: Mapping[str, tuple[Rule, Null]] = {
    "ungated": (ungated, lambda evidence, chance: evidence),
    "paired_sign": (paired_sign, _flip_contexts),
    "strict_improvement": (strict_improvement, _swap_tasks),
    "survival": (survival, _shuffle_members),
    "calibrated_mean": (calibrated_mean, _swap_tasks),
    "below_zero": (below_zero, _flip_readings),
    "predictive_t": (predictive_t, _shuffle_predictions),
    "cited": (cited, _shuffle_observations),
    "funnel": (funnel, _deal_verdicts),
    "grader_controls": (grader_controls, _deal_grades),
}


def decide(gate: str, evidence: Evidence, parameters: Parameters) -> Decision:
    """Ask a gate by name. ValueError for one that does not exist."""
    if gate not in GATES:
        raise ValueError(f"gate={gate!r}; allowed: {', '.join(GATES)}")
    return GATES[gate][0](evidence, parameters)


def null_rate(gate: str, evidence: Evidence, parameters: Parameters, count: int) -> float | None:
    """Share of ``count`` exchanges of labels in which the gate lets the candidate in; None for
    count = 0. The same evidence gives the same rate."""
    return _null_rate(gate, canonical(evidence), canonical(parameters), count)


@functools.lru_cache(maxsize=4096)
def _null_rate(gate: str, evidence: str, parameters: str, count: int) -> float | None:
    if not count:
        return None
    table, numbers = json.loads(evidence), json.loads(parameters)
    rule, exchange = GATES[gate]
    chance = draws("null", gate, evidence)
    return sum(rule(exchange(table, chance), numbers).accepted for _ in range(count)) / count


def acceptance(
    gate: str,
    sample: Callable[[np.random.Generator], Json],
    parameters: Parameters,
    *,
    count: int,
    seed: int,
) -> Interval:
    """How often a gate accepts evidence that ``sample`` draws, with a 95 % interval. With a sampler
    whose candidate is the incumbent this is the gate's null acceptance rate."""
    chance = draws("acceptance", gate, seed)
    accepted = [decide(gate, sample(chance), parameters).accepted for _ in range(count)]
    return interval([float(a) for a in accepted], "normal")


def judged_contexts(
    prompts: int, contexts: int, win: float, loss: float
) -> Callable[[np.random.Generator], Json]:
    """A sampler for ``paired_sign``: each context is won, lost or tied by itself."""

    def sample(chance: np.random.Generator) -> Json:
        lots = chance.random((prompts, contexts))
        table = (lots < win).astype(int) - (lots >= 1 - loss)
        return {"prompts": [{"contexts": row.tolist()} for row in table]}

    return sample
