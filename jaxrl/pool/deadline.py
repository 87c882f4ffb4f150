"""A wait that ends: a call with a time limit, whose failure is told with its root cause."""

import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

from jaxrl.pool.contract import PoolError

T = TypeVar("T")

_abandoned: list[threading.Thread] = []  # nobody waits for them any more


def within(seconds: float, work: Callable[[], T], what: str) -> T:
    """The result of ``work()``, run in a thread of its own.

    PoolError with the text of what it raised, or if it has not ended after ``seconds``. A call that
    hangs cannot be killed and keeps its thread, but the thread does not keep the process alive (see
    ``leave``).
    """
    answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put((work(), None))
        except BaseException as error:  # handed to the waiting thread, which raises it
            answer.put((None, error))

    thread = threading.Thread(target=run, name=what.split(maxsplit=1)[0], daemon=True)
    thread.start()
    try:
        result, error = answer.get(timeout=seconds)
    except queue.Empty:
        _abandoned.append(thread)
        raise PoolError(f"{what} gave no answer within {seconds} s (pool.watchdog_s)") from None
    if isinstance(error, PoolError):
        raise error
    if error is not None:
        raise PoolError(f"{what} failed: {type(error).__name__}: {error}") from error
    return result  # pyright: ignore[reportReturnType]  # T may itself hold None


def leave(message: str) -> NoReturn:
    """End the process with this message and exit code 1, like ``sys.exit``; at once where a call
    still hangs, which may be in compiled code: that crashes when what it uses is taken down."""
    if not any(thread.is_alive() for thread in _abandoned):
        sys.exit(message)
    print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
