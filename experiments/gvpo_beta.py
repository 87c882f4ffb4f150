"""How much should GVPO hold on to its anchor, and does it depend on where the anchor stands?

Look at: held-out avg@4 and greedy accuracy at the end (summary.json), reward, entropy.
Expect: beta's scale is the reward's; too small leaves the anchor and is unstable, too large stays.
Result: open.
"""

BASE = "configs/gvpo.py"


def sweep() -> list[dict[str, object]]:
    """Overrides of each run."""
    return [
        {"algorithm.beta": beta, "algorithm.anchor": anchor, "seed": seed}
        for beta in (0.02, 0.05, 0.1, 0.2)
        for anchor in ("start", "frozen")
        for seed in (0, 1, 2)
    ]
