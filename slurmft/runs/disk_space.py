"""The error of a run whose disk is full: what is missing, and what could be removed."""

import contextlib
import errno
import heapq
import itertools
import os
import shlex
from pathlib import Path

from slurmft.core import filesystem, hooks, ownership
from slurmft.core.errors import SlurmftError
from slurmft.core.text import in_bytes
from slurmft.runs.rundir import RunDir

_RUNS = 500
"""How many runs are looked at, for what is large. A failing run must not search for minutes."""


def is_full(error: Exception) -> bool:
    """Returns whether a disk or a quota is full."""
    return filesystem.disk_error(error) in (errno.ENOSPC, errno.EDQUOT)


def no_room(
    run: RunDir, what: str, error: Exception, needed_bytes: int | None = None
) -> SlurmftError:
    """Returns the error of a disk that is full, as `is_full` says: what is missing, and what to
    remove.

    Args:
        run: the run that writes.
        what: it writes.
        error: the one that says that the disk is full.
        needed_bytes: about how many bytes that has; None: not known.
    """
    # A library may have written elsewhere, into a cache of its own.
    path = filesystem.place_of(error, run.path)
    reason = str(error)
    in_words = filesystem.why_not(error, path)
    if in_words is not None:
        reason, _ = in_words
    needs = ""
    if needed_bytes is not None:
        needs = f"it needs {in_bytes(needed_bytes)}; "
    candidates = []
    for size_bytes, path in largest(run):
        candidates.append(f"{path} ({in_bytes(size_bytes)})")
    others = "; ".join(candidates)
    runs_dir = shlex.quote(str(run.path.parent))
    if not others:
        others = "no other run of yours has much there"
    return SlurmftError(
        f"no room for {what}: {needs}{reason}",
        f"make room: {others}; slurmft clean --runs-dir {runs_dir} shows what nobody needs",
    )


def largest(run: RunDir, count: int = 3) -> list[tuple[int, Path]]:
    """Returns the largest checkpoints and tokens of this user's other runs beside a run, and the
    caches that runs share, if they are on its disk and have a MiB or more: bytes and path, the
    largest first."""
    paths = [cache.folder for cache in hooks.shared_caches()]
    with os.scandir(run.path.parent) as entries:
        for entry in itertools.islice(entries, _RUNS):
            other = RunDir(Path(entry.path))
            if other.path != run.path:
                paths += [other.checkpoints, other.tokens]
    # To remove what lies on another disk makes no room here.
    device = run.path.stat().st_dev
    large = []
    for path in paths:
        if _is_own(path, device):
            size_bytes = size_of(path)
            # To remove less than a MiB helps nobody.
            if size_bytes >= 2**20:
                large.append((size_bytes, path))
    return heapq.nlargest(count, large)


def _is_own(path: Path, device: int) -> bool:
    try:
        # Of a link itself: to remove it makes no room.
        about = ownership.status(path, follow_symlinks=False)
    except OSError:  # most runs have no tokens, and many no checkpoints
        return False
    is_of_user = about.st_uid == os.getuid()
    return is_of_user and about.st_dev == device


def size_of(path: Path) -> int:
    """Returns the bytes of a file, or of all files in a folder."""
    if not path.is_dir():
        return _file_size(str(path))
    total = 0
    folders = [str(path)]
    # Not os.walk, which calls itself for each folder within another.
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    total += _file_size(entry.path)
    return total


def _file_size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:  # somebody else has removed it
        return 0
