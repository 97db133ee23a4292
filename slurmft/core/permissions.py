"""Permissions: who may read a run, and which files are trusted to decide what code runs."""

import contextlib
import os
import pwd
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from slurmft.core.errors import SlurmftError
from slurmft.core.filesystem import existing

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NotOwnError(SlurmftError):
    """A file or folder that others have written, or could have."""


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

    Folders above it are made as the umask has them, but never for others to write. A shared folder
    hands its group on to what is made in it (setgid), as the folder above may do.

    Raises:
        OSError: the folder is there and may not be, or it cannot be made.
    """
    user_umask = current_umask()
    os.umask(user_umask | 0o022)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    finally:
        os.umask(user_umask)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if exist_ok and path.is_dir():
            return
        raise
    # By mkdir's mode the umask would decide, and setgid would be lost.
    inherited = path.stat().st_mode & stat.S_ISGID
    mode = inherited | 0o700
    if share_with_group:
        mode = 0o2750
    with contextlib.suppress(PermissionError):  # a file system that knows no modes
        path.chmod(mode)


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


# --- what nobody else can have written ------------------------------------------------------------


def read_own(path: Path) -> bytes:
    """Reads a file that nobody else can have written: it decides what runs as this user.

    The open file itself is examined: one that is put in its place meanwhile is not read. So it does
    not matter that a group may write in the folders above, as in those of projects.

    Raises:
        NotOwnError: the file or its folder is another user's or may be written by others; or
            everybody may rename what lies in a folder above.
        OSError: the file cannot be read, or is a link.
    """
    with own_folder(path.parent) as folder, open(open_own(path, folder), "rb") as file:
        return file.read()


@contextlib.contextmanager
def own_folder(path: Path) -> Iterator[int]:
    """Opens a folder in which nobody else can have written; the path may be a link to it.

    Yields:
        A descriptor of the folder.

    Raises:
        NotOwnError, OSError: as `read_own` does.
    """
    # Without links: the folders above it are those that hold it.
    place = Path(os.path.realpath(path))
    descriptor = open_own(place, is_folder=True)
    try:
        for above in place.parents:
            mode = above.stat().st_mode
            # In a sticky folder, as /tmp is, only the owner of a file renames it.
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise _writable(above, mode, f"chmod o-w {shlex.quote(str(above))}")
        yield descriptor
    finally:
        os.close(descriptor)


def open_own(path: Path, folder: int | None = None, is_folder: bool = False) -> int:
    """Opens a regular file, or a folder, that nobody else can have written.

    Args:
        path: no link.
        folder: descriptor of the folder of `path`; None: `path` is opened from the root.

    Returns:
        A descriptor.

    Raises:
        NotOwnError, OSError: as `read_own` does.
    """
    # Without O_NONBLOCK, opening a FIFO would wait for a writer.
    kind = os.O_NONBLOCK
    if is_folder:
        kind = os.O_DIRECTORY
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind
    # By its name in the open folder: another may have taken the folder's place by now.
    name = str(path)
    if folder is not None:
        name = path.name
    descriptor = os.open(name, flags, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        # What root writes need not be feared: root can do all that this user can.
        if status.st_uid not in (0, os.geteuid()):
            raise NotOwnError(
                f"{_refused()}: {str(path)!r} belongs to {user_name(status.st_uid)}",
                "use a run of your own; slurmft status, logs and follow show those of others, too",
            )
        if status.st_mode & _OTHERS_WRITE:
            raise _writable(
                path, status.st_mode, f"chmod go-w {shlex.quote(str(path))}"
            )
        if not is_folder and not stat.S_ISREG(status.st_mode):
            raise NotOwnError(f"{str(path)!r} is not a regular file")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _writable(path: Path, mode: int, command: str) -> NotOwnError:
    return NotOwnError(
        f"{_refused()}: others can write {str(path)!r} (mode {stat.S_IMODE(mode):04o})",
        f"if you trust what is there: {command}",
    )


def _refused() -> str:
    return f"refused, as it would decide what runs as {user_name(os.geteuid())}"


def user_name(number: int) -> str:
    """Returns the name of a user by the number; "user 1000" where it has no name."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
