"""Which weights are to be sampled from: a file that the trainer writes and engines follow."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

CURRENT = "current.json"  # in the pool's folder: {epoch, step, digest, path}


def announce(path: pathlib.Path, record: Mapping[str, Any]) -> None:
    """Write a JSON file that is whole at any time, durable on return."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(path.name + ".tmp")
    with half.open("w") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())
    half.replace(path)
