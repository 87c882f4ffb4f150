"""A trainer and workers that are killed, and whoever starts them again: ``python -m
tests.pool.crashes PLAN`` runs a plan and prints what happened, both as JSON.

Ledger, spool, pool, checkpoints and journal are the real ones, in the order of the trainer's loop;
the step is a stub (a hash of what was consumed is the weights), so that a new start does not pay
for compilation. Processes are forked from one that has imported everything and started nothing.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jaxrl.pool.ledger import GroupState, Lease, LedgerRefusal
from jaxrl.pool.ledger_sqlite import SqliteLedger
from jaxrl.pool.remote import RemotePool, Rules
from jaxrl.pool.rollout import Failure, Version, digest_of
from jaxrl.pool.segments import Spool
from jaxrl.pool.spool import encode
from jaxrl.train.checkpoint import Checkpoints
from jaxrl.train.workdir import Workdir
from tests.pool.hands import RULES, newest, rollout_of, seal
from tests.pool.scripted import Letters, Sums, answer_of

TRAINER_POINTS = [
    f"{when} {what}"
    for what in ("reserve", "compute", "checkpoint", "commit")
    for when in ("before", "after")
]
WORKER_POINTS = ["leased", "generating", "before seal", "after seal"]

TASKS = 40


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is run, and what goes wrong."""

    folder: str
    steps: int
    groups: int = 3
    samples: int = 2
    staleness: int = 0
    over_age: str = "drop"
    every: int = 1  # steps of a checkpoint
    workers: int = 2
    seed: int = 0
    lease_s: float = 0.5
    trainer_point: str = ""  # where it dies, once, in step trainer_step
    trainer_step: int = 1
    worker_point: str = ""  # where a worker dies, once
    death: float = 0.0  # chance that a worker dies, at each of its points
    kills: float = 0.0  # chance that the trainer is killed, wherever it is, soon after a step
    # chance of a duplicate, late, truncated, flipped, failed or cancelled seal
    mischief: float = 0.0
    jumps: float = 0.0  # times a second that the clock jumps by an hour
    seconds: float = 100.0


def clock(folder: pathlib.Path) -> Callable[[], float]:
    """The time as all processes of the run see it."""
    path = folder / "clock"
    return lambda: time.time() + (float(path.read_text() or 0) if path.exists() else 0.0)


def die() -> None:
    """At once, as if the machine had lost power."""
    os.kill(os.getpid(), signal.SIGKILL)


