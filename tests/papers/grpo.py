"""GRPO and Dr. GRPO, one number at a time. Sources: arXiv 2402.03300, 2503.20783.

Rows are rollouts; ``acted[i][t]`` says which tokens count, ``valid[i]`` which rollouts.
"""

import math


def clamp(x, low, high):
    return max(low, min(high, x))


def advantages(reward, group, valid, scale_by_std):
    """(R_i - mean) / std over the valid rollouts of the same group, std over n - 1."""
    found = []
    for i in range(len(reward)):
        if not valid[i]:
            found.append(0.0)
            continue
        members = [reward[j] for j in range(len(reward)) if valid[j] and group[j] == group[i]]
        n = len(members)
        if n == 1:
            found.append(0.0)
            continue
        mean = sum(members) / n
        std = math.sqrt(sum((r - mean) ** 2 for r in members) / (n - 1))
        if not scale_by_std:
            found.append(reward[i] - mean)
        elif std < 1e-8:
            found.append(0.0)
        else:
            found.append((reward[i] - mean) / std)
    return found


def policy_term(logp, old_logp, advantage, clip_low, clip_high, dual_clip):
    """-min(r A, clip(r) A), and at most -c A where A < 0."""
    ratio = math.exp(clamp(logp - old_logp, -20, 20))
    loss = max(-advantage * ratio, -advantage * clamp(ratio, 1 - clip_low, 1 + clip_high))
    if advantage < 0:
        loss = min(loss, -advantage * dual_clip)
    return loss


def kl_term(logp, old_logp, ref_logp):
    """r k3: its derivative by logp is r (logp - ref_logp)."""
    gap = clamp(ref_logp - logp, -20, 20)
    return math.exp(clamp(logp - old_logp, -20, 20)) * (math.exp(gap) - 1 - gap)


def fallen(logp, old_logp, acted):
    """Mean over the response of old_logp - logp."""
    gaps = [b - a for a, b, counts in zip(logp, old_logp, acted, strict=True) if counts]
    return sum(gaps) / max(len(gaps), 1)


def reduce(token_loss, acted, weighting, length):
    """Token losses of one update -> its loss. Rollouts without a counted token are left out."""
    rows = [
        [x for x, counts in zip(row, mask, strict=True) if counts]
        for row, mask in zip(token_loss, acted, strict=True)
    ]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if weighting == "token_mean":
        return sum(sum(row) for row in rows) / sum(len(row) for row in rows)
    if weighting == "rollout_mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    if weighting == "rollout_sum_mean":
        return sum(sum(row) for row in rows) / len(rows)
    assert weighting == "fixed_length"
    return sum(sum(row) for row in rows) / (len(rows) * length)


def loss(logp, old_logp, sampler_logp, ref_logp, reward, group, valid, acted, p):
    """Loss of one update; ``p`` holds the method's parameters by name."""
    trust = p["trust"]
    advantage = advantages(reward, group, valid, p["scale_by_std"])
    if p["full_group"] > 0:
        for i, label in enumerate(group):
            n = sum(1 for j in range(len(group)) if valid[j] and group[j] == label)
            if n > 1:
                advantage[i] *= (1 - 1 / p["full_group"]) / (1 - 1 / n)
    token_loss = []
    for i in range(len(reward)):
        row = []
        for t in range(len(logp[i])):
            x = policy_term(
                logp[i][t],
                old_logp[i][t],
                advantage[i],
                trust["clip_low"],
                trust["clip_high"],
                trust["dual_clip"],
            )
            if trust["mismatch"] == "truncate":
                gap = clamp(old_logp[i][t] - sampler_logp[i][t], -20, 20)
                x *= min(math.exp(gap), trust["mismatch_high"])
            if advantage[i] < 0 and fallen(logp[i], old_logp[i], acted[i]) > p["mask_limit"]:
                x = 0.0
            if p["kl_weight"] > 0:  # the KL term is not corrected for the sampler
                x += p["kl_weight"] * kl_term(logp[i][t], old_logp[i][t], ref_logp[i][t])
            row.append(x)
        token_loss.append(row)
    counted = [[acted[i][t] and valid[i] for t in range(len(row))] for i, row in enumerate(acted)]
    return reduce(token_loss, counted, p["weighting"], p["length_tokens"])
