"""File systems: which one a path lies on, whether other nodes may see it, how much room it has."""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slurmft.core import mounts, ownership, users
from slurmft.core.text import in_bytes

LOCK_PRIMITIVES = ("flock", "lockf", "ofd", "soft")
"""Kinds of file locks: flock; POSIX byte-range locks; byte-range locks of open file descriptions;
the existence of a file. Which of them hold between nodes is the file system's choice."""

_LOCAL = (
    "bcachefs",
    "btrfs",
    "devtmpfs",
    "exfat",
    "ext2",
    "ext3",
    "ext4",
    "f2fs",
    "jfs",
    "overlay",
    "ramfs",
    "reiserfs",
    "rootfs",
    "squashfs",
    "tmpfs",
    "vfat",
    "xfs",
    "zfs",
)
"""Kernel file systems of one machine. All others are taken for shared: the safe side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSystem:
    """A mounted file system, as the kernel shows it."""

    type: str
    """The kernel's word: nfs4, gpfs, lustre, fuse.sshfs, ext4, ..."""
    source: str
    """The mounted thing: server:/export, a device, ..."""
    mount: str
    """Where it is mounted here."""

    @property
    def is_shared(self) -> bool:
        """True if other nodes may see it, by its type."""
        return self.type not in _LOCAL

    def __str__(self) -> str:
        return f"{self.type} at {self.mount}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Space that a file system still has for this user, in one folder."""

    free_bytes: int
    free_inodes: int | None
    """Files that can still be made; None: the file system does not count them."""
    problem: str | None
    """Why a file of a megabyte could not be written there; None: it could."""


def room(folder: Path) -> Room:
    """Measures the room of a folder, or of the nearest one above it that exists.

    A megabyte is written: a quota shows in nothing else.
    """
    import tempfile  # 3 ms: only doctor tries a folder

    place = existing(folder)
    usage = os.statvfs(place)
    problem = None
    try:
        # Without a name: nothing can be left behind.
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = error.strerror or str(error)
    return Room(
        free_bytes=usage.f_bavail * usage.f_frsize,
        free_inodes=_free_inodes(usage),
        problem=problem,
    )


def _free_inodes(usage: os.statvfs_result) -> int | None:
    # btrfs makes inodes as needed, and counts none.
    if not usage.f_files:
        return None
    return usage.f_favail


def place_of(error: BaseException, default: Path) -> Path:
    """Returns the file that an error names, else another path."""
    name = getattr(error, "filename", None)
    # It may be the number of a descriptor.
    if not isinstance(name, (str, bytes)):
        return default
    return Path(os.fsdecode(name))


def reason(error: BaseException, path: Path) -> str:
    """Returns in words why a path cannot be written: the system's message, and what its disk
    lacks, or whose folder refuses it."""
    disk = why_not(error, path)
    number = disk_error(error)
    if disk is None or number is None:
        text = getattr(error, "strerror", None) or str(error)
        return f"{text}{_owner_who_refuses(error, path)}"
    problem, _ = disk
    return f"{os.strerror(number)}: {problem}"


def _owner_who_refuses(error: BaseException, path: Path) -> str:
    """Returns whose the folder is in which this user may make nothing; "" where it is theirs."""
    if not isinstance(error, PermissionError):
        return ""
    folder = existing(path)
    with contextlib.suppress(OSError):
        status = ownership.status(folder)
        if status.st_uid != os.geteuid():
            mode = stat.S_IMODE(status.st_mode)
            owner = users.user_name(status.st_uid)
            return f": {str(folder)!r} belongs to {owner} (mode {mode:o})"
    return ""


# numpy's words: they lack those of the system.
_SHORT_WRITE = re.compile(
    r"\d+ requested and \d+ written|Not enough free space to write"
)


def disk_error(error: BaseException) -> int | None:
    """Returns the number of an error by which a disk takes nothing more: it is full (ENOSPC), as is
    a quota (EDQUOT), or may only be read (EROFS), or fails (EIO); None for another error.

    By the error's text, where it has no number: libraries pass the system's message on.
    """
    number = getattr(error, "errno", None)
    text = str(error)
    for each in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
        if number == each or (number is None and os.strerror(each) in text):
            return each
    if number is None and _SHORT_WRITE.search(text):
        return errno.ENOSPC
    return None


def why_not(error: BaseException, path: Path) -> tuple[str, str] | None:
    """Returns in words why the disk of a path takes nothing more, and what to do; None where an
    error says something else."""
    number = disk_error(error)
    if number is None:
        return None
    place = of(path)
    cure = (
        "make room there (slurmft clean shows what nobody needs), or give another place"
    )
    match number:
        case errno.EDQUOT:
            return f"your quota on the {place} is used up", cure
        case errno.EROFS:
            return f"the {place} is mounted read-only", "give another place"
        case errno.EIO:
            cure = "try later; those who run this machine may know more"
            return f"the {place} fails", cure
    usage = os.statvfs(existing(path))
    free = in_bytes(usage.f_bavail * usage.f_frsize)
    if _free_inodes(usage) == 0:
        problem = f"the {place} has no free inodes: it takes no more files"
        return f"{problem}, though {free} are free", cure
    return f"the {place} has {free} free, your quota perhaps less", cure


_FULL_BYTES = 2**16
"""With less than this, the files of a run do not fit."""


def full(path: Path) -> str | None:
    """Returns in words that the disk of a path takes nothing more; None: it takes something, but
    for a quota, which cannot be seen from here."""
    try:
        usage = os.statvfs(path)
    except OSError:
        return None
    # Some FUSE file systems count nothing, and report zeros.
    if not usage.f_blocks:
        return None
    if usage.f_bavail * usage.f_frsize >= _FULL_BYTES and _free_inodes(usage) != 0:
        return None
    reason = why_not(OSError(errno.ENOSPC, ""), path)
    return reason and reason[0]


def absolute(path: str | Path) -> Path:
    """Returns an absolute path, with ~ and ~user expanded; ~user stays where there is no such user,
    as in a shell."""
    return Path(os.path.expanduser(path)).absolute()


def of(path: str | Path) -> FileSystem:
    """Returns the file system of a path, or of the nearest folder above it that exists."""
    place = existing(Path(path))
    # A link may lead to another file system.
    return find(mounts.lines(), os.path.realpath(place))


def existing(path: Path) -> Path:
    """Returns a path, or the nearest one above it that exists."""
    place = path.absolute()
    # What lies in a folder that is closed to this user does not exist for it either.
    while not os.path.exists(place) and place != place.parent:
        place = place.parent
    return place


def find(mount_lines: Iterable[str], path: str) -> FileSystem:
    """Returns the file system of a real path, from `mounts.lines`.

    Of several mounts at one place, the last one counts.
    """
    # In a chroot no line may name what holds the path.
    best = FileSystem(type="unknown", source="unknown", mount="/")
    for line in mount_lines:
        # Fields of proc(5): the fifth is the mount point; behind the hyphen are type and source.
        left, _, right = line.partition(" - ")
        mount = _unescape(left.split(" ")[4])
        # With the slash: what is in /data2 is not in /data.
        holds_path = path == mount or path.startswith(mount.rstrip("/") + "/")
        if holds_path and len(mount) >= len(best.mount):
            kind, source = right.split(" ")[:2]
            best = FileSystem(type=kind, source=_unescape(source), mount=mount)
    return best


def _unescape(text: str) -> str:
    r"""Undoes the octal escapes of mountinfo: \040 is a space, \134 a backslash."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
