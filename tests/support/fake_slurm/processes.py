"""The processes of a job: all that its runner has started, at any depth."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> set[int]:
    """Returns the living processes below `root`, but not those of other jobs: a command within a
    job may start the next one."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        fields = _stat(name) if name.isdigit() else []
        if fields and fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(name))
    below: set[int] = set()
    new = [root]
    while new:
        children_of_new = [
            child for parent in new for child in children.get(parent, [])
        ]
        new = [pid for pid in children_of_new if not _is_background(pid)]
        below.update(new)
    return below


def session_of(pid: int) -> int:
    """Returns the session of a process, 0 if it is gone."""
    fields = _stat(str(pid))
    return int(fields[3]) if fields else 0


def send(signum: int, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def _is_background(pid: int) -> bool:
    """Returns whether a process is the runner of a job, or wakes the scheduler."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return False
    return any(b"fake_slurm.program" in word for word in words) and bool(
        {b"runner", b"timer"} & set(words)
    )


def _stat(pid: str) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent, group, session, ..."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
