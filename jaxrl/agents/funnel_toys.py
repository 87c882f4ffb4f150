"""Small packages with a planted fault each, for the funnel's world.

    clean       none
    flaky       what the function calls depends on the machine's boot number, at a planted rate
    leak        a compiled copy of the function lies under a name that cleaning does not know
    private     its tests are to ask for a private name (the scripted writer adds that one)
    impossible  it needs a file that lies among its old tests, so that nothing passes without them

Constants depend on the seed.
"""

import marshal
import re
from collections.abc import Sequence

import numpy as np

from jaxrl.agents.packages import Package

# (name, source): N, M and K are the seed's constants; every function has a private part and a
# documentation that shows calls.
SHAPES = {
    "wrap": '''
def _fold(n, low, high):
    width = high - low + 1
    return (n - low) % width + low

def wrap(n, high):
    """Bring n into N .. high by whole turns. high is above N.

    >>> wrap(3, 99)
    >>> wrap(100, 120)
    >>> wrap(-5, 77)
    """
    if high <= N:
        raise ValueError("high")
    return _fold(n, N, high)
''',
    "runs": '''
def _cut(items, size):
    return [items[i : i + size] for i in range(0, len(items), size)]

def runs(items, size):
    """Sums of runs of size items, a last short one times N.

    >>> runs([1, 2, 3, 4, 5], 2)
    >>> runs([4, 4, 4], 3)
    >>> runs([], 2)
    """
    if size < 1:
        raise ValueError("size")
    return [sum(part) * (N if len(part) < size else 1) for part in _cut(items, size)]
''',
    "shift": '''
def _turned(sign, by):
    return chr((ord(sign) - 97 + by) % 26 + 97) if "a" <= sign <= "z" else sign

def shift(text, by):
    """Move lower-case letters by places in the alphabet, and N more behind every blank.

    >>> shift("abc xyz", 1)
    >>> shift("hello big world", 13)
    >>> shift("NO", 5)
    """
    moved, more = [], 0
    for sign in text:
        more = more + N if sign == " " else more
        moved.append(_turned(sign, by + more))
    return "".join(moved)
''',
    "score": '''
def _weight(place):
    return N + place % M

def score(digits):
    """Sum of digits by weights that go up from N and start again after M places; K's remainder.

    >>> score("123456")
    >>> score("9999")
    >>> score("7")
    """
    if not digits.isdigit():
        raise ValueError(digits)
    return sum(int(d) * _weight(i) for i, d in enumerate(digits)) % K
''',
}

# What spoils a value: late() is true at FLAKE of 1000 boots, table() needs a file.
FLICKER = """
def late():
    return BOOT % 1000 < FLAKE
"""
TABLE = """
def table():
    return int(FILES["tests/table.txt"])
"""

FAULTS = ("clean", "flaky", "leak", "private", "impossible")


def toys(seed: int, faults: Sequence[str], flake: float) -> list[tuple[Package, str]]:
    """One package for each fault, with it; ``flake``: rate at which a flaky one's verifier errs.

    ValueError for a fault that is none of FAULTS."""
    unknown = sorted(set(faults) - set(FAULTS))
    if unknown:
        raise ValueError(f"world.planted={unknown}; allowed: {', '.join(FAULTS)}")
    chance = np.random.Generator(np.random.Philox(key=seed))
    found = []
    for place, fault in enumerate(faults):
        shape = list(SHAPES)[place % len(SHAPES)]
        constants = {
            sign: str(chance.integers(low, high))
            for sign, low, high in (("N", 2, 9), ("M", 3, 7), ("K", 11, 97))
        }
        source = re.sub(r"\b[NMK]\b", lambda sign, to=constants: to[sign[0]], SHAPES[shape])
        name = f"toy{place:02d}_{shape}"
        tree = {f"{name}.py": source, f"{name}-1.0.dist-info/RECORD": "", ".git/HEAD": source}
        if fault == "flaky":
            late = FLICKER.replace("FLAKE", str(round(1000 * flake)))
            tree[f"{name}.py"] = _spoilt(source, "late()") + late
        elif fault == "leak":
            whole = compile(source, f"{name}.py", "exec")
            tree[f"{name}_data.bin"] = "x" * 16 + marshal.dumps(whole).decode("latin-1")
        elif fault == "impossible":
            tree[f"{name}.py"] = _spoilt(source, "table() != 7") + TABLE
            tree["tests/table.txt"] = "7"
        found.append((Package(name, "1.0", "Apache-2.0", tree), fault))
    return found


def _spoilt(source: str, condition: str) -> str:
    """The function gives no value where the condition holds."""
    head, _, tail = source.rpartition("    return ")
    return f"{head}    if {condition}:\n        return None\n    return {tail}"
