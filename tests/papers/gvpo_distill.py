"""Group-variance distillation, one number at a time. Source: GVPO++, arXiv 2609.21432.

Rows are rollouts; ``acted[i][t]`` says which tokens belong to the response, ``usable[i]`` which
rollouts take part.
"""


def differences_of(logp, teacher_logp, length, usable, acted, alpha):
    """{rollout: d_i = |y_i|^-alpha (l_i - t_i)}."""
    found = {}
    for i, row in enumerate(logp):
        if usable[i]:
            total = sum(x for x, counts in zip(row, acted[i], strict=True) if counts)
            found[i] = length[i] ** -alpha * (total - teacher_logp[i])
    return found


def prompts_of(group, usable):
    """The usable rollouts of each prompt that has at least two."""
    found = {}
    for i, prompt in enumerate(group):
        if usable[i]:
            found.setdefault(prompt, []).append(i)
    return [rollouts for rollouts in found.values() if len(rollouts) >= 2]


def loss(logp, teacher_logp, length, group, usable, acted, alpha):
    """Mean over prompts of 1/2 sum_i c(d)_i^2 / (k - 1)."""
    d = differences_of(logp, teacher_logp, length, usable, acted, alpha)
    prompts = prompts_of(group, usable)
    total = 0.0
    for rollouts in prompts:
        mean = sum(d[i] for i in rollouts) / len(rollouts)
        total += sum((d[i] - mean) ** 2 for i in rollouts) / (2 * (len(rollouts) - 1))
    return total / max(len(prompts), 1)
