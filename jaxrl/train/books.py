"""What a run writes down: curves, samples, checkpoints, and the accounts that go into them."""

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl.pool.contract import Group, Manifest, PoolError, RolloutPool
from jaxrl.pool.rollout import ACTION, Version
from jaxrl.train import goodput, hosts, show
from jaxrl.train.accounts import Account
from jaxrl.train.checkpoint import CheckpointError, Checkpoints, Restored
from jaxrl.train.metrics import Logger, Progress, samples_table
from jaxrl.train.settings import Phase
from jaxrl.train.state import TrainState
from jaxrl.train.step import LOAD, SHOWN, SPREAD
from jaxrl.train.workdir import Workdir


@dataclasses.dataclass
class Books:
    """What is written down, and the accounts that go into each checkpoint."""

    workdir: Workdir
    checkpoints: Checkpoints
    logger: Logger
    progress: Progress
    identity: Mapping[str, Any]  # what a continuation of this run must share with it
    prompts: Mapping[str, str]  # text of the train split's tasks, by key
    epoch: int = 0  # of the lineage: one more after each restart
    consumed: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"groups": 0, "digest": "", "last": []}
    )  # groups trained so far and the chained digest of their manifests
    accounts: dict[str, Account] = dataclasses.field(default_factory=dict)  # by phase
    compilations: dict[str, int] = dataclasses.field(default_factory=dict)
    published: tuple[Version, str] | None = None  # the newest weights directory
    saved: int = -1  # step of the newest checkpoint
    began: float = dataclasses.field(default_factory=time.time)  # when the run was first started
    profile: int = 0  # steps still to be traced, from the second one of this process
    profiled: bool = False  # a trace is being made
    decode: Callable[[Sequence[int]], str] = lambda ids: str(list(ids))

    def open(self, restored: Restored | None) -> None:
        """Take over the accounts of a checkpoint, if any, and drop what was written past it.

        The epoch is above all that ever published here, also above those of attempts that ended
        before their first checkpoint: a version never means two sets of weights.
        """
        lead = hosts.crew().lead
        epochs = lead(lambda: [epoch for epoch, _ in self.workdir.published()])
        self.workdir.forget_after(restored.step if restored else -1)
        if restored:
            epochs.append(restored.host["epoch"])
            self.saved = restored.step
            self.consumed = restored.host["consumed"]
            self.began = restored.host.get("began", self.began)  # older checkpoints do not say
            accounts = restored.host["accounts"]
            self.accounts = {name: Account(**account) for name, account in accounts.items()}
            self.progress.note(f"continuing at step {restored.step}")
            self.logger.scalars(restored.step, {"checkpoint/fallbacks": restored.fallbacks})
        self.epoch = max(epochs, default=-1) + 1

    def consume(self, manifest: Manifest) -> None:
        """Chain the manifest of a step into the account of what was trained."""
        groups = [list(group) for group in manifest.groups]
        chained = self.consumed["digest"] + json.dumps(groups)
        self.consumed = {
            "groups": self.consumed["groups"] + len(groups),
            "digest": hashlib.blake2b(chained.encode(), digest_size=16).hexdigest(),
            "last": groups,
        }
        self.workdir.journal(manifest)

    def out_of_bounds(self, phase: Phase, numbers: Mapping[str, float]) -> str:
        """Count the takes that ``train.stop`` looks at; why the phase is to end, "" if it is not.
        Every process counts, from the same numbers."""
        account = self.accounts[phase.name]
        fault = phase.train.stop.beyond(numbers)
        account.beyond = account.beyond + 1 if fault else 0
        if account.beyond >= phase.train.stop.takes:
            account.stopped = f"{fault}, {account.beyond} takes in a row"
        return account.stopped

    def trace(self, due: bool) -> None:
        """Profile the steps that were asked for, one after another once it is ``due``; what the
        first one compiles would hide the rest. TensorBoard shows them beside the curves."""
        if self.profiled and (self.profile == 0 or not due):
            jax.profiler.stop_trace()
            self.profiled, self.profile = False, 0
        if self.profile and due:
            if not self.profiled:
                jax.profiler.start_trace(str(self.workdir.root / "tb"))
                self.profiled = True
            self.profile -= 1

    def close(self) -> None:
        """End the files that are open."""
        self.progress.close()
        self.logger.close()
        self.checkpoints.close()


