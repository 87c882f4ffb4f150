"""Supervised fine-tuning, one number at a time."""


def loss(logp, valid, acted):
    """Mean negative log-prob of the action tokens of valid rollouts."""
    counted = [
        logp[i][t]
        for i in range(len(logp))
        for t in range(len(logp[i]))
        if valid[i] and acted[i][t]
    ]
    return -sum(counted) / len(counted) if counted else 0.0
