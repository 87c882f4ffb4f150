"""What a gateway costs: the same samples from the embedded pool, and through HTTP and a ledger.

    python -m experiments.bench.gateway [--groups 96] [--size 8] [--takes 3] [--workers 2]

The quickstart's model with random weights, its sampler, questions and verifier. Remote: a gateway
process with the sampler in it and worker processes, as ``pool.kind=remote`` starts them; the
trainer's side takes groups and trains nothing. Reported are the median take, and the gateway's own
processor time (everything but the engine's thread), a take, a sample and a generated token.
"""

import argparse
import dataclasses
import importlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxrl.model.versions import write_weights
from jaxrl.pool.contract import RolloutPool
from jaxrl.pool.ledger import open_ledger
from jaxrl.pool.local import LocalPool
from jaxrl.pool.remote import RemotePool, Rules
from jaxrl.pool.rollout import ACTION, Version
from jaxrl.pool.segments import Spool
from jaxrl.pool.services import Services
from jaxrl.train import rounds, settings
from jaxrl.train.settings import Phase


def quickstart(variant: str) -> Phase:
    """The last phase of the main job."""
    config: ConfigDict = importlib.import_module("configs.quickstart").get_config(variant)
    return settings.phases(config)[-1]


def weights(parts: Any, folder: Path, step: int) -> tuple[Version, str]:
    """Random ones, published."""
    path = str(folder / "weights" / f"v=0-{step}")
    params = parts.policy.init(jax.random.key(step))
    return Version(0, step, write_weights(path, params, epoch=0, step=step)), path


def local(parts: Any, phase: Phase, size: int) -> RolloutPool:
    """The embedded pool."""
    return LocalPool(
        parts.sampler,
        parts.tokenizer,
        parts.source,
        run_id="bench",
        seed=phase.seed,
        rollouts_per_group=size,
        temperature=phase.sampler.temperature,
        max_new_tokens=phase.sampler.max_new_tokens,
        max_prompt_tokens=max(phase.sampler.prompt_buckets),
        watchdog_s=phase.pool.watchdog_s,
        max_refills=0,
    )


def remote(
    parts: Any, phase: Phase, size: int, folder: Path, workers: int
) -> tuple[RolloutPool, Services]:
    """The pool of other processes, and what runs them."""
    pool = folder / "pool"
    ledger, spool = str(pool / "ledger.sqlite"), str(pool / "spool")
    sections = ("model", "task", "pool", "sampler")
    run = {
        "run_id": "bench",
        "seed": phase.seed,
        "ledger": ledger,
        "ledger_run": "bench",
        "spool": spool,
        "folder": str(pool),
        "mesh": dict(phase.mesh),
        **{name: dataclasses.asdict(phase.__dict__[name]) for name in sections},
    }
    services = Services(
        pool, run, gateway="", launcher="subprocess", workers=workers, patience_s=120.0
    )
    rules = Rules(0, "drop", 0, 3, 0, phase.pool.watchdog_s, phase.pool.poll_s, 1, True, ())
    made = RemotePool(
        open_ledger(ledger, "bench"),
        Spool(spool),
        pool,
        parts.tokenizer,
        parts.source,
        rules,
        seed=phase.seed,
        rollouts_per_group=size,
        max_prompt_tokens=max(phase.sampler.prompt_buckets),
        helpers=services,
    )
    return made, services


def taken(pool: RolloutPool, parts: Any, folder: Path, groups: int, takes: range) -> Any:
    """Seconds of each take, generated tokens of all, and the groups' hashes."""
    seconds, tokens, hashes = [], 0, []
    for step in takes:
        pool.publish(*weights(parts, folder, step))
        began = time.monotonic()
        found, _ = pool.take(groups, step)
        seconds.append(time.monotonic() - began)
        hashes += [group.content_hash for group in found]
        rollouts = [rollout for group in found for rollout in group.rollouts]
        tokens += sum(int((rollout.kind == ACTION).sum()) for rollout in rollouts)
        pool.commit(step)
    return seconds, tokens, hashes


def main() -> None:
    """Measure and print."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--variant", default="")
    asked.add_argument("--groups", type=int, default=96)
    asked.add_argument("--size", type=int, default=8)
    asked.add_argument("--takes", type=int, default=3)
    asked.add_argument("--workers", type=int, default=2)
    told = asked.parse_args()
    phase = quickstart(told.variant)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = rounds.assemble([phase], importlib.import_module("etils.epath").Path(name))
        first, takes = range(1), range(1, told.takes + 1)  # the first one compiles
        near = local(parts, phase, told.size)
        taken(near, parts, folder, told.groups, first)
        embedded, tokens, hashes = taken(near, parts, folder, told.groups, takes)
        pool, services = remote(parts, phase, told.size, folder, told.workers)
        try:
            taken(pool, parts, folder, told.groups, first)
            before = [services.counts(of) for of in ("gateway", "engine")]
            apart, same_tokens, same = taken(pool, parts, folder, told.groups, takes)
            after = [services.counts(of) for of in ("gateway", "engine")]
        finally:
            pool.close()
            services.close()
    assert (same_tokens, same) == (tokens, hashes), "the two pools gave different samples"
    count, samples = told.takes, told.groups * told.size
    own = after[0]["own_s"] - before[0]["own_s"]
    batches, busy = (after[1][name] - before[1][name] for name in ("batches", "busy_s"))
    print(f"embedded: {statistics.median(embedded):.3f} s a take of {samples} samples")
    print(f"remote:   {statistics.median(apart):.3f} s a take, {told.workers} workers")
    print(f"engine:   {busy / count:.3f} s a take, in {batches / count:.1f} batches")
    print(
        f"gateway's own processor time: {own / count:.3f} s a take, "
        f"{1e6 * own / count / samples:.0f} us a sample, {1e6 * own / tokens:.0f} us a token"
    )
    print("the same groups from both")


if __name__ == "__main__":
    main()
