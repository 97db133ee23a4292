"""Who has the machine's one test cluster.

A kernel lock on a file (flock), which ends with its holder, however that dies; the file's text only
says who that is. `up` and `down` by hand hold it while they run, `with Cluster()` until its end: so
a cluster that was started by hand is replaced by whoever comes next, that of a living session not.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from tests.support.cluster import system
from tests.support.cluster.system import POLL_S, ClusterError

LOCK = Path("/run/slurmft-cluster.lock")
UP, DOWN, SESSION = "up", "down", "session"


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds the lock, and since when."""

    pid: int
    purpose: str
    """UP and DOWN take seconds, a SESSION as long as its tests."""
    since: str
    command: str

    @classmethod
    def me(cls, purpose: str) -> Holder:
        pid, now = os.getpid(), datetime.now().strftime("%H:%M:%S")
        return cls(pid, purpose, now, shlex.join(system.argv_of(pid)))

    def __str__(self) -> str:
        return f"process {self.pid} since {self.since} ({self.purpose}): {self.command}"


@contextlib.contextmanager
def held(purpose: str, timeout_s: float = 60) -> Iterator[None]:
    """Holds the lock; waits for an `up` or `down` to end, but for no session.

    Raises:
        ClusterError: another process has it, with that process's name.
    """
    # not inherited by programs
    descriptor = os.open(LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _take(descriptor, timeout_s)
        _write(descriptor, json.dumps(asdict(Holder.me(purpose))))
        try:
            yield
        finally:
            _write(descriptor, "")
    finally:
        os.close(descriptor)


def _take(descriptor: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not _lock(descriptor):
        holder = _holder(descriptor)
        if holder and holder.purpose == SESSION:
            raise ClusterError(
                f"the test cluster is in use by {holder}\n"
                f"hint: wait for its end, or end it (kill {holder.pid}) and try again"
            )
        if time.monotonic() > deadline:
            who = holder or "a process that left no name"
            raise ClusterError(
                f"waited {timeout_s:g} s for the test cluster's lock, held by {who}\n"
                f"hint: `fuser -v {LOCK}` shows who has it open"
            )
        time.sleep(POLL_S)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(descriptor: int) -> Holder | None:
    """Who the file says it is; None: it does not, or names one who is dead.

    The holder writes its name just after it has the lock: until then that of a dead one may stand.
    """
    try:
        holder = Holder(**json.loads(os.pread(descriptor, 1 << 20, 0)))
    except (ValueError, TypeError):
        return None
    return holder if Path(f"/proc/{holder.pid}").exists() else None


def _write(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
