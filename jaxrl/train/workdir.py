"""Where a run writes, beside checkpoints and curves: weights, evaluations, samples, journal.

Everything goes through ``etils.epath``, so a workdir may be a folder or a bucket. Files appear
whole or not at all. Of several processes the first one writes.
"""

import contextlib
import dataclasses
import fcntl
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from jaxrl.pool.contract import Group, Manifest
from jaxrl.train.metrics import read_lines


def write_json(path: epath.Path, record: Mapping[str, Any]) -> None:
    """Write a JSON file under a temporary name, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    temporary.replace(path)


@dataclasses.dataclass(frozen=True)
class Workdir:
    """The layout of contracts: ``weights/ eval/ samples/ pool/ journal.jsonl`` under one root."""

    root: epath.Path

    @property
    def pool(self) -> epath.Path:
        """Records of this run, unless the config names a local disk for them."""
        return self.root / "pool"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of a local workdir; RuntimeError if one is in it.

        A bucket has no locks: there, nothing is kept out. The lock ends with the process.
        """
        if "://" in str(self.root) or jax.process_index() != 0:
            yield
            return
        with (self.root / ".lock").open("w") as file:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RuntimeError(f"another process is running in {self.root}") from error
            yield

    def weights(self, epoch: int, step: int) -> epath.Path:
        """The directory of one published version."""
        return self.root / "weights" / f"v={epoch}-{step}"

    def published(self) -> list[tuple[int, int]]:
        """(epoch, step) of the published versions, oldest first."""
        names = [
            re.fullmatch(r"v=(\d+)-(\d+)", p.name) for p in (self.root / "weights").glob("v=*")
        ]
        return sorted((int(name[1]), int(name[2])) for name in names if name)

    def drop_weights(self, keep: int) -> None:
        """Delete all published versions but the newest ``keep`` and the best."""
        if jax.process_index():
            return
        best = self.best()
        for version in self.published()[:-keep]:
            if best is None or list(version) != [best["epoch"], best["step"]]:
                self.weights(*version).rmtree()
        for half in (self.root / "weights").glob("v=*.tmp"):  # of processes that were killed
            half.rmtree()

    def best(self) -> dict[str, Any] | None:
        """Epoch, step and held-out avg@k of the best weights that are kept."""
        path = self.root / "best.json"
        return json.loads(path.read_text()) if path.exists() else None

    def note_best(self, version: tuple[int, int], avg_at_k: float) -> None:
        """Keep these weights from now on if none were better."""
        best = self.best()
        if not jax.process_index() and (best is None or avg_at_k > best["avg_at_k"]):
            record = {"epoch": version[0], "step": version[1], "avg_at_k": avg_at_k}
            write_json(self.root / "best.json", record)

    def write_eval(self, step: int, result: Mapping[str, Any]) -> None:
        """Keep the held-out result of the weights after ``step`` steps."""
        if jax.process_index():
            return
        write_json(self.root / "eval" / f"{step}.json", result)

    def read_eval(self, step: int) -> dict[str, Any] | None:
        """The held-out result of ``step``, if it was measured."""
        path = self.root / "eval" / f"{step}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def write_samples(
        self, step: int, groups: Sequence[Group], prompts: Mapping[str, str], limit: int
    ) -> list[dict[str, Any]]:
        """Keep the first rollouts of a step as text, one JSON line each, and return them."""
        rows = [
            {
                "group": group.id,
                "sample": rollout.sample,
                "prompt": prompts.get(rollout.task_key, f"({rollout.task_key})"),
                "response": rollout.text,
                "reward": rollout.reward,
                "correct": rollout.correct,
                "stop_reason": str(rollout.stop_reason),
            }
            for group in groups
            for rollout in group.rollouts
        ][:limit]
        if jax.process_index():
            return rows
        path = self.root / "samples" / f"{step}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return rows

    def write_page(self, step: int, page: str) -> None:
        """Keep the samples of a step as a page to look at."""
        if not jax.process_index():
            (self.root / "samples" / f"{step}.html").write_text(page)

    def forget_after(self, step: int) -> None:
        """Remove what an abandoned lineage wrote past ``step``."""
        if jax.process_index():
            return
        for folder in ("eval", "samples"):
            for path in (self.root / folder).glob("*"):
                if path.name.split(".")[0].isdigit() and int(path.name.split(".")[0]) > step:
                    path.unlink()
        journal = self.root / "journal.jsonl"
        if journal.exists():
            kept = [line for line in read_lines(journal) if line["step"] < step]
            temporary = journal.with_name("journal.jsonl.tmp")
            temporary.write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in kept))
            temporary.replace(journal)

    def journal(self, manifest: Manifest) -> None:
        """Append what a step consumed: a replay after a rollback can be compared with it."""
        if jax.process_index():
            return
        line = json.dumps(dataclasses.asdict(manifest), sort_keys=True)
        with (self.root / "journal.jsonl").open("a") as file:
            file.write(line + "\n")
