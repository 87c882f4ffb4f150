"""ArenaFlow's credit, one number at a time: places of a tournament, steps named by the judge.

Lists run over rollouts; ``group[i]`` names the prompt, ``counted[i]`` says who takes part.
"""

import math


def members(group, counted):
    """{prompt: its counted rollouts}."""
    found = {}
    for i, prompt in enumerate(group):
        if counted[i]:
            found.setdefault(prompt, []).append(i)
    return found


def ranks(points, group, counted):
    """0 for the most points; equal points share the mean of the places that they take up."""
    found = [0.0] * len(group)
    for rollouts in members(group, counted).values():
        ordered = sorted(rollouts, key=lambda i: -points[i])
        for i in rollouts:
            places = [place for place, j in enumerate(ordered) if points[j] == points[i]]
            found[i] = sum(places) / len(places)
    return found


def rewards(points, group, counted):
    """1 - rank / (G - 1); 0 in groups of one and in groups that are tied throughout."""
    rank, found = ranks(points, group, counted), [0.0] * len(group)
    for rollouts in members(group, counted).values():
        if len(rollouts) > 1 and len({points[i] for i in rollouts}) > 1:
            for i in rollouts:
                found[i] = 1 - rank[i] / (len(rollouts) - 1)
    return found


def advantages(points, group, counted, scale_by_std):
    """Centred rank rewards, or divided by their standard deviation (n - 1) besides."""
    reward, found = rewards(points, group, counted), [0.0] * len(group)
    for rollouts in members(group, counted).values():
        n = len(rollouts)
        mean = sum(reward[i] for i in rollouts) / n
        for i in rollouts:
            found[i] = reward[i] - mean
        std = math.sqrt(sum(found[i] ** 2 for i in rollouts) / (n - 1)) if n > 1 else 0.0
        if scale_by_std:
            for i in rollouts:
                found[i] = found[i] / std if std >= 1e-8 else 0.0
    return found


def gains(wins, steps):
    """g(s) = W(s) / max W, W(s) = sum over won matches of exp(depth) where s was named.

    ``wins`` of one rollout: a list of (depth, named steps); names beyond ``steps`` are ignored.
    """
    worth = [
        sum(math.exp(depth) for depth, named in wins if step in named) for step in range(steps)
    ]
    top = max(worth)
    return [w / top if top > 0 else 0.0 for w in worth]


def amplified(advantage, gain, step, acted, weight):
    """A_i (1 + weight g_i(step of t)) where A_i > 0, else A_i; 0 where the policy did not act."""
    found = []
    for a, g, row, acts in zip(advantage, gain, step, acted, strict=True):
        tokens = []
        for s, counts in zip(row, acts, strict=True):
            factor = 1 + weight * g[s] if a > 0 and 0 <= s < len(g) else 1.0
            tokens.append(a * factor if counts else 0.0)
        found.append(tokens)
    return found


def loss(logp, old_logp, advantage, acted, clip_low, clip_high):
    """Token mean of the clipped surrogate, for a sampler that equals the old policy."""
    total, tokens = 0.0, 0
    for i, row in enumerate(acted):
        for t, counts in enumerate(row):
            if counts:
                a, ratio = advantage[i][t], math.exp(logp[i][t] - old_logp[i][t])
                bounded = max(1 - clip_low, min(1 + clip_high, ratio))
                total -= min(ratio * a, bounded * a)
                tokens += 1
    return total / max(tokens, 1)
