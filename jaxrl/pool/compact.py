"""JSON of which a pool writes some for every sample: quick and exact. No jax here."""

import json
from typing import Any

import orjson

_EXACT = json.JSONEncoder(separators=(",", ":"), allow_nan=False, sort_keys=True, default=vars)


def compact(value: Any) -> bytes:
    """A value as one line of JSON, names in order, dataclasses as their fields; floats come back
    bit for bit. ValueError for a number that is not finite, TypeError for what JSON has not."""
    try:
        told = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # large integers, half of a surrogate pair: it is strict where json is not
        told = b"null"
    # It writes null for a number that is not finite: whatever has one is json's to judge.
    return _EXACT.encode(value).encode() if b"null" in told else told
