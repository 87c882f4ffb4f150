"""What each phase of a run has cost so far: kept across restarts, stated in the summary."""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxrl.pool.contract import Group
from jaxrl.train.settings import Phase


@dataclasses.dataclass
class Account:
    """Sums over the steps of one phase."""

    steps: int = 0
    rollouts: int = 0  # generated or read, those of refused groups too
    updates: int = 0  # of the student's weights; skipped ones left out
    trained_tokens: int = 0
    sampled_tokens: int = 0  # those of refused groups too; none where rollouts are read
    running_s: float = 0.0  # wall clock of the loop, without compilation and evaluation
    take_s: float = 0.0  # of that, in takes
    compile_s: float = 0.0
    beyond: int = 0  # takes in a row in which a curve was out of the bounds of train.stop
    stopped: str = ""  # why the phase ended early, "" if it did not

    def add(
        self,
        phase: Phase,
        groups: Sequence[Group],
        numbers: Mapping[str, float],
        seconds: Mapping[str, float],
    ) -> float:
        """Count a step by its curves; returns the seconds that it took without compilation."""
        wall = sum(seconds[f"time/{part}_s"] for part in ("take", "step", "publish", "save"))
        running_s = max(wall - seconds["time/compile_s"], 1e-9)
        refused = sum(int(numbers.get(f"pool/{why}", 0)) for why in ("filtered", "voided"))
        self.steps += 1
        self.rollouts += sum(len(group.rollouts) for group in groups)
        self.rollouts += refused * phase.pool.rollouts_per_group
        self.updates += int(numbers["optim/updates"])
        self.trained_tokens += int(numbers["batch/action_tokens"])
        self.sampled_tokens += int(numbers.get("pool/sampled_tokens", 0))
        self.running_s += running_s
        self.take_s += max(seconds["time/take_s"] - seconds["time/take_compile_s"], 0)
        self.compile_s += seconds["time/compile_s"]
        return running_s
