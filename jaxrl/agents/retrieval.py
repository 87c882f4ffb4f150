"""Which artefacts stand near a text: words hashed to a vector, and the cosine between vectors."""

import functools
import hashlib
import re
from collections.abc import Mapping, Sequence

import numpy as np

SIZE = 512  # of a vector; two of a thousand words share a place now and then

_WORD = re.compile(r"[^\W_]+")


@functools.lru_cache(maxsize=4096)
def embed(text: str) -> np.ndarray:
    """Counts of a text's words, as a vector of length 1 (0 for no words)."""
    vector = np.zeros(SIZE)
    for word in _WORD.findall(text.lower()):
        place = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest(), "big")
        vector[place % SIZE] += 1
    return vector / max(float(np.linalg.norm(vector)), 1.0)


def cosine(one: str, other: str) -> float:
    """Of two texts, in [0, 1]."""
    return float(embed(one) @ embed(other))


def nearest(
    text: str,
    triggers: Mapping[str, str],
    count: int,
    least: float,
    bonus: Mapping[str, float] | None = None,
) -> Sequence[tuple[str, float]]:
    """The ``count`` names whose trigger is nearest to a text, of those with a similarity of at
    least ``least``, with their similarities: by similarity plus ``bonus``, then by name."""
    extra = bonus or {}
    near = {name: cosine(text, trigger) for name, trigger in triggers.items()}
    fit = [name for name in near if near[name] >= least]
    fit.sort(key=lambda name: (-near[name] - extra.get(name, 0.0), name))
    return [(name, near[name]) for name in fit[:count]]
