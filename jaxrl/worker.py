"""A worker of a remote pool, on any machine that reaches its gateway.

    JAXRL_POOL_KEY=... python -m jaxrl.worker --gateway URL [--most N]
    python -m jaxrl.worker --gateway URL --jobset IMAGE --workers N     a manifest for Kubernetes

The key is in the file ``pool/key`` of the run's workdir. Task source, reward and harness are told
by the gateway. No jax is started here.
"""

import argparse
import json
import os
import sys


def main() -> None:
    """Work until the gateway is gone; exit code 1 then, with a line that says why."""
    asked = argparse.ArgumentParser(prog="jaxrl.worker")
    asked.add_argument("--gateway", required=True, help="its URL, or the run's pool/gateway.json")
    asked.add_argument("--most", type=int, default=64, help="agents, or samples, at a time")
    asked.add_argument("--jobset", default="", help="print a manifest of workers of this image")
    asked.add_argument("--workers", type=int, default=2, help="of the manifest")
    asked.add_argument("--secret", default="jaxrl-pool", help="which Secret has the key, as `key`")
    asked.add_argument("--restarts", type=int, default=10, help="of the manifest")
    told = asked.parse_args()
    from jaxrl.pool import launchers, workers

    launchers.die_with_parent()
    if told.jobset:
        manifest = launchers.jobset(
            "jaxrl-workers",
            told.jobset,
            told.gateway,
            told.workers,
            secret=told.secret,
            most=told.most,
            restarts=told.restarts,
        )
        print(json.dumps(manifest, indent=1))
        return
    key = os.environ.get(launchers.KEY_VARIABLE, "")
    if not key:
        sys.exit(f"jaxrl.worker: {launchers.KEY_VARIABLE} is not set; allowed: the pool's key")
    try:
        workers.work_for(told.gateway, key, told.most)
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        sys.exit(f"jaxrl.worker: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
