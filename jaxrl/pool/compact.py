"""JSON of which a pool writes and reads some for every sample: quick and exact. No jax."""

import json
from typing import Any

import orjson

# Each digit as 0 and all else as what no number has: to look for a long run of digits.
_DIGITS = bytes(48 if 48 <= one < 58 else 0 for one in range(256))
_LONG = b"0" * 19  # an integer of so many may be over 64 bits
_BEFORE = b"[:,- \t\r\n"  # what may stand before a number

_EXACT = json.JSONEncoder(separators=(",", ":"), allow_nan=False, sort_keys=True, default=vars)


def compact(value: Any) -> bytes:
    """A value as one line of JSON, names in order, dataclasses as their fields; floats come back
    bit for bit. ValueError for a number that is not finite and for values that are nested too
    deeply, TypeError for what JSON has not."""
    try:
        told = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # large integers, half of a surrogate pair: it is strict where json is not
        told = b"null"
    # It writes null for a number that is not finite: whatever has one is json's to judge.
    try:
        return _EXACT.encode(value).encode() if b"null" in told else told
    except RecursionError as error:
        raise ValueError("values are nested too deeply") from error


def parsed(data: bytes) -> Any:
    """The value of a JSON text as ``json.loads`` has it. ValueError for what is none."""
    if not _has_long(data):  # it makes floats of larger integers
        try:
            return orjson.loads(data)
        except ValueError:
            pass  # it is strict where json is not, which says what is wrong, too
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("values are nested too deeply") from error


def _has_long(data: bytes) -> bool:
    """Whether a long run of digits begins where a number may; those in a proof of hex do not."""
    digits, at = data.translate(_DIGITS), 0
    while (at := digits.find(_LONG, at)) >= 0:
        if at == 0 or data[at - 1] in _BEFORE:
            return True
        at = digits.find(0, at)  # behind the run
        if at < 0:
            return False
    return False
