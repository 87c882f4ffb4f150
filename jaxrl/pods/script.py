"""A slice of TPU VMs by ``gcloud``: queued resources, and a restart budget, as a shell script."""

import re
import shlex

from jaxrl.pods.plan import Plan

_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes"

# On a host, whose metadata names all hosts of the slice (their addresses, third) and this one.
_WHO = f"""\
ask() {{ curl -sf -H 'Metadata-Flavor: Google' {_METADATA}/"$1"; }}
HOSTS=$(ask worker-network-endpoints | tr ',' '\\n' | cut -d: -f3 | paste -sd, -)
PROCESS=$(ask agent-worker-number)
"""


# The whole; words in @ are filled in.
_SCRIPT = """\
#!/usr/bin/env bash
# @slice@: @hosts@ hosts. Written by jaxrl.pod.
# What failed is tried again @restarts@ times; being preempted costs nothing.
set -euo pipefail

# Before anything is created: does the bucket take what the run writes?
echo jaxrl | gcloud storage cp - @probe@ || { echo @refused@ >&2; exit 1; }

remove() { gcloud compute tpus queued-resources delete @name@ @place@ --force --quiet || true; }
create() {
  gcloud compute tpus queued-resources create @name@ @place@ --node-id=@name@ @kind@ \\
    --valid-until-duration=@wait_s@s
  while true; do
    state=$(gcloud compute tpus queued-resources describe @name@ @place@ \\
      --format='value(state.state)')
    case "$state" in
      ACTIVE) return 0 ;;
      FAILED | SUSPENDED | SUSPENDING) echo "queued resource: $state" >&2; return 1 ;;
    esac
    sleep 30
  done
}
start() {  # 76: it did not come to the run
  create || return 76
  gcloud compute tpus tpu-vm scp --recurse . @name@:~/@name@ @place@ --worker=all || return 76
  gcloud compute tpus tpu-vm ssh @name@ @place@ --worker=all --command=@install@ || return 76
  gcloud compute tpus tpu-vm ssh @name@ @place@ --worker=all --command=@run@
}
taken() {  # the machines were wanted back: the run was told and said so by 75, or they are gone
  [ "$1" = 75 ] && return 0
  state=$(gcloud compute tpus tpu-vm describe @name@ @place@ --format='value(state)') || return 0
  [ "$state" != READY ]
}

trap remove EXIT
failed=0
while true; do
  code=0; start || code=$?
  [ "$code" = 0 ] && break
  if [ "$code" = 76 ] || ! taken "$code"; then
    failed=$((failed + 1))
    [ "$failed" -le @restarts@ ] || { echo "failed $failed times" >&2; exit 1; }
  fi
  remove
done
"""


def script(plan: Plan) -> str:
    """The commands, to be read or run by bash. ValueError naming what this way does not have."""
    pod, sold = plan.pod, plan.sold
    pod.need("gcloud", "project", "zone")
    if not sold.gcloud:
        raise ValueError(f"pod.slice={pod.slice!r}: no TPU VMs are rented; allowed: --to gke")
    if plan.where.slices > 1:
        raise ValueError(
            f"pod.slice={pod.slice!r}: {plan.where.slices} slices; allowed: one, or --to gke"
        )
    if pod.workers:
        raise ValueError(f"pod.workers={pod.workers!r}: a slice has no such machines; allowed: gke")
    kind = f"--type={sold.gcloud} --topology={plan.topology}"
    kind += f" --runtime-version={shlex.quote(pod.runtime or sold.runtime)}"
    launch = plan.launch('"$HOSTS"', '"$PROCESS"')
    filled = {
        "slice": plan.where.name,
        "hosts": str(plan.hosts),
        "restarts": str(pod.restarts),
        "name": pod.name,
        "place": f"--project={shlex.quote(pod.project)} --zone={shlex.quote(pod.zone)}",
        "kind": kind + (" --spot" if pod.spot else ""),
        "wait_s": str(pod.wait_s),
        "probe": shlex.quote(pod.workdir.rstrip("/") + "/.writable"),
        "refused": shlex.quote(f"pod.workdir={pod.workdir}: no permission to write there"),
        "install": shlex.quote(f"cd ~/{pod.name} && {pod.setup}"),
        "run": shlex.quote(f"{_WHO}cd ~/{pod.name} && {launch}"),
    }
    return re.sub(r"@(\w+)@", lambda word: filled[word[1]], _SCRIPT)
