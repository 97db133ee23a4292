"""What a full disk means to a run, in words: what is missing, and what could go."""

import contextlib
import errno
import heapq
import os
import shlex
import shutil
from pathlib import Path

from slurmft.core import filesystem
from slurmft.core.errors import SlurmftError
from slurmft.core.text import in_bytes
from slurmft.runs import token_cache
from slurmft.runs.rundir import RunDir

_RUNS = 500
"""How many runs are looked at, for what is large."""


def is_full(error: Exception) -> bool:
    """Whether an error says that a disk or a quota is full: libraries have it in their words."""
    return any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT))


def no_room(run: RunDir, what: str, needed_bytes: int) -> SlurmftError:
    """The error where the disk takes no more: what is missing, and what to free."""
    free = in_bytes(shutil.disk_usage(run.path).free)
    found = [f"{path} ({in_bytes(size)})" for size, path in largest(run)]
    runs_dir = shlex.quote(str(run.path.parent))
    return SlurmftError(
        f"no room for {what}: it needs {in_bytes(needed_bytes)}; the {filesystem.of(run.path)} has "
        f"{free} free, your quota perhaps less",
        f"make room: {'; '.join(found) or 'no other run of yours has much there'}; slurmft clean "
        f"--runs-dir {runs_dir} shows what nobody needs",
    )


def largest(run: RunDir, count: int = 3) -> list[tuple[int, Path]]:
    """The largest checkpoints and tokens of this user's other runs beside it, and the token cache,
    where they are on its disk: bytes and path, the largest first."""
    with os.scandir(run.path.parent) as entries:
        others = [RunDir(Path(e.path)) for e, _ in zip(entries, range(_RUNS), strict=False)]
    paths = [p for o in others if o.path != run.path for p in (o.checkpoints, o.tokens)]
    device = run.path.stat().st_dev
    sizes = [(size_of(p), p) for p in (*paths, token_cache.folder()) if _is_own(p, device)]
    return [found for found in heapq.nlargest(count, sizes) if found[0] >= 2**20]


def _is_own(path: Path, device: int) -> bool:
    with contextlib.suppress(OSError):
        found = path.lstat()
        return found.st_uid == os.getuid() and found.st_dev == device
    return False


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    below = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    total = 0
    for file in below if path.is_dir() else [path]:
        with contextlib.suppress(OSError):  # somebody else has removed it
            total += os.lstat(file).st_size
    return total
