"""GVPO, one number at a time. Source: arXiv 2504.19599.

Rows are rollouts; ``acted[i][t]`` says which tokens belong to the response, ``counted[i]`` which
rollouts take part. ``behaviour[i]`` is who sampled a rollout, where a group holds fixed numbers of
several policies' rollouts.
"""


def response(logp, acted):
    """l_i: the sum, never the mean, of a response's log-probs; 0 for an empty one."""
    return [
        sum(x for x, counts in zip(row, mask, strict=True) if counts)
        for row, mask in zip(logp, acted, strict=True)
    ]


def members(group, counted):
    """{prompt: its counted rollouts}, prompts with at least two only."""
    found = {}
    for i, prompt in enumerate(group):
        if counted[i]:
            found.setdefault(prompt, []).append(i)
    return {prompt: rollouts for prompt, rollouts in found.items() if len(rollouts) >= 2}


def residuals(logp, anchor_logp, reward, group, counted, acted, beta):
    """{rollout: e_i} of the prompts that count."""
    new, anchor = response(logp, acted), response(anchor_logp, acted)
    found = {}
    for rollouts in members(group, counted).values():
        implicit = {i: beta * (new[i] - anchor[i]) for i in rollouts}
        mean_implicit = sum(implicit.values()) / len(rollouts)
        mean_reward = sum(reward[i] for i in rollouts) / len(rollouts)
        for i in rollouts:
            found[i] = (implicit[i] - mean_implicit) - (reward[i] - mean_reward)
    return found


def loss(logp, anchor_logp, reward, group, counted, acted, beta):
    """Mean over prompts of 1/2 sum_i e_i^2 / (k - 1)."""
    prompts = members(group, counted)
    residual = residuals(logp, anchor_logp, reward, group, counted, acted, beta)
    total = 0.0
    for rollouts in prompts.values():
        total += sum(residual[i] ** 2 for i in rollouts) / (2 * (len(rollouts) - 1))
    return total / max(len(prompts), 1)


def gradient(logp, anchor_logp, reward, group, counted, acted, beta):
    """d loss / d logp[i][t] = -beta / (k - 1) w_i / prompts on its tokens, with w_i = -e_i."""
    prompts = members(group, counted)
    residual = residuals(logp, anchor_logp, reward, group, counted, acted, beta)
    found = [[0.0] * len(row) for row in logp]
    for rollouts in prompts.values():
        for i in rollouts:
            for t, counts in enumerate(acted[i]):
                if counts:
                    w = -residual[i]
                    found[i][t] = -beta / (len(rollouts) - 1) * w / len(prompts)
    return found


def accompanied(group, behaviour, counted):
    """``counted`` without the prompts that have a single counted rollout of some policy."""
    return [
        counted[i]
        and all(
            sum(1 for j in rollouts if behaviour[j] == behaviour[one]) >= 2
            for rollouts in [[j for j in range(len(group)) if counted[j] and group[j] == group[i]]]
            for one in rollouts
        )
        for i in range(len(group))
    ]


def stratified_loss(logp, anchor_logp, reward, group, behaviour, counted, acted, beta):
    """Mean over prompts of half the unbiased variance of r - R under the mixture of policies."""
    prompts = members(group, accompanied(group, behaviour, counted))
    new, anchor = response(logp, acted), response(anchor_logp, acted)
    total = 0.0
    for rollouts in prompts.values():
        x = {i: beta * (new[i] - anchor[i]) - reward[i] for i in rollouts}
        k = len(rollouts)
        mean = sum(x.values()) / k
        variance = sum((x[i] - mean) ** 2 for i in rollouts) / k
        for policy in {behaviour[i] for i in rollouts}:
            own = [x[i] for i in rollouts if behaviour[i] == policy]
            inner = sum(own) / len(own)
            spread = sum((value - inner) ** 2 for value in own)
            variance += len(own) / (len(own) - 1) * spread / k**2
        total += variance / 2
    return total / max(len(prompts), 1)
