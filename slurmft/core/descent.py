"""Descent: opens a folder component by component, from the root on.

Whoever makes a link decides where a path leads, now and later. So a link on the way is followed
only if this user or root has made it, as one to a larger disk; or whoever alone can write the
folder that holds it, as a site's account for projects.
"""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from slurmft.core import ownership

_MOST_LINKS = 40
"""As the kernel: more of them on one way are a circle."""
_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
# O_DIRECTORY, too: without it, O_PATH mounts nothing where homes are mounted when they are used.
_FOLDER_PLACE = _PLACE | os.O_DIRECTORY
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_SYSTEMS_OWN = frozenset((".snapshot", ".snapshots", ".zfs"))
"""What NFS servers, GPFS and ZFS show in a folder that is new."""
OR_INODE = " (or its file system shows another inode of it at each look)"
"""Ends messages about a folder or file that is another than before, as far as its inode tells."""
_DESCRIPTOR = re.compile(r"/proc/self/fd/(\d+)(/.*)?")


@dataclass(slots=True)
class _Held:
    """An open folder, in which this process finds what its path names."""

    place: int
    users: int = 0


_held: dict[str, _Held] = {}
"""Path of a folder -> the one that this process holds under it."""


_here: list[tuple[str, int | None]] = []
"""The working folder of the command that runs: its path at the start, and the open folder."""


class ForeignLinkError(PermissionError):
    """A link on the way that somebody else can lead elsewhere at any time."""

    def __init__(self, link: PurePath, user: int, path: Path) -> None:
        why = f"the link {link.name!r} on the way belongs to another user (uid {user})"
        super().__init__(errno.EPERM, why, str(path))
        self.link = link
        self.user = user


@contextlib.contextmanager
def opened(
    path: Path,
    check_above: Callable[[Path, os.stat_result], None] | None = None,
) -> Iterator[int]:
    """Opens a folder for the block.

    Args:
        check_above: called with each folder on the way; raises where it may not be one.

    Yields:
        A descriptor of the folder.

    Raises:
        ForeignLinkError: another user's link leads there.
        OSError: it is absent or no folder.
    """
    descent = _Descent(path)
    try:
        descent.go(check_above)
        descriptor = os.open(".", _FOLDER, dir_fd=descent.place)
    finally:
        os.close(descent.place)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_file(
    path: Path, flags: int, check_above: Callable[[Path, os.stat_result], None]
) -> int:
    """Opens what is no folder, by the links that `opened` follows; returns its descriptor.

    Args:
        flags: of `os.open`.
        check_above: called with each folder on the way, also those that hold a link; raises where
            it may not be one.

    Raises:
        ForeignLinkError: another user's link leads there.
        OSError: it is absent, a folder, or cannot be opened.
    """
    descent = _Descent(path)
    try:
        try:
            descent.go(check_above)
        except NotADirectoryError:
            # In the middle of the way, there has to be a folder.
            if not descent.is_at_end:
                raise
        else:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        return os.open(descent.name, flags | os.O_NOFOLLOW, dir_fd=descent.place)
    finally:
        os.close(descent.place)


def examine_way(
    path: Path, check: Callable[[Path, os.stat_result], None], includes_end: bool
) -> None:
    """Goes from the root to what a path leads to, by its links, whatever this process holds.

    Args:
        path: a folder, a file, or what is absent.
        check: called with each folder on the way, also those that hold a link; raises where it may
            not be one.
        includes_end: call it with the folder at the end, too.

    Raises:
        ForeignLinkError: another user's link leads there.
        OSError: the way ends before that, or in a file.
    """
    descent = _Descent(path, from_root=True)
    try:
        descent.go(check)
        if includes_end:
            check(Path(descent.way), ownership.status(descent.place))
    finally:
        os.close(descent.place)


@contextlib.contextmanager
def held(path: Path, folder: int) -> Iterator[None]:
    """Holds an open folder for the block: by its path, and all below it, this process finds what is
    in that folder, whatever others put in the place of its name."""
    key = str(path)
    # Another thread may hold it already, and does so until both have ended.
    if key not in _held:
        # Nothing is open for a server or its lock manager: as the working directory of a process.
        _held[key] = _Held(os.open(".", _FOLDER_PLACE, dir_fd=folder))
    holding = _held[key]
    holding.users += 1
    try:
        yield
    finally:
        holding.users -= 1
        if not holding.users:
            del _held[key]
            os.close(holding.place)


def through(path: Path) -> Path:
    """Returns a path that leads through the nearest folder that this process holds; the path itself
    where it holds none above it. For this process alone, and not for messages."""
    text = str(path)
    nearest = ""
    for key in tuple(_held):
        if len(key) > len(nearest) and f"{text}/".startswith(f"{key}/"):
            nearest = key
    if not nearest:
        return path
    return Path(f"/proc/self/fd/{_held[nearest].place}{text[len(nearest) :]}")


@contextlib.contextmanager
def staying() -> Iterator[None]:
    """Keeps the working folder of a command open for the block: see `from_here`."""
    place = os.open(".", _FOLDER_PLACE)
    _here.append((os.getcwd(), place))
    try:
        yield
    finally:
        _here.pop()
        os.close(place)


@contextlib.contextmanager
def away_from_here() -> Iterator[None]:
    """Leaves the present folder for the block: a library that is imported meanwhile takes none of
    its settings from files there, which may be anybody's, or FIFOs."""
    # By a descriptor: the folder may have another name afterwards, or none.
    here = os.open(".", _FOLDER_PLACE)
    os.chdir("/")
    try:
        yield
    finally:
        os.fchdir(here)
        os.close(here)


def working_folder() -> list[Path]:
    """Returns the path that the working folder had when the command was typed, and the one that it
    has now."""
    return [Path(name) for name, _ in _working_folder()]


