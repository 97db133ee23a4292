"""Who else can write a file, or rename what lies in a folder."""

import contextlib
import os
import stat
from pathlib import Path

from slurmft.core import ownership
from slurmft.core.users import group_name, is_private_group, owner

EVERYBODY = "everybody"
"""Who can rename what lies in a folder that all may write, without the sticky bit."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LISTS = ("system.posix_acl_default", "system.posix_acl_access")
"""Attributes with the access control lists of a folder."""


def can_others_rename(folder: int) -> bool:
    """Returns whether somebody else can rename what lies in an open folder."""
    status = ownership.status(folder)
    is_others = status.st_uid not in (0, os.geteuid())
    opened = Path(f"/proc/self/fd/{folder}")
    return is_others or bool(who_renames(opened, status))


def can_others_make(folder: Path, status: os.stat_result) -> bool:
    """Returns whether somebody else can make files in a folder: also in a sticky one."""
    is_others = status.st_uid not in (0, os.geteuid())
    return is_others or bool(who_writes(folder, status))


def who_renames(folder: Path, status: os.stat_result) -> str:
    """Returns who else can rename what lies in a folder; "": nobody."""
    mode = status.st_mode
    if mode & OTHERS_WRITE and mode & stat.S_ISVTX:
        # In a sticky folder its owner renames everything, and others what is theirs.
        if status.st_uid in (0, os.geteuid()):
            return ""
        return owner(status.st_uid)
    return who_writes(folder, status)


def who_writes(path: Path, status: os.stat_result) -> str:
    """Returns who, besides its owner, can write a file or folder, in words; "": nobody."""
    mode = status.st_mode
    if mode & stat.S_IWOTH:
        return EVERYBODY
    if not mode & stat.S_IWGRP:
        return ""
    # The group's bits are the most that the list gives to anybody whom it names.
    if _has_list(path):
        return f"whoever is in the access control list of {str(path)!r}"
    if is_private_group(status.st_gid):
        return ""
    return f"the group {group_name(status.st_gid)}"


def _has_list(path: Path) -> bool:
    """Returns whether a file or folder has an access control list."""
    try:
        return "system.posix_acl_access" in os.listxattr(path)
    except OSError:  # the file system knows none
        return False


def remove_lists(folder: int | Path) -> bool:
    """Removes the access control lists of a new folder, which it has taken over from the one above;
    returns whether there were any.

    Where they are, the umask does not count: what is made there would be open to those whom they
    name.
    """
    try:
        lists = [name for name in os.listxattr(folder) if name in _LISTS]
    except OSError:  # the file system knows none
        return False
    for name in lists:
        with contextlib.suppress(OSError):  # another process has removed it
            os.removexattr(folder, name)
    return bool(lists)


def set_folder_mode(folder: int | Path, mode: int) -> None:
    """Gives a folder a mode; one that hands its group on to what is made in it goes on doing so."""
    handing_on = os.stat(folder).st_mode & stat.S_ISGID
    with contextlib.suppress(PermissionError):  # a file system that knows no modes
        os.chmod(folder, handing_on | mode)
