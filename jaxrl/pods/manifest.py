"""A slice on GKE: a JobSet whose jobs are slices and whose pods are hosts, and Kueue's queue."""

from typing import Any

from jaxrl.pods.plan import PORT, Plan

PREEMPTED = 75  # jaxrl.runner's
HOSTS = "hosts"  # name of the replicated job of the slices
KEY = "JAXRL_POOL_KEY"
POOL = "/pool"  # on the first host: what run and gateway share

_INDEX = "metadata.labels['jobset.sigs.k8s.io/job-index']"


def names(plan: Plan) -> list[str]:
    """Of all hosts, in order: a JobSet gives its pods names that are known before."""
    jobset = plan.pod.name
    return [
        f"{jobset}-{HOSTS}-{job}-{pod}.{jobset}"
        for job in range(plan.where.slices)
        for pod in range(plan.hosts)
    ]


def manifest(plan: Plan) -> list[dict[str, Any]]:
    """The objects, Kueue's first. ValueError naming what is missing."""
    plan.pod.need("gke", "image")
    return [*(_queue(plan) if plan.pod.make_queue else []), _jobset(plan)]


def _jobset(plan: Plan) -> dict[str, Any]:
    pod = plan.pod
    metadata: dict[str, Any] = {"name": pod.name, "namespace": pod.namespace}
    if pod.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": pod.queue}
    if plan.where.slices > 1:  # each slice on a node pool of its own
        exclusive = "alpha.jobset.sigs.k8s.io/exclusive-topology"
        metadata["annotations"] = {exclusive: "cloud.google.com/gke-nodepool"}
    jobs = [_slices(plan)]
    if pod.workers:
        jobs.append(_workers(plan))
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": pod.name},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [HOSTS]},
            "failurePolicy": {
                "maxRestarts": pod.restarts,
                "rules": [
                    {
                        "name": "preempted",  # costs nothing of the budget
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": jobs,
        },
    }


def _slices(plan: Plan) -> dict[str, Any]:
    pod = plan.pod
    process = f"$((JOB_INDEX * {plan.hosts} + JOB_COMPLETION_INDEX))"
    container = {
        "name": "jaxrl",
        "image": pod.image,
        # exec: the shell would keep the notice of preemption to itself
        "command": ["sh", "-c", f"exec {_launch(plan, process)}"],
        "env": [{"name": "JOB_INDEX", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}],
        "ports": [_port(port) for port in (PORT, PORT + 1, 8080)],
        "resources": {"limits": {"google.com/tpu": str(plan.chips_a_host)}},
    }
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    rules = [
        {"action": "FailJob", "onPodConditions": [disrupted]},
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": "jaxrl", "operator": "In", "values": [PREEMPTED]},
        },
    ]
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": pod.grace_s,
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": plan.sold.gke,
            "cloud.google.com/gke-tpu-topology": plan.topology,
        },
        "containers": [container],
    }
    if pod.workers:
        shared = [{"name": "pool", "mountPath": POOL}]
        container["volumeMounts"] = shared
        spec["volumes"] = [{"name": "pool", "emptyDir": {}}]
        spec["initContainers"] = [{**_gateway(plan, process), "volumeMounts": shared}]
    if pod.spot:
        spec["nodeSelector"]["cloud.google.com/gke-spot"] = "true"
        spec["tolerations"] = [
            {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true"}
            | {"effect": "NoSchedule"}
        ]
    return _job(HOSTS, plan.where.slices, plan.hosts, spec, {"podFailurePolicy": {"rules": rules}})


def _launch(plan: Plan, process: str) -> str:
    pool = ""
    if plan.pod.workers:
        pool = f" --config.pool.local_dir={POOL} --config.pool.gateway={_url(plan)}"
        pool += " --config.pool.launcher=none"
    return plan.launch(",".join(names(plan)), process) + pool


def _port(number: int) -> dict[str, Any]:
    return {"containerPort": number, "protocol": "TCP"}


def _url(plan: Plan) -> str:
    return f"http://{names(plan)[0]}:{plan.pod.gateway_port}"


def _gateway(plan: Plan, process: str) -> dict[str, Any]:
    """Beside the first host's run, over the same folder: a sidecar, which ends when the run does.
    The workers' key is the run's before it looks for one."""
    serve = f"exec python -m jaxrl.gateway --pool {POOL} --host 0.0.0.0"
    return {
        "name": "gateway",
        "image": plan.pod.image,
        "restartPolicy": "Always",
        "command": [
            "sh",
            "-c",
            f'[ "{process}" = 0 ] || exec sleep infinity\n'
            f'umask 077; printf %s "${KEY}" > {POOL}/key\n'
            f"until [ -e {POOL}/pool.json ]; do sleep 1; done\n"
            f"{serve} --port {plan.pod.gateway_port}",
        ],
        "env": [
            {"name": "JOB_INDEX", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
            _key(plan),
        ],
        "ports": [_port(plan.pod.gateway_port)],
    }


def _job(
    name: str, replicas: int, pods: int, spec: dict[str, Any], more: dict[str, Any]
) -> dict[str, Any]:
    job = {
        "parallelism": pods,
        "completions": pods,
        "completionMode": "Indexed",
        "template": {"spec": spec},
        **more,
    }
    return {"name": name, "replicas": replicas, "template": {"spec": {"backoffLimit": 0, **job}}}


def _key(plan: Plan) -> dict[str, Any]:
    return {
        "name": KEY,
        "valueFrom": {"secretKeyRef": {"name": plan.pod.secret, "key": "key"}},
    }


def _workers(plan: Plan) -> dict[str, Any]:
    """The pool's workers, for the gateway that the first host starts. One that fails starts again
    by itself: a slice is not stopped for it."""
    pod = plan.pod
    container = {
        "name": "worker",
        "image": pod.image,
        "command": ["python", "-m", "jaxrl.worker", f"--gateway={_url(plan)}"],
        "env": [_key(plan)],
        "resources": {"requests": {"cpu": str(pod.worker_cpus)}},
    }
    spec = {"restartPolicy": "OnFailure", "containers": [container]}
    return _job("workers", 1, pod.workers, spec, {"backoffLimit": 1000})


def _queue(plan: Plan) -> list[dict[str, Any]]:
    """A flavor, a cluster's queue with room for this pod, and the namespace's queue before it."""
    pod, version = plan.pod, "kueue.x-k8s.io/v1beta2"
    flavor, tpus = f"{pod.queue}-{plan.sold.gke}", plan.chips * plan.where.slices
    covered = {"google.com/tpu": tpus}
    if pod.workers:
        covered["cpu"] = pod.workers * pod.worker_cpus
    quotas = [{"name": name, "nominalQuota": str(count)} for name, count in covered.items()]
    flavors = [{"name": flavor, "resources": quotas}]
    spec = {
        "namespaceSelector": {},
        "resourceGroups": [{"coveredResources": list(covered), "flavors": flavors}],
    }
    return [
        {"apiVersion": version, "kind": "ResourceFlavor", "metadata": {"name": flavor}},
        {
            "apiVersion": version,
            "kind": "ClusterQueue",
            "metadata": {"name": pod.queue},
            "spec": spec,
        },
        {
            "apiVersion": version,
            "kind": "LocalQueue",
            "metadata": {"name": pod.queue, "namespace": pod.namespace},
            "spec": {"clusterQueue": pod.queue},
        },
    ]
