"""A pod is checked before anything is created, and what is handed over is what others accept."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs import pod as fields
from jaxrl import pod
from jaxrl.pods import hand_over, manifest, plan, script

RUN = ("--config", "configs/gvpo.py:qwen3_8b", "--config.mesh.fsdp=16", "--config.mesh.tensor=4")
GIVEN = {
    "slice": "v5p:4x4x4",
    "workdir": "gs://bucket/gvpo",
    "project": "p",
    "zone": "us-east5-a",
    "image": "registry/jaxrl:1",
    "cluster": "c",
}


def made(*words: str, **changes: Any) -> plan.Plan:
    config = fields.get_config()
    config.update(GIVEN | changes)
    return pod.planned(config, words or RUN)


REFUSED = {
    "no slice": ({"slice": "v5q:4x4x4"}, "pod.slice='v5q:4x4x4': the chip 'v5q' is unknown"),
    "another shape": ({"slice": "v5p:4x4"}, "pod.slice='v5p:4x4': extents 4x4; allowed for v5p: 3"),
    "a mesh that does not fit": (
        {"slice": "v5p:4x4x8"},
        "mesh.fsdp=16, mesh.tensor=4.*is 64, but pod.slice='v5p:4x4x8' has 128 devices",
    ),
    "no bucket": ({"workdir": "/tmp/run"}, "pod.workdir='/tmp/run'; allowed: gs://BUCKET/PATH"),
    "a name": ({"name": "My_Run"}, "pod.name='My_Run'; allowed: small letters"),
    "no budget": ({"restarts": -1}, "pod.restarts=-1; allowed: 0 or more"),
    "no port": ({"gateway_port": 99999}, "pod.gateway_port=99999; allowed: 1 to 65535"),
    "no processor": ({"worker_cpus": 0}, "pod.worker_cpus=0; allowed: 1 or more"),
    "no name of a queue": ({"queue": "My Queue"}, "pod.queue='My Queue'; allowed: a-z0-9.-"),
    "a command for an image": ({"image": "i;rm"}, "pod.image='i;rm'; allowed: A-Za-z0-9"),
    "no queue": ({"make_queue": True}, "pod.make_queue=True with pod.queue=''"),
    "idle workers": ({"workers": 4}, "pod.workers=4 with pool.kind=local, recorded"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_before_anything_is_created(case):
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        made(**changes)


def test_a_run_that_could_not_start_is_refused():
    for words, message in {
        (*RUN, "--config.algorithm.betta=1"): "betta",
        (*RUN, "--config.sampler.temperature=0.0"): "sampler.temperature=0.0; allowed: > 0",
        (*RUN, "--workdir=gs://other"): "'--workdir=gs://other' is no flag .* that fits here",
        ("--experiment", "experiments/gvpo_beta.py"): "--experiment NAME --index I",
        ("--experiment", "experiments/gvpo_beta.py", "--index=99"): "--index 99; allowed: 0 to 23",
    }.items():
        with pytest.raises(ValueError, match=message):
            made(*words)


def test_a_run_of_a_sweep_gets_the_named_mesh():
    words = ("--experiment", "experiments/quickstart_rates.py", "--index=4")
    with pytest.raises(ValueError, match="is 1, but pod.slice='v5e:2x2' has 4 devices"):
        made(*words, slice="v5e:2x2")
    one = made(*words, "--mesh", "configs/meshes.py:v5e_2x2", slice="v5e:2x2")
    assert "--index=4 --mesh configs/meshes.py:v5e_2x2 --workdir gs:" in one.launch("h", "0")


def test_each_way_names_what_it_lacks():
    for to, field in {"gcloud": "zone", "gke": "image", "xpk": "cluster"}.items():
        with pytest.raises(ValueError, match=f"pod.{field}='': --to {to} needs them"):
            pod.text_of(made(**{field: ""}), to)


@pytest.mark.parametrize(
    ("shape", "fsdp", "hosts", "chips"),
    [("v5e:2x2", 4, 1, 4), ("v6e:2x4", 8, 1, 8), ("v6e:4x4", 16, 4, 4), ("v5p:2x2x2", 8, 2, 4)],
)
def test_hosts_of_a_slice(shape, fsdp, hosts, chips):
    one = made(*RUN[:2], f"--config.mesh.fsdp={fsdp}", slice=shape)
    assert (one.hosts, one.chips_a_host) == (hosts, chips)


# -- gcloud


def test_the_script_is_bash_and_asks_the_bucket_first():
    text = script.script(made())
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert text.index("gcloud storage cp -") < text.index("queued-resources create")
    for words in (
        "--type=v5p --topology=4x4x4 --runtime-version=v2-alpha-tpuv5 --spot",
        "--valid-until-duration=86400s",
        '-le 10 ] || { echo "failed $failed times"',
        '--hosts "$HOSTS" --process "$PROCESS"',
    ):
        assert words in text
    assert "--spot" not in script.script(made(spot=False))
    with pytest.raises(ValueError, match="2 slices; allowed: one, or --to gke"):
        script.script(made(*RUN[:2], "--config.mesh.fsdp=128", slice="v5p:4x4x4*2"))


def test_a_host_finds_itself_in_the_metadata(tmp_path):
    """The lines of the script that a host runs, over what the metadata of a slice look like."""
    text = script.script(made())
    start, end = text.index("HOSTS="), text.index("cd ~/jaxrl && python")
    lines = text[start:end].replace("'\"'\"'", "'")
    told = "agent-worker-number) echo 1;; *) echo a:b:10.0.0.2,a:b:10.0.0.3;;"
    ask = f"ask() {{ case $1 in {told} esac; }}"
    said = subprocess.run(
        ["bash", "-euc", f"{ask}\n{lines}\necho $HOSTS $PROCESS"], capture_output=True, text=True
    )
    assert said.stdout == "10.0.0.2,10.0.0.3 1\n"


# -- gke


def objects(**changes: Any) -> dict[str, Any]:
    return {one["kind"]: one for one in manifest.manifest(made(**changes))}


def remote(**changes: Any) -> plan.Plan:
    words = (*RUN[:2], "--config.mesh.fsdp=512", "--config.pool.kind=remote")
    queue = {"queue": "q", "make_queue": True, "workers": 8}
    return made(*words, slice="v6e:16x16*2", **(queue | changes))


def test_the_jobset_is_what_its_published_models_know():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api")
    for one in (made(), remote()):
        jobset = next(x for x in manifest.manifest(one) if x["kind"] == "JobSet")
        spec = models.JobsetV1alpha2JobSetSpec.from_dict(jobset["spec"])
        assert spec.to_dict() == jobset["spec"]  # a field that they do not know would be lost


def closed(schema: Any) -> Any:
    """A schema that also refuses fields it does not know, as a cluster does when asked to."""
    if isinstance(schema, list):
        return [closed(x) for x in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {name: closed(x) for name, x in schema.items()}
    if "properties" in schema and "x-kubernetes-preserve-unknown-fields" not in schema:
        schema.setdefault("additionalProperties", False)
    return schema


def test_the_manifest_fits_the_published_schemas():
    """JAXRL_CRDS: a folder with the CustomResourceDefinitions of JobSet's and Kueue's releases."""
    jsonschema = pytest.importorskip("jsonschema")
    if "JAXRL_CRDS" not in os.environ:
        pytest.skip("JAXRL_CRDS names no folder with the CRDs of JobSet and Kueue")
    schemas = {}
    for path in Path(os.environ["JAXRL_CRDS"]).glob("*.yaml"):
        crd = yaml.safe_load(path.read_text())["spec"]
        for version in crd["versions"]:
            schema = closed(version["schema"]["openAPIV3Schema"])
            del schema["additionalProperties"]
            schema["properties"]["metadata"] = {"type": "object"}
            schemas[f"{crd['group']}/{version['name']}", crd["names"]["kind"]] = schema
    for one in manifest.manifest(remote()):
        jsonschema.validate(one, schemas[one["apiVersion"], one["kind"]])


def test_every_host_knows_the_others_and_itself():
    one = remote()
    hosts = manifest.names(one)
    assert len(hosts) == len(set(hosts)) == 128
    assert (hosts[0], hosts[64]) == ("jaxrl-hosts-0-0.jaxrl", "jaxrl-hosts-1-0.jaxrl")
    jobset = next(x for x in manifest.manifest(one) if x["kind"] == "JobSet")
    slices, workers = jobset["spec"]["replicatedJobs"]
    job = slices["template"]["spec"]
    assert (slices["replicas"], job["completions"], job["parallelism"]) == (2, 64, 64)
    container = job["template"]["spec"]["containers"][0]
    words = shlex.split(container["command"][2].replace("$((", "'$((").replace("))", "))'"))
    assert words[words.index("--hosts") + 1].split(",") == hosts
    process = words[words.index("--process") + 1]
    said = subprocess.run(
        ["sh", "-c", f"echo {process}"],
        env={"JOB_INDEX": "1", "JOB_COMPLETION_INDEX": "3", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert hosts[int(said.stdout)] == "jaxrl-hosts-1-3.jaxrl"
    assert container["resources"]["limits"] == {"google.com/tpu": "4"}
    assert job["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "16x16"

    # The pool's workers come to the gateway beside the first host, with the same key.
    worker = workers["template"]["spec"]["template"]["spec"]["containers"][0]
    gateway = job["template"]["spec"]["initContainers"][0]
    assert worker["command"][-1] == "--gateway=http://jaxrl-hosts-0-0.jaxrl:8700"
    assert "--port 8700" in gateway["command"][2] and gateway["restartPolicy"] == "Always"
    assert worker["env"][0] in gateway["env"]
    assert "--config.pool.gateway=http://jaxrl-hosts-0-0.jaxrl:8700" in words


def test_preemption_costs_nothing_of_the_budget():
    spec = objects()["JobSet"]["spec"]
    assert spec["failurePolicy"]["maxRestarts"] == 10
    (rule,) = spec["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert job["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"] == [75]
    assert job["backoffLimit"] == 0 and job["template"]["spec"]["restartPolicy"] == "Never"


# -- others' launchers


def test_xpk_accepts_the_command():
    """JAXRL_XPK: xpk of an environment of its own, whose pins are not ours."""
    program = os.environ.get("JAXRL_XPK") or shutil.which("xpk")
    if not program:
        pytest.skip("xpk is not installed, and JAXRL_XPK names none")
    words = [program, *hand_over.xpk(made())[1:], "--dry-run"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-2000:]
    assert "google.com/tpu: 4" in ran.stdout and "--hosts" in ran.stdout


def test_skypilot_gets_a_task():
    task = yaml.safe_load(pod.text_of(made(), "sky"))
    assert task["resources"]["accelerators"] == "tpu-v5p-128" and task["resources"]["use_spot"]
    assert task["resources"]["job_recovery"]["max_restarts_on_errors"] == 10
    ran = "export SKYPILOT_NODE_IPS='10.0.0.2\n10.0.0.3' SKYPILOT_NODE_RANK=1; "
    command = task["run"].split("--hosts", 1)[1]
    said = subprocess.run(["bash", "-c", f"{ran}echo {command}"], capture_output=True, text=True)
    assert said.stdout == "10.0.0.2,10.0.0.3 --process 1\n"


SKY = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(wanted,) = task.resources
print(task.num_nodes, wanted.accelerators, wanted.use_spot)
"""


def test_skypilot_reads_the_task(tmp_path):
    """JAXRL_SKY: python of an environment that has SkyPilot, whose pins are not ours."""
    if "JAXRL_SKY" not in os.environ:
        pytest.skip("JAXRL_SKY names no python with SkyPilot")
    (tmp_path / "task.yaml").write_text(pod.text_of(made(), "sky"))
    words = [os.environ["JAXRL_SKY"], "-c", SKY, str(tmp_path / "task.yaml")]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert ran.stdout == "1 {'tpu-v5p-128': 1} True\n", ran.stderr[-2000:]


def test_go_without_its_program_creates_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="--to gke is done by kubectl, which is not installed"):
        pod.go(made(), "gke", "")
    with pytest.raises(ValueError, match="pod.workdir cannot be tried: gcloud is not installed"):
        pod.check_bucket("gs://bucket/run")
