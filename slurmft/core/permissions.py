"""Who may read a run, and whose files are trusted: what runs code as this user must be theirs."""

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
    """Makes what this process, and those that it starts, write from now on private, or readable for
    the group; whatever the user's umask."""
    os.umask(umask(share_with_group))


def umask(share_with_group: bool) -> int:
    """What the files of a run are kept from; directories lose the same."""
    return 0o027 if share_with_group else 0o077


def make_folder(path: Path, share_with_group: bool, exist_ok: bool = False) -> None:
    """Makes a folder that is the user's own; folders above it, as the umask has them, but never for
    others to write. OSError where it is there, or cannot be made.

    A shared one hands its group on to what is made in it (setgid), as the one above may do.
    """
    old = os.umask(0o022)
    os.umask(old | 0o022)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    finally:
        os.umask(old)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if exist_ok and path.is_dir():
            return
        raise
    inherited = path.stat().st_mode & stat.S_ISGID
    with contextlib.suppress(PermissionError):  # a file system that knows no modes
        path.chmod(0o2750 if share_with_group else inherited | 0o700)


@contextlib.contextmanager
def as_in(folder: Path) -> Iterator[None]:
    """What this process writes in the block is for those for whom a cache is: all who may read its
    folder, or the nearest one above that exists; its group may write, if the folder hands its group
    on. Nothing is for everybody to write."""
    found = existing(folder).stat()
    is_its_group = found.st_mode & stat.S_ISGID or found.st_gid == os.getegid()
    least = 0o002 if is_its_group else 0o022 if found.st_mode & stat.S_IROTH else 0o077
    old = os.umask(~found.st_mode & 0o077 | least)
    try:
        yield
    finally:
        os.umask(old)


# --- what nobody else can have written ------------------------------------------------------------


def read_own(path: Path) -> bytes:
    """The bytes of a file that nobody else can have written: it decides what runs as this user.

    The open file itself is examined: one that is put in its place meanwhile is not read. So it does
    not matter that a group may write in the folders above, as in those of projects.

    Raises:
        NotOwnError: it, or its folder, is another user's or may be written by others; or everybody
            may rename what lies in a folder above.
        OSError: it cannot be read, or is a link.
    """
    with own_folder(path.parent) as folder, open(open_own(path, folder), "rb") as file:
        return file.read()


@contextlib.contextmanager
def own_folder(path: Path) -> Iterator[int]:
    """A descriptor of a folder in which nobody else can have written; the path may be a link to it.
    Raises as `read_own`."""
    place = Path(os.path.realpath(path))
    descriptor = open_own(place, is_folder=True)
    try:
        for above in place.parents:
            mode = above.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise _writable(above, mode, f"chmod o-w {shlex.quote(str(above))}")
        yield descriptor
    finally:
        os.close(descriptor)


def open_own(path: Path, folder: int | None = None, is_folder: bool = False) -> int:
    """Opens a regular file, or a folder, that nobody else can have written; returns a descriptor.
    Raises as `read_own`.

    Args:
        path: no link; its last part, where `folder` is given.
        folder: descriptor of the folder where it is looked for.
    """
    kind = os.O_DIRECTORY if is_folder else os.O_NONBLOCK  # a FIFO would wait for a writer
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind
    descriptor = os.open(path if folder is None else path.name, flags, dir_fd=folder)
    try:
        found = os.fstat(descriptor)
        if found.st_uid not in (0, os.geteuid()):
            raise NotOwnError(
                f"{_refused()}: {str(path)!r} belongs to {user_name(found.st_uid)}",
                "use a run of your own; slurmft status, logs and follow show those of others, too",
            )
        if found.st_mode & _OTHERS_WRITE:
            raise _writable(path, found.st_mode, f"chmod go-w {shlex.quote(str(path))}")
        if not is_folder and not stat.S_ISREG(found.st_mode):
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
    """Of a user's number; "user 1000" where it has no name."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