def once(folder: pathlib.Path, what: str) -> bool:
    """Whether this is the first time, over all processes."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(folder / f"once {what}", os.O_CREAT | os.O_EXCL))
        return True
    return False


# -- the trainer


def train(plan: Plan) -> None:
    """The loop: take, compute, publish, save, commit."""
    folder = pathlib.Path(plan.folder)
    workdir, checkpoints = Workdir(epath.Path(folder)), Checkpoints(folder / "checkpoints", keep=2)

    def point(name: str, step: int) -> None:
        if (name, step) == (plan.trainer_point, plan.trainer_step) and once(folder, name):
            die()

    state = {"step": jnp.zeros((), jnp.int32), "weights": jnp.zeros(4)}
    restored = checkpoints.latest(lambda _: jax.eval_shape(lambda: state))
    start, consumed = 0, ""
    before = newest(folder)
    epochs = [before.epoch] if before else []
    workdir.forget_after(restored.step if restored else -1)
    rules: dict[str, Any] = RULES | dict(
        staleness=plan.staleness, over_age=plan.over_age, max_attempts=1000, watchdog_s=60.0
    )
    pool = RemotePool(
        SqliteLedger(str(folder / "ledger.sqlite"), "run", clock(folder)),
        Spool(folder / "spool"),
        folder,
        Letters(),
        Sums(TASKS),
        Rules(**rules),
        seed=plan.seed,
        rollouts_per_group=plan.samples,
        max_prompt_tokens=16,
    )
    if restored:
        state, start, consumed = restored.state, restored.step, restored.host["consumed"]
        epochs.append(restored.host["epoch"])
        pool.restore(restored.host["pool"])
        pool.commit(restored.step - 1)
    epoch = max(epochs, default=-1) + 1
    pool.publish(Version(epoch, start, consumed), "nowhere")
    for step in range(start, plan.steps):
        point("before reserve", step)
        groups, manifest = pool.take(plan.groups, step)
        point("after reserve", step)
        point("before compute", step)
        consumed = hashed(consumed, groups)
        state = {
            "step": jnp.int32(step + 1),
            "weights": state["weights"] + np.frombuffer(bytes.fromhex(consumed), np.uint8)[:4],
        }
        point("after compute", step)
        workdir.journal(manifest)
        pool.publish(Version(epoch, step + 1, consumed), "nowhere")
        if (step + 1) % plan.every == 0 or step + 1 == plan.steps:
            point("before checkpoint", step)
            host = {"epoch": epoch, "consumed": consumed, "pool": pool.state()}
            checkpoints.save(step + 1, state, host)
            point("after checkpoint", step)
            point("before commit", step)
            pool.commit(step)
            point("after commit", step)
    pool.close()


def hashed(consumed: str, groups: Any) -> str:
    """The chain of what was trained on."""
    text = consumed + "".join(digest_of(group.rollouts) for group in groups)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# -- workers


def work(plan: Plan, seed: int) -> None:
    """Lease, answer, verify and seal until killed."""
    folder, chance = pathlib.Path(plan.folder), random.Random(seed)
    ledger = SqliteLedger(str(folder / "ledger.sqlite"), "run", clock(folder))
    spool, source = Spool(folder / "spool"), Sums(TASKS)

    def point(name: str) -> None:
        if chance.random() < plan.death or (name == plan.worker_point and once(folder, name)):
            die()

    while True:
        lease = ledger.lease(f"worker {os.getpid()}", plan.lease_s)
        if lease is None:
            time.sleep(0.005)
            continue
        with contextlib.suppress(LedgerRefusal):  # counted by the ledger
            point("leased")
            while (version := newest(folder)) is None or version < lease.version:
                time.sleep(0.002)
                ledger.find(lease.token)
            ledger.start(lease.token)
            point("generating")
            rollout = rollout_of(lease, answer_of, source, version)
            key = f"call-{lease.group}-{lease.sample}-{lease.attempt}"
            spool.append(lease.epoch, [([key], b"{}")])
            point("before seal")
            sealed(plan, chance, ledger, spool, lease, rollout)
            point("after seal")


def sealed(
    plan: Plan,
    chance: random.Random,
    ledger: SqliteLedger,
    spool: Spool,
    lease: Lease,
    rollout: Any,
) -> None:
    """Seal an attempt, or what goes wrong with it."""
    if chance.random() >= plan.mischief:
        seal(ledger, spool, lease, rollout)
        return
    mischiefs = ["duplicate", "late", "truncated", "flipped", "full", "failed", "cancelled"]
    mischief = chance.choice(mischiefs)
    ledger.count(f"tried_{mischief}")
    if mischief == "duplicate":
        seal(ledger, spool, lease, rollout)
        seal(ledger, spool, lease, rollout)
    elif mischief == "late":
        time.sleep(1.5 * plan.lease_s)
        seal(ledger, spool, lease, rollout)
    elif mischief == "cancelled":  # as a gateway does; its worker does not know, and seals
        ledger.cancel([lease.token], "pressure")
        seal(ledger, spool, lease, rollout)
    elif mischief == "failed":
        ledger.fail(lease.token, Failure.ENV, "the sandbox is gone")
    elif mischief == "full":
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            spool.seal((lease.group, lease.sample, lease.attempt), [encode(rollout)])
        except OSError as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            ledger.fail(lease.token, Failure.INFRA, str(error))
    else:
        seal(ledger, spool, lease, rollout, truncate if mischief == "truncated" else flip)


def truncate(path: pathlib.Path) -> None:
    """Lose the end of a file."""
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: pathlib.Path) -> None:
    """Change a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


# -- whoever starts them


def forked(body: Callable[[], None]) -> int:
    """A child process that runs ``body``."""
    child = os.fork()
    if child:
        return child
    try:
        body()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def journal_size(folder: pathlib.Path) -> int:
    """Grows with each step, shrinks with a rollback."""
    path = folder / "journal.jsonl"
    return path.stat().st_size if path.exists() else 0


