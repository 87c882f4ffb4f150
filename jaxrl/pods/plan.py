"""What a pod is to be, checked before anything is created: its slice, its hosts, what they run."""

import dataclasses
import math
import re
import shlex
from collections.abc import Mapping, Sequence

from jaxrl.forecast.chips import Slice, read_slice

OURS = ("workdir", "hosts", "process", "port", "join_s")  # flags that a pod says itself
PORT = 8476  # jaxrl.launch's; the one above is used too


@dataclasses.dataclass(frozen=True)
class Sold:
    """What a chip is called where it is rented."""

    gcloud: str  # --type; "": no TPU VMs
    runtime: str
    gke: str  # label of its nodes


# Names of docs.cloud.google.com/tpu/docs/runtimes and /kubernetes-engine/docs/concepts/plan-tpus,
# not tried on a cloud. tpu7x is rented through GKE only.
SOLD: Mapping[str, Sold] = {
    "v5e": Sold("v5litepod", "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice"),
    "v5p": Sold("v5p", "v2-alpha-tpuv5", "tpu-v5p-slice"),
    "v6e": Sold("v6e", "v2-alpha-tpuv6e", "tpu-v6e-slice"),
    "tpu7x": Sold("", "", "tpu7x"),
}
A_HOST = 4  # chips of each host of a slice that has several
ONE_HOST = 8  # chips up to which a slice of v5e or v6e is one host


# Of the fields that are numbers: least and most.
BOUNDS: Mapping[str, tuple[float, float]] = {
    "restarts": (0, math.inf),
    "workers": (0, math.inf),
    "worker_cpus": (1, math.inf),
    "grace_s": (0, math.inf),
    "join_s": (1, math.inf),
    "wait_s": (1, math.inf),
    "gateway_port": (1, 65_535),
}
# Signs of the names of others' things; empty where a way to start does not need them.
NAMES: Mapping[str, str] = {
    **dict.fromkeys(("zone", "namespace", "queue", "cluster", "secret"), "a-z0-9.-"),
    "project": "a-z0-9.:-",
    "image": "A-Za-z0-9._/:@-",
    "runtime": "A-Za-z0-9._-",
}


@dataclasses.dataclass(frozen=True)
class PodConfig:
    """A pod's fields, see configs/pod.py. ValueError naming the field that cannot be."""

    name: str
    slice: str
    workdir: str
    restarts: int
    spot: bool
    setup: str
    join_s: float
    grace_s: int
    project: str
    zone: str
    runtime: str
    wait_s: int
    image: str
    namespace: str
    queue: str
    make_queue: bool
    cluster: str
    workers: int
    worker_cpus: int
    secret: str
    gateway_port: int

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", self.name):
            raise ValueError(
                f"pod.name={self.name!r}; allowed: small letters, digits and -, from a letter on, "
                "at most 40"
            )
        if not re.fullmatch(r"gs://[a-z0-9][-_.a-z0-9]{1,61}[a-z0-9](/.*)?", self.workdir):
            raise ValueError(f"pod.workdir={self.workdir!r}; allowed: gs://BUCKET/PATH")
        for field, (least, most) in BOUNDS.items():
            if not least <= self.__dict__[field] <= most:
                stated = f"{least} to {most}" if most < math.inf else f"{least} or more"
                raise ValueError(f"pod.{field}={self.__dict__[field]!r}; allowed: {stated}")
        for field, signs in NAMES.items():
            if not re.fullmatch(f"[{signs}]*", self.__dict__[field]):
                raise ValueError(f"pod.{field}={self.__dict__[field]!r}; allowed: {signs}")
        if self.make_queue and not self.queue:
            raise ValueError("pod.make_queue=True with pod.queue=''; allowed: the queue's name")

    def need(self, where: str, *fields: str) -> None:
        """ValueError naming the fields that a way to start needs and that are empty."""
        if empty := [field for field in fields if not self.__dict__[field]]:
            stated = ", ".join(f"pod.{field}=''" for field in empty)
            raise ValueError(f"{stated}: --to {where} needs them; allowed: what they name")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A pod that fits together."""

    pod: PodConfig
    where: Slice
    words: Sequence[str]  # of jaxrl.launch, without workdir and hosts

    @property
    def sold(self) -> Sold:
        """What the chip is called."""
        return SOLD[self.where.name.split(":")[0]]

    @property
    def topology(self) -> str:
        """Of a slice: 4x4x4."""
        return "x".join(map(str, self.where.extents))

    @property
    def chips(self) -> int:
        """Of a slice."""
        return math.prod(self.where.extents)

    @property
    def hosts(self) -> int:
        """Of a slice."""
        return self.chips // self.chips_a_host

    @property
    def chips_a_host(self) -> int:
        """As it is rented."""
        flat = self.where.chip.dimensions == 2
        return self.chips if self.chips <= (ONE_HOST if flat else A_HOST) else A_HOST

    def launch(self, hosts: str, process: str) -> str:
        """The shell command of one host; both are shell words, expanded there."""
        words = ["python", "-m", "jaxrl.launch", *self.words, "--workdir", self.pod.workdir]
        words += ["--port", str(PORT), "--join_s", f"{self.pod.join_s:g}"]
        return f"{shlex.join(words)} --hosts {hosts} --process {process}"


def make(pod: PodConfig, mesh: Mapping[str, int], words: Sequence[str], kinds: set[str]) -> Plan:
    """Check all that can be known before anything is created. ``mesh`` is that of the run,
    ``kinds`` are its phases' ``pool.kind``. ValueError naming the field."""
    try:
        where = read_slice(pod.slice)
    except ValueError as error:
        raise ValueError(f"pod.{error}") from error
    if math.prod(mesh.values()) != where.devices:
        stated = ", ".join(f"mesh.{axis}={size}" for axis, size in mesh.items())
        raise ValueError(
            f"{stated}: the product is {math.prod(mesh.values())}, but pod.slice={pod.slice!r} has "
            f"{where.devices} devices; allowed: a mesh of as many (see configs/meshes.py)"
        )
    plan = Plan(pod, where, words)
    if plan.chips % plan.chips_a_host:
        raise ValueError(
            f"pod.slice={pod.slice!r} has {plan.chips} chips; allowed: whole hosts of {A_HOST}"
        )
    if bool(pod.workers) != ("remote" in kinds):
        raise ValueError(
            f"pod.workers={pod.workers!r} with pool.kind={', '.join(sorted(kinds))}; allowed: "
            "workers beside pool.kind='remote', and none else"
        )
    if taken := [word for word in words if word.lstrip("-").split("=")[0] in OURS]:
        raise ValueError(f"{taken[0]} is said by the pod itself; allowed: what jaxrl.launch runs")
    return plan
