"""A pod for those who have a launcher already: the command of xpk, the task of SkyPilot."""

import shlex
from typing import Any

from jaxrl.pods.plan import Plan

# What GKE tells each host of a slice, and SkyPilot each of its nodes.
_GKE = ('"$TPU_WORKER_HOSTNAMES"', '"$TPU_WORKER_ID"')
_SKY = ('$(echo "$SKYPILOT_NODE_IPS" | paste -sd, -)', '"$SKYPILOT_NODE_RANK"')


def _one_slice(plan: Plan, where: str) -> None:
    if plan.where.slices > 1 or plan.pod.workers:
        raise ValueError(
            f"pod.slice={plan.pod.slice!r}, pod.workers={plan.pod.workers!r}: --to {where} starts "
            "one slice and nothing beside it; allowed: --to gke"
        )


def tpu_type(plan: Plan) -> str:
    """A slice by its count: v5p's is of TensorCores, two a chip. ValueError for tpu7x, which is
    named by its topology."""
    kinds = {"v5e": "v5litepod", "v5p": "v5p", "v6e": "v6e"}
    chip = plan.where.name.split(":")[0]
    if chip not in kinds:
        raise ValueError(f"pod.slice={plan.pod.slice!r} has no name there; allowed: --to gke")
    return f"{kinds[chip]}-{plan.chips * (2 if chip == 'v5p' else 1)}"


def xpk(plan: Plan) -> list[str]:
    """The command that queues the run on a cluster of xpk's."""
    pod = plan.pod
    pod.need("xpk", "image", "cluster", "project", "zone")
    _one_slice(plan, "xpk")
    return [
        *("xpk", "workload", "create", f"--workload={pod.name}", f"--cluster={pod.cluster}"),
        *(f"--project={pod.project}", f"--zone={pod.zone}", f"--tpu-type={tpu_type(plan)}"),
        *("--num-slices=1", f"--docker-image={pod.image}", f"--max-restarts={pod.restarts}"),
        f"--termination-grace-period-seconds={pod.grace_s}",
        f"--command={plan.launch(*_GKE)}",
    ]


def sky(plan: Plan) -> dict[str, Any]:
    """The task that SkyPilot's managed jobs start again where there is room."""
    pod = plan.pod
    _one_slice(plan, "sky")
    resources: dict[str, Any] = {
        "infra": f"gcp/*/{pod.zone}" if pod.zone else "gcp",
        "accelerators": f"tpu-{tpu_type(plan)}",
        "accelerator_args": {"runtime_version": pod.runtime or plan.sold.runtime},
        "use_spot": pod.spot,
        "job_recovery": {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": pod.restarts},
    }
    return {
        "name": pod.name,
        "resources": resources,
        "workdir": ".",
        "setup": pod.setup,
        "run": plan.launch(*_SKY),
    }


def shown(words: list[str]) -> str:
    """A command as it is typed."""
    return shlex.join(words)
