"""Steps that a device has done. On a GPU the host only queues them, and is ahead of it: its own
progress says nothing of a device that hangs."""

import sys
from collections import deque
from typing import Any

_KINDS = ("cuda", "xpu")
"""Modules of torch for devices that work through a queue. ROCm's devices are "cuda", too."""


class DeviceSteps:
    """The steps that are queued, each with an event that the device reaches after it."""

    def __init__(self) -> None:
        self._queued: deque[tuple[int, Any]] = deque()

    def last_done(self, step: int) -> int | None:
        """Notes that the host has come to the end of `step`; returns the last step that has been
        done since it was asked before, or None. Nothing waits for the device."""
        event = _event()
        if event is None:  # the host computes
            return step
        self._queued.append((step, event))
        last = None
        # A device does its work in the order in which it was queued.
        while self._queued and self._queued[0][1].query():
            last, _ = self._queued.popleft()
        return last


def _event() -> Any | None:
    """Queues an event on the device that this process uses; None where it uses none."""
    # Not imported: a program that has not imported torch uses no device by it.
    torch = sys.modules.get("torch")
    for kind in _KINDS:
        module = getattr(torch, kind, None)
        if module is not None and module.is_initialized():
            event = module.Event()
            event.record()
            return event
    return None
