"""A wait that ends: a call with a time limit, whose failure is told with its root cause."""

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from jaxrl.pool.contract import PoolError

T = TypeVar("T")


def within(seconds: float, work: Callable[[], T], what: str) -> T:
    """The result of ``work()``, run in a thread of its own.

    PoolError with the text of what it raised, or if it has not ended after ``seconds``. A call that
    hangs cannot be killed and keeps its thread, but the thread does not keep the process alive.
    """
    answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put((work(), None))
        except BaseException as error:  # handed to the waiting thread, which raises it
            answer.put((None, error))

    threading.Thread(target=run, name=what.split(maxsplit=1)[0], daemon=True).start()
    try:
        result, error = answer.get(timeout=seconds)
    except queue.Empty:
        raise PoolError(f"{what} gave no answer within {seconds} s (pool.watchdog_s)") from None
    if isinstance(error, PoolError):
        raise error
    if error is not None:
        raise PoolError(f"{what} failed: {type(error).__name__}: {error}") from error
    return result  # pyright: ignore[reportReturnType]  # T may itself hold None
