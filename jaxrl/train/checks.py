"""Checks of a section's fields: ValueError naming section, field, value and what is allowed."""

import re
from typing import Any

from jaxrl.pool.characters import WIDTHS

TOKENIZERS = ("sentencepiece", *WIDTHS)  # made from the task's text


def at_least(section: str, record: Any, *fields: str, least: float = 1) -> None:
    """ValueError naming the field of a record that is no number, or below ``least``."""
    for field in fields:
        value = record.__dict__[field]
        if not _is_number(value):
            raise ValueError(f"{section}.{field}={value!r}; allowed: a number >= {least}")
        if not value >= least:
            raise ValueError(f"{section}.{field}={value!r} is too small; allowed: >= {least}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def one_of(section: str, record: Any, field: str, allowed: tuple[str, ...]) -> None:
    """A field that is one of some words."""
    value = record.__dict__[field]
    if value not in allowed:
        raise ValueError(f"{section}.{field}={value!r} is unknown; allowed: {', '.join(allowed)}")


def named_tokenizer(section: str, record: Any, made: tuple[str, ...]) -> None:
    """A tokenizer that is made, or a published one at a path."""
    value = record.tokenizer
    if value not in made and "/" not in value:
        raise ValueError(
            f"{section}.tokenizer={value!r} is unknown; allowed: {', '.join(made)}, or a published "
            "tokenizer (a path with a /)"
        )


def ladder(section: str, record: Any, field: str) -> None:
    """Increasing positive lengths."""
    value = record.__dict__[field]
    if not value or list(value) != sorted(set(value)) or value[0] < 1:
        raise ValueError(f"{section}.{field}={value!r}; allowed: increasing positive lengths")


def admission(pool: Any) -> None:
    """How much of a remote pool may be under way."""
    one_of("pool", pool, "admission", ("auto", "aimd", "fixed"))
    marks = pool.usage_marks
    three = isinstance(marks, list | tuple) and len(marks) == 3 and all(map(_is_number, marks))
    if not (three and 0 < marks[0] <= marks[1] <= marks[2] <= 1):
        raise ValueError(
            f"pool.usage_marks={marks}; allowed: target, trim and hard, increasing, in (0, 1]"
        )
    at_least("pool", pool, "judge_calls", "sandboxes", "spool_bytes", "under_way", least=0)
    if pool.under_way and pool.under_way < pool.rollouts_per_group:
        raise ValueError(
            f"pool.under_way={pool.under_way!r}; allowed: 0 (no bound), or at least "
            f"pool.rollouts_per_group={pool.rollouts_per_group}"
        )
    if pool.spool_bytes and pool.kind == "local":
        raise ValueError(
            f"pool.spool_bytes={pool.spool_bytes!r} with pool.kind='local'; allowed: 0 (nothing "
            "waits on disk for this trainer)"
        )
    shares(pool.quotas)


def shares(quotas: Any) -> None:
    """Pairs of a regular expression and a share, of ``pool.quotas``."""
    allowed = "allowed: pairs of a regular expression and a share in (0, 1]"
    if not isinstance(quotas, list | tuple):
        raise ValueError(f"pool.quotas={quotas!r}; {allowed}")
    for pair in quotas:
        try:
            pattern, share = pair
            re.compile(pattern)
        except (TypeError, ValueError, re.error) as error:
            raise ValueError(f"pool.quotas has {pair!r} ({error}); {allowed}") from error
        if not (isinstance(pattern, str) and _is_number(share) and 0 < share <= 1):
            raise ValueError(f"pool.quotas has {pair!r}; {allowed}")
