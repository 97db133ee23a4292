"""File systems: which one a path lies on, whether other nodes may see it, how much room it has."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

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
    """A mounted file system, as /proc/self/mountinfo shows it."""

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
    # btrfs makes inodes as needed, and counts none.
    free_inodes = None
    if usage.f_files:
        free_inodes = usage.f_favail
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
        free_inodes=free_inodes,
        problem=problem,
    )


def absolute(path: str | Path) -> Path:
    """Returns an absolute path, with ~ and ~user expanded; ~user stays where there is no such user,
    as in a shell."""
    return Path(os.path.expanduser(path)).absolute()


def of(path: str | Path) -> FileSystem:
    """Returns the file system of a path, or of the nearest folder above it that exists."""
    place = existing(Path(path))
    mountinfo = "/proc/self/mountinfo"
    # The kernel writes names as they are: they need not be UTF-8.
    with open(mountinfo, encoding="utf-8", errors="surrogateescape") as file:
        # A link may lead to another file system.
        return find(file.read(), os.path.realpath(place))


def existing(path: Path) -> Path:
    """Returns a path, or the nearest one above it that exists."""
    place = path.absolute()
    # What lies in a folder that is closed to this user does not exist for it either.
    while not os.path.exists(place) and place != place.parent:
        place = place.parent
    return place


def find(mountinfo: str, path: str) -> FileSystem:
    """Returns the file system of a real path, from the text of mountinfo.

    Of several mounts at one place, the last one counts.
    """
    # In a chroot no line may name what holds the path.
    best = FileSystem(type="unknown", source="unknown", mount="/")
    # Not splitlines: a path may hold other characters that it splits at.
    for line in mountinfo.rstrip("\n").split("\n"):
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