def _working_folder() -> list[tuple[str, int | None]]:
    places = list(_here)
    # It may have been renamed since the command was typed, or be gone.
    with contextlib.suppress(OSError):
        places.append((os.getcwd(), None))
    return places


def opened_working_folder() -> str:
    """Returns a path to the working folder, for this process: through the descriptor of the command
    that runs, or, outside of commands, its own."""
    for _, place in _here:
        return f"/proc/self/fd/{place}"
    return os.getcwd()


def from_here(path: Path) -> tuple[int, str, list[str]]:
    """Returns a new descriptor of a folder, its path, and the names that lead from it to a path.

    What lies below the working folder, and the folders that hold it, are found from that, whatever
    has its name by now: it is the folder in which the command was typed. All else is found from the
    root.
    """
    for name, place in _working_folder():
        here = Path(name)
        if path.is_relative_to(here):
            names = list(path.relative_to(here).parts)
        elif here.is_relative_to(path):
            names = [".."] * len(here.relative_to(path).parts)
        else:
            continue
        return os.open(".", _FOLDER_PLACE, dir_fd=place), name, names
    return os.open("/", _FOLDER_PLACE), "/", list(path.parts[1:])


def pinned(path: Path) -> Path:
    """Returns a path to a folder on which nobody else has a link that is followed: the path as it
    is, or what it leads to now.

    What is checked and then used by its path is to be the same: the holder of a folder could lead
    their link elsewhere meanwhile.
    """
    try:
        descent = _Descent(path)
    except OSError:
        return path
    try:
        descent.go(None)
    except OSError:  # whoever opens it says why
        return path
    finally:
        os.close(descent.place)
    if descent.follows_others:
        return Path(descent.way)
    return path


class _Descent:
    """A way from the root to a folder."""

    def __init__(self, path: Path, from_root: bool = False) -> None:
        """
        Args:
            path: the folder.
            from_root: whatever folders this process holds.
        """
        self.path = path
        self.way = PurePath("/")
        """Names, none of a link, that lead to the folder that is open now."""
        self.follows_others = False
        """A link that was followed is neither this user's nor root's."""
        through_descriptor = None
        if not from_root:
            through_descriptor = _DESCRIPTOR.fullmatch(str(through(path)))
        if through_descriptor:
            # The caller has opened it, and may have examined it.
            self.place = os.dup(int(through_descriptor[1]))
            below = through_descriptor[2] or ""
            self.way = PurePath(str(path).removesuffix(below))
            path = Path(below or "/")
        else:
            self.place = os.open("/", _FOLDER_PLACE)
        self.name = ""
        """The name, in the open folder, that was looked up last."""
        self._parts = list(reversed(path.absolute().parts[1:]))

    @property
    def is_at_end(self) -> bool:
        return not self._parts

    def go(self, check_above: Callable[[Path, os.stat_result], None] | None) -> None:
        """Opens one component after the other; see `opened`."""
        links = 0
        while self._parts:
            part = self._parts.pop()
            self.name = part
            if check_above is not None:
                check_above(Path(self.way), ownership.status(self.place))
            try:
                next_place = os.open(part, _FOLDER_PLACE, dir_fd=self.place)
            except NotADirectoryError:
                target = self._target(part)
                links += 1
                if links > _MOST_LINKS:
                    reason = os.strerror(errno.ELOOP)
                    raise OSError(errno.ELOOP, reason, str(self.path)) from None
                # Of an absolute link, the first part is "/".
                self._parts += reversed(PurePath(target).parts)
                continue
            except OSError as error:
                error.filename = str(self.path)
                raise
            os.close(self.place)
            self.place = next_place
            self._note(part)

    def _note(self, part: str) -> None:
        # The kernel goes up from the folder itself, and no link is on the way to it.
        if part == "..":
            self.way = self.way.parent
        else:
            self.way /= part

    def _target(self, name: str) -> str:
        """Returns what a link that may be followed leads to.

        Raises:
            ForeignLinkError: it is another user's.
            OSError: it is no link.
        """
        # The open link itself is asked and read: another may take its place.
        link = os.open(name, _PLACE, dir_fd=self.place)
        try:
            status = ownership.status(link)
            if not stat.S_ISLNK(status.st_mode):
                reason = os.strerror(errno.ENOTDIR)
                raise NotADirectoryError(errno.ENOTDIR, reason, str(self.path))
            if status.st_uid not in (0, os.geteuid()):
                holder = ownership.status(self.place)
                # Whoever alone can write a folder decides anyway what is found there.
                if status.st_uid != holder.st_uid or holder.st_mode & 0o022:
                    link_path = self.way / name
                    raise ForeignLinkError(link_path, status.st_uid, self.path)
                self.follows_others = True
            return os.readlink("", dir_fd=link)
        finally:
            os.close(link)


def is_new(folder: int) -> bool:
    """Returns whether an open folder holds nothing but what its file system shows in each."""
    return all(_is_shown_in_each(folder, name) for name in os.listdir(folder))


def _is_shown_in_each(folder: int, name: str) -> bool:
    """Returns whether a file system shows a name in each folder: a folder that is not this user's,
    as another of that name, which they have made and filled, would be."""
    if name not in _FILE_SYSTEMS_OWN:
        return False
    try:
        status = ownership.status(name, folder, follow_symlinks=False)
    except OSError:  # listed, but not to be looked at
        return True
    if not stat.S_ISDIR(status.st_mode):
        return False
    is_mounted = status.st_dev != os.fstat(folder).st_dev
    # Such folders are root's: of its own ones, nothing tells them apart.
    return is_mounted or os.geteuid() == 0 or status.st_uid != os.geteuid()
