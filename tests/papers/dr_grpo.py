"""Dr. GRPO, one number at a time. Source: arXiv 2503.20783.

Rows are rollouts; ``acted[i][t]`` says which tokens count, ``valid[i]`` which rollouts.
"""

import math


def loss(logp, old_logp, sampler_logp, reward, group, valid, acted, p):
    """Sum over the responses' tokens / (responses * length); ``p``: parameters by name."""
    trust, total, responses = p["trust"], 0.0, 0
    for i, r in enumerate(reward):
        tokens = [t for t, counts in enumerate(acted[i]) if counts]
        if not valid[i] or not tokens:
            continue
        responses += 1
        members = [reward[j] for j in range(len(reward)) if valid[j] and group[j] == group[i]]
        advantage = r - sum(members) / len(members)
        for t in tokens:
            ratio = math.exp(logp[i][t] - old_logp[i][t])
            bounded = max(1 - trust["clip_low"], min(1 + trust["clip_high"], ratio))
            x = -min(ratio * advantage, bounded * advantage)
            if advantage < 0:
                x = min(x, -advantage * trust["dual_clip"])
            if trust["mismatch"] == "truncate":
                x *= min(math.exp(old_logp[i][t] - sampler_logp[i][t]), trust["mismatch_high"])
            total += x
    return total / max(responses * p["length_tokens"], 1)
