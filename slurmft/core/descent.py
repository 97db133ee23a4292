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
from pathlib import Path, PurePath

_MOST_LINKS = 40
"""As the kernel: more of them on one way are a circle."""
_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
# O_DIRECTORY, too: without it, O_PATH mounts nothing where homes are mounted when they are used.
_FOLDER_PLACE = _PLACE | os.O_DIRECTORY
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DESCRIPTOR = re.compile(r"/proc/self/fd/(\d+)(/.*)?")


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
    through_descriptor = _DESCRIPTOR.fullmatch(str(path))
    if through_descriptor:
        # The caller has opened it, and may have examined it.
        place = os.dup(int(through_descriptor[1]))
        path = Path(through_descriptor[2] or "/")
    else:
        place = os.open("/", _FOLDER_PLACE)
    try:
        parts = list(reversed(path.absolute().parts[1:]))
        links = 0
        # For messages: names that lead to the folder that is open now.
        way = PurePath("/")
        while parts:
            part = parts.pop()
            if check_above is not None:
                check_above(Path(way), os.fstat(place))
            try:
                next_place = os.open(part, _FOLDER_PLACE, dir_fd=place)
            except NotADirectoryError:
                target = _target(part, place, way, path)
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(
                        errno.ELOOP, os.strerror(errno.ELOOP), str(path)
                    ) from None
                # Of an absolute link, the first part is "/".
                parts += reversed(PurePath(target).parts)
                continue
            except OSError as error:
                error.filename = str(path)
                raise
            os.close(place)
            place = next_place
            way /= part
        descriptor = os.open(".", _FOLDER, dir_fd=place)
    finally:
        os.close(place)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _target(name: str, folder: int, way: PurePath, path: Path) -> str:
    """Returns what a link that may be followed leads to.

    Raises:
        ForeignLinkError: it is another user's.
        OSError: it is no link.
    """
    # The open link itself is asked and read: another may take its place.
    link = os.open(name, _PLACE, dir_fd=folder)
    try:
        status = os.fstat(link)
        if not stat.S_ISLNK(status.st_mode):
            raise NotADirectoryError(
                errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)
            )
        holder = os.fstat(folder)
        # Whoever alone can write a folder decides anyway what is found there.
        is_holders = status.st_uid == holder.st_uid and not holder.st_mode & 0o022
        if status.st_uid not in (0, os.geteuid()) and not is_holders:
            raise ForeignLinkError(way / name, status.st_uid, path)
        return os.readlink("", dir_fd=link)
    finally:
        os.close(link)
