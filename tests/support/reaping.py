"""Ends what a test leaves running, however the test ended.

A process belongs to a test if its environment holds the test's mark, if it works in the test's
temporary folder or names it on its command line, or if the server of tests/support/prepared.py has
forked it for the test. What was there before the test stays: fixtures of modules and sessions
start it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "SLURMFT_TEST"
"""Environment variable that every process of a test inherits."""

_DAEMONS = frozenset(
    {"slurmctld", "slurmd", "slurmstepd", "slurmdbd", "munged", "mariadbd"}
)
"""Of the test cluster, which outlives a test that restarts one of them."""

_CLOCK_STEP_S = 2.0
"""The kernel tells the start of a process in ticks since boot, and the time of boot in seconds."""

_PATIENCE_S = 10.0
"""A killed process may need a moment, and one that restarts it is killed in the next round."""


@contextlib.contextmanager
def reaped(
    mark: str, folder: Path, server_pid: Callable[[], int | None]
) -> Iterator[None]:
    """Kills what the block leaves running.

    Args:
        mark: value of MARK within the block.
        folder: temporary folder of the test; no other test works in it.
        server_pid: gives the process that forks commands for tests; it may start in the block.
    """
    before = _descendants(server_pid())
    since = time.time() - _CLOCK_STEP_S
    try:
        with marked(mark):
            yield
    finally:
        _kill(_Test(mark, folder, since), server_pid(), before)


@contextlib.contextmanager
def marked(mark: str) -> Iterator[None]:
    """What the block starts has the mark."""
    outer = os.environ.get(MARK)
    os.environ[MARK] = mark
    try:
        yield
    finally:
        del os.environ[MARK]
        if outer is not None:
            os.environ[MARK] = outer


def kill_below(server_pid: int) -> None:
    """Kills all that a process has started, and what that has started."""
    while below := _descendants(server_pid):
        for pid in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                _kill_one(psutil.Process(pid))
        time.sleep(0.02)


def kill_marked(prefix: str) -> None:
    """Kills every process whose mark begins with `prefix`: those of a whole session."""
    for process in psutil.process_iter():
        if _mark_of(process).startswith(prefix):
            _kill_one(process)


@dataclass(frozen=True, slots=True)
class _Test:
    """How the processes of a test are recognized."""

    mark: str
    folder: Path
    since: float
    """Unix time: no process of the test started before."""


def _kill(test: _Test, server_pid: int | None, before: set[int]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while left := list(_left(test, server_pid, before)):
        for process in left:
            _kill_one(process)
        if time.monotonic() > deadline:
            names = [f"{process.pid} {process.name()}" for process in left]
            raise AssertionError(f"processes of this test cannot be ended: {names}")
        time.sleep(0.02)


def _left(
    test: _Test, server_pid: int | None, before: set[int]
) -> Iterator[psutil.Process]:
    forked = _descendants(server_pid, stop_at=before)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            if _may_be_killed(process, test.since):
                is_marked = process.pid in forked or _mark_of(process) == test.mark
                if is_marked or _is_in(process, test.folder):
                    yield process


def _may_be_killed(process: psutil.Process, since: float) -> bool:
    if process.pid == os.getpid() or process.create_time() < since:
        return False
    return process.status() != psutil.STATUS_ZOMBIE and process.name() not in _DAEMONS


def _descendants(server_pid: int | None, stop_at: set[int] | None = None) -> set[int]:
    """Ids of all processes below the server; not those of `stop_at`, nor what is below these."""
    if server_pid is None:
        return set()
    below: set[int] = set()
    waiting = [server_pid]
    while waiting:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(waiting.pop()).children():
                if child.pid not in (stop_at or ()):
                    below.add(child.pid)
                    waiting.append(child.pid)
    return below


def _mark_of(process: psutil.Process) -> str:
    try:
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return ""
    for entry in environment.split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == MARK.encode():
            return value.decode()
    return ""


def _is_in(process: psutil.Process, folder: Path) -> bool:
    """Whether a process works in the folder, or was started with a path in it."""
    try:
        if Path(process.cwd()).is_relative_to(folder):
            return True
    except (psutil.Error, OSError):
        return False
    return any(word.startswith(f"{folder}/") for word in process.cmdline()[:8])


def _kill_one(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGKILL)
