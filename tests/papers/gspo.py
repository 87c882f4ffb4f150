"""GSPO, one number at a time. Source: arXiv 2507.18071.

Rows are rollouts; ``acted[i][t]`` says which tokens count, ``valid[i]`` which rollouts.
"""

import math


def scaled(reward, group, valid, i):
    """(R_i - mean) / std over the valid rollouts of the group, std over n - 1."""
    members = [reward[j] for j in range(len(reward)) if valid[j] and group[j] == group[i]]
    n = len(members)
    mean = sum(members) / n
    std = math.sqrt(sum((r - mean) ** 2 for r in members) / (n - 1)) if n > 1 else 0.0
    return (reward[i] - mean) / std if std >= 1e-8 else 0.0


def ratio(logp, old_logp, acted):
    """(probability of the response / old probability) ^ (1 / length)."""
    tokens = [t for t, counts in enumerate(acted) if counts]
    new, old = sum(logp[t] for t in tokens), sum(old_logp[t] for t in tokens)
    return (math.exp(new) / math.exp(old)) ** (1 / len(tokens))


def loss(logp, old_logp, sampler_logp, reward, group, valid, acted, p):
    """Mean over responses of -min(s A, clip(s) A) times the mean weight of its tokens."""
    trust, terms = p["trust"], []
    for i in range(len(reward)):
        tokens = [t for t, counts in enumerate(acted[i]) if counts]
        if not valid[i] or not tokens:
            continue
        advantage, s = scaled(reward, group, valid, i), ratio(logp[i], old_logp[i], acted[i])
        bounded = max(1 - trust["clip_low"], min(1 + trust["clip_high"], s))
        x = -min(s * advantage, bounded * advantage)
        if advantage < 0:
            x = min(x, -advantage * trust["dual_clip"])
        gaps = [old_logp[i][t] - sampler_logp[i][t] for t in tokens]
        weights = [1.0] * len(tokens)
        if trust["mismatch"] == "truncate":
            weights = [min(math.exp(gap), trust["mismatch_high"]) for gap in gaps]
        elif trust["mismatch"] == "rollout_truncate":
            weights = [min(math.exp(sum(gaps)), trust["mismatch_high"])] * len(tokens)
        terms.append(x * sum(weights) / len(tokens))
    return sum(terms) / max(len(terms), 1)
