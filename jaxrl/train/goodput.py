"""How well the time is spent: the share that trained, the share of the peak, and the slowest host.

goodput/frac     seconds of takes, steps, publishing and saving that a checkpoint covers, over
                 seconds since the run was first started: what compilation, evaluation, restarts
                 and steps done twice have cost is missing
throughput/mfu   FLOPs that the student's tokens ask for, once forward and twice backward each
                 epoch, over seconds and the devices' published peak; padding is no token
hosts/<i>/<what>_s   seconds that a process took for its share of a take
"""

import time
from collections.abc import Mapping, Sequence

import jax

from jaxrl.forecast.chips import CHIPS
from jaxrl.model.flops import forward
from jaxrl.train.accounts import Account
from jaxrl.train.settings import Phase

MANY_HOSTS = 16  # beyond, only the fastest and the slowest have curves


def peak_flops(stated: float) -> float:
    """Operations a second of all devices: as stated of one, or as published; 0 if unknown."""
    kinds = {chip.kind: chip.flops for chip in CHIPS.values()}
    return (stated or kinds.get(jax.devices()[0].device_kind, 0.0)) * jax.device_count()


def throughput(phase: Phase, numbers: Mapping[str, float], seconds: float) -> dict[str, float]:
    """FLOPs a second of the student's tokens, and their share of the peak where it is known."""
    rollouts, tokens = numbers["batch/valid_rollouts"], numbers["batch/tokens"]
    if not tokens or not rollouts:
        return {}
    a_token = 3 * forward(phase.model, max(round(tokens / rollouts), 1)).all
    rate = a_token * tokens * phase.train.epochs / seconds
    told = {"throughput/model_flops_per_s": rate}
    if peak := peak_flops(phase.log.device_flops):
        told["throughput/mfu"] = rate / peak
    return told


def goodput(accounts: Mapping[str, Account], began: float) -> dict[str, float]:
    """The share of the time since ``began`` (of the clock) that trained."""
    useful = sum(account.running_s for account in accounts.values())
    return {"goodput/frac": useful / max(time.time() - began, useful, 1e-9)}


def stragglers(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Seconds of each host by what it was asked for, and which one took longest."""
    told: dict[str, float] = {}
    for what, each in seconds.items():
        slowest = max(each)
        told |= {f"hosts/{what}_s_max": slowest, f"hosts/{what}_s_min": min(each)}
        told[f"hosts/{what}_slowest"] = float(each.index(slowest))
        if len(each) <= MANY_HOSTS:
            told |= {f"hosts/{i:02d}/{what}_s": x for i, x in enumerate(each)}
    return told
