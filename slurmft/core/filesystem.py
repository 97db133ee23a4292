"""What file system a path lies on, and whether other nodes may see it."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

LOCK_PRIMITIVES = ("flock", "lockf", "ofd", "soft")
"""Kinds of file locks: flock; POSIX byte-range locks; byte-range locks of open file descriptions;
the existence of a file. Which of them hold between nodes is the file system's choice."""

_LOCAL = (
    "bcachefs", "btrfs", "devtmpfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay",
    "ramfs", "reiserfs", "rootfs", "squashfs", "tmpfs", "vfat", "xfs", "zfs",
)  # fmt: skip
"""Kernel file systems of one machine. All others are taken for shared: the safe side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSystem:
    """A mounted file system, as /proc/self/mountinfo shows it."""

    type: str
    """The kernel's word: nfs4, gpfs, lustre, fuse.sshfs, ext4, ..."""
    source: str
    """What is mounted: server:/export, a device, ..."""
    mount: str
    """Where it is mounted here."""

    @property
    def is_shared(self) -> bool:
        """Whether other nodes may see it, by its type."""
        return self.type not in _LOCAL

    def __str__(self) -> str:
        return f"{self.type} at {self.mount}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What a file system still takes from this user, in one folder."""

    free_bytes: int
    free_inodes: int | None
    """None: the file system does not count them."""
    problem: str | None
    """Why a file of a megabyte could not be written there; None: it could."""


def room(folder: Path) -> Room:
    """Tries a folder, or the nearest one above it that exists; a quota shows in the trial only."""
    import tempfile  # 3 ms: only doctor tries a folder

    place = existing(folder)
    counted = os.statvfs(place)
    problem = None
    try:
        with tempfile.TemporaryFile(dir=place) as file:  # unnamed: nothing can be left behind
            file.write(bytes(2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = error.strerror or str(error)
    return Room(
        free_bytes=counted.f_bavail * counted.f_frsize,
        free_inodes=counted.f_favail if counted.f_files else None,
        problem=problem,
    )


def absolute(path: str | Path) -> Path:
    """An absolute path; of "~name" without such a user, as the shell leaves it."""
    return Path(os.path.expanduser(path)).absolute()


def of(path: str | Path) -> FileSystem:
    """The file system of a path, or of the nearest folder above it that exists."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        return find(file.read(), os.path.realpath(existing(Path(path))))


def existing(path: Path) -> Path:
    """The path, or the nearest one above it that exists."""
    place = path.absolute()
    while not os.path.exists(place) and place != place.parent:  # or in a folder closed to us
        place = place.parent
    return place


def find(mountinfo: str, path: str) -> FileSystem:
    """The file system of a real path, from the text of mountinfo; the last mount over it counts."""
    best = FileSystem(
        type="unknown", source="unknown", mount="/"
    )  # in a chroot nothing may hold it
    for line in mountinfo.rstrip("\n").split("\n"):  # a path may hold what splitlines splits at
        left, _, right = line.partition(" - ")
        mount = _unescape(left.split(" ")[4])
        if path == mount or path.startswith(mount.rstrip("/") + "/"):
            kind, source = right.split(" ")[:2]
            if len(mount) >= len(best.mount):
                best = FileSystem(type=kind, source=_unescape(source), mount=mount)
    return best


def _unescape(text: str) -> str:
    r"""Spaces and backslashes are \040 and \134 there."""
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), text)
