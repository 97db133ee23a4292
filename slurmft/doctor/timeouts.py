"""Calls that may hang, as in a dead file system, with a limit on how long they are waited for."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Result = TypeVar("Result")


def within(timeout_s: float, work: Callable[[], Result]) -> Result:
    """What `work` returns or raises, if that takes no longer; else it goes on unheard, in a thread
    that ends with this process: a call that hangs in a dead file system cannot be ended.

    Raises:
        TimeoutError: it takes longer.
    """
    return all_within(timeout_s, [work])[0]()


def all_within(
    timeout_s: float, works: Sequence[Callable[[], Result]]
) -> list[Callable[[], Result]]:
    """Runs all at the same time; for each, in their order, a call that gives its result.

    Those calls raise what the work has raised, or TimeoutError.
    """
    boxes: list[queue.SimpleQueue[Callable[[], Result]]] = [queue.SimpleQueue() for _ in works]
    for work, box in zip(works, boxes, strict=True):
        threading.Thread(target=_fill, args=(work, box), daemon=True).start()
    deadline = time.monotonic() + timeout_s
    found = []
    for box in boxes:
        try:
            found.append(box.get(timeout=max(0.0, deadline - time.monotonic())))
        except queue.Empty:
            late = TimeoutError(f"no answer in {timeout_s:.0f} s")
            found.append(_raising(late))
    return found


def _fill(work: Callable[[], Result], box: queue.SimpleQueue[Callable[[], Result]]) -> None:
    try:
        result = work()
    except Exception as error:
        box.put(_raising(error))
    else:
        box.put(lambda: result)


def _raising(error: Exception) -> Callable[[], Any]:
    def give() -> Any:
        raise error

    return give
