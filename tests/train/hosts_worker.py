"""One process of a run, started by test_hosts.py: it runs a config, and then tells what it held.

hosts_worker.py RECORD.npz HOSTS PROCESS PORT WORKDIR CONFIG NAME=VALUE...
"""

import ast
import dataclasses
import importlib
import os
import signal
import sys
import time
from typing import Any

import jax
import numpy as np

from jaxrl.train import hosts, loop, rounds

STOP_AT = "STOP_AT"  # this process sends itself SIGTERM, or SIGKILL, at this step
DIE_AT = "DIE_AT"
SPOIL = "SPOIL"  # this group of each take comes with a reward that is no number


class Spoiled:
    """A pool whose data are bad."""

    def __init__(self, pool: Any, place: int) -> None:
        self.pool, self.place = pool, place

    def take(self, n: int, step: int) -> Any:
        groups, manifest = self.pool.take(n, step)
        bad = groups[self.place]
        spoilt = [dataclasses.replace(r, reward=float("nan")) for r in bad.rollouts]
        groups[self.place] = dataclasses.replace(bad, rollouts=spoilt)
        return groups, manifest


def main() -> None:
    record, names, process, port, workdir, config, *overrides = sys.argv[1:]
    if "," in names:
        hosts.join(names.split(","), int(process), port=int(port), join_s=120, lost_s=10)
    hosts.heed_sigterm()
    path, _, variant = config.partition(":")
    asked: Any = importlib.import_module(path).get_config(variant)
    for override in overrides:
        name, value = override.split("=", 1)
        with asked.ignore_type():
            asked.update_from_flattened_dict({name: ast.literal_eval(value)})
    held: dict[str, Any] = {"rows": []}
    fetch, train = loop.fetch, loop.train

    def fetch_and_count(parts: Any, phase: Any, algorithm: Any, pool: Any, step: int) -> Any:
        for name, number in ((STOP_AT, signal.SIGTERM), (DIE_AT, signal.SIGKILL)):
            if os.environ.get(name) == f"{step}/{process}":
                os.kill(os.getpid(), number)
                time.sleep(5)  # the notice goes round while the others wait for this step
        if SPOIL in os.environ:
            pool = Spoiled(pool, int(os.environ[SPOIL]))
        fetched = fetch(parts, phase, algorithm, pool, step)
        own = fetched[2].tokens.addressable_shards
        valid = sum(int(np.asarray(s.data).sum()) for s in fetched[2].valid.addressable_shards)
        held["rows"].append((len(fetched[0]), sum(s.data.shape[0] for s in own), valid))
        return fetched

    def train_and_keep(*words):
        state = train(*words)
        for name, x in state.roles["student"].all.items():
            held[f"p/{name}"] = np.asarray(x.addressable_data(0))
        return state

    loop.fetch, loop.train = fetch_and_count, train_and_keep
    try:
        rounds.run(asked, workdir)
    except hosts.Preempted as stop:
        print(stop)
        sys.exit(75)
    finally:
        np.savez(record, **held)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
