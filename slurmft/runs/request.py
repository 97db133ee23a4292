"""Requests: commands that came from elsewhere, by `--on`. A request makes one run only, however
often it comes."""

import contextlib
import errno
import fcntl
import math
import os
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from slurmft.core import permissions, removal, trusted
from slurmft.core.errors import SlurmftWarning
from slurmft.core.files import parse_json
from slurmft.runs.rundir import RunDir

ON = "SLURMFT_ON"
"""Variable with the name of the cluster, in such a command."""
REQUEST = "SLURMFT_REQUEST"
"""Variable with the facts of the submission, in JSON."""

_SILENT_S = 1.0
"""How long a process waits for another one before it says so."""
_PAUSE_S = 0.1
_OPENINGS = 10
"""How often a lock file is opened whose folder others remove meanwhile."""
_mutexes: dict[Path, threading.Lock] = {}
"""Of each lock file: lockf excludes other processes alone, and its lock ends with any descriptor of
the file that this process closes."""


def facts() -> dict[str, Any]:
    """Returns the facts of the submission: request (an id), command, sender, git; else nothing."""
    try:
        value = parse_json(os.environ.get(REQUEST, "{}"))
    except ValueError:
        return {}
    if not isinstance(value, dict):
        return {}
    return value


def run_of(runs_dir: Path, request: str) -> RunDir | None:
    """Returns the run that a request has made, if it did so before."""
    for path in runs_dir.glob(f"*-{request[:6]}"):  # as `RunDir.create` names it
        run = RunDir(path)
        # Own, too: another user's run, in a shared folder, may name the same request.
        if run.read_submission().request == request and run.is_own():
            return run
    return None


@contextlib.contextmanager
def alone(runs_dir: Path, request: str) -> Iterator[None]:
    """Lets one process at a time submit what a request asks for: the first may still be at it."""
    with alone_with(runs_dir / f".request-{request[:6]}"):
        yield


@contextlib.contextmanager
def alone_with(path: Path, most_wait_s: float = math.inf) -> Iterator[None]:
    """Lets one process and thread at a time do what it does while it holds a file, and removes that
    at the end, with the folders that were made for it and are empty.

    Args:
        most_wait_s: how long to wait for the others; then goes on with a warning.
    """
    lock = _Lock(path)
    try:
        _wait_for(lock, most_wait_s)
        yield
    finally:
        lock.release()


def _wait_for(lock: "_Lock", most_wait_s: float) -> None:
    begin = time.monotonic()
    is_silent = True
    while not lock.take():
        waited_s = time.monotonic() - begin
        if waited_s >= most_wait_s:
            problem = (
                f"waited {waited_s:.0f} s for other submissions, which hold "
                f"{str(lock.path)!r}: goes on without"
            )
            warnings.warn(problem, SlurmftWarning, stacklevel=4)
            return
        if is_silent and waited_s >= _SILENT_S:
            is_silent = False
            wait = f"waits for another submission, which holds {str(lock.path)!r}"
            warnings.warn(wait, SlurmftWarning, stacklevel=4)
        time.sleep(_PAUSE_S)


class _Lock:
    """A lock file, which whoever holds it removes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mutex = _mutexes.setdefault(path.absolute(), threading.Lock())
        self._file: IO[bytes] | None = None
        self._new_folders: list[Path] = []

    def take(self) -> bool:
        """Tries once to lock the file; returns whether it holds it."""
        if not self._mutex.acquire(blocking=False):
            return False
        try:
            self._file = self._locked()
        finally:
            if self._file is None:
                self._mutex.release()
        return self._file is not None

    def release(self) -> None:
        """Removes the file, if it is held, and the folders."""
        if self._file is not None:
            with self._file as file:
                inode = os.fstat(file.fileno()).st_ino
                name = removal.exactly(self.path.name)
                removal.discard(self.path, name, inode=inode)
            self._file = None
            self._mutex.release()
        for folder in self._new_folders:
            removal.discard_empty(folder)

    def _locked(self) -> IO[bytes] | None:
        """Returns the file, open and locked; None: another process holds it."""
        file = self._opened()
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Every other error: there are no locks here.
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return file
            file.close()
            return None
        # Also a file server that has lost the file: the next try opens it anew.
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):
                return file
        file.close()  # its lock keeps nobody out: others open a new file
        return None

    def _opened(self) -> IO[bytes]:
        """Opens the file; makes it, and the folders above it, where they are absent."""
        for _ in range(_OPENINGS):
            # Whoever held it before removes the folders.
            with contextlib.suppress(FileNotFoundError):
                self._new_folders += permissions.make_above(self.path)
                return open(trusted.own_lock_file(self.path), "ab")
        return open(trusted.own_lock_file(self.path), "ab")
