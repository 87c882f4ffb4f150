"""Held-out accuracy: avg@k, unbiased pass@k, greedy; intervals over prompts and over seeds. No jax
here."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxrl.pool.contract import Generator, Request, Tokenizer
from jaxrl.pool.rollout import StopReason
from jaxrl.tasks.contract import Task, TaskSource, Verdict

Method = Literal["t", "normal", "bootstrap"]

# Evaluation draws under group ids from here on, training below: their random keys never coincide.
FIRST_GROUP = 2**30

BOOTSTRAP_DRAWS = 2000


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold a right one: 1 - C(n-c, k) / C(n,
    k).

    The unbiased estimator of «at least one of k is right» from n samples of which c are right (Chen
    et al. 2021, equation 1, arXiv:2107.03374), as a product of small factors. k = 1 gives c / n.
    ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"n={n}, c={c}, k={k}; allowed: 0 <= c <= n and 1 <= k <= n")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval: of what, and how it was found, stands beside the
    numbers."""

    mean: float
    low: float | None  # None: one value has no interval
    high: float | None
    level: float
    method: Method
    n: int

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)


def interval(values: Sequence[float], method: Method, *, level: float = 0.95) -> Interval:
    """Confidence interval of the mean of independent values.

    "t" is mean +- t(n-1) s / sqrt(n), s with n-1: for few values, such as seeds. "normal" has the
    normal quantile instead: for many. "bootstrap" takes quantiles of the mean of 2000 resamples
    from a fixed seed: for many bounded values, such as prompts.

    One value shows no spread: low and high are None then. ValueError for no values, values that are
    not finite, and an unknown method or level.
    """
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all():
        raise ValueError(f"values={values!r}; allowed: a row of one finite number or more")
    if method not in ("t", "normal", "bootstrap"):
        raise ValueError(f"method={method!r}; allowed: 't', 'normal', 'bootstrap'")
    if not 0 < level < 1:
        raise ValueError(f"level={level!r}; allowed: between 0 and 1")
    mean, n = float(array.mean()), len(array)
    if n == 1:
        return Interval(mean, None, None, level, method, n)
    if method == "bootstrap":
        low, high = _bootstrap(array, level)
        return Interval(mean, low, high, level, method, n)
    from scipy.special import ndtri, stdtrit  # slow to load, and most intervals are bootstrap's

    upper = 0.5 + level / 2
    quantile = float(stdtrit(n - 1, upper) if method == "t" else ndtri(upper))
    half = quantile * float(array.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, level, method, n)


def _bootstrap(array: np.ndarray, level: float) -> tuple[float, float]:
    draws = np.random.Generator(np.random.Philox(0))
    picks = draws.integers(0, len(array), (BOOTSTRAP_DRAWS, len(array)))
    low, high = np.quantile(array[picks].mean(axis=1), (0.5 - level / 2, 0.5 + level / 2))
    return float(low), float(high)


def paired(
    before: Mapping[int, float],
    after: Mapping[int, float],
    *,
    method: Method = "t",
    level: float = 0.95,
) -> Interval:
    """Interval of the differences after - before, matched by seed (or prompt): what both share
    cancels.

    ValueError naming the seeds that only one side has: leaving them out would change what is
    compared.
    """
    alone = sorted(set(before) ^ set(after))
    if alone or not before:
        raise ValueError(
            f"seeds {alone} have no partner; allowed: the same seeds on both sides, at least one"
        )
    return interval([after[seed] - before[seed] for seed in sorted(before)], method, level=level)


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """Accuracy of one model on one set of prompts. Fractions in [0, 1]; correct is a verifier's
    full mark."""

    avg_at_k: float  # mean over prompts of the fraction of samples that are correct
    pass_at_k: float  # mean over prompts of the unbiased chance that one of k is correct
    greedy: float  # fraction of prompts whose most likely response is correct
    score: float  # mean score of the samples as the verifier gives it, partial marks included
    truncated: float  # fraction of samples that were cut by max_new_tokens
    interval: Interval  # of avg_at_k, over prompts
    pass_interval: Interval  # of pass_at_k, over prompts
    greedy_interval: Interval  # of greedy, over prompts
    k: int
    samples: int  # a prompt, k or more
    temperature: float
    max_new_tokens: int
    prompts: int  # that the means are over
    rejected_long: int  # prompts over the limit, left out of the means
    unverified: (
        int  # prompts left out of the means because the verifier failed on one of their responses
    )
    correct: Mapping[str, int]  # content hash of a prompt: how many of its samples are correct
    version: tuple[int, int, str]  # epoch, step and digest of the weights

    def to_json(self) -> dict[str, Any]:
        """Plain values, for ``eval/<step>.json`` and ``summary.json``."""
        return dataclasses.asdict(self)


