"""A request makes one run only."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from slurmft.runs import request

REQUEST = "0123456789"


def test_a_lock_file_that_was_removed_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waited for a file that its holder removes takes the lock of the file that others open."""
    path = tmp_path / f".request-{REQUEST[:6]}"
    locked: list[int] = []

    def lock(file: Any, operation: int) -> None:
        assert operation == fcntl.LOCK_EX
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
