"""PRAXIS, one number at a time: its own iteration on classes, and its loss on responses.

The sampler, the archive and the bound are those of the paper's §3 and Theorem 5.4.
"""

import math


def consistency(logp, cap):
    """D = min(-log p(label), C) / C."""
    return min(-logp, cap) / cap


def archive(score, sharpness):
    """w = softmax(b s)."""
    top = max(sharpness * s for s in score)
    weight = [math.exp(sharpness * s - top) for s in score]
    return [w / sum(weight) for w in weight]


def utility(rule_right, model_right, harm):
    """F - gamma B of one rule: how often it is right, less how often it breaks what was right."""
    examples = len(model_right)
    right = sum(rule_right) / examples
    broken = sum(1 for a, b in zip(rule_right, model_right, strict=True) if b and not a) / examples
    return right - harm * broken


def divergence(q, p):
    """KL(q, p)."""
    return sum(a * math.log(a / b) for a, b in zip(q, p, strict=True) if a > 0)


def tilt(q, base, gain, stay, home):
    """argmax_p <p, gain> - stay KL(p, q) - home KL(p, base)."""
    power = stay + home
    moved = [
        math.exp((stay * math.log(a) + home * math.log(b) + g) / power)
        for a, b, g in zip(q, base, gain, strict=True)
    ]
    return [x / sum(moved) for x in moved]


def between(q, target, t):
    """q^(1 - t) target^t, renormalised."""
    mixed = [a ** (1 - t) * b**t for a, b in zip(q, target, strict=True)]
    return [x / sum(mixed) for x in mixed]


def bounded(q, target, kappa):
    """The farthest of these that KL allows, found by walking in small steps."""
    if divergence(target, q) <= kappa:
        return target
    steps = 4_000
    best = 0
    while divergence(between(q, target, (best + 1) / steps), q) <= kappa:
        best += 1
    return between(q, target, best / steps)


def bound(q_next, q, weight_next, weight, loss_bound, lam):
    """M sqrt(2 KL) + lam |w' - w|_1."""
    moved = sum(abs(a - b) for a, b in zip(weight_next, weight, strict=True))
    return (loss_bound + lam) * math.sqrt(2 * divergence(q_next, q)) + lam * moved


def endorsements(picks, weight, gates, size):
    """e_i = k sum_j w_j g_j 1[rule j picks rollout i] of one group."""
    return [
        size * sum(w * g for pick, w, g in zip(picks, weight, gates, strict=True) if pick == i)
        for i in range(size)
    ]


def policy_term(logp, old_logp, advantage, clip):
    """-min(r A, clip(r) A)."""
    ratio = math.exp(logp - old_logp)
    return -min(ratio * advantage, max(min(ratio, 1 + clip), 1 - clip) * advantage)


def loss(logp, old_logp, reward, group, acted, endorsement, odds, *, lam, cap, clip):
    """Mean over rollouts with a response of (mean over its tokens of the policy term + lam e D),
    times the odds of its task.
    """
    rollouts = [i for i, row in enumerate(acted) if any(row)]
    total = 0.0
    for i in rollouts:
        same = [reward[j] for j in range(len(reward)) if group[j] == group[i]]
        advantage = reward[i] - sum(same) / len(same)
        tokens = [t for t, counts in enumerate(acted[i]) if counts]
        terms = [policy_term(logp[i][t], old_logp[i][t], advantage, clip) for t in tokens]
        gap = consistency(sum(logp[i][t] for t in tokens), cap)
        total += odds[i] * (sum(terms) / len(tokens) + lam * endorsement[i] * gap)
    return total / max(len(rollouts), 1)
