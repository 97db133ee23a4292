"""glibc's heap, where the node's profile tells it to keep what is freed: it gives back in time.

Batches of ever other sizes leave holes that the next ones do not fit into, and a rank would grow
with every step.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping

KEEPS = "MALLOC_TRIM_THRESHOLD_"
"""The variable by which a profile makes it keep everything."""

_SETTLING, _GROWTH = 8, 1.3
"""Batches after which memory in use is what batches need; and how much more it may become."""


class Heap:
    """The heap of this process."""

    def __init__(
        self, environment: Mapping[str, str], trim: Callable[[], object] | None = None
    ) -> None:
        """
        Args:
            environment: of this process; without `KEEPS` glibc gives back by itself.
            trim: gives free memory back to the kernel; glibc's, where it is not given.
        """
        self._trim = (trim or glibc_trim()) if environment.get(KEEPS) else None
        self._batches, self._limit = 0, 0.0

    def after_batch(self) -> None:
        """Gives free memory back where much of it has gathered; costs the next batch page faults.

        What batches need is seen in the first ones after that: so it is at most done every few.
        """
        if self._trim is None:
            return
        self._batches += 1
        if self._batches < _SETTLING:
            return
        resident = resident_bytes()
        if self._batches == _SETTLING:
            self._limit = _GROWTH * resident
        elif resident > self._limit:
            self._trim()
            self._batches = 0


def glibc_trim() -> Callable[[], object] | None:
    """glibc's malloc_trim; None: this is another C library, or another allocator is preloaded."""
    found = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if found is None else lambda: found(0)


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
