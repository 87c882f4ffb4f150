"""MiMo-V2.6's credit, one number at a time: rewards, redistribution, penalties, policy term.

Lists run over rollouts; ``group[i]`` names the prompt, ``counted[i]`` says who takes part, and
``acted[i][t]`` which tokens are trained on.
"""

import math


def prompts(group, counted):
    """{prompt: its counted rollouts}."""
    found = {}
    for i, prompt in enumerate(group):
        if counted[i]:
            found.setdefault(prompt, []).append(i)
    return found


def usable(quality, passed, graded, group, counted):
    """f where each of the prompt's passes has a grade in (0, 1], else 1 for the whole prompt."""
    found = [1.0] * len(group)
    for rollouts in prompts(group, counted).values():
        passes = [i for i in rollouts if passed[i]]
        if all(graded[i] and 0 < quality[i] <= 1 for i in passes):
            for i in passes:
                found[i] = quality[i]
    return found


def product(quality, passed, group, counted, least_spread):
    """R_i = pass_i f_i; R_i = pass_i in prompts whose passes' f have a std below the floor."""
    found = [0.0] * len(group)
    for rollouts in prompts(group, counted).values():
        passes = [i for i in rollouts if passed[i]]
        if not passes:
            continue
        mean = sum(quality[i] for i in passes) / len(passes)
        std = math.sqrt(sum((quality[i] - mean) ** 2 for i in passes) / len(passes))
        for i in passes:
            found[i] = quality[i] if std >= least_spread else 1.0
    return found


def centred(reward, group, counted):
    """R_i - mean of the prompt."""
    found = [0.0] * len(group)
    for rollouts in prompts(group, counted).values():
        mean = sum(reward[i] for i in rollouts) / len(rollouts)
        for i in rollouts:
            found[i] = reward[i] - mean
    return found


def redistribution(quality, passed, group, counted, cap):
    """Steps 2 to 7 of the group advantage redistribution; ``passed`` is free of exploits."""
    found = [0.0] * len(group)
    for rollouts in prompts(group, counted).values():
        reward = {i: 1.0 if passed[i] else 0.0 for i in rollouts}
        mean = sum(reward.values()) / len(rollouts)
        advantage = {i: reward[i] - mean for i in rollouts}
        passes = [i for i in rollouts if passed[i]]
        if len(passes) in (0, len(rollouts)):
            continue
        if len(passes) > 1 and len({quality[i] for i in passes}) > 1:
            lam = sum(advantage[i] for i in passes)
            lam /= sum(quality[i] * advantage[i] for i in passes)
            for i in passes:
                advantage[i] *= min(lam, cap) * quality[i]
            mean = sum(advantage.values()) / len(rollouts)
            advantage = {i: a - mean for i, a in advantage.items()}
        for i in rollouts:
            found[i] = advantage[i]
    return found


def closed_form(quality, passed, cap):
    """The same for one prompt, solved: rho = min(lam, cap) / lam, lam = 1 / mean_P(f)."""
    passes = [i for i, right in enumerate(passed) if right]
    rate = len(passes) / len(passed)
    mean = sum(quality[i] for i in passes) / len(passes)
    rho = min(1 / mean, cap) * mean
    return [
        rho * (1 - rate) * quality[i] / mean + (1 - rho) * rate * (1 - rate)
        if passed[i]
        else -rate * (1 - (1 - rho) * (1 - rate))
        for i in range(len(passed))
    ]


def quantile(values, fraction):
    """Linear between order statistics, the lowest at 0 and the highest at 1."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def length_penalty(length, passed, group, counted, p):
    """X clip((L / l* - 1 - delta) / (s - delta), 0, 1)^gamma at passes of prompts often solved."""
    found = [0.0] * len(group)
    for rollouts in prompts(group, counted).values():
        passes = [i for i in rollouts if passed[i]]
        if not passes or len(passes) / len(rollouts) <= p["pass_rate"]:
            continue
        short = max(quantile([length[i] for i in passes], p["quantile"]), 1)
        for i in passes:
            excess = (length[i] / short - 1 - p["slack"]) / (p["full"] - p["slack"])
            found[i] = p["penalty"] * min(max(excess, 0.0), 1.0) ** p["power"]
    return found


def segments(advantage, flagged, group, acted, p):
    """Advantages of the tokens after flagged spans gave up their reward, or took more blame."""
    found = [list(row) for row in advantage]
    for prompt in set(group):
        sums = {"H+": 0.0, "C+": 0.0, "H-": 0.0, "C-": 0.0}
        places = {name: [] for name in sums}
        for i in range(len(group)):
            for t, a in enumerate(advantage[i]):
                if group[i] == prompt and acted[i][t] and a != 0:
                    name = ("H" if flagged[i][t] else "C") + ("+" if a > 0 else "-")
                    sums[name] += abs(a)
                    places[name].append((i, t))
        factor = {"H+": 0.0, "C+": 1.0, "H-": p["harsher"], "C-": 1.0}
        if sums["C+"] > 0:
            factor["C+"] = min(p["most"], 1 + sums["H+"] / sums["C+"])
        if sums["C-"] > 0:
            factor["C-"] = max(p["least"], 1 - (p["harsher"] - 1) * sums["H-"] / sums["C-"])
        for name, where in places.items():
            for i, t in where:
                found[i][t] *= factor[name]
    return found


def advantages(reward, length, facts, group, counted, acted, p):
    """Advantage of each token; ``p`` holds the method's parameters by name."""
    passed = [r >= 1 and not cheat for r, cheat in zip(reward, facts["exploit"], strict=True)]
    quality = usable(facts["grade"], passed, facts["graded"], group, counted)
    penalty = length_penalty(length, passed, group, counted, p["length"])
    if p["grading"] == "product":
        reward = product(quality, passed, group, counted, p["least_spread"])
        reward = [r * (1 - x) for r, x in zip(reward, penalty, strict=True)]
        each = centred(reward, group, counted)
    else:
        quality = [f * (1 - x) for f, x in zip(quality, penalty, strict=True)]
        each = redistribution(quality, passed, group, counted, p["cap"])
    tokens = [[a if acts else 0.0 for acts in row] for a, row in zip(each, acted, strict=True)]
    if p["segments"]["use"]:
        tokens = segments(tokens, facts["token_flagged"], group, acted, p["segments"])
    return tokens


def gradient(logp, sampler_logp, advantage, group, acted, band):
    """(value, d loss / d logp) of -mean over prompts of sum m r keep A logp / sum of lengths."""
    trained = [prompt for prompt, row in zip(group, acted, strict=True) if any(row)]
    tokens = {
        prompt: sum(sum(row) for g, row in zip(group, acted, strict=True) if g == prompt)
        for prompt in trained
    }
    value, slope = 0.0, [[0.0] * len(row) for row in logp]
    for i, row in enumerate(acted):
        for t, acts in enumerate(row):
            if not acts:
                continue
            a = advantage[i][t]
            ratio = math.exp(max(-20.0, min(20.0, logp[i][t] - sampler_logp[i][t])))
            sign = "negative" if a < 0 else "positive"
            if not band[f"{sign}_low"] <= ratio <= band[f"{sign}_high"]:
                continue
            share = 1 / (len(set(trained)) * tokens[group[i]])
            value -= ratio * a * logp[i][t] * share
            slope[i][t] = -ratio * a * share
    return value, slope
