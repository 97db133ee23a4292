"""Removal: all that slurmft deletes goes through this module.

What is deleted may lie in a folder that a group can write, or behind a link. So three rules hold
for everything:

- A folder is opened component by component, and names are removed in the open folder. A link on the
  way is followed if this user or root has made it, as one to a larger disk; or whoever alone can
  write the folder that holds it, as a site's account for projects.
- Of names, only those go that slurmft itself makes: every caller gives their form. A user's own
  files beside them stay, hidden ones, too.
- What goes belongs to this user. A link goes itself, never what it leads to.
"""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path, PurePath

ASIDE = re.compile(r"\..+\.\d+-[0-9a-f]{4}")
"""Names that `aside_of` makes."""

_MOST_LINKS = 40
"""As the kernel: more of them on one way are a circle."""
_DEEPEST = 200
"""Each level of folders has a descriptor open."""
_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
# O_DIRECTORY, too: without it, O_PATH mounts nothing where homes are mounted when they are used.
_FOLDER_PLACE = _PLACE | os.O_DIRECTORY
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DESCRIPTOR = re.compile(r"/proc/self/fd/(\d+)(/.*)?")


def aside_of(path: Path) -> Path:
    """Returns a hidden name beside a path, which nobody else uses.

    GlusterFS places names of this form with that of the path. If file and replacement were on two
    of its servers, there would be none for a moment.
    """
    return path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(2).hex()}")


def exactly(name: str) -> re.Pattern[str]:
    """Returns the form of a single name."""
    return re.compile(re.escape(name))


def remove(
    path: Path,
    form: re.Pattern[str],
    at_once: bool = False,
    inode: int | None = None,
) -> None:
    """Removes a file, a link itself, or a folder with all that is in it.

    Args:
        path: what goes.
        form: the form of its name.
        at_once: for whoever looks, all of a folder goes at the same moment.
        inode: number of what is to go; None: any.

    Raises:
        FileNotFoundError: it is absent.
        OSError: it stays, or some of it does; `strerror` says why.
    """
    if not form.fullmatch(path.name):
        raise _refusal(path, "slurmft makes nothing of this name")
    with _opened(path.parent) as folder:
        _remove(folder, path, at_once, inode)


def discard(path: Path, form: re.Pattern[str] = ASIDE, at_once: bool = False) -> None:
    """Removes a file or a folder as `remove` does, as far as that is possible: another error is
    being reported already, or what stays is removed some other time."""
    with contextlib.suppress(OSError):
        remove(path, form, at_once)


def sweep(folder: Path, form: re.Pattern[str]) -> list[str]:
    """Removes all of a form from a folder; returns a line for what stays."""
    left = []
    try:
        paths = _matching(folder, form)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"what is left in {str(folder)!r} stays: {error.strerror or error}"]
    for path in paths:
        try:
            remove(path, form)
        except FileNotFoundError:  # another process has removed it
            continue
        except OSError as error:
            left.append(f"{str(path)!r} stays: {error.strerror or error}")
    return left


def matching(folder: Path, form: re.Pattern[str]) -> list[Path]:
    """Returns what has a name of a form in a folder, in order; nothing of a folder that is absent,
    or to which a link of another user's leads."""
    try:
        return _matching(folder, form)
    except OSError:
        return []


def _matching(folder: Path, form: re.Pattern[str]) -> list[Path]:
    with _opened(folder) as descriptor:
        names = sorted(os.listdir(descriptor))
    return [folder / name for name in names if form.fullmatch(name)]


def _remove(folder: int, path: Path, at_once: bool, inode: int | None) -> None:
    name = path.name
    _check(path, os.stat(name, dir_fd=folder, follow_symlinks=False), inode)
    # Where the caller has seen another, one that takes its place now would go: so it is looked at
    # again under a name that nobody has expected.
    if at_once or inode is not None:
        name = aside_of(path).name
        os.rename(path.name, name, src_dir_fd=folder, dst_dir_fd=folder)
        try:
            _check(path, os.stat(name, dir_fd=folder, follow_symlinks=False), inode)
        except OSError:
            os.rename(name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            raise
    try:
        _remove_entry(folder, name)
    except FileNotFoundError:
        raise
    except OSError as error:
        # It has another name by now.
        raise OSError(error.errno, error.strerror, str(path.with_name(name))) from None


def _check(path: Path, status: os.stat_result, inode: int | None) -> None:
    if inode is not None and status.st_ino != inode:
        raise _refusal(path, "it was replaced meanwhile")
    if status.st_uid != os.geteuid():
        raise _refusal(path, f"it belongs to another user (uid {status.st_uid})")


def _refusal(path: Path | str, why: str) -> OSError:
    return PermissionError(errno.EPERM, why, str(path))


def _remove_entry(folder: int, name: str, depth: int = 0) -> None:
    if depth > _DEEPEST:
        raise OSError(errno.ELOOP, "its folders are nested too deep", name)
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=folder)
        return
    # It may be a link by now: that is not opened.
    descriptor = os.open(name, _FOLDER, dir_fd=folder)
    try:
        _empty(descriptor, depth + 1)
    finally:
        os.close(descriptor)
    os.rmdir(name, dir_fd=folder)


def _empty(folder: int, depth: int) -> None:
    """Removes what is in an open folder, all that can be; raises the first error."""
    first_error: OSError | None = None
    # A list: the order of names may change while some are removed.
    for name in os.listdir(folder):
        try:
            _remove_entry(folder, name, depth)
        except FileNotFoundError:  # another process removes it, too
            continue
        except OSError as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Opens a folder for the block, from the root down.

    Yields:
        A descriptor of the folder.

    Raises:
        OSError: it is absent or no folder, or another user's link leads there.
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
        while parts:
            part = parts.pop()
            try:
                next_place = os.open(part, _FOLDER_PLACE, dir_fd=place)
            except NotADirectoryError:
                target = _target(part, place, path)
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
                # Of an absolute link, the first part is "/".
                parts += reversed(PurePath(target).parts)
                continue
            os.close(place)
            place = next_place
        descriptor = os.open(".", _FOLDER, dir_fd=place)
    finally:
        os.close(place)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _target(name: str, folder: int, path: Path) -> str:
    """Returns what a link that may be followed leads to.

    Raises:
        OSError: it is no link, or another user's.
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
            why = f"the link {name!r} on the way belongs to another user (uid {status.st_uid})"
            raise _refusal(path, why)
        return os.readlink("", dir_fd=link)
    finally:
        os.close(link)
