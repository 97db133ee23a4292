"""Who may read a run, and whose pickles are loaded."""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import stat
from pathlib import Path

from slurmft.core.errors import SlurmftError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def settle(share_with_group: bool) -> None:
    """Makes what this process, and those that it starts, write from now on private, or readable for
    the group; whatever the user's umask."""
    os.umask(umask(share_with_group))


def umask(share_with_group: bool) -> int:
    """What the files of a run are kept from; directories lose the same."""
    return 0o027 if share_with_group else 0o077


def text(share_with_group: bool) -> str:
    """The umask as shells take it."""
    return f"{umask(share_with_group):04o}"


def make_folder(path: Path, share_with_group: bool, exist_ok: bool = False) -> None:
    """Makes a folder that is the user's own; folders above it, as the umask has them, but never for
    others to write.

    A shared one hands its group on to what is made in it (setgid), as the one above may do.

    Raises:
        OSError: it is there, or cannot be made.
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


def read_own(path: Path) -> bytes:
    """The bytes of a file that nobody else can have written: what is about to be unpickled, which
    can do all that the user can.

    The open file itself is examined: one that is put in its place meanwhile is not read. So it does
    not matter that a group may write in the folders above, as in those of projects.

    Raises:
        SlurmftError: it, or its folder, is another user's or may be written by others; or everybody
            may rename what lies in a folder above.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        _check_own(path, os.fstat(descriptor))
        _check_own(path.parent, path.parent.stat())
        for folder in path.parent.resolve().parents:
            mode = folder.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise _refusal(folder, mode, f"chmod o-w {shlex.quote(str(folder))}")
        return file.read()


def _check_own(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (0, os.geteuid()):
        raise SlurmftError(
            f"refuses to unpickle: {str(path)!r} belongs to {_user(found.st_uid)}, not to "
            f"{_user(os.geteuid())}",
            "submit the run yourself: `slurmft submit`, or `slurmft resume` of a copy of your own",
        )
    if found.st_mode & _OTHERS_WRITE:
        raise _refusal(path, found.st_mode, f"chmod go-w {shlex.quote(str(path))}")


def _refusal(path: Path, mode: int, command: str) -> SlurmftError:
    return SlurmftError(
        f"refuses to unpickle: others than {_user(path.stat().st_uid)} can write {str(path)!r} "
        f"(mode {stat.S_IMODE(mode):04o})",
        f"if you trust what is there: {command}",
    )


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
