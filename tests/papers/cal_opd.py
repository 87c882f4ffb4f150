"""Cal-OPD, one number at a time. Source: arXiv 2609.21619, equations 13 and 14.

Rows are rollouts; ``acted[i][t]`` says which tokens count, ``probed[i]`` for which rollouts both
probes are there.
"""

import math

LEAST = math.log(1e-10)


def clamp(x, low, high):
    return max(low, min(high, x))


def advantage(student, teacher, right, wrong, width):
    """Distance to the interval [teacher - width down, teacher + width up], signed."""
    up, down = 0.0, 0.0
    for told in (right, wrong):
        move = told - teacher
        up, down = max(up, move), max(down, -move)
    low, high = teacher - width * down, teacher + width * up
    if student < low:
        found = low - student
    elif student > high:
        found = high - student
    else:
        found = 0.0
    return found if abs(found) >= 1e-5 else 0.0


def policy_term(logp, old_logp, advantage, trust):
    """-min(r A, clip(r) A), and at most -c A where A < 0."""
    ratio = math.exp(clamp(logp - old_logp, -20, 20))
    bounded = clamp(ratio, 1 - trust["clip_low"], 1 + trust["clip_high"])
    loss = max(-advantage * ratio, -advantage * bounded)
    if advantage < 0:
        loss = min(loss, -advantage * trust["dual_clip"])
    return loss


def loss(logp, old_logp, teacher_logp, right_logp, wrong_logp, acted, probed, p):
    """Mean over all action tokens of the rollouts with probes; 0 if no token is active."""
    total, tokens = 0.0, 0
    for i, row in enumerate(logp):
        for t in range(len(row)):
            if acted[i][t] and probed[i]:
                views = [max(x[i][t], LEAST) for x in (teacher_logp, right_logp, wrong_logp)]
                a = advantage(*[old_logp[i][t], *views, p["width"]])
                total += policy_term(logp[i][t], old_logp[i][t], a, p["trust"])
                tokens += 1
    return total / max(tokens, 1)
