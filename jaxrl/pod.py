r"""Start a run on a pod: check it, say what will be done, and do it with --go.

    python -m jaxrl.pod --pod configs/pod.py --pod.slice=v5p:4x4x4 --pod.workdir=gs://BUCKET/RUN \
        --to gcloud|gke|xpk|sky [--go] [--out FILE] -- --config configs/NAME.py [jaxrl.launch's]

What follows -- is what ``jaxrl.launch`` gets on every host. Without --go nothing is created: the
script (gcloud), the manifest (gke), the command (xpk) or the task (sky) is printed, or written to
FILE. A slice that does not exist, a mesh that does not fit it and an empty field are refused
before; with --go also a bucket that cannot be written. See configs/pod.py for the fields.
"""

import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from absl import app, flags
from ml_collections import config_flags

from jaxrl.pods import hand_over, manifest, plan, script

_POD = config_flags.DEFINE_config_file("pod", None, "configs/pod.py, or a copy for a cluster")
_TO = flags.DEFINE_enum(
    "to", None, ["gcloud", "gke", "xpk", "sky"], "who starts the machines", allow_override=True
)
_GO = flags.DEFINE_bool("go", False, "do it")
_OUT = flags.DEFINE_string("out", "", "a file for what would be printed", allow_override=True)

# The program that does it, and its words before the file.
PROGRAMS = {
    "gcloud": ["bash"],
    "gke": ["kubectl", "apply", "-f"],
    "sky": ["sky", "jobs", "launch", "--yes"],
}


def runs_of(words: Sequence[str]) -> list[Any]:
    """The phases of what jaxrl.launch would run with these words. ValueError if it would not."""
    from jaxrl import experiment

    asked, line = flags.FlagValues(), ["jaxrl.launch", *words]
    # The fields of a config become flags by what the command line says of them.
    for name in ("config", "mesh"):
        config_flags.DEFINE_config_file(name, None, "", flag_values=asked, sys_argv=line)
    flags.DEFINE_string("experiment", None, "", flag_values=asked)
    flags.DEFINE_integer("index", None, "", flag_values=asked)
    flags.DEFINE_bool("tiny", False, "", flag_values=asked)
    try:
        left = asked(line, known_only=True)[1:]
    except (flags.Error, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"after --: {error}") from error
    unknown = [word for word in left if word.split("=")[0].lstrip("-") not in KNOWN]
    if unknown:
        raise ValueError(f"after --: {unknown[0]!r} is no flag of jaxrl.launch that fits here")
    mesh = asked["mesh"].value or {}
    if (config := asked["config"].value) is not None:
        config.mesh.update(mesh)
        return experiment.read(config)
    if not asked["experiment"].value or asked["index"].value is None:
        raise ValueError("after --: allowed: --config NAME, or --experiment NAME --index I")
    runs = experiment.load(asked["experiment"].value, small=bool(asked["tiny"].value)).runs
    index = int(asked["index"].value)
    if not 0 <= index < len(runs):
        raise ValueError(f"--index {index}; allowed: 0 to {len(runs) - 1}")
    swept: Any = experiment.config_of(runs[index])
    swept.mesh.update(mesh)
    return experiment.read(swept)


KNOWN = ("model_from", "profile", "lost_s", "debug")


def planned(pod: Any, words: Sequence[str]) -> plan.Plan:
    """A pod's fields and a run, checked together. ValueError or TypeError naming the field."""
    phases = runs_of(words)
    fields = plan.PodConfig(**pod.to_dict())
    return plan.make(fields, phases[0].mesh, words, {phase.pool.kind for phase in phases})


def text_of(made: plan.Plan, to: str) -> str:
    """What is started, as text."""
    if to == "gcloud":
        return script.script(made)
    if to == "gke":
        return yaml.safe_dump_all(manifest.manifest(made), sort_keys=False, width=1000)
    if to == "xpk":
        return hand_over.shown(hand_over.xpk(made)) + "\n"
    return yaml.safe_dump(hand_over.sky(made), sort_keys=False, width=1000)


def check_bucket(workdir: str) -> None:
    """Write a file where the run will. ValueError naming the field if that is refused."""
    if shutil.which("gcloud") is None:
        raise ValueError("pod.workdir cannot be tried: gcloud is not installed")
    probe = workdir.rstrip("/") + "/.writable"
    words = ["gcloud", "storage", "cp", "-", probe]
    tried = subprocess.run(words, input="jaxrl\n", capture_output=True, text=True, timeout=120)
    if tried.returncode:
        last = (tried.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"pod.workdir={workdir!r} cannot be written: {last}")


def go(made: plan.Plan, to: str, text: str) -> int:
    """Do it; the exit code of the program that does. ValueError if that is not installed."""
    words = hand_over.xpk(made) if to == "xpk" else PROGRAMS[to]
    if shutil.which(words[0]) is None:
        raise ValueError(f"--to {to} is done by {words[0]}, which is not installed")
    check_bucket(made.pod.workdir)
    if to == "xpk":
        return subprocess.run(words).returncode
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{made.pod.name}.yaml")
        file.write_text(text)
        return subprocess.run([*words, str(file)]).returncode


def main(argv: list[str]) -> None:
    """Check, say, and with --go do. What was refused ends with one message and exit code 1."""
    try:
        made = planned(_POD.value, argv[1:])
        text = text_of(made, str(_TO.value))
        chips = math.prod(made.where.extents) * made.where.slices
        stated = f"{made.where.name}: {chips} chips on {made.hosts * made.where.slices} hosts"
        print(f"# {stated}, run in {made.pod.workdir}", file=sys.stderr)
        if _OUT.value:
            Path(_OUT.value).write_text(text)
        elif not _GO.value:
            print(text, end="")
        code = go(made, str(_TO.value), text) if _GO.value else 0
    except (ValueError, TypeError, OSError, subprocess.SubprocessError) as error:
        sys.exit(f"jaxrl.pod: {type(error).__name__}: {error}")
    sys.exit(code)


if __name__ == "__main__":
    flags.mark_flags_as_required(["pod", "to"])
    app.run(main)
