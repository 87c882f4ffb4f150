"""On-policy distillation and GKD, one number at a time. Sources: Thinking Machines, "On-Policy
Distillation", 2025; GKD, arXiv 2306.13649.

Rows are rollouts; ``acted[i][t]`` says which tokens count. ``p`` holds the method's parameters.
"""

import math


def clamp(x, low, high):
    return max(low, min(high, x))


def softmax(logits):
    top = max(logits)
    total = sum(math.exp(x - top) for x in logits)
    return [math.exp(x - top) / total for x in logits]


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def divergence(student, teacher, name, alpha):
    """Of two distributions: reverse KL(S, T), forward KL(T, S), or (1 - alpha) KL(S, M) + alpha
    KL(T, M) with M = (1 - alpha) S + alpha T.
    """
    if name == "reverse":
        return kl(student, teacher)
    if name == "forward":
        return kl(teacher, student)
    mean = [(1 - alpha) * s + alpha * t for s, t in zip(student, teacher, strict=True)]
    return (1 - alpha) * kl(student, mean) + alpha * kl(teacher, mean)


def buckets(of, chosen, k):
    """Probabilities of the k tokens that ``chosen`` holds most likely, then of the rest."""
    order = sorted(range(len(chosen)), key=lambda v: -chosen[v])
    return [of[v] for v in order[:k]] + [sum(of[v] for v in order[k:])]


def advantage(logp, teacher_logp, name, alpha):
    """A with E[-A grad log S(y)] = grad of the divergence, y drawn from S."""
    rho = math.exp(max(teacher_logp, math.log(1e-10)) - logp)
    if name == "reverse":
        return math.log(rho)
    if name == "forward":
        return rho - 1
    return (1 - alpha) * math.log((1 - alpha) + alpha * rho)


def advantages(logp, teacher_logp, acted, p):
    """At each counted token, its own and the discounted ones of the later tokens of its row."""
    found = []
    for i, row in enumerate(acted):
        at = [t for t, counts in enumerate(row) if counts]
        own = {
            t: advantage(logp[i][t], teacher_logp[i][t], p["divergence"], p["alpha"]) for t in at
        }
        found.append([0.0] * len(row))
        for place, t in enumerate(at):
            found[i][t] = sum(
                p["discount"] ** (n - place) * own[at[n]] for n in range(place, len(at))
            )
    return found


def policy_term(logp, old_logp, advantage, trust):
    """-min(r A, clip(r) A), and at most -c A where A < 0."""
    ratio = math.exp(clamp(logp - old_logp, -20, 20))
    bounded = clamp(ratio, 1 - trust["clip_low"], 1 + trust["clip_high"])
    loss = max(-advantage * ratio, -advantage * bounded)
    if advantage < 0:
        loss = min(loss, -advantage * trust["dual_clip"])
    return loss


def mean(token_loss, acted):
    """Over the counted tokens of one update."""
    found = [
        x
        for row, mask in zip(token_loss, acted, strict=True)
        for x, counts in zip(row, mask, strict=True)
        if counts
    ]
    return sum(found) / max(len(found), 1)


def sampled_loss(logp, old_logp, sampler_logp, teacher_logp, acted, p):
    """Surrogate of the advantages at the old policy, times min(old / sampler, cap)."""
    given, trust = advantages(old_logp, teacher_logp, acted, p), p["trust"]
    token_loss = [[0.0] * len(row) for row in logp]
    for i, row in enumerate(logp):
        for t in range(len(row)):
            x = policy_term(logp[i][t], old_logp[i][t], given[i][t], trust)
            if trust["mismatch"] == "truncate":
                gap = clamp(old_logp[i][t] - sampler_logp[i][t], -20, 20)
                x *= min(math.exp(gap), trust["mismatch_high"])
            token_loss[i][t] = x
    return mean(token_loss, acted)


def full_loss(logits, teacher_logits, acted, p):
    """Divergence over the vocabulary, or over top_k tokens of one side and the rest together."""
    token_loss = []
    for row, teacher_row in zip(logits, teacher_logits, strict=True):
        token_loss.append([])
        for student, teacher in zip(map(softmax, row), map(softmax, teacher_row), strict=True):
            if p["estimator"] == "top_k":
                chosen = student if p["support"] == "student" else teacher
                student, teacher = (buckets(x, chosen, p["top_k"]) for x in (student, teacher))
            token_loss[-1].append(divergence(student, teacher, p["divergence"], p["alpha"]))
    return mean(token_loss, acted)
