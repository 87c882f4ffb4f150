"""FLOPs of a take by formula, from the form of the models and how the step walks through them.

What a position costs in the forward pass stands in ``model/flops.py``. The backward pass costs the
same once for what flows to the inputs, and once more for the trained kernels' own gradients.
``useful`` is what the method asks for: each observer and each other scorer forward, the student
(and each lesson's role) forward and backward, every position of the bucket counted, padding too.
``executed`` adds what is computed again under ``model.remat``, the head's second forward pass under
``model.score_remat``, and what the attention at hand computes beyond the causal half: dense, all T
keys; splash, half a block of keys more, and going back the scores and the weights' gradients once
for the queries and once more for keys and values; tokamax's, these once, over longer blocks.
"""

import dataclasses
from collections.abc import Collection, Mapping

from jaxrl.algorithms.contract import Algorithm
from jaxrl.model import attention, tokamax_kernels, transformer
from jaxrl.model.flops import NOTHING, Position, forward, kernels, keys_seen, routed
from jaxrl.model.form import ModelConfig
from jaxrl.train.step import Plan

DENSE, SPLASH, TOKAMAX = "dense", "splash", "tokamax"


def computed_again(config: ModelConfig, form: str) -> tuple[float, float]:
    """Shares of the trunk's and of the attention's forward FLOPs that the backward pass repeats.

    The last product of an inner block is never needed again. Dense attention keeps no weights: it
    is repeated even where what it gives is kept.
    """
    if config.remat in ("none", "dots"):
        return 0.0, 0.0 if config.remat == "none" else 1.0
    parts = {"down": 0.0, "projections": 0.0, "inner": 0.0, "rest": 0.0}
    for name, numbers in kernels(config).items():
        last = [part for part in name.split("/") if part not in ("kernel",)][-1]
        kind = {"query": "projections", "key": "projections", "value": "projections"}.get(last)
        kind = kind or {"gate": "inner", "up": "inner", "down": "down"}.get(last, "rest")
        if kind == "inner" and config.experts.count:
            kind = "rest"  # experts' are not kept by name
        parts[kind] += numbers
    kept = {"down"}
    kept |= {"projections"} if config.remat in ("projections", "inner") else set()
    kept |= {"inner"} if config.remat == "inner" else set()
    again = sum(numbers for kind, numbers in parts.items() if kind not in kept)
    repeated = form == DENSE or config.remat == "full"
    return again / sum(parts.values()), float(repeated)


def attention_overhead(config: ModelConfig, tokens: int, form: str) -> tuple[float, float]:
    """What the attention at hand computes over the keys seen: forward, and backward over twice the
    forward pass.
    """
    seen = sum(keys_seen(config, layer, tokens) for layer in range(config.layers))
    if form == DENSE:
        return config.layers * tokens / seen, config.layers * tokens / seen
    block = min(attention.BLOCK, tokens)
    over = (seen + config.layers * block / 2) / seen
    if form == SPLASH:
        return over, over * 7 / 4  # seven products going back, where four would do
    keys = tokamax_kernels.keys_at_once(tokens, block)
    return over, (seen + config.layers * keys / 2) / seen * 5 / 4


@dataclasses.dataclass(frozen=True)
class Work:
    """FLOPs of a take, all devices together."""

    useful: Position
    executed: Position
    experts: float  # executed in the products of experts' rows with weights
    experts_own: float  # executed for the gradients of these weights


def work(
    algorithm: Algorithm,
    plan: Plan,
    forms: Mapping[str, ModelConfig],
    tokens: Mapping[str, int],
    trained: Mapping[str, Collection[str]],
    attentions: Mapping[str, str],
    *,
    observes_student: bool,
) -> Work:
    """The FLOPs of one take.

    ``forms`` are the models by who scores, ``tokens`` the length of a row by view, ``trained`` the
    names of the parameters that each learner trains, ``attentions`` the form of it by view.
    ``observes_student``: a student with experts is always observed.
    """
    rows = plan.rollouts
    useful, executed, experts, own = NOTHING, NOTHING, 0.0, 0.0

    def pass_of(who: str, view: str) -> tuple[Position, Position]:
        """Useful and executed FLOPs of a row, forward."""
        config, length = forms[who], tokens[view]
        one = forward(config, length).scaled(length, length, length)
        over, _ = attention_overhead(config, length, attentions[view])
        return one, one.scaled(1, over, 1)

    def add(pair: tuple[Position, Position], times: float) -> None:
        nonlocal useful, executed
        useful += pair[0].scaled(times, times, times)
        executed += pair[1].scaled(times, times, times)

    def add_forward(who: str, view: str, times: float) -> None:
        nonlocal experts
        add(pass_of(who, view), times)
        experts += times * tokens[view] * _experts(forms[who])

    observers = list(algorithm.observers)
    if observes_student and ("student", "plain") not in observers:
        observers.append(("student", "plain"))
    known = [pair for pair in observers if pair[0] in forms]
    again = algorithm.refresh == "update" and plan.updates > 1
    for who, view in known:
        add_forward(who, view, rows * (1 + (plan.epochs if again else 0)))
    learners = [("student", algorithm.scorers), *((who, x.scorers) for who, x in algorithm.lessons)]
    for learner, scorers in learners:
        for who, view in scorers:
            if who not in forms:
                continue
            times = rows * plan.epochs
            add_forward(who, view, times)
            if forms[who].score_remat:  # the chunk's logits, going back
                add((NOTHING, pass_of(who, view)[1].scaled(0, 0, 1)), times)
            if who == learner:
                add(_back(forms[who], tokens[view], trained[who], attentions[view]), times)
                experts += times * tokens[view] * _experts_back(forms[who])
                own += times * tokens[view] * _experts(forms[who], trained[who])
    return Work(useful, executed, experts, own)


def _experts(config: ModelConfig, names: Collection[str] | None = None) -> float:
    """FLOPs of a position in experts' products, forward; of some of their parameters."""
    own = kernels(config)
    return 2 * sum(
        n for name, n in own.items() if routed(name, config) and (names is None or name in names)
    )


def _experts_back(config: ModelConfig) -> float:
    """Going back: to the inputs, and what is computed again."""
    again = [name for name in kernels(config) if name.split("/")[-1] != "down"]
    repeated = 0.0 if config.remat in ("none", "dots") else _experts(config, again)
    return _experts(config) + repeated


def _back(
    config: ModelConfig, tokens: int, trained: Collection[str], form: str
) -> tuple[Position, Position]:
    """Useful and executed FLOPs of a row, backward."""
    own = kernels(config)
    share = sum(n for name, n in own.items() if name in trained) / sum(own.values())
    head = any(name in trained for name in transformer.head_names(config))
    one = forward(config, tokens).scaled(tokens, tokens, tokens)
    useful = one.scaled(1 + share, 2, 1 + head)
    forth, back = attention_overhead(config, tokens, form)
    trunk, attended = computed_again(config, form)
    return useful, useful.scaled(1, back, 1) + one.scaled(trunk, attended * forth, 0)
