"""Launchers with real processes, real Ray actors, and a manifest against a schema."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from jaxrl.pool.contract import PoolError
from jaxrl.pool.launchers import KEY_VARIABLE, RayWorkers, Subprocesses, jobset, worker_command
from jaxrl.pool.services import Services, pool_key
from tests.pool.scripted import Scripted
from tests.pool.serving import KEY, gateway

ROOT = Path(__file__).parents[2]
TASK = {
    "source": "jaxrl.tasks.tools",
    "family": "lookup",
    "parameters": {"names": 4, "told_fraction": 0.5, "shown_fraction": 0.5},
    "seed": 0,
    "train_prompts": 8,
    "held_out_prompts": 2,
    "held_out_fraction": 0.3,
    "reward": "exact",
}
RUN = {"task": TASK, "harness": "", "lease_s": 2.0}


def tasks() -> Any:
    fields = {name: value for name, value in TASK.items() if name not in ("source", "reward")}
    source = importlib.import_module("jaxrl.tasks.tools").Source
    return source(fields.pop("family"), fields.pop("parameters"), **fields).tasks("train")


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has asked about yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def sleeper(folder: Path, count: int, restarts: int) -> Subprocesses:
    code = "import time; print('here', flush=True); time.sleep(600)"
    return Subprocesses(
        [sys.executable, "-c", code], count, name="helper", logs=folder, restarts=restarts
    )


def test_dead_processes_are_started_again_while_the_budget_lasts(tmp_path):
    helpers = sleeper(tmp_path, 2, restarts=1)
    helpers.ensure()
    wait_for(lambda: "here" in (tmp_path / "helper-1.log").read_text())
    helpers.kill(1)
    assert helpers.status() == ["running", "ended with -9"]
    helpers.ensure()
    assert helpers.status() == ["running"] * 2
    wait_for(lambda: (tmp_path / "helper-1.log").read_text().count("here") == 2)
    helpers.kill(0)
    with pytest.raises(PoolError, match=r"helper 0 ended with -9, and all .* spent.*\n.*here"):
        helpers.ensure()
    helpers.close()
    assert helpers.status() == []


def test_helpers_die_with_their_parent_however_it_ends(tmp_path):
    """The parent is killed: nobody has the time to tell its children."""
    child = (
        "import time; from jaxrl.pool.launchers import die_with_parent; die_with_parent();"
        "print('here', flush=True); time.sleep(600)"
    )
    parent = (
        "import sys, time; from jaxrl.pool.launchers import Subprocesses;"
        f"s = Subprocesses([sys.executable, '-c', {child!r}], 1, name='c', logs={str(tmp_path)!r},"
        "restarts=0); s.ensure(); print(s._helpers[0].pid, flush=True); time.sleep(600)"
    )
    started = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE)
    assert started.stdout is not None
    pid = int(started.stdout.readline())
    wait_for(lambda: "here" in (tmp_path / "c-0.log").read_text())
    assert alive(pid)
    started.send_signal(signal.SIGKILL)
    started.wait()
    wait_for(lambda: not alive(pid), 10)


def seal_all(place: Any, launcher: Any, groups: int) -> dict[int, tuple[int, str]]:
    """Kill a worker once some samples are sealed; the rest must come all the same."""
    for number, task in enumerate(tasks()[:groups]):
        place.open(task.prompt, task_key=task.key, content_hash=task.content_hash)
        assert number < groups
    launcher.ensure()
    wait_for(lambda: place.ledger.counts()["slots_sealed"] >= 1)
    launcher.kill(0)
    late = len(tasks()[:groups])
    for task in tasks()[:groups]:
        place.open(task.prompt, task_key=task.key, content_hash=task.content_hash)

    def done() -> bool:
        launcher.ensure()
        place.ledger.expire()
        return place.ledger.counts()["slots_sealed"] == 2 * late

    wait_for(done)
    assert launcher.status() == ["running"] * len(launcher.status())
    return {n: (len(place.sealed(n)), place.sealed(n)[0].digest) for n in range(2 * late)}


def run_gateway(folder: Path) -> Any:
    return gateway(folder, Scripted(lambda request: "1 2"), lease_s=2.0, run=RUN)


@pytest.fixture(scope="module")
def by_subprocess(tmp_path_factory):
    """What workers that are subprocesses seal, one of them killed on the way."""
    folder = tmp_path_factory.mktemp("subprocess")
    with run_gateway(folder) as place:
        workers = Subprocesses(
            worker_command(place.url, 4),
            2,
            name="worker",
            logs=folder / "logs",
            restarts=2,
            environment={KEY_VARIABLE: KEY},
        )
        try:
            return seal_all(place, workers, 4)
        finally:
            workers.close()


@pytest.mark.slow
def test_workers_as_subprocesses_seal_everything_though_one_is_killed(by_subprocess):
    assert len(by_subprocess) == 8


def test_a_worker_without_a_key_says_so():
    environment = {k: v for k, v in os.environ.items() if k != KEY_VARIABLE}
    command = worker_command("http://127.0.0.1:9", 1)
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1 and f"{KEY_VARIABLE} is not set" in ended.stderr


def test_the_key_and_what_is_told_of_a_run_are_for_one_users_eyes(tmp_path):
    run = {"ledger": "postgresql://me:secret@host/db"}
    services = Services(
        tmp_path, run, gateway="http://127.0.0.1:9", launcher="none", workers=2, patience_s=1.0
    )
    assert services.url == "http://127.0.0.1:9" and services.counts() == {}
    modes = {name: (tmp_path / name).stat().st_mode & 0o777 for name in ("key", "pool.json")}
    assert modes == {"key": 0o600, "pool.json": 0o600}
    assert len(services.key) >= 32 and pool_key(tmp_path) == services.key
    services.ensure()
    services.close()


def test_a_gateway_that_cannot_start_says_why(tmp_path):
    with pytest.raises(PoolError, match="jaxrl.gateway: .*pool.json lacks run_id, seed"):
        Services(tmp_path, {}, gateway="", launcher="none", workers=0, patience_s=60.0)


def absent(name: str) -> bool:
    return importlib.util.find_spec(name) is None


@pytest.mark.slow
@pytest.mark.skipif(absent("ray"), reason="ray is not installed (extra ray)")
def test_ray_actors_seal_the_same_though_one_is_killed(by_subprocess, tmp_path):
    ray = importlib.import_module("ray")
    path = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        runtime_env=path,
        object_store_memory=100 * 2**20,
    )
    try:
        with run_gateway(tmp_path) as place:
            workers = RayWorkers(place.url, KEY, 2, most=4, restarts=2, resources={"num_cpus": 0})
            sealed = seal_all(place, workers, 4)
            workers.kill(0)
            wait_for(lambda: workers.status()[0] != "running")
            workers.close()
    finally:
        ray.shutdown()
    assert sealed == by_subprocess


def test_ray_says_which_extra_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match="the extra ray"):
        RayWorkers("http://127.0.0.1:9", KEY, 1, most=1, restarts=0, resources={})


# The documented part of JobSet v1alpha2 and of what it embeds: the fields that our manifest uses,
# with their types and what is required. The whole definition is the cluster's to judge.
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}


def closed(required: list[str], **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": required,
        "properties": fields,
        "additionalProperties": False,
    }


SECRET = closed(["secretKeyRef"], secretKeyRef=closed(["key"], name=NAME, key={"type": "string"}))
VARIABLE = closed(["name"], name={"type": "string"}, valueFrom=SECRET, value={"type": "string"})
CONTAINER = closed(
    ["name"],
    name=NAME,
    image={"type": "string", "minLength": 1},
    command={"type": "array", "items": {"type": "string"}},
    env={"type": "array", "items": VARIABLE},
)
POD = closed(
    ["containers"],
    containers={"type": "array", "minItems": 1, "items": CONTAINER},
    restartPolicy={"enum": ["OnFailure", "Never"]},
)
COUNT = {"type": "integer", "minimum": 0}
JOB = closed(
    ["template"],
    backoffLimit=COUNT,
    parallelism=COUNT,
    completions=COUNT,
    template=closed(["spec"], spec=POD),
)
REPLICATED = closed(
    ["name", "template"], name=NAME, replicas=COUNT, template=closed(["spec"], spec=JOB)
)
SCHEMA = closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=closed(["name"], name=NAME),
    spec=closed(
        ["replicatedJobs"],
        failurePolicy=closed([], maxRestarts=COUNT),
        replicatedJobs={"type": "array", "minItems": 1, "items": REPLICATED},
    ),
)


def test_the_manifest_for_a_cluster_fits_the_documented_schema():
    command = [sys.executable, "-m", "jaxrl.worker", "--gateway=http://gateway:8900"]
    told = subprocess.run(
        [*command, "--jobset=registry/jaxrl:1", "--workers=3", "--secret=pool-key"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    manifest = json.loads(told.stdout)
    jsonschema.validate(manifest, SCHEMA)
    (jobs,) = manifest["spec"]["replicatedJobs"]
    (container,) = jobs["template"]["spec"]["template"]["spec"]["containers"]
    assert jobs["replicas"] == 3 and container["image"] == "registry/jaxrl:1"
    assert container["env"][0]["valueFrom"]["secretKeyRef"]["name"] == "pool-key"
    assert KEY not in told.stdout
    for broken in ({"spec": {}}, {"kind": "Job"}, {"metadata": {"name": "Not A Name"}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**manifest, **broken}, SCHEMA)


def test_the_manifest_is_made_of_what_it_is_given():
    made = jobset("w", "image", "http://g", 1, secret="s", most=8, restarts=4)
    jsonschema.validate(made, SCHEMA)
    assert made["spec"]["failurePolicy"]["maxRestarts"] == 4
