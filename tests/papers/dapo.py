"""DAPO, one number at a time. Source: arXiv 2503.14476."""

import math


def overlong(length, limit, buffer, penalty):
    """Soft overlong punishment, added to the reward."""
    if length <= limit - buffer:
        return 0.0
    if length < limit:
        return -(length - (limit - buffer)) / buffer * penalty
    return -penalty


def keep(rewards):
    """Dynamic sampling: neither all right nor all wrong, by the verifier's reward."""
    return max(rewards) != min(rewards)


def loss(logp, old_logp, sampler_logp, reward, group, valid, truncated, acted, p):
    """Loss of one update; ``p`` holds the method's parameters by name."""
    trust = p["trust"]
    shaped = []
    for i, r in enumerate(reward):
        length = sum(1 for counts in acted[i] if counts and valid[i])
        limit, buffer = p["overlong_limit_tokens"], p["overlong_buffer_tokens"]
        shaped.append(r + overlong(length, limit, buffer, p["overlong_penalty"]))
    total, tokens = 0.0, 0
    for i in range(len(reward)):
        if not valid[i] or (p["drop_truncated"] and truncated[i]):
            continue
        members = [shaped[j] for j in range(len(reward)) if valid[j] and group[j] == group[i]]
        n = len(members)
        mean = sum(members) / n
        std = math.sqrt(sum((r - mean) ** 2 for r in members) / (n - 1)) if n > 1 else 0.0
        advantage = (shaped[i] - mean) / std if std >= 1e-8 else 0.0
        for t, counts in enumerate(acted[i]):
            if not counts:
                continue
            ratio = math.exp(max(-20, min(20, logp[i][t] - old_logp[i][t])))
            clipped = max(1 - trust["clip_low"], min(1 + trust["clip_high"], ratio))
            x = -min(ratio * advantage, clipped * advantage)
            if advantage < 0:
                x = min(x, -advantage * trust["dual_clip"])
            if trust["mismatch"] == "truncate":
                gap = max(-20, min(20, old_logp[i][t] - sampler_logp[i][t]))
                x *= min(math.exp(gap), trust["mismatch_high"])
            total += x
            tokens += 1
    return total / max(tokens, 1)
