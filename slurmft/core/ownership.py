"""Whose a file is, as far as that is to be believed.

In a file system in user space (FUSE) owners and modes are whatever its server shows. Where a site
lets its users mount one for others (`user_allow_other`), one of theirs could show files of root, or
of whoever looks. So all there counts as the user's who has mounted it, and as open to everybody:
what this user makes there, the server can change as well.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from slurmft.core import mounts
from slurmft.core.users import owner

_PLACE = os.O_PATH | os.O_CLOEXEC
_USER_MAP = "/proc/self/uid_map"
# From linux/magic.h: Python does not tell the type of a file system.
_FUSE_MAGIC = 0x65735546
_STATFS_BYTES = 256
_NOBODY = 65534
"""Whose all is in a file system that was unmounted since it was opened."""
BASH = Path(__file__).with_suffix(".bash")
"""The same questions in bash; see `bash.functions`."""


def status(
    place: int | str | Path, dir_fd: int | None = None, follow_symlinks: bool = True
) -> os.stat_result:
    """Returns the status of a file, folder or link, with an owner and a mode to be believed.

    Args:
        place: a descriptor, a path, or a name in a folder.
        dir_fd: that folder.
        follow_symlinks: not the link itself, but what it leads to.

    Raises:
        OSError: it is absent, or cannot be looked at.
    """
    if isinstance(place, int):
        return _status_of(place)
    flags = _PLACE
    if not follow_symlinks:
        flags |= os.O_NOFOLLOW
    # What is looked at must be the same as what its file system is asked of.
    descriptor = os.open(place, flags, dir_fd=dir_fd)
    try:
        return _status_of(descriptor)
    finally:
        os.close(descriptor)


def check_kept(place: Path) -> None:
    """Checks that what this user has made is kept by a file system of root's, or of their own.

    Raises:
        PermissionError: another user has mounted it.
    """
    descriptor = os.open(place, _PLACE)
    try:
        user = _other_server(descriptor)
    finally:
        os.close(descriptor)
    if user is not None:
        why = f"{owner(user)} has mounted this file system, and can change all in it"
        raise PermissionError(errno.EPERM, why, str(place))


def _status_of(descriptor: int) -> os.stat_result:
    shown = os.fstat(descriptor)
    user = _other_server(descriptor)
    if user is None:
        return shown
    values = list(shown)
    values[stat.ST_MODE] = (shown.st_mode | stat.S_IWOTH) & ~stat.S_ISVTX
    values[stat.ST_UID] = user
    return os.stat_result(values)


def _other_server(descriptor: int) -> int | None:
    """Returns who has mounted the file system of an open file; None: root, this user, or it is none
    in user space."""
    device = os.fstat(descriptor).st_dev
    # Users cannot mount a disk.
    if os.major(device):
        return None
    try:
        server = server_of(mounts.lines(), device)
    except KeyError:
        server = None
        if _is_fuse(descriptor):
            server = _NOBODY
    if server in _trusted_numbers():
        return None
    return server


def server_of(mount_lines: Iterable[str], device: int) -> int | None:
    """Returns the user who has mounted a file system in user space; None: it is of another kind.

    Args:
        mount_lines: see `mounts.lines`.
        device: number of the file system.

    Raises:
        KeyError: it is not mounted.
    """
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mount_lines:
        mount, _, about = line.partition(" - ")
        if mount.split(" ")[2] != number:
            continue
        kind, _, options = about.split(" ", 2)
        if kind != "fuse" and not kind.startswith("fuse."):
            return None
        for option in options.split(","):
            name, _, value = option.partition("=")
            if name == "user_id":
                return int(value)
    raise KeyError(number)


def _is_fuse(descriptor: int) -> bool:
    import ctypes  # 13 ms, and hardly ever needed

    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    # None: the C library that this Python itself is linked to.
    if ctypes.CDLL(None).fstatfs(descriptor, buffer):
        return False
    return ctypes.c_long.from_buffer(buffer).value == _FUSE_MAGIC


def _trusted_numbers() -> set[int]:
    """Returns the numbers of root and of this user, also of the one that they are outside of a
    container, which mounts may name."""
    user = os.geteuid()
    numbers = {0, user}
    # A kernel without user namespaces has no map.
    with contextlib.suppress(FileNotFoundError), open(_USER_MAP) as file:
        for line in file:
            inside, outside, count = map(int, line.split())
            if inside <= user < inside + count:
                numbers.add(outside + user - inside)
    return numbers
