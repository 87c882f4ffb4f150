"""PPO with a value model or without, one number at a time. arXiv 1707.06347, 1506.02438.

Rows are rollouts; ``acted[i][t]`` says which tokens count, ``valid[i]`` which rollouts.
"""

import math


def advantages(old_logp, ref_logp, value, reward, valid, acted, returns):
    """{(i, t): A_t}, by the sum over what follows: sum_k (discount trace)^k d_{t+k}."""
    found = {}
    discount, trace = returns["discount"], returns["trace"]
    for i, r in enumerate(reward):
        tokens = [t for t, counts in enumerate(acted[i]) if counts and valid[i]]
        rewards = [r if t == tokens[-1] else 0.0 for t in tokens]
        if returns["kl_weight"] > 0:
            for k, t in enumerate(tokens):
                rewards[k] -= returns["kl_weight"] * (old_logp[i][t] - ref_logp[i][t])
        values = [value[i][t] if returns["value"] else 0.0 for t in tokens] + [0.0]
        surprise = [rewards[k] + discount * values[k + 1] - values[k] for k in range(len(tokens))]
        for k, t in enumerate(tokens):
            found[i, t] = sum(
                (discount * trace) ** (j - k) * surprise[j] for j in range(k, len(tokens))
            )
    return found


def whitened(signal):
    """(x - mean) / std over all entries, std over n - 1."""
    n = len(signal)
    mean = sum(signal.values()) / n
    std = math.sqrt(sum((x - mean) ** 2 for x in signal.values()) / (n - 1))
    return {at: (x - mean) / std for at, x in signal.items()}


def loss(logp, old_logp, sampler_logp, ref_logp, value, reward, valid, acted, p):
    """Mean over all tokens of the policy's term; ``p``: parameters by name."""
    trust = p["trust"]
    advantage = advantages(old_logp, ref_logp, value, reward, valid, acted, p["returns"])
    if p["whiten"]:
        advantage = whitened(advantage)
    total = 0.0
    for (i, t), a in advantage.items():
        ratio = math.exp(logp[i][t] - old_logp[i][t])
        bounded = max(1 - trust["clip_low"], min(1 + trust["clip_high"], ratio))
        x = -min(ratio * a, bounded * a)
        if a < 0:
            x = min(x, -a * trust["dual_clip"])
        if trust["mismatch"] == "truncate":
            x *= min(math.exp(old_logp[i][t] - sampler_logp[i][t]), trust["mismatch_high"])
        total += x
    return total / max(len(advantage), 1)


def value_loss(new_value, old_logp, ref_logp, value, reward, valid, acted, p):
    """Mean over all tokens of the held squared error of the value to A + V."""
    advantage = advantages(old_logp, ref_logp, value, reward, valid, acted, p["returns"])
    total = 0.0
    for (i, t), a in advantage.items():
        goal, old, new = a + value[i][t], value[i][t], new_value[i][t]
        held = max(old - p["value_clip"], min(old + p["value_clip"], new))
        total += max((new - goal) ** 2, (held - goal) ** 2) / 2
    return total / max(len(advantage), 1)
