"""A phase's remote pool: its ledger and spool, and the gateway and workers that it starts.

<pool>/ledger/<phase>.sqlite   accounts
<pool>/spool/<phase>/          tokens
<pool>/pool.json, logs/, ...   of the helpers, see ``jaxrl.pool.services``
"""

import dataclasses
import math
import os
import warnings
from typing import Any

from etils import epath

from jaxrl.pool.contract import Annotate, Keep
from jaxrl.pool.ledger import open_ledger
from jaxrl.pool.remote import RemotePool, Rules
from jaxrl.pool.segments import Spool
from jaxrl.pool.services import Services
from jaxrl.tasks.contract import TaskSource
from jaxrl.train.loop import Parts
from jaxrl.train.pools import permits_of
from jaxrl.train.settings import Phase


def open_remote(
    phase: Phase,
    parts: Parts,
    folder: epath.Path,
    run_id: str,
    *,
    keep: Keep | None,
    annotate: Annotate | None,
) -> RemotePool:
    """The pool of a phase, with its helpers started. ValueError naming the field for a folder that
    is no local disk."""
    pool = phase.pool
    warn_of_age(phase)
    if "://" in os.fspath(folder):
        raise ValueError(
            f"pool.local_dir={pool.local_dir!r} beside a workdir at {folder}; allowed with "
            "pool.kind='remote': a folder on a local disk"
        )
    rules = rules_of(phase, parts.source)
    root = os.path.abspath(folder)
    address = pool.ledger
    if address == "sqlite":
        address = os.path.join(root, "ledger", f"{phase.name}.sqlite")
    spool = os.path.join(root, "spool", phase.name)
    ledger = open_ledger(address, run_id)
    try:
        services = Services(
            root,
            described(phase, root, run_id, address, spool),
            gateway=pool.gateway,
            launcher=pool.launcher,
            workers=pool.workers,
            patience_s=pool.watchdog_s,
        )
    except BaseException:
        ledger.close()
        raise
    return RemotePool(
        ledger,
        Spool(spool),
        root,
        parts.tokenizer,
        parts.source,
        rules,
        seed=phase.seed,
        rollouts_per_group=pool.rollouts_per_group,
        max_prompt_tokens=max(phase.sampler.prompt_buckets),
        max_feedback_tokens=pool.max_feedback_tokens,
        keep=keep,
        annotate=annotate,
        reward=phase.task.reward,
        epochs=pool.epochs,
        shard=(pool.shard, pool.shards),
        helpers=services,
    )


def rules_of(phase: Phase, source: TaskSource) -> Rules:
    """What the pool does about age and failure. ValueError for a limit on what no verdict of the
    source needs."""
    pool = phase.pool
    return Rules(
        staleness=pool.staleness,
        over_age=pool.over_age,
        max_refills=pool.max_refills,
        max_attempts=pool.max_attempts,
        min_group=pool.min_group,
        watchdog_s=pool.watchdog_s,
        poll_s=pool.poll_s,
        keep_checkpoints=phase.checkpoint.keep,
        record=pool.record,
        quotas=pool.quotas,
        permits=permits_of(phase, source),
    )


def warn_of_age(phase: Phase) -> None:
    """Warn where samples may be old and the objective bounds no ratio of the trainer's to the
    sampler's probabilities: their gap grows with the lag."""
    kind = phase.algorithm.get("mismatch", "none")
    cap = phase.algorithm.get("mismatch_cap", math.inf)
    if phase.pool.staleness and kind == "none" and cap == math.inf:
        warnings.warn(
            f"phases.{phase.name}: pool.staleness={phase.pool.staleness} with algorithm "
            f"{phase.algorithm['name']!r}, which bounds no ratio between trainer and sampler "
            "(mismatch, mismatch_cap); look at sampler/gap_lag_share",
            stacklevel=2,
        )


def described(phase: Phase, root: str, run_id: str, address: str, spool: str) -> dict[str, Any]:
    """What helpers must know of a run, as JSON values; it is read by ``jaxrl.gateway``."""
    return {
        "run_id": run_id,
        "folder": root,
        "ledger": address,
        "ledger_run": run_id,
        "spool": spool,
        "seed": phase.seed,
        "mesh": dict.fromkeys(phase.mesh, 1),  # the engine beside the gateway has one device
        "model": dataclasses.asdict(phase.model),
        "task": dataclasses.asdict(phase.task),
        "pool": dataclasses.asdict(phase.pool),
        "sampler": dataclasses.asdict(phase.sampler),
    }
