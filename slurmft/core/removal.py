"""Removal: all that slurmft deletes goes through this module.

What is deleted may lie in a folder that a group can write, or behind a link. So four rules hold
for everything:

- A folder is opened component by component, as `core.descent` does, and names are removed in the
  open folder.
- Of names, only those go that slurmft itself makes: every caller gives their form. A user's own
  files beside them stay, hidden ones, too.
- What goes belongs to this user. A link goes itself, never what it leads to.
- Where others can rename, they can have given the name to anything of this user's. There only what
  the caller knows by its inode goes, and what is empty.
"""

import contextlib
import errno
import os
import re
import stat
from pathlib import Path

from slurmft.core import descent, ownership
from slurmft.core.writers import can_others_rename

ASIDE_ENDING = r"\.slurmft-\d+-[0-9a-f]{4}"
"""The end of the names that `aside_of` makes: with the word, nothing of the user's own fits."""
ASIDE = re.compile(rf"\..+{ASIDE_ENDING}")
"""Names that `aside_of` makes."""

_DEEPEST = 200
"""Each level of folders has a descriptor open."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def aside_of(path: Path) -> Path:
    """Returns a hidden name beside a path, which nobody else uses.

    GlusterFS places names of this form with that of the path. If file and replacement were on two
    of its servers, there would be none for a moment.
    """
    ending = f"slurmft-{os.getpid()}-{os.urandom(2).hex()}"
    return path.with_name(f".{path.name}.{ending}")


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
        inode: number of what is to go, which the caller has made or looked at; None: what has the
            name, where nobody else can rename.

    Raises:
        FileNotFoundError: it is absent.
        OSError: it stays, or some of it does; `strerror` says why.
    """
    if not form.fullmatch(path.name):
        raise _refusal(path, "slurmft makes nothing of this name")
    with descent.opened(path.parent) as folder:
        if inode is None:
            _check_name_suffices(folder, path)
        _remove(folder, path, at_once, inode)


def discard(
    path: Path,
    form: re.Pattern[str] = ASIDE,
    at_once: bool = False,
    inode: int | None = None,
) -> None:
    """Removes a file or a folder as `remove` does, as far as that is possible: another error is
    being reported already, or what stays is removed some other time."""
    with contextlib.suppress(OSError):
        remove(path, form, at_once, inode)


def discard_empty(folder: Path) -> None:
    """Removes a folder that holds nothing, as far as that is possible."""
    with contextlib.suppress(OSError), descent.opened(folder.parent) as above:
        os.rmdir(folder.name, dir_fd=above)


def sweep(folder: Path, form: re.Pattern[str], why_not: str = "") -> list[str]:
    """Removes all of a form from a folder; returns a line for what stays.

    Args:
        why_not: why nothing may be removed there, so that all of it stays.
    """
    left = []
    try:
        paths = _matching(folder, form)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"what is left in {str(folder)!r} stays: {error.strerror or error}"]
    for path in paths:
        if why_not:
            left.append(f"{str(path)!r} stays: {why_not}")
            continue
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
    with descent.opened(folder) as descriptor:
        names = sorted(os.listdir(descriptor))
    return [folder / name for name in names if form.fullmatch(name)]


def _remove(folder: int, path: Path, at_once: bool, inode: int | None) -> None:
    name = path.name
    _check(path, folder, name, inode)
    # Where the caller has seen another, one that takes its place now would go: so it is looked at
    # again under a name that nobody has expected.
    if at_once or inode is not None:
        name = aside_of(path).name
        os.rename(path.name, name, src_dir_fd=folder, dst_dir_fd=folder)
        try:
            _check(path, folder, name, inode)
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


def _check_name_suffices(folder: int, path: Path) -> None:
    status = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
    is_empty = stat.S_ISREG(status.st_mode) and not status.st_size
    if not is_empty and can_others_rename(folder):
        raise _refusal(path, "others can rename what is there")


def _check(path: Path, folder: int, name: str, inode: int | None) -> None:
    status = ownership.status(name, folder, follow_symlinks=False)
    if inode is not None and status.st_ino != inode:
        raise _refusal(path, f"it was replaced meanwhile{descent.OR_INODE}")
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
