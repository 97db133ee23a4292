"""Phase clocks: where the time of a run goes."""

from __future__ import annotations

import time
from collections.abc import Callable


class PhaseClock:
    """Adds up the wall time of named phases, one after the other.

    `synchronize` waits for the device, so that a phase's end is the end of its work.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self.seconds = {"train": 0.0, "evaluate": 0.0, "metric": 0.0, "broadcast": 0.0}
        self._synchronize = synchronize
        self._since = time.perf_counter()

    def restart(self) -> None:
        """Begins a phase: time since the last one belongs to none."""
        self._synchronize()
        self._since = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Ends a phase, and begins the next."""
        self._synchronize()
        now = time.perf_counter()
        self.seconds[phase] += now - self._since
        self._since = now
