"""A control group of this machine whose memory is limited, where one can be made."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

_PLACES = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)
"""Of version 1 and of version 2: the folder of groups, and the file of the limit."""
_MEMBERS = "cgroup.procs"
"""The file of a group that takes a process into it."""


@contextlib.contextmanager
def limited(memory_bytes: int) -> Iterator[list[str]]:
    """Makes a group for the block; skips the test where that cannot be.

    Yields:
        The command before that of a process that is to be in the group.
    """
    with _group(memory_bytes) as group:
        enter = f'echo $$ > {group}/{_MEMBERS} && exec "$@"'
        yield ["sh", "-c", enter, "sh"]


@contextlib.contextmanager
def holding(pids: Iterable[int], memory_bytes: int) -> Iterator[None]:
    """Puts processes, and all that they start, into a group for the block."""
    with _group(memory_bytes) as group:
        _move(pids, group)
        try:
            yield
        finally:
            left = (group / _MEMBERS).read_text().split()
            _move(map(int, left), group.parent)


@contextlib.contextmanager
def _group(memory_bytes: int) -> Iterator[Path]:
    for top, limit in _PLACES:
        group = top / f"slurmft-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(memory_bytes))
        except OSError:
            if group.exists():
                group.rmdir()
            continue
        try:
            yield group
        finally:
            _remove(group)
        return
    pytest.skip("no control group with a limit on memory can be made here")


def _move(pids: Iterable[int], group: Path) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            (group / _MEMBERS).write_text(str(pid))


def _remove(group: Path) -> None:
    """Removes a group, once the kernel has ended what was in it."""
    deadline = time.monotonic() + 30
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
