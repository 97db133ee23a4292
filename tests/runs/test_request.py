"""A request makes one run only."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slurmft.core import trusted
from slurmft.core.errors import SlurmftWarning
from slurmft.runs import request
from tests.support import PATIENCE_S

REQUEST = "0123456789"


def test_a_lock_file_that_was_removed_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waited for a file that its holder removes takes the lock of the file that others open."""
    path = tmp_path / f".request-{REQUEST[:6]}"
    locked: list[int] = []

    def lock(file: Any, operation: int) -> None:
        assert operation == fcntl.LOCK_EX | fcntl.LOCK_NB
        if not locked:
            path.unlink()  # the holder is done, while this process waits
        locked.append(os.fstat(file.fileno()).st_ino)

    monkeypatch.setattr(fcntl, "lockf", lock)
    with request.alone(tmp_path, REQUEST):
        assert len(locked) == 2
        assert locked[-1] == path.stat().st_ino
    assert not path.exists()


def test_a_failed_submission_leaves_no_lock_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), request.alone(tmp_path, REQUEST):
        raise RuntimeError
    assert not list(tmp_path.iterdir())


HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "ab")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
def test_a_submission_that_hangs_holds_up_the_next_for_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ".outputs-1000"
    command = [sys.executable, "-c", HOLDER, str(path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as holder:
        assert holder.stdout
        assert holder.stdin
        assert holder.stdout.readline() == b"locked\n"
        monkeypatch.setattr(request, "_SILENT_S", 0.0)
        with (
            pytest.warns(SlurmftWarning) as warned,
            request.alone_with(path, most_wait_s=0.2),
        ):
            pass
        assert path.exists()  # it is the holder's
        holder.stdin.close()
        holder.wait(PATIENCE_S)
    waits, goes_on = [str(each.message) for each in warned]
    assert waits.startswith("waits for another submission, which holds ")
    assert goes_on.endswith(": goes on without")
    with request.alone_with(path):
        pass
    assert not path.exists()


def test_threads_of_one_process_take_turns(tmp_path: Path) -> None:
    """lockf lets a process have what it has, and drops it with any descriptor of the file."""
    path = tmp_path / ".outputs-1000"
    inside = threading.Lock()

    def submit(_: int) -> bool:
        with request.alone_with(path):
            is_alone = inside.acquire(blocking=False)
            threading.Event().wait(0.05)
            with contextlib.suppress(RuntimeError):
                inside.release()
            return is_alone

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(submit, range(4)))
    assert not path.exists()


def test_folders_that_the_holder_removes_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs" / "mine" / ".outputs-1000"
    open_file = trusted.own_lock_file
    removals = [path.parent, path.parent.parent]

    def remove_and_open(path: Path) -> int:
        while removals:
            removals.pop(0).rmdir()
        return open_file(path)

    monkeypatch.setattr(trusted, "own_lock_file", remove_and_open)
    with request.alone_with(path):
        assert path.exists()
    assert not list(tmp_path.iterdir())
