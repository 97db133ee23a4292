"""Permissions: who may read a run. Which files may decide what runs is asked in `core.trusted`."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from slurmft.core import ownership
from slurmft.core.below import Below
from slurmft.core.filesystem import existing
from slurmft.core.writers import remove_lists, set_folder_mode


def settle(share_with_group: bool) -> None:
    """Sets the umask of this process and of those that it starts, whatever the user's is: files are
    private, or readable for the group."""
    os.umask(umask(share_with_group))


def umask(share_with_group: bool) -> int:
    """Returns the umask for the files and folders of a run."""
    if share_with_group:
        return 0o027
    return 0o077


def current_umask() -> int:
    """Returns the umask of this process."""
    # It can only be read by setting another.
    value = os.umask(0o022)
    os.umask(value)
    return value


def make_folder(path: Path, share_with_group: bool, exist_ok: bool = False) -> None:
    """Makes a folder that is private, or that the user's group can read.

    Folders above it are made by `make_above`. A shared folder hands its group on to what is made in
    it (setgid), as the folder above may do; not its access control lists.

    Raises:
        OSError: the folder is there and may not be, or it cannot be made.
    """
    make_above(path)
    mode = 0o700
    if share_with_group:
        mode = 0o2750
    try:
        _make(path, mode, may_be_used=exist_ok)
    except FileExistsError:
        if not (exist_ok and path.is_dir()):
            raise


def make_above(path: Path) -> list[Path]:
    """Makes the folders above a path that are missing, as the umask has them, but never for others
    to write; returns those that were missing, the nearest first.

    Raises:
        OSError: they cannot be made.
    """
    missing = []
    for folder in path.parents:
        if folder.is_dir():
            break
        missing.append(folder)
    for folder in reversed(missing):
        # Another process may make it, too.
        with contextlib.suppress(FileExistsError):
            _make(folder, 0o755 & ~current_umask(), may_be_used=True)
    return missing


def _make(path: Path, mode: int, may_be_used: bool) -> None:
    """Makes a folder that hands its group on, as the one above it does, but takes over none of its
    access control lists.

    Args:
        may_be_used: another process may write into it at once.
    """
    first_mode = 0o700
    # Where another process has written into it by then, it stays as it is made.
    if may_be_used:
        first_mode = mode & 0o777
    user_umask = os.umask(0o777 & ~first_mode)
    try:
        path.mkdir(mode=first_mode)
    finally:
        os.umask(user_umask)
    # By a descriptor: others may put a link, or another folder of this user's, in its place, and
    # have that opened to the group.
    with Below(Path(os.path.realpath(path.parent), path.name)) as new:
        try:
            new.check_new()
        except FileExistsError:
            if not may_be_used:
                raise
            return
        folder = new.path()
        try:
            ownership.check_kept(folder)
        except PermissionError as error:
            error.filename = str(path)
            raise
        remove_lists(folder)
        # By mkdir's mode the umask would decide.
        set_folder_mode(folder, mode)


@contextlib.contextmanager
def as_in(folder: Path) -> Iterator[None]:
    """Gives what this process writes in the block to those who may read a cache.

    The folder decides, or the nearest one above it that exists: who may read it may read the files.
    Its group may write them, if the folder hands its group on. Others may never write.
    """
    status = existing(folder).stat()
    mode = status.st_mode
    # New files will have the folder's group, by setgid or because it is this process's own.
    if mode & stat.S_ISGID or status.st_gid == os.getegid():
        least = 0o002
    # Everybody may read the folder: it does not matter which group they have.
    elif mode & stat.S_IROTH:
        least = 0o022
    # They will have another group, which gets nothing.
    else:
        least = 0o077
    # What the folder denies to others, its files deny, too.
    denied = ~mode & 0o077
    before = os.umask(denied | least)
    try:
        yield
    finally:
        os.umask(before)
