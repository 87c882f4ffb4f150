"""CISPO, one number at a time. Source: arXiv 2506.13585.

Rows are rollouts; ``acted[i][t]`` says which tokens count, ``valid[i]`` which rollouts. The held
ratios are constants: they are formed from ``at``, the log-probs where the slope is taken.
"""

import math


def scaled(reward, group, valid, i):
    """(R_i - mean) / std over the valid rollouts of the group, std over n - 1."""
    members = [reward[j] for j in range(len(reward)) if valid[j] and group[j] == group[i]]
    n = len(members)
    mean = sum(members) / n
    std = math.sqrt(sum((r - mean) ** 2 for r in members) / (n - 1)) if n > 1 else 0.0
    return (reward[i] - mean) / std if std >= 1e-8 else 0.0


def loss(logp, at, old_logp, sampler_logp, reward, group, valid, acted, p):
    """Mean over the tokens of all responses of -clip(r) A logp; ``p``: parameters by name."""
    total, tokens = 0.0, 0
    for i in range(len(reward)):
        if not valid[i]:
            continue
        advantage = scaled(reward, group, valid, i)
        for t, counts in enumerate(acted[i]):
            if not counts:
                continue
            held = min(max(math.exp(at[i][t] - old_logp[i][t]), p["ratio_floor"]), p["ratio_cap"])
            x = -held * advantage * logp[i][t]
            if p["mismatch_cap"] < math.inf:
                x *= min(math.exp(old_logp[i][t] - sampler_logp[i][t]), p["mismatch_cap"])
            total += x
            tokens += 1
    return total / max(tokens, 1)