def note(books: Books, step: int, area: str, title: str, result: Mapping[str, Any]) -> None:
    """Curves and a line of one accuracy."""
    k = result["k"]
    accuracies = {
        f"avg_at_{k}": result["avg_at_k"],
        f"pass_at_{k}": result["pass_at_k"],
        "greedy": result["greedy"],
    }
    books.logger.scalars(step, {f"{area}/{name}": value for name, value in accuracies.items()})
    stated = "  ".join(f"{name} {100 * value:.1f} %" for name, value in accuracies.items())
    books.progress.note(f"{title} after {step} steps: {stated}")


def save(books: Books, phase: Phase, state: TrainState, pool: RolloutPool) -> None:
    """Checkpoint all that the next step depends on, then let the pool commit what it covers."""
    host = {
        "phase": phase.name,
        "epoch": books.epoch,
        "identity": books.identity,
        "consumed": books.consumed,
        "began": books.began,
        "accounts": {name: dataclasses.asdict(x) for name, x in books.accounts.items()},
        "pool": pool.state(),
    }
    books.logger.flush()  # curves of steps that will not run again
    books.checkpoints.save(int(state.step), state, host)
    books.saved = int(state.step)
    pool.commit(int(state.step) - 1)


def save_rest(books: Books, phase: Phase, state: TrainState, pool: RolloutPool) -> None:
    """Checkpoint the steps of this phase that no checkpoint covers, where a pool gives no more."""
    if int(state.step) > phase.first_step and int(state.step) != books.saved:
        save(books, phase, state, pool)


@contextlib.contextmanager
def rescuing(books: Books, phase: Phase, state: TrainState, pool: RolloutPool) -> Iterator[None]:
    """``save_rest`` beside an error of the pool, which stays the one that ends the run: nothing
    that was trained is lost with the pool."""
    try:
        yield
    except PoolError:
        try:
            save_rest(books, phase, state, pool)
        except (CheckpointError, OSError) as error:
            books.progress.note(f"the pool failed, and so did a last checkpoint: {error}")
        raise


def log(
    books: Books,
    phase: Phase,
    step: int,
    groups: Sequence[Group],
    numbers: Mapping[str, float],
    arrays: Mapping[str, np.ndarray],
    seconds: Mapping[str, float],
) -> None:
    """Curves, samples and the progress line of one step."""
    account = books.accounts.setdefault(phase.name, Account())
    tokens = int(numbers["batch/action_tokens"])
    working = account.add(phase, groups, numbers, seconds)
    if (step + 1) % phase.log.every_steps == 0:
        rates = {"train/tokens_per_s": tokens / working}
        rates |= goodput.throughput(phase, numbers, working)
        rates |= goodput.goodput(books.accounts, books.began)
        rates |= goodput.stragglers(hosts.crew().seconds)
        books.logger.scalars(step, {**numbers, **seconds, **rates})
    due = (step - phase.first_step) % phase.log.samples_every_steps == 0
    if phase.log.samples and due and groups:
        illustrate(books, phase, step, groups, arrays)
    books.progress.update(
        step + 1,
        {"loss": numbers["loss/total"], "reward": numbers["reward/mean"]}
        | ({"skipped": numbers["optim/skipped"]} if numbers["optim/skipped"] else {}),
        tokens=tokens,
        seconds=working + seconds["time/compile_s"],
        compile_seconds=seconds["time/compile_s"],
        label=phase.name,
    )


def illustrate(
    books: Books,
    phase: Phase,
    step: int,
    groups: Sequence[Group],
    arrays: Mapping[str, np.ndarray],
) -> None:
    """Samples with the advantage of each token, histograms, and experts' loads as a picture."""
    logger = books.logger
    rows = books.workdir.write_samples(step, groups, books.prompts, phase.log.samples)
    shown = {name.removeprefix(SHOWN): x for name, x in arrays.items() if name.startswith(SHOWN)}
    tokens = show.acted(groups, shown, books.decode, len(rows)) if shown else [None] * len(rows)
    runs = [show.marked(each) if each else None for each in tokens]
    logger.text(step, "samples/rollouts", samples_table(rows, runs))
    books.workdir.write_page(step, show.page(f"step {step}", rows, tokens))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    lengths = [int((rollout.kind == ACTION).sum()) for rollout in rollouts]
    logger.histograms(step, {"reward/spread": rewards, "response/length": lengths})
    for name, counts in arrays.items():
        if name.startswith(SPREAD):
            logger.counted(step, name.removeprefix(SPREAD), counts)
        elif name == LOAD:
            logger.image(step, LOAD, show.loads_picture(counts))