def evaluate(
    generator: Generator,
    tokenizer: Tokenizer,
    source: TaskSource,
    tasks: Sequence[Task],
    *,
    samples: int,
    temperature: float,
    max_new_tokens: int,
    k: int | None = None,
    max_prompt_tokens: int | None = None,
    first_group: int = FIRST_GROUP,
    method: Method = "bootstrap",
) -> EvalResult:
    """Sample each task ``samples`` times at ``temperature`` and once greedily; score the texts.

    ``k`` defaults to ``samples``. Task i draws under group ``first_group + i``, so the same tasks
    with the same weights give the same numbers. Prompts over ``max_prompt_tokens`` and those whose
    verifier fails are left out of the means and counted: neither is the model's mistake. ValueError
    for a temperature that is not positive, for k > samples, for two versions among the completions,
    and if no prompt is left.
    """
    k = samples if k is None else k
    if not temperature > 0:
        raise ValueError(
            f"eval.temperature={temperature!r}; allowed: > 0, greedy is reported beside"
        )
    if not 1 <= k <= samples:
        raise ValueError(f"k={k}, eval.samples={samples}; allowed: 1 <= k <= eval.samples")
    prompts = [tokenizer.prompt(task.prompt) for task in tasks]
    longest = math.inf if max_prompt_tokens is None else max_prompt_tokens
    fits = [i for i, prompt in enumerate(prompts) if 0 < len(prompt) <= longest]
    if not fits:
        raise ValueError(f"none of {len(tasks)} prompts fits max_prompt_tokens={max_prompt_tokens}")
    asked = {first_group + i: prompts[i] for i in fits}
    requests = _requests(asked, samples, temperature, max_new_tokens, tokenizer.stop_ids)
    completions = generator.generate(requests)
    versions = {completion.version for completion in completions}
    if len(completions) != len(requests) or len(versions) != 1:
        raise ValueError(
            f"{len(completions)} completions of versions {sorted(versions)} for {len(requests)} "
            "requests; allowed: one each, all of one version"
        )
    rows = [completions[at : at + samples + 1] for at in range(0, len(requests), samples + 1)]
    verdicts = {
        i: _verdicts(source, tasks[i], [tokenizer.decode(c.tokens.tolist()) for c in row])
        for i, row in zip(fits, rows, strict=True)
    }
    marked = {i: row for i, row in verdicts.items() if row is not None}
    if not marked:
        raise ValueError(f"the verifier failed on all of {len(fits)} prompts")
    cut = [c.stop_reason is StopReason.LENGTH for row in rows for c in row[:samples]]
    return EvalResult(
        **_accuracy(list(marked.values()), k, method),
        truncated=float(np.mean(cut)),
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        rejected_long=len(tasks) - len(fits),
        unverified=len(fits) - len(marked),
        correct={
            tasks[i].content_hash: sum(v.correct for v in row[:samples])
            for i, row in marked.items()
        },
        version=dataclasses.astuple(versions.pop()),
    )


def _requests(
    prompts: Mapping[int, Sequence[int]],
    samples: int,
    temperature: float,
    max_new_tokens: int,
    stop_ids: frozenset[int],
) -> list[Request]:
    """For each group: its samples, then the greedy one."""
    return [
        Request(
            prompt=prompt,
            group=group,
            sample=sample,
            temperature=temperature if sample < samples else 0.0,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
        )
        for group, prompt in prompts.items()
        for sample in range(samples + 1)
    ]


def _verdicts(source: TaskSource, task: Task, texts: Sequence[str]) -> list[Verdict] | None:
    """Verdicts on the responses to one task; None if the verifier fails on one of them."""
    try:
        verdicts = [source.verify(task, text) for text in texts]
    except Exception:  # whatever a verifier raises, the model is not to blame; the caller counts
        return None
    return verdicts if all(math.isfinite(verdict.score) for verdict in verdicts) else None


def _accuracy(rows: Sequence[Sequence[Verdict]], k: int, method: Method) -> dict[str, Any]:
    """The means and intervals over prompts; the last verdict of each row is the greedy one."""
    samples = len(rows[0]) - 1
    correct = [sum(verdict.correct for verdict in row[:-1]) for row in rows]
    average = interval([c / samples for c in correct], method)
    passes = interval([pass_at_k(samples, c, k) for c in correct], method)
    greedy = interval([float(row[-1].correct) for row in rows], method)
    return {
        "avg_at_k": average.mean,
        "pass_at_k": passes.mean,
        "greedy": greedy.mean,
        "score": float(np.mean([verdict.score for row in rows for verdict in row[:-1]])),
        "interval": average,
        "pass_interval": passes,
        "greedy_interval": greedy,
        "k": k,
        "samples": samples,
        "prompts": len(rows),
    }
