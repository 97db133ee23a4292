"""Keeps the layers of tests apart: a test without a layer's mark is pure, and starts no process.

Pure tests are quick wherever they run, and cannot depend on what else the machine does. A test that
starts a command, forks a rank, or needs Slurm says so by a mark: `processes` or `slurm`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_STARTS = frozenset(
    {
        "subprocess.Popen",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.exec",
        "os.system",
    }
)
"""Audit events of Python that announce a new process."""

RECORD = "SLURMFT_RECORD_STARTS"
"""Variable with a file: pure tests may start processes, and are named in the file."""


class ProcessStarted(AssertionError):
    """A pure test starts a process."""


class _Guard:
    """The audit hook, which cannot be removed once it is added; `test` turns it on and off."""

    def __init__(self) -> None:
        self.test: str | None = None
        self._is_added = False

    def watch(self, test: str) -> None:
        self.test = test
        if not self._is_added:
            sys.addaudithook(self._on_event)
            self._is_added = True

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.test is None or event not in _STARTS:
            return
        test = self.test
        self.test = None  # what follows may start processes of its own
        if file := os.environ.get(RECORD):
            with open(file, "a") as record:
                record.write(f"{test}\n")
            return
        raise ProcessStarted(
            f"{test} starts a process ({event}): mark it `processes`, or do without"
        )


_guard = _Guard()


@contextmanager
def pure(test: str) -> Iterator[None]:
    """Within the block, the start of a process is an error that names the test."""
    _guard.watch(test)
    try:
        yield
    finally:
        _guard.test = None
