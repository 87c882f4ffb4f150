"""ExpDis, one number at a time. Source: arXiv 2610.10536 and its authors' code, as specified.

Rows are rollouts; ``acted[i][t]`` says which tokens belong to the response.
"""

import math

import numpy as np


def network(layers, x):
    """Three linear layers, ReLU between them; ``layers`` holds (kernel, bias), input by output."""
    for number, (kernel, bias) in enumerate(layers):
        if number:
            x = [max(0.0, value) for value in x]
        x = [
            sum(x[i] * kernel[i][o] for i in range(len(x))) + bias[o] for o in range(len(kernel[0]))
        ]
    return x


def square_error(target, predictor, x):
    """Mean over dimensions of (target - predictor)^2: what the predictor descends."""
    a, b = network(target, x), network(predictor, x)
    return sum((p - q) ** 2 for p, q in zip(a, b, strict=True)) / len(a)


def novelty(square_errors):
    """Mean over layers of sqrt(error + 1e-8)."""
    return sum(math.sqrt(e + 1e-8) for e in square_errors) / len(square_errors)


def neighbour_novelty(features, memory, k):
    """Mean of 1 - cosine to the k nearest of what was kept."""

    def length(x):
        return math.sqrt(sum(value * value for value in x))

    distances = sorted(
        1 - sum(a * b for a, b in zip(features, m, strict=True)) / (length(features) * length(m))
        for m in memory
    )[:k]
    return sum(distances) / len(distances) if distances else 0.0


def elliptical_novelty(features, memory, ridge):
    """sqrt(f^T S^-1 f) with S = ridge I + sum m m^T, all of length 1."""
    matrix = ridge * np.eye(len(features))
    for m in memory:
        unit = np.asarray(m) / np.linalg.norm(m)
        matrix += np.outer(unit, unit)
    unit = np.asarray(features) / np.linalg.norm(features)
    return math.sqrt(unit @ np.linalg.inv(matrix) @ unit)


def overlong(length, limit, buffer, penalty):
    """0 to -penalty over the last ``buffer`` tokens before the limit."""
    if length <= limit - buffer:
        return 0.0
    return -min(1.0, (length - (limit - buffer)) / buffer) * penalty


def total_reward(reward, new, length, p):
    """+1 with the bonus or -1, then the penalty."""
    verdict = 1.0 + p["novelty_weight"] * new if reward >= 1 else -1.0
    limit, buffer = p["overlong_limit_tokens"], p["overlong_buffer_tokens"]
    return verdict + overlong(length, limit, buffer, p["overlong_penalty"])


def keep(rewards, novelty_weight):
    """Dynamic sampling: an all-right group may differ in novelty, an all-wrong one does not."""
    return max(rewards) != min(rewards) or (novelty_weight > 0 and min(rewards) >= 1)


def loss(logp, old_logp, reward, new, group, valid, truncated, acted, p):
    """Loss of one update; ``new`` holds each rollout's novelty, ``p`` the parameters by name."""
    rollouts = range(len(reward))
    length = [sum(acted[i]) if valid[i] else 0 for i in rollouts]
    total = [total_reward(reward[i], new[i], length[i], p) for i in rollouts]
    trained = []
    for i in rollouts:
        members = [total[j] for j in rollouts if valid[j] and group[j] == group[i]]
        varies = len(members) > 1 and max(members) != min(members)
        trained.append(valid[i] and not truncated[i] and varies and length[i] > 0)
    value = 0.0
    for i in rollouts:
        if not trained[i]:
            continue
        members = [total[j] for j in rollouts if valid[j] and group[j] == group[i]]
        advantage = total[i] - sum(members) / len(members)
        for t, counts in enumerate(acted[i]):
            if counts:
                ratio = math.exp(logp[i][t] - old_logp[i][t])
                bounded = max(1 - p["clip_low"], min(1 + p["clip_high"], ratio))
                value -= min(ratio * advantage, bounded * advantage)
    return value / (max(sum(trained), 1) * p["length_tokens"])


def looping(text, span, repeats):
    """Does some span of so many characters come so many times in a row?"""
    return any(
        text[at : at + span * repeats] == text[at : at + span] * repeats
        for at in range(len(text) - span * repeats + 1)
    )
