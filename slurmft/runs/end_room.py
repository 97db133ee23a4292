"""Room for the end of a run on a disk, or in a quota, that is full by then.

A job that nobody watches has no other place to say how it ended: the log lies on the same disk. So
a file of some KiB lies beside the state of a run from the start of its job. Where the disk takes
nothing more, the last state is written into the blocks of this file, which then gets the name of
the state: neither asks for room.
"""

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import Any

from slurmft.core import descent, filesystem, removal
from slurmft.core.files import to_json, write_bytes, write_json
from slurmft.core.writers import can_others_rename

_BYTES = 2**14
"""More than what the last state adds to the one before."""
_EXISTING_FILE = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def keep(path: Path) -> None:
    """Keeps room for the last state of a run, whose file this is; none where that cannot be."""
    with contextlib.suppress(OSError):
        size_bytes = path.stat().st_size + _BYTES
        # Not zeros: some file systems give those no blocks.
        write_bytes(_room_of(path), os.urandom(size_bytes))


def write_last_json(path: Path, value: Any) -> None:
    """Replaces the state of a run by its last one, as `files.write_json` does, and gives the room
    back that was kept for it.

    Raises:
        OSError: it cannot be written, not even into that room.
    """
    room = _room_of(path)
    try:
        write_json(path, value)
    except OSError as error:
        if filesystem.disk_error(error) not in (errno.ENOSPC, errno.EDQUOT):
            raise
        content = (to_json(value, indent=2) + "\n").encode("utf-8")
        if not _write_into(room, path.name, content):
            raise
    removal.discard(room, removal.exactly(room.name))


def _room_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.room")


def _write_into(room: Path, name: str, content: bytes) -> bool:
    """Writes into the blocks of a file, and gives it another name in its folder; returns whether
    that was possible."""
    with contextlib.suppress(OSError), descent.opened(room.parent) as folder:
        # They could have given any file of this user's that name.
        if can_others_rename(folder):
            return False
        descriptor = os.open(room.name, _EXISTING_FILE, dir_fd=folder)
        with open(descriptor, "wb", buffering=0) as file:
            about = os.fstat(descriptor)
            is_regular = stat.S_ISREG(about.st_mode) and about.st_nlink == 1
            # What is longer would need further blocks.
            if not is_regular or len(content) > about.st_size:
                return False
            file.write(content)
            file.truncate()
            os.fsync(descriptor)
        os.replace(room.name, name, src_dir_fd=folder, dst_dir_fd=folder)
        return True
    return False
