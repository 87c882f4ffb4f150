"""CoVer, one number at a time. Source: arXiv 2609.21208, sections 3 and 4; the estimator over soft
labels is ours.

``passed[i][j]`` says whether program i passes test j, ``truth[i]`` in [0, 1] which part of the
ground-truth tests it passes, ``counted[i][j]`` whether the cell was measured.
"""

import math


def column(passed, truth, counted, j):
    """(outcome, truth) of the programs that were measured on test j."""
    return [(1 if passed[i][j] else 0, truth[i]) for i in range(len(truth)) if counted[i][j]]


def covariance(pairs):
    """mean_i (E_i - mean E) (y_i - mean y)."""
    n = len(pairs)
    if n == 0:
        return 0.0
    mean_e = sum(e for e, _ in pairs) / n
    mean_y = sum(y for _, y in pairs) / n
    return sum((e - mean_e) * (y - mean_y) for e, y in pairs) / n


def table_information(table):
    """sum P log(P / (row total * column total)) over a table of probabilities, nats."""
    found = 0.0
    for row in table:
        for b, p in enumerate(row):
            if p > 0:
                found += p * math.log(p / (sum(row) * sum(other[b] for other in table)))
    return found


def soft_information(pairs):
    """Each program is right with probability y: P(e, right) = mean(1[E = e] y)."""
    n = len(pairs)
    if n == 0:
        return 0.0
    table = [
        [sum((e == a) * (1 - y) for e, y in pairs) / n, sum((e == a) * y for e, y in pairs) / n]
        for a in (0, 1)
    ]
    return table_information(table)


def binned_information(pairs, levels, miller_madow):
    """Plug-in over v = round(levels y); minus (occupied levels - 1) / (2 n), at least 0."""
    n = len(pairs)
    if n == 0:
        return 0.0
    bins = [round(levels * y) for _, y in pairs]
    table = [
        [
            sum((e == a) and v == b for (e, _), v in zip(pairs, bins, strict=True)) / n
            for b in range(levels + 1)
        ]
        for a in (0, 1)
    ]
    found = table_information(table)
    if miller_madow:
        found -= (len(set(bins)) - 1) / (2 * n)
    return max(found, 0.0)


def reward_of_test(passed, truth, counted, j, kind, gate, levels):
    """Reward of test j of a task. A pass rate knows no truth and no gate."""
    pairs = column(passed, truth, counted, j)
    if not pairs:
        return 0.0
    if kind == "pass_rate":
        return sum(e for e, _ in pairs) / len(pairs)
    if kind == "information":
        value = soft_information(pairs)
    elif kind == "binned":
        value = binned_information(pairs, levels, miller_madow=False)
    elif kind == "miller_madow":
        value = binned_information(pairs, levels, miller_madow=True)
    else:
        assert kind == "covariance"
        value = covariance(pairs)
    return value if covariance(pairs) > 1e-6 or not gate else 0.0


def standardised(values, bound):
    """(x - mean) / std with std over n, clipped; None where all are equal: the role is dropped."""
    n = len(values)
    if n == 0:
        return None
    mean = sum(values) / n
    std = math.sqrt(sum((x - mean) ** 2 for x in values) / n)
    if std < 1e-6:
        return None
    return [max(-bound, min(bound, (x - mean) / std)) for x in values]


def advantages(rows, p):
    """{row: advantage} of the rows that are trained.

    A row is a dict: group, role ("coder", "tester"), valid, passed, counted, truth, test, selected,
    rewarded.
    """
    found = {}
    for group in sorted({row["group"] for row in rows}):
        mine = [i for i, row in enumerate(rows) if row["group"] == group and row["valid"]]
        coders = [i for i in mine if rows[i]["role"] == "coder"]
        testers = [i for i in mine if rows[i]["role"] == "tester" and rows[i]["selected"]]
        truth = [rows[i]["truth"] for i in coders]
        passed = [rows[i]["passed"] for i in coders]
        counted = [rows[i]["counted"] for i in coders]
        told = []
        for i in testers:
            value = reward_of_test(
                passed, truth, counted, rows[i]["test"], p["reward"], p["gate"], p["levels"]
            )
            told.append(value if rows[i]["rewarded"] or p["reward_duplicates"] else 0.0)
        for members, values in ((coders, truth), (testers, told)):
            scores = standardised(values, p["advantage_clip"])
            if scores is not None:
                found.update(zip(members, scores, strict=True))
    return found


def kl_term(logp, old_logp, ref_logp):
    """r k3, whose derivative by logp is r (logp - ref_logp)."""
    gap = max(-20, min(20, ref_logp - logp))
    return math.exp(max(-20, min(20, logp - old_logp))) * (math.exp(gap) - 1 - gap)


def loss(logp, old_logp, ref_logp, rows, acted, p):
    """Loss of one update: each role's mean over its rollouts of means over tokens, roles weighed by
    tester_share.
    """
    found = advantages(rows, p)
    total = 0.0
    for role, share in (("coder", 1 - p["tester_share"]), ("tester", p["tester_share"])):
        means = []
        for i, advantage in sorted(found.items()):
            if rows[i]["role"] != role or not any(acted[i]):
                continue
            terms = []
            for t in range(len(logp[i])):
                if not acted[i][t]:
                    continue
                ratio = math.exp(max(-20, min(20, logp[i][t] - old_logp[i][t])))
                bounded = max(1 - p["clip_low"], min(1 + p["clip_high"], ratio))
                x = max(-advantage * ratio, -advantage * bounded)
                if advantage < 0:
                    x = min(x, -advantage * p["dual_clip"])
                terms.append(
                    x + p["kl_weight"] * kl_term(logp[i][t], old_logp[i][t], ref_logp[i][t])
                )
            means.append(sum(terms) / len(terms))
        if means:
            total += share * sum(means) / len(means)
    return total


def select(invalid, inputs, columns, k):
    """Walk the tests in order; new inputs with new columns first, then new inputs with seen
    columns, then seen inputs, then invalid tests; the first k of these.
    """
    seen_inputs, seen_columns = [], []
    buckets = [[], [], [], []]
    for j in range(len(invalid)):
        if invalid[j]:
            buckets[3].append(j)
        elif inputs[j] in seen_inputs:
            buckets[2].append(j)
        elif columns[j] in seen_columns:
            buckets[1].append(j)
        else:
            buckets[0].append(j)
        if not invalid[j]:
            seen_inputs.append(inputs[j])
            seen_columns.append(columns[j])
    return [j for bucket in buckets for j in bucket][:k]


def select_by_badness(invalid, inputs, columns, k):
    """What the authors' code does: whole clusters of duplicates are punished, none is kept for
    the others.
    """
    badness = [
        1000 * bool(invalid[j])
        + 100 * (inputs.count(inputs[j]) - 1)
        + 10 * (columns.count(columns[j]) - 1)
        for j in range(len(invalid))
    ]
    return sorted(range(len(invalid)), key=lambda j: (badness[j], j))[:k]