def supervise(plan: Plan) -> dict[str, Any]:
    """Keep all of them running until the trainer has ended; what was killed, and how long it
    took."""
    folder, chance = pathlib.Path(plan.folder), random.Random(plan.seed)
    folder.mkdir(parents=True, exist_ok=True)
    kills = {"trainer": 0, "worker": 0}
    failed, began, jump, starts = 0, time.monotonic(), 0.0, plan.workers
    trainer = forked(lambda: train(plan))
    workers = {forked(lambda n=n: work(plan, plan.seed + n)) for n in range(plan.workers)}
    tick, written, at = 0.02, 0, float("inf")
    try:
        while time.monotonic() - began < plan.seconds:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                time.sleep(tick)
                # By progress and not by the clock: on a slow machine a run would never end.
                size = journal_size(folder)
                if size != written and chance.random() < plan.kills:
                    at = time.monotonic() + chance.uniform(0, 0.3)
                written = size
                if time.monotonic() > at:
                    os.kill(trainer, signal.SIGKILL)
                    at = float("inf")
                if chance.random() < plan.jumps * tick:
                    jump = 3600.0 - jump
                    half = folder / "clock.tmp"
                    half.write_text(str(jump))
                    half.replace(folder / "clock")
                continue
            killed = os.WIFSIGNALED(status)
            failed += not killed and os.waitstatus_to_exitcode(status) != 0
            if child == trainer and not killed:
                break
            kills["trainer" if child == trainer else "worker"] += killed
            if child == trainer:
                trainer = forked(lambda: train(plan))
                if chance.random() < plan.kills:  # while it starts, too
                    at = time.monotonic() + chance.uniform(0, 2)
            else:
                workers.discard(child)
                starts += 1
                workers.add(forked(lambda n=starts: work(plan, plan.seed + n)))
    finally:
        ended = time.monotonic() - began
        for child in (trainer, *workers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
    return {"kills": kills, "failed": failed, "seconds": ended}


# -- what must hold afterwards


def journal(folder: pathlib.Path) -> list[dict[str, Any]]:
    """What each step consumed, and what was measured."""
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def manifest(folder: pathlib.Path) -> list[Any]:
    """What each step consumed: ids and content hashes, which hold what sampled them."""
    return [(line["step"], line["groups"]) for line in journal(folder)]


def check(
    folder: pathlib.Path,
    steps: int,
    groups: int,
    samples: int,
    staleness: int,
    dropping: bool = False,
) -> None:
    """Every group once, none lost, none doubled, none too old; each sample sealed once, and its
    segment is whole. Where old groups may be dropped, void ones are those."""
    lines = journal(folder)
    assert [line["step"] for line in lines] == list(range(steps))
    taken = [number for line in lines for number, _ in line["groups"]]
    assert len(taken) == len(set(taken)) == steps * groups
    assert max(line["readings"]["staleness_max"] for line in lines) <= staleness
    ledger, spool = SqliteLedger(str(folder / "ledger.sqlite"), "run"), Spool(folder / "spool")
    try:
        counts = ledger.counts()
        assert counts["groups_committed"] == len(taken)
        live = {group.id for group in ledger.live()}
        assert all(group.state is not GroupState.RESERVED for group in ledger.live())
        void = {group.id for group in ledger.voided(0)}
        assert {*taken, *live, *void} == set(range(ledger.next_id()))
        assert dropping or not void
        steps_of = {number: line["step"] for line in lines for number, _ in line["groups"]}
        for number in taken:
            members = ledger.members(number)
            assert [member.sample for member in members] == list(range(samples))
            for member in members:
                rollout = spool.fetch(member.sealed)[0]
                assert (rollout.group_id, rollout.attempt) == (number, member.attempt)
                assert rollout.reward == 1.0
                oldest = min(version.step for version in rollout.versions)
                assert steps_of[number] - staleness <= oldest <= steps_of[number]
    finally:
        ledger.close()


def main() -> None:
    """Run the plans of the command line, one after the other."""
    jax.config.update("jax_platforms", "cpu")
    told = [supervise(Plan(**plan)) for plan in json.loads(sys.argv[1])]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
