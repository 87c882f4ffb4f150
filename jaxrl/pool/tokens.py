"""Tokens of attempts: each says whose it is, and proves it.

    <group>-<sample>-<attempt>-<epoch>-<once>-<proof>

The proof is a keyed digest of what stands before it, 256 bits, under a secret that the ledger
alone has; ``once`` is drawn anew with each grant. So no table of all that were ever granted is
needed: a slot holds the ``once`` that may act, and any other that is proven was granted before.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from typing import NamedTuple

PROOF = 32  # bytes
DIGITS = 18  # of a number: what a database holds
NUMBER = rf"(\d{{1,{DIGITS}}})-"
FORM = re.compile(
    rf"{NUMBER * 3}(-?\d{{1,{DIGITS}}})-([0-9a-f]{{16}})-[0-9a-f]{{{2 * PROOF}}}", re.ASCII
)
KEPT = 2**14  # claims of the newest grants, that need no proof again


class Claim(NamedTuple):
    """Whose attempt a token says that it is."""

    group: int
    sample: int
    attempt: int
    epoch: int
    once: str


class Tokens:
    """Grants and reads the tokens of one ledger."""

    def __init__(self, secret: bytes) -> None:
        self._proof = hashlib.blake2b(key=secret, digest_size=PROOF)
        self._granted: dict[str, Claim] = {}

    def grant(self, slots: Sequence[tuple[int, int, int]], epoch: int, once: str) -> list[str]:
        """A token for the attempt at each (group, sample, attempt); ``once`` as ``fresh`` drew
        it."""
        claims = [Claim(group, sample, attempt, epoch, once) for group, sample, attempt in slots]
        names = [f"{group}-{sample}-{attempt}-{epoch}-{once}" for group, sample, attempt in slots]
        tokens = [f"{name}-{self._proven(name)}" for name in names]
        if len(self._granted) > KEPT:
            self._granted = {}
        self._granted.update(zip(tokens, claims, strict=True))
        return tokens

    def read(self, token: str) -> Claim | None:
        """Whose a token is; None for one that was never granted."""
        if (known := self._granted.get(token)) is not None:
            return known
        name, _, proof = token.rpartition("-")
        if not hmac.compare_digest(proof.encode(), self._proven(name).encode()):
            return None
        return claimed(token)

    def _proven(self, name: str) -> str:
        found = self._proof.copy()
        found.update(name.encode())
        return found.hexdigest()


def fresh() -> str:
    """What sets a grant apart from all others."""
    return secrets.token_hex(8)


def claimed(token: str) -> Claim | None:
    """Whose a token says that it is, whoever wrote it; None for anything else."""
    found = FORM.fullmatch(token)
    if not found:
        return None
    group, sample, attempt, epoch = map(int, found.groups()[:4])
    return Claim(group, sample, attempt, epoch, found[5])


def name_of(token: str) -> str:
    """A token without its proof: names the attempt where others read, and opens nothing."""
    return token.rpartition("-")[0]
