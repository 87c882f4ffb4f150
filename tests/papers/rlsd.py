"""RLSD, one number at a time: GRPO's advantages (arXiv 2402.03300), reweighted by a teacher.

Rows are rollouts; ``acted[i][t]`` says which tokens count, ``valid[i]`` which rollouts, ``held[i]``
which of them the teacher has scored.
"""

import math


def clamp(x, low, high):
    return max(low, min(high, x))


def verdicts(reward, group, valid, scale_by_std):
    """(R_i - mean) / std over the valid rollouts of the same group, std over n - 1."""
    found = []
    for i in range(len(reward)):
        members = [reward[j] for j in range(len(reward)) if valid[j] and group[j] == group[i]]
        if not valid[i] or len(members) == 1:
            found.append(0.0)
            continue
        mean = sum(members) / len(members)
        std = math.sqrt(sum((r - mean) ** 2 for r in members) / (len(members) - 1))
        found.append((reward[i] - mean) / (std if scale_by_std else 1.0))
    return found


def reweighted(verdict, student, teacher, share, band):
    """A (1 - share + share clip((T / S)^sign(A), 1 - band, 1 + band))."""
    if verdict == 0:
        return 0.0
    agreement = teacher - student if verdict > 0 else student - teacher
    return verdict * (1 - share + share * clamp(math.exp(agreement), 1 - band, 1 + band))


def policy_term(logp, old_logp, advantage, trust):
    """-min(r A, clip(r) A), and at most -c A where A < 0."""
    ratio = math.exp(clamp(logp - old_logp, -20, 20))
    bounded = clamp(ratio, 1 - trust["clip_low"], 1 + trust["clip_high"])
    loss = max(-advantage * ratio, -advantage * bounded)
    if advantage < 0:
        loss = min(loss, -advantage * trust["dual_clip"])
    return loss


def loss(logp, old_logp, teacher_logp, reward, group, valid, acted, held, p):
    """Mean over rollouts with a token of the means over their tokens."""
    verdict = verdicts(reward, group, valid, p["scale_by_std"])
    rows = []
    for i, row in enumerate(logp):
        found = []
        for t in range(len(row)):
            if not (acted[i][t] and valid[i]):
                continue
            a = verdict[i]
            if held[i]:
                teacher = max(teacher_logp[i][t], math.log(1e-10))
                a = reweighted(a, old_logp[i][t], teacher, p["share"], p["band"])
            found.append(policy_term(logp[i][t], old_logp[i][t], a, p["trust"]))
        if found:
            rows.append(sum(found) / len(found))
    return sum(rows) / max(len(rows), 1)
