"""Residual advantage, one number at a time. Source: arXiv 2610.11519.

Rows are rollouts; ``acted[i][t]`` says which tokens count, ``valid[i]`` which rollouts. Logits are
nested lists [rollout][token][vocab] of the model that sees what stands before the token.
"""

import math


def clamp(x, low, high):
    return max(low, min(high, x))


def softmax(logits):
    top = max(logits)
    mass = [math.exp(x - top) for x in logits]
    return [x / sum(mass) for x in mass]


def residual(student_logits, teacher_logits, taken):
    """a = d(y) - sum_v pS(v) d(v), d = pT - pS."""
    student, teacher = softmax(student_logits), softmax(teacher_logits)
    gap = [t - s for s, t in zip(student, teacher, strict=True)]
    return gap[taken] - sum(s * d for s, d in zip(student, gap, strict=True))


def verified(reward, group, valid, acted, verifier):
    """[rollout][token] A_ver; 0 where no token counts."""
    found = [[0.0] * len(row) for row in acted]
    if verifier == "whitened":
        at = [(i, t) for i, row in enumerate(acted) for t, on in enumerate(row) if on and valid[i]]
        mean = sum(reward[i] for i, _ in at) / max(len(at), 1)
        spread = sum((reward[i] - mean) ** 2 for i, _ in at) / max(len(at) - 1, 1)
        for i, t in at:
            found[i][t] = (reward[i] - mean) / math.sqrt(spread) if spread > 1e-16 else 0.0
        return found
    for i in range(len(reward)):
        members = [reward[j] for j in range(len(reward)) if valid[j] and group[j] == group[i]]
        if not valid[i] or len(members) < 2:
            continue
        mean = sum(members) / len(members)
        std = math.sqrt(sum((r - mean) ** 2 for r in members) / (len(members) - 1))
        advantage = reward[i] - mean
        if verifier == "scaled":
            advantage = 0.0 if std < 1e-8 else advantage / std
        found[i] = [advantage if on else 0.0 for on in acted[i]]
    return found


def labels(reward, group, valid, acted, residuals, verifier, residual_weight, center_responses):
    """A_t = A_ver + lambda (a_t - abar) at the valid rollouts' counted tokens, 0 elsewhere."""
    found = verified(reward, group, valid, acted, verifier)
    for i in range(len(reward)):
        at = [t for t, on in enumerate(acted[i]) if on and valid[i]]
        mean = sum(residuals[i][t] for t in at) / max(len(at), 1) if center_responses else 0.0
        for t in at:
            found[i][t] += residual_weight * (residuals[i][t] - mean)
    return found


def policy_term(logp, old_logp, sampler_logp, advantage, trust):
    """-min(r A, clip(r) A), at most -c A where A < 0, times the truncated trainer over sampler."""
    ratio = math.exp(clamp(logp - old_logp, -20, 20))
    bounded = clamp(ratio, 1 - trust["clip_low"], 1 + trust["clip_high"])
    loss = max(-advantage * ratio, -advantage * bounded)
    if advantage < 0:
        loss = min(loss, -advantage * trust["dual_clip"])
    if trust["mismatch"] == "truncate":
        gap = clamp(old_logp - sampler_logp, -20, 20)
        loss *= min(math.exp(gap), trust["mismatch_high"])
    return loss


def loss(logp, old_logp, sampler_logp, advantage, valid, acted, trust, weighting):
    """Loss of one update from its labels."""
    rows = [
        [
            policy_term(logp[i][t], old_logp[i][t], sampler_logp[i][t], advantage[i][t], trust)
            for t, on in enumerate(acted[i])
            if on and valid[i]
        ]
        for i in range(len(valid))
    ]
    rows = [row for row in rows if row]
    if weighting == "token_mean":
        return sum(map(sum, rows)) / max(sum(map(len, rows)), 1)
    return sum(sum(row) / len(row) for row in rows) / max(len(rows), 1)
