"""REINFORCE++ and its variant with a group's baseline, one number at a time. arXiv 2501.03262.

Rows are rollouts; ``acted[i][t]`` says which tokens count, ``valid[i]`` which rollouts.
"""

import math


def signals(old_logp, ref_logp, reward, group, valid, acted, p):
    """{(i, t): what is whitened}: discounted rewards to go, or R - mean of the group."""
    found = {}
    for i, r in enumerate(reward):
        tokens = [t for t, counts in enumerate(acted[i]) if counts and valid[i]]
        if p["group_baseline"]:
            members = [reward[j] for j in range(len(reward)) if valid[j] and group[j] == group[i]]
            if len(members) > 1:
                found.update({(i, t): r - sum(members) / len(members) for t in tokens})
            continue
        ahead = 0.0
        for t in reversed(tokens):
            here = r if t == tokens[-1] else 0.0
            if p["kl_weight"] > 0:
                here -= p["kl_weight"] * (old_logp[i][t] - ref_logp[i][t])
            ahead = here + p["discount"] * ahead
            found[i, t] = ahead
    return found


def whitened(signal):
    """(x - mean) / std over all entries, std over n - 1; 0 where there is none."""
    n = len(signal)
    mean = sum(signal.values()) / max(n, 1)
    var = sum((x - mean) ** 2 for x in signal.values()) / max(n - 1, 1)
    if math.sqrt(var) < 1e-8:
        return {at: 0.0 for at in signal}
    return {at: (x - mean) / math.sqrt(var) for at, x in signal.items()}


def loss(logp, old_logp, sampler_logp, ref_logp, reward, group, valid, acted, p):
    """Mean over all tokens of PPO's term; ``p``: parameters by name."""
    trust = p["trust"]
    advantage = whitened(signals(old_logp, ref_logp, reward, group, valid, acted, p))
    total, tokens = 0.0, 0
    for i in range(len(reward)):
        for t, counts in enumerate(acted[i]):
            if not (counts and valid[i]):
                continue
            a = advantage.get((i, t), 0.0)
            ratio = math.exp(logp[i][t] - old_logp[i][t])
            bounded = max(1 - trust["clip_low"], min(1 + trust["clip_high"], ratio))
            x = -min(ratio * a, bounded * a)
            if a < 0:
                x = min(x, -a * trust["dual_clip"])
            if trust["mismatch"] == "truncate":
                x *= min(math.exp(old_logp[i][t] - sampler_logp[i][t]), trust["mismatch_high"])
            if p["group_baseline"] and p["kl_weight"] > 0:
                gap = ref_logp[i][t] - logp[i][t]
                x += p["kl_weight"] * ratio * (math.exp(gap) - 1 - gap)
            total += x
            tokens += 1
    return total / max(tokens, 1)
