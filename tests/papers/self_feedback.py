"""SELF, one number at a time: hindsight distillation and feedback likelihood of transitions.

``trajectories`` is a list of lists of turns. A turn is a mapping: ``student`` and ``teacher`` hold
the logits of each action token, position by position, the teacher's None where its context did not
fit; ``feedback`` holds the log-prob of each token that the environment answered.
"""

import math


def log_softmax(logits):
    """log p_v of one position."""
    top = max(logits)
    total = math.log(sum(math.exp(x - top) for x in logits)) + top
    return [x - total for x in logits]


def divergence(logits, other):
    """sum_v p_v (log p_v - log q_v) of one position."""
    p, q = log_softmax(logits), log_softmax(other)
    return sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def distillation(turn):
    """l_sd = 1/L sum_j KL(student_j, teacher_j); None where the turn has no such term."""
    if not turn["feedback"] or turn["teacher"] is None or not turn["student"]:
        return None
    pairs = list(zip(turn["student"], turn["teacher"], strict=True))
    return sum(divergence(p, q) for p, q in pairs) / len(pairs)


def likelihood(turn):
    """l_env = -1/M sum_k log p(f_k); None where the environment answered nothing."""
    if not turn["feedback"]:
        return None
    return -sum(turn["feedback"]) / len(turn["feedback"])


def expectation(term, trajectories):
    """Draw a trajectory that has the term, then one of its turns that has it: the mean of that."""
    means = []
    for turns in trajectories:
        found = [value for value in map(term, turns) if value is not None]
        if found:
            means.append(sum(found) / len(found))
    return sum(means) / len(means) if means else 0.0


def loss(trajectories, feedback_weight, distillation_weight):
    """The objective of one update."""
    return feedback_weight * expectation(likelihood, trajectories) + (
        distillation_weight * expectation(distillation, trajectories)
    )


def slope(logits, other):
    """d KL / d logits_v = p_v (log p_v - log q_v - KL), the teacher held fixed."""
    p, q = log_softmax(logits), log_softmax(other)
    kl = divergence(logits, other)
    return [math.exp(a) * (a - b - kl) for a, b in zip(p, q, strict=True)]
