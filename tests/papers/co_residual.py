"""Co-RA, one number at a time. Source: arXiv 2610.11519, appendix B.8.

One take: labels from the old student and the old teacher, then each learns by its own ratio.
``student`` and ``teacher`` hold log-probs [rollout][token] of the taken tokens, ``new`` and
``old``; ``residuals`` are those of the old pair.
"""

import math


def clamp(x, low, high):
    return max(low, min(high, x))


def verified(reward, group, valid):
    """GRPO's A_ver of each rollout."""
    found = []
    for i in range(len(reward)):
        members = [reward[j] for j in range(len(reward)) if valid[j] and group[j] == group[i]]
        if not valid[i] or len(members) < 2:
            found.append(0.0)
            continue
        mean = sum(members) / len(members)
        std = math.sqrt(sum((r - mean) ** 2 for r in members) / (len(members) - 1))
        found.append(0.0 if std < 1e-8 else (reward[i] - mean) / std)
    return found


def clipped(new, old, advantage, low, high):
    """-min(r A, clip(r) A)."""
    ratio = math.exp(clamp(new - old, -20, 20))
    return -min(ratio * advantage, clamp(ratio, 1 - low, 1 + high) * advantage)


def mean_of_means(token_loss):
    rows = [row for row in token_loss if row]
    return sum(sum(row) / len(row) for row in rows) / max(len(rows), 1)


def take(student, teacher, residuals, reward, group, valid, acted, p):
    """(student's loss, teacher's loss). ``p``: residual_weight, clip_*, teacher_clip_*."""
    advantage = verified(reward, group, valid)
    student_loss, teacher_loss = [], []
    for i in range(len(reward)):
        at = [t for t, on in enumerate(acted[i]) if on and valid[i]]
        mean = sum(residuals[i][t] for t in at) / max(len(at), 1)
        labels = {t: advantage[i] + p["residual_weight"] * (residuals[i][t] - mean) for t in at}
        student_loss.append(
            [
                clipped(
                    student["new"][i][t],
                    student["old"][i][t],
                    labels[t],
                    p["clip_low"],
                    p["clip_high"],
                )
                for t in at
            ]
        )
        teacher_loss.append(
            [
                clipped(
                    teacher["new"][i][t],
                    teacher["old"][i][t],
                    advantage[i],
                    p["teacher_clip_low"],
                    p["teacher_clip_high"],
                )
                for t in at
            ]
        )
    return mean_of_means(student_loss), mean_of_means(teacher_loss)
