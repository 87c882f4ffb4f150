"""What a remote pool measures of a take: ages of tokens, tallies of the ledger, the gateway."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl.pool import staleness
from jaxrl.pool.contract import Group
from jaxrl.pool.permits import UNITS
from jaxrl.pool.rollout import Version

# Of a gateway: its numbers now, and what grew since the take before (its processor time, what the
# limit did, servers that told nothing, requests that engines put back, questions for samples that
# waited for a permit).
NOW = ("limit", "under_way", "kv_usage", "waiting", *UNITS)
GROWN = {"own_s": "s", **{name: name for name in ("grew", "trimmed", "cut", "untold", "preempted")}}
GROWN |= {f"waited_{unit}": f"waited_{unit}" for unit in UNITS}


class Curves:
    """Readings of each take, with what was told at the take before."""

    def __init__(self) -> None:
        self._tallies: Mapping[str, int] = {}
        self._gateway: Mapping[str, float] = {}

    def begin(self, tallies: Mapping[str, int]) -> None:
        """Count from these tallies on."""
        self._tallies = tallies

    def note(self, told: Mapping[str, int], counts: Counter[str]) -> None:
        """Add what the ledger counted since the last take: refusals, retries, drift."""
        for name, count in told.items():
            if not name.startswith(("groups_", "slots_", "void")):
                counts[name] += count - self._tallies.get(name, 0)
        self._tallies = told

    def gateway(self, told: Mapping[str, float]) -> dict[str, float]:
        """What a gateway tells, by ``gateway_<name>``; nothing of what it does not tell. One that
        was started again counts from 0."""
        found = {f"gateway_{name}": float(told[name]) for name in NOW if name in told}
        before = self._gateway
        if any(told[name] < before.get(name, 0.0) for name in GROWN if name in told):
            before = {}
        for name, short in GROWN.items():
            if name in told:
                found[f"gateway_{short}"] = float(told[name] - before.get(name, 0.0))
        if found:
            self._gateway = told
        return found


def ages(groups: Sequence[Group], step: int, resumed: Version, limit: int) -> dict[str, float]:
    """Steps that the weights of the sampled tokens are behind: mean and largest."""
    each = [
        staleness.ages(rollout, step, resumed, limit)
        for group in groups
        for rollout in group.rollouts
    ]
    steps = np.concatenate([*each, np.zeros(0, np.int64)])
    return {
        "staleness_mean": float(steps.mean()) if steps.size else 0.0,
        "staleness_max": float(steps.max()) if steps.size else 0.0,
    }
