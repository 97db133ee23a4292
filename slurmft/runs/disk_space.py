"""What a full disk means to a run, in words: what is missing, and how to make room."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
from pathlib import Path

from slurmft.core import filesystem
from slurmft.core.errors import SlurmftError
from slurmft.core.text import in_bytes
from slurmft.runs.rundir import RunDir


def is_full(error: Exception) -> bool:
    """Whether an error says that a disk or a quota is full: libraries have it in their words."""
    return any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT))


def no_room(run: RunDir, what: str, needed_bytes: int) -> SlurmftError:
    """The error where the disk takes no more: what is missing, and how to free some."""
    free = in_bytes(shutil.disk_usage(run.path).free)
    return SlurmftError(
        f"no room for {what}: it needs {in_bytes(needed_bytes)}; the {filesystem.of(run.path)} has "
        f"{free} free, your quota perhaps less",
        "make room; what nobody needs any more, and its sizes: slurmft clean --runs-dir "
        f"{shlex.quote(str(run.path.parent))}",
    )


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    try:
        return total if path.is_dir() else path.lstat().st_size
    except OSError:  # somebody else has removed it
        return total
