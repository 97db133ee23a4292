"""What lies below a folder, opened component by component and through no link.

The names may be a stranger's, as those of an index of git are, and others may exchange folders for
links while a command works. So no name leads out of the folder, and what was opened is what is
read, written or examined.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from slurmft.core import descent
from slurmft.core.files import UnfitFileError

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO would wait for a writer.
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class BehindLinkError(NotADirectoryError):
    """A folder on the way is a link."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.ENOTDIR, "a link is on the way", path)


def is_below(name: str) -> bool:
    """Returns whether a name is that of something below a folder, as git writes names: not
    absolute, without empty parts, `.` and `..`, and in no repository."""
    parts = name.split("/")
    return not any(part in ("", ".", "..") or part.lower() == ".git" for part in parts)


class Below:
    """An open folder. Its methods take names for which `is_below` is true.

    Args:
        top: its path, on which no links lie.
        above: an open folder that holds it; None: it is looked for from the root on, or from the
            working folder (`descent.from_here`).
    """

    def __init__(self, top: Path, above: int | None = None) -> None:
        self.top = top
        if above is not None:
            self._folder = _opened(top.name, above, str(top))
            return
        place, path, names = descent.from_here(top)
        try:
            self._folder = self._descend(place, path, names)
        finally:
            os.close(place)

    def __enter__(self) -> "Below":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._folder)

    def inode(self) -> int:
        """Returns the number of the folder itself."""
        return os.fstat(self._folder).st_ino

    def path(self) -> Path:
        """Returns a path that leads to the folder itself, for this process."""
        return Path(f"/proc/self/fd/{self._folder}")

    def check_new(self) -> None:
        """Raises FileExistsError where the folder holds something: it is not the one that this
        process has just made under its name."""
        listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._folder)
        try:
            if not descent.is_new(listing):
                reason = "it was replaced meanwhile"
                raise FileExistsError(errno.EEXIST, reason, str(self.top))
        finally:
            os.close(listing)

    def status(self, name: str) -> os.stat_result:
        """Returns the status of a file, or of a link itself.

        Raises:
            BehindLinkError: a folder on the way is a link.
            OSError: it is absent.
        """
        with self._holder(name) as (folder, last):
            return os.stat(last, dir_fd=folder, follow_symlinks=False)

    def open(self, name: str) -> BinaryIO:
        """Opens a regular file to read it.

        Raises:
            UnfitFileError: it is no regular file.
            OSError: as of `status`; or it cannot be read.
        """
        with self._holder(name) as (folder, last):
            try:
                descriptor = os.open(last, _FILE, dir_fd=folder)
            except OSError as error:
                if error.errno == errno.ELOOP:
                    raise UnfitFileError(errno.ELOOP, "it is a link", name) from None
                raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            path = str(self.top / name)
            raise UnfitFileError(errno.EINVAL, "not a regular file", path)
        return open(descriptor, "rb")

    def target(self, name: str) -> str:
        """Returns what a link leads to; OSError as of `status`, or where it is none."""
        with self._holder(name) as (folder, last):
            return os.readlink(last, dir_fd=folder)

    def create(self, name: str) -> BinaryIO:
        """Makes a file, and opens it; OSError as of `status`, or where something has the name."""
        with self._holder(name) as (folder, last):
            return open(os.open(last, _NEW_FILE, 0o666, dir_fd=folder), "w+b")

    def link(self, name: str, target: str) -> None:
        """Makes a link; OSError as of `create`."""
        with self._holder(name) as (folder, last):
            os.symlink(target, last, dir_fd=folder)

    def make_folder(self, name: str) -> None:
        """Makes a folder, and those above it, where they are absent; OSError as of `status`."""
        parts = name.split("/")
        for depth in range(1, len(parts) + 1):
            above = "/".join(parts[:depth])
            with (
                self._holder(above) as (folder, last),
                contextlib.suppress(FileExistsError),
            ):
                os.mkdir(last, dir_fd=folder)

    @contextlib.contextmanager
    def _holder(self, name: str) -> Iterator[tuple[int, str]]:
        """Opens the folder of a file for the block; errors name the whole path.

        Yields:
            A descriptor of the folder, and the name of the file in it.
        """
        *folders, last = name.split("/")
        try:
            folder = self._descend(self._folder, str(self.top), folders)
            try:
                yield folder, last
            finally:
                os.close(folder)
        except OSError as error:
            error.filename = str(self.top / name)
            error.filename2 = None
            raise

    def _descend(self, top: int, path: str, names: Iterable[str]) -> int:
        """Opens a folder by the names that lead to it from an open one."""
        folder = os.dup(top)
        try:
            for name in names:
                path = os.path.join(path, name)
                inner = _opened(name, folder, path)
                os.close(folder)
                folder = inner
        except BaseException:
            os.close(folder)
            raise
        return folder


def _opened(name: str, folder: int, path: str) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except NotADirectoryError:
        # With O_DIRECTORY, the kernel calls a link no directory.
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            raise BehindLinkError(path) from None
        raise
