"""RLOO, one number at a time. Source: arXiv 2402.14740."""

import math


def advantages(reward, group, valid):
    """R_i - mean of the other valid rollouts of the prompt; 0 where there is no other."""
    found = []
    for i, r in enumerate(reward):
        others = [
            reward[j]
            for j in range(len(reward))
            if j != i and valid[i] and valid[j] and group[j] == group[i]
        ]
        found.append(r - sum(others) / len(others) if others else 0.0)
    return found


def loss(logp, old_logp, sampler_logp, reward, group, valid, acted, mismatch_cap):
    """Mean over non-empty rollouts of -A_i sum_t rho_t logp_t."""
    advantage = advantages(reward, group, valid)
    total, rollouts = 0.0, 0
    for i in range(len(reward)):
        if not valid[i] or not any(acted[i]):
            continue
        rollouts += 1
        for t, counts in enumerate(acted[i]):
            if counts:
                gap = max(-20, min(20, old_logp[i][t] - sampler_logp[i][t]))
                rho = min(math.exp(gap), mismatch_cap) if mismatch_cap < math.inf else 1.0
                total -= advantage[i] * rho * logp[i][t]
    return total / max(rollouts, 1)
