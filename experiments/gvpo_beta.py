"""How much should GVPO hold on to its anchor, and does the answer depend on where the anchor stands?

Look at: held-out avg@4 and greedy accuracy at the end (summary.json), the reward curve, the entropy.
Expect: beta's scale is the reward's; too small forgets the anchor and gets unstable, too large stays at it.
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
