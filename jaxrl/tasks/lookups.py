"""The hidden table of jaxrl/tasks/tools.py as a tool, called turn by turn. No jax here."""

import itertools
import string
from collections.abc import Mapping
from typing import Any

from jaxrl.tasks.contract import content_hash, split_of
from jaxrl.tasks.tools import Source

FRACTION = (
    0.5  # of the pairs in either split of the source; agents' worlds have splits of their own
)


def codes(names: int, seed: int) -> Mapping[tuple[str, ...], str]:
    """The code of every pair of names: what a right ``find left right`` is answered by.

    ValueError as ``tools.Source`` has it.
    """
    letters = string.ascii_lowercase[:names]
    prompts = [f"find {left} {right}\n" for left, right in itertools.product(letters, repeat=2)]
    parts = [split_of(content_hash(prompt), FRACTION) for prompt in prompts]
    sizes: dict[str, Any] = {
        "train_prompts": parts.count("train"),
        "held_out_prompts": parts.count("held_out"),
        "held_out_fraction": FRACTION,
    }
    parameters = {"names": names, "told_fraction": 1.0, "shown_fraction": 0.0}
    source = Source("lookup", parameters, seed=seed, **sizes)
    found = {}
    for task in (*source.tasks("train"), *source.tasks("held_out")):
        _, left, right = task.prompt.split()
        told = source.verify(task, task.metadata["code"]).feedback
        found[left, right] = told.removeprefix("OK ").strip()
    return found
