"""Contrastive self-distillation, one number at a time. Source: arXiv 2609.21561.

Rows are rollouts; ``acted[i][t]`` says which tokens count, ``shown[side][i]`` for which rollouts
the context of that side is there.
"""

import math

LEAST = math.log(1e-10)


def clamp(x, low, high):
    return max(low, min(high, x))


def drawn_to(student, teacher, alpha):
    """Sampled advantage of the generalised Jensen-Shannon divergence; reverse KL at alpha = 1."""
    rho = math.exp(teacher - student)
    return math.log(rho) if alpha == 1 else (1 - alpha) * math.log((1 - alpha) + alpha * rho)


def advantage(student, right, wrong, alpha, sides):
    """Half the pull of the one minus half the pull of the other; a side alone in full."""
    if sides == "right":
        return drawn_to(student, right, alpha)
    if sides == "wrong":
        return -drawn_to(student, wrong, alpha)
    return (drawn_to(student, right, alpha) - drawn_to(student, wrong, alpha)) / 2


def policy_term(logp, old_logp, advantage, trust):
    """-min(r A, clip(r) A), and at most -c A where A < 0."""
    ratio = math.exp(clamp(logp - old_logp, -20, 20))
    bounded = clamp(ratio, 1 - trust["clip_low"], 1 + trust["clip_high"])
    loss = max(-advantage * ratio, -advantage * bounded)
    if advantage < 0:
        loss = min(loss, -advantage * trust["dual_clip"])
    return loss


def kl_term(logp, old_logp, ref_logp):
    """r k3: its derivative by logp is r (logp - ref_logp)."""
    gap = clamp(ref_logp - logp, -20, 20)
    return math.exp(clamp(logp - old_logp, -20, 20)) * (math.exp(gap) - 1 - gap)


def taught(reward, valid, shown, p):
    """Wrong responses for which every context that is used exists."""
    sides = ("right", "wrong") if p["sides"] == "both" else (p["sides"],)
    return [
        valid[i] and reward[i] < p["success"] and all(shown[side][i] for side in sides)
        for i in range(len(reward))
    ]


def loss(logp, old_logp, right_logp, wrong_logp, ref_logp, acted, rows, p):
    """Mean over the tokens of the rows that are taught."""
    total, tokens = 0.0, 0
    for i, row in enumerate(logp):
        for t in range(len(row)):
            if acted[i][t] and rows[i]:
                right, wrong = (max(x[i][t], LEAST) for x in (right_logp, wrong_logp))
                a = advantage(old_logp[i][t], right, wrong, p["alpha"], p["sides"])
                total += policy_term(logp[i][t], old_logp[i][t], a, p["trust"])
                total += p["kl_weight"] * kl_term(logp[i][t], old_logp[i][t], ref_logp[i][t])
                tokens += 1
    return total / max(tokens, 1)
