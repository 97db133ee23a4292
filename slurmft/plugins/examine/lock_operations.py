"""The lock operations of an agent: real processes on a node take, hold and lose locks."""

import contextlib
import os
import re
import secrets
import signal
from pathlib import Path
from typing import Any

from slurmft import locks
from slurmft.core import removal

_PREFIX = ".slurmft-lock-"

Held = tuple[int, Any]
"""A file descriptor, and what `locks.lock` returned."""


class LockOperations:
    """The operations of one node."""

    def __init__(self) -> None:
        self._held: dict[Path, Held] = {}

    def lock(self, folder: str, operation: str, primitive: str, name: str) -> str:
        """Does one operation; returns one word, or the text of an error."""
        path = Path(folder) / f"{_PREFIX}{name}"
        try:
            method = getattr(self, f"_{operation}")
            return str(method(path, primitive))
        except BlockingIOError:  # somebody else holds the lock
            return "busy"
        except OSError as error:
            return error.strerror or str(error)

    def _token(self, path: Path, primitive: str) -> str:
        """Returns a name that nobody else uses."""
        return secrets.token_hex(6)

    def _hold(self, path: Path, primitive: str) -> str:
        self._held[path] = acquire(path, primitive)
        return "got"

    def _free(self, path: Path, primitive: str) -> str:
        release(self._held.pop(path), primitive)
        return "got"

    def _try(self, path: Path, primitive: str) -> str:
        """Takes the lock and gives it up at once."""
        held = acquire(path, primitive)
        release(held, primitive)
        return "got"

    def _leave(self, path: Path, primitive: str) -> str:
        """Lets a process take the lock, and end without giving it up."""
        return self._child(path, primitive, None)

    def _die(self, path: Path, primitive: str) -> str:
        """Lets a process take the lock, and kills it."""
        return self._child(path, primitive, signal.SIGKILL)

    def _child(self, path: Path, primitive: str, end_signal: int | None) -> str:
        """Returns what a child process gets, before a signal or its own exit ends it."""
        answer_reader, answer_writer = os.pipe()
        end_reader, end_writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            # else the child would not see that the parent closes its own
            os.close(end_writer)
            name = path.name.removeprefix(_PREFIX)
            answer = self.lock(str(path.parent), "hold", primitive, name)
            os.write(answer_writer, answer.encode())
            os.read(end_reader, 1)  # until the parent closes its end
            os._exit(0)  # with no unlock, and no library's care at exit
        # The child alone has this end now: where it dies without an answer, the read below ends.
        os.close(answer_writer)
        os.close(end_reader)
        answer = os.read(answer_reader, 4096).decode()
        # Before its end of the pipe is closed, on which it leaves by itself.
        if end_signal is not None:
            os.kill(pid, end_signal)
        os.close(end_writer)
        os.close(answer_reader)
        # What the probe asks next is what is left of the lock when the process is gone.
        os.waitpid(pid, 0)
        return answer

    def _write(self, path: Path, primitive: str) -> str:
        path.touch()
        return "yes"

    def _see(self, path: Path, primitive: str) -> str:
        if path.exists():
            return "yes"
        return "no"

    def _clear(self, path: Path, primitive: str) -> str:
        """Removes what a probe has left here."""
        form = re.compile(re.escape(path.name) + ".*")
        for file in removal.matching(path.parent, form):
            # By its inode: filelock writes into such a file, and others may rename it here. Nobody
            # has known its name (`_token`) before.
            with contextlib.suppress(OSError):
                removal.discard(file, form, inode=file.lstat().st_ino)
        return "yes"


def acquire(path: Path, primitive: str) -> Held:
    """Opens and locks a file; returns what `release` needs."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        return fd, locks.lock(fd, primitive)
    except OSError:
        os.close(fd)
        raise


def release(held: Held, primitive: str) -> None:
    """Gives up what `acquire` returned."""
    fd, state = held
    locks.unlock(fd, primitive, state)
    os.close(fd)
