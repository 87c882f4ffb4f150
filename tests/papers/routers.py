"""Routers of mixtures of experts, one number at a time. Sources: Qwen3-MoE and DeepSeek-V3 (arXiv
2412.19437, Eq. 12-16) as published; the load as in tests' case 32.

``logits[t][e]``; a route of -1 is none.
"""

import math


def softmax(logits):
    top = max(logits)
    total = sum(math.exp(x - top) for x in logits)
    return [math.exp(x - top) / total for x in logits]


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def best(score, k):
    """Indices of the k highest, the lower index first of equals."""
    return sorted(range(len(score)), key=lambda e: (-score[e], e))[:k]


def score(logits, kind):
    return softmax(logits) if kind == "softmax" else [sigmoid(x) for x in logits]


def routes(logits, bias, kind, k):
    found = score(logits, kind)
    return best([s + b for s, b in zip(found, bias, strict=True)], k)


def gates(logits, chosen, kind, normalise, scale):
    """Of the given routes."""
    found = score(logits, kind)
    kept = [found[e] if e >= 0 else 0.0 for e in chosen]
    total = sum(kept) + 1e-20 if normalise else 1
    return [scale * s / total for s in kept]


def load(chosen, mask, experts):
    count = [0] * experts
    for mine, counted in zip(chosen, mask, strict=True):
        for e in mine:
            if counted and e >= 0:
                count[e] += 1
    return count


def evenness(count):
    """Numbers of one layer's load, by the kernel's name."""
    experts, total = len(count), sum(count)
    mean = total / experts
    share = [n / total for n in count]
    return {
        "max_share": max(share),
        "normalised_entropy": -sum(f * math.log(f) for f in share if f) / math.log(experts),
        "load_cv": math.sqrt(sum((n - mean) ** 2 for n in count) / experts) / mean,
        "load_peak": max(count) / mean,
        "cold_share": sum(n < 0.1 * mean for n in count) / experts,
    }


def balance(probability, share):
    return len(share) * sum(f * p for f, p in zip(share, probability, strict=True))


def agreement(chosen, recorded):
    return len({e for e in chosen if e >= 0} & set(recorded)) / len(chosen)
