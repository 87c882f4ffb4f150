r"""A pod: which slice a run gets, where it writes, how it is started, and what stands beside it.

python -m jaxrl.pod --pod configs/pod.py --pod.slice=v5p:4x4x4 --pod.workdir=gs://BUCKET/gvpo \
    --to gke -- --config configs/gvpo.py:qwen3_8b --config.mesh.fsdp=16 --config.mesh.tensor=4

Copy it for a cluster of your own, and say there what is always the same.
"""

from ml_collections import ConfigDict


def get_config(variant: str = "") -> ConfigDict:
    """Every field there is. Raises ValueError: there are no variants."""
    if variant:
        raise ValueError(f"config variant {variant!r} is unknown; allowed: none")
    pod = ConfigDict()
    pod.name = "jaxrl"  # of all that is created: small letters, digits and -
    pod.slice = ""  # chip and shape: v5e:4x4, v5p:4x4x4, v6e:16x16, v6e:8x8*2 for two slices
    pod.workdir = ""  # gs://BUCKET/PATH
    pod.restarts = 10  # failures after which it is given up; being preempted is none
    pod.spot = True
    pod.setup = "pip install -q -c constraints.txt -e '.[tpu]'"  # on each host, in the checkout
    pod.join_s = 900.0  # seconds after which hosts that did not come are named
    pod.grace_s = 60  # between the notice that a machine is wanted back and its end

    # gcloud: TPU VMs by queued resources
    pod.project = ""
    pod.zone = ""
    pod.runtime = ""  # "": the one of the chip
    pod.wait_s = 86_400  # in the queue, then the request is given up

    # gke: a JobSet, queued by Kueue; also what xpk and SkyPilot run
    pod.image = ""  # with the checkout as its working directory
    pod.namespace = "default"
    pod.queue = ""  # Kueue's LocalQueue; "": no queue
    pod.make_queue = False  # write that queue too, with room for this pod
    pod.cluster = ""  # of xpk

    # of a run with pool.kind="remote": helpers on machines without accelerators
    pod.workers = 0
    pod.worker_cpus = 4
    pod.secret = "jaxrl-pool"  # Secret whose field `key` is the pool's key
    pod.gateway_port = 8700
    return pod
