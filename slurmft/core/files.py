"""Files that a reader never sees half written: written aside, synced, renamed."""

import contextlib
import dataclasses
import errno
import functools
import json
import math
import os
import stat
import time
from collections.abc import Iterator
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, BinaryIO

from slurmft.core import descent, removal
from slurmft.core.errors import UsageError
from slurmft.core.removal import aside_of
from slurmft.core.writers import remove_lists, set_folder_mode

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_STALE_S = 4.0
"""How long a client of a shared file system may still take a file for the one that another has
replaced: on GlusterFS 1 to 2 s."""
_STALE_PAUSE_S = 0.05

MOST_BYTES = 8 * 2**20
"""Size of the largest file that is read as a whole: what another user has written may be of any
size."""
MOST_FILES = 10_000
"""How many files of one folder of a run are read."""
_MOST_BRACKETS = 200_000
"""How many lists and tables a file has: those of 10,000 ranks, several times."""
_MOST_DEPTH = 64
"""How deep lists and tables may lie in each other: Python calls itself for each level."""


_READABLE = 0o666
"""Mode of a new file, out of which goes what the umask denies."""
_PRIVATE = 0o600


def write_text(path: Path, text: str, is_private: bool = False) -> None:
    """Replaces a file at once: readers see the old or the new text, also after a crash.

    Args:
        is_private: nobody else can ever read it, whatever the umask.
    """
    write_bytes(path, text.encode("utf-8"), is_private)


def write_bytes(path: Path, content: bytes, is_private: bool = False) -> None:
    """Replaces a file at once by these bytes, as `write_text` does. No link of another user's is
    followed to its folder."""
    mode = _READABLE
    if is_private:
        mode = _PRIVATE
    try:
        with descent.opened(path.parent) as folder:
            _replace(folder, path, content, mode)
    except OSError as error:
        # To write says only what is wrong with the disk; to open names the hidden file.
        error.filename = str(path)
        error.filename2 = None
        raise


def _replace(folder: int, path: Path, content: bytes, mode: int) -> None:
    """Replaces a file in an open folder."""
    aside = aside_of(path).name
    with open(os.open(aside, _NEW_FILE, mode, dir_fd=folder), "wb") as file:
        inode = os.fstat(file.fileno()).st_ino
        try:
            file.write(content)
            file.flush()
            # Without it, a crash after the rename could leave an empty file under the new name.
            os.fsync(file.fileno())
            os.replace(aside, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        # Ctrl-C, too, is to leave nothing behind.
        except BaseException:
            removal.discard(Path(f"/proc/self/fd/{folder}", aside), inode=inode)
            raise


def open_to_append(path: Path) -> FileIO:
    """Opens a file of a run to append to it, and makes it where it is absent; a link of that name
    is not followed, nor another user's link to its folder.

    Raises:
        OSError: it cannot be opened.
    """
    try:
        with descent.opened(path.parent) as folder:
            descriptor = os.open(path.name, _APPEND, _READABLE, dir_fd=folder)
    except OSError as error:
        # With dir_fd, the error has the bare name. Messages name the path.
        error.filename = str(path)
        raise
    try:
        return open(descriptor, "a+b", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def named_by_user(path: Path) -> Path:
    """Returns where a file lies that the user has named, to write it: whoever's links lead there,
    they lead there from now on."""
    return Path(os.path.realpath(path.parent), path.name)


def write_json(path: Path, value: Any, is_private: bool = False) -> None:
    """Replaces a file at once by a value as JSON, as `write_text` does."""
    write_text(path, to_json(value, indent=2) + "\n", is_private)


def to_json(value: Any, indent: int | None = None) -> str:
    """Returns a value as JSON: dataclasses are objects, NaN and infinities are null."""
    write = functools.partial(
        json.dumps,
        indent=indent,
        ensure_ascii=False,
        # Python would write NaN, which readers in other languages refuse.
        allow_nan=False,
        default=dataclasses.asdict,
    )
    # A walk through the whole value is worth its time only where something is not finite.
    try:
        return write(value)
    except ValueError:
        return write(_finite(value))


def _finite(value: Any) -> Any:
    """Returns a value with None in place of NaN and infinities, which are no JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def check_place(file: Path, flag: str) -> None:
    """Checks that a file can be written: before the work whose result it is to take.

    Raises:
        UsageError: its folder is missing or may not be written, or it is a folder.
    """
    if file.is_dir():
        raise UsageError(
            f"{flag} {str(file)!r} is a folder", "give the name of a file in it"
        )
    if not file.parent.is_dir():
        problem = f"no such folder: {str(file.parent)!r}"
        raise UsageError(problem, f"make it, or change {flag}")
    if not os.access(file.parent, os.W_OK):
        problem = f"{flag} {str(file)!r}: you may not write into {str(file.parent)!r}"
        raise UsageError(problem, "give another place")


def exists_now(path: Path) -> bool:
    """Returns True if a file is there; another node may just have written it.

    NFS remembers up to a minute that a name was not there; opening the folder makes it ask again.
    """
    with contextlib.suppress(OSError):  # the folder may be absent, too
        os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
    return path.exists()


def other_kind(path: Path) -> str | None:
    """Returns in words what is at a path, as "a FIFO"; None: a file, a folder, or nothing."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return "a link that leads nowhere" if path.is_symlink() else None
    if stat.S_ISFIFO(mode):
        return "a FIFO"
    if stat.S_ISSOCK(mode):
        return "a socket"
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        return "a device"
    return None


class UnfitFileError(OSError):
    """Something that is no regular file, or too large. It is nothing that a run has written."""


def open_regular(path: Path) -> BufferedReader:
    """Opens a file to read it, never a FIFO or a device: one that somebody has put among the files
    of a run would keep its readers for ever.

    Raises:
        OSError: the file is absent, or cannot be read.
        UnfitFileError: it is no regular file.
    """
    # Without O_NONBLOCK, opening a FIFO would wait for a writer.
    try:
        descriptor = os.open(
            descent.through(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        )
    except OSError as error:
        error.filename = str(path)
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnfitFileError(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "rb")


def read_on(file: BinaryIO, size: int) -> bytes:
    """Reads on in a file, past what was never written: that reads as zeros, and may be a terabyte
    which takes no room on the disk."""
    block = file.read(size)
    is_zeros = bool(block) and not block.strip(b"\0")
    if not is_zeros:
        return block
    # Only after zeros: not every file system tells right where it has data.
    place = file.tell()
    data = _next_data(file, place)
    if data == place:
        return block
    file.seek(data)
    return file.read(size)


def _next_data(file: BinaryIO, place: int) -> int:
    """Returns where the next data of a file begins, at a place or after it."""
    descriptor = file.fileno()
    # The file object has a position of its own, which it believes to be the descriptor's.
    before = os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        return os.lseek(descriptor, place, os.SEEK_DATA)
    except OSError:  # no data follows, or the file system does not tell
        return max(place, os.fstat(descriptor).st_size)
    finally:
        os.lseek(descriptor, before, os.SEEK_SET)


def read_bytes(path: Path, most_bytes: int | None = MOST_BYTES) -> bytes:
    """Reads a regular file.

    Args:
        path: the file.
        most_bytes: the largest size that is read; None: any, of a file that nobody else has
            written.

    Raises:
        OSError: as of `open_regular`.
        UnfitFileError: the same, or the file is larger.
    """
    with open_regular(path) as file:
        if most_bytes is None:
            return file.read()
        size_bytes = os.fstat(file.fileno()).st_size
        _check_size(path, size_bytes, most_bytes)
        # Not more, even if the file has grown since. A file server may tell a size too late.
        return file.read(max(size_bytes, 2**16))


def check_size(path: Path, most_bytes: int = MOST_BYTES) -> None:
    """Checks a file before it is read by other means; UnfitFileError where it is larger."""
    _check_size(path, descent.through(path).stat().st_size, most_bytes)


def _check_size(path: Path, size_bytes: int, most_bytes: int) -> None:
    if size_bytes > most_bytes:
        problem = f"larger than {most_bytes // 2**20} MiB"
        raise UnfitFileError(errno.EFBIG, problem, str(path))


def read_end(path: Path, size_bytes: int) -> bytes:
    """Reads the last bytes of a regular file; OSError as of `open_regular`."""
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - size_bytes))
        return file.read(size_bytes)


def read_text(path: Path, most_bytes: int | None = MOST_BYTES) -> str:
    """Reads a text file, again and again while another client of a shared file system replaces it.

    Raises:
        OSError: the file is absent, cannot be read, or is too large: see `read_bytes`.
        UnicodeDecodeError: it is no UTF-8.
    """
    deadline = time.monotonic() + _STALE_S
    while True:
        try:
            text = read_bytes(path, most_bytes).decode("utf-8")
            # The mark of the byte order, which editors on Windows write, is none of it.
            return text.removeprefix("\ufeff")
        except OSError as error:
            # NFS's word for a file that was opened, and replaced before it was read.
            if error.errno != errno.ESTALE or time.monotonic() > deadline:
                raise
        time.sleep(_STALE_PAUSE_S)


def read_json(path: Path, most_bytes: int | None = MOST_BYTES) -> dict[str, Any] | None:
    """Reads a JSON object; None where the file is absent or damaged. What has known fields is read
    by `core.decode`."""
    try:
        value = parse_json(read_text(path, most_bytes))
    except (OSError, ValueError):
        return None
    if not isinstance(value, dict):
        return None
    return value


def parse_json(text: str | bytes) -> Any:
    """Parses JSON that anybody may have written.

    Raises:
        ValueError: it is no JSON, no UTF-8, or nested too deeply.
    """
    if isinstance(text, bytes):
        # json.loads would guess an encoding, and let halves of characters pass.
        text = text.decode("utf-8")
    # Each takes twenty times as much memory as text.
    brackets = text.count("[") + text.count("{")
    if brackets > _MOST_BRACKETS:
        raise ValueError(f"more than {_MOST_BRACKETS:,} lists and tables")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    # A walk through the whole value is worth its time only where something may be found.
    if brackets > _MOST_DEPTH or "\\u" in text:
        _check(value)
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Parses TOML that anybody may have written.

    Raises:
        ValueError: it is no TOML, or nested too deeply.
    """
    import tomllib  # 4 ms, which not every command needs

    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check(values)
    return values


_TOO_DEEP = f"brackets within brackets, more than {_MOST_DEPTH} deep"


def _check(value: Any) -> None:
    """Checks the depth of a value, and that all texts in it can be written: an escape of JSON may
    stand for half a character. Raises ValueError."""
    level = [value]
    for _ in range(_MOST_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                item.encode("utf-8")
            elif isinstance(item, dict):
                below += item
                below += item.values()
            elif isinstance(item, list):
                below += item
        if not below:
            return
        level = below
    raise ValueError(_TOO_DEEP)


def is_number(value: Any) -> bool:
    """Returns whether a value of a file can be calculated with: files may be foreign, or hold
    NaN."""
    is_plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    # NaN is not below it either.
    return is_plain and abs(value) < 2**63


def is_measurement(value: Any) -> bool:
    """Returns whether a value is a number that a program has measured. A training that diverges
    measures NaN, infinities, and more than any count."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def fingerprint(path: Path) -> dict[str, Any]:
    """Returns the size and the checksum of a file."""
    import hashlib  # not for every command

    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


@contextlib.contextmanager
def new_folder(path: Path, replace: bool = True) -> Iterator[Path]:
    """Makes a folder to write into, beside `path`, and renames it to that at the end of the block.

    Readers see it whole, or, for a moment while an older one gives way, not at all. This process
    holds it (`descent.held`): a path `through` it leads to no folder that others put there.

    Args:
        path: the folder's name at the end.
        replace: let it take the place of a folder that is there. Otherwise one that another process
            has put there meanwhile stays.
    """
    aside = aside_of(path)
    try:
        with descent.opened(path.parent) as above:
            with _made(aside, above) as folder:
                yield aside
                _sync_all(folder)
                _take_place(above, aside, path, replace)
            # The name is kept by the folder above.
            os.fsync(above)
    except OSError as error:
        # What another process has put there is as good.
        if replace or not path.exists():
            if error.filename == aside.name:
                error.filename = str(path)
            raise


@contextlib.contextmanager
def _made(aside: Path, above: int) -> Iterator[Path]:
    """Makes a folder in an open one, and holds it for the block; removes it after an error.

    Yields:
        A path through it.
    """
    os.mkdir(aside.name, dir_fd=above)
    folder = os.open(aside.name, _FOLDER, dir_fd=above)
    try:
        # Others may have put another folder of this user's there.
        _check_new(folder, aside)
        if remove_lists(folder):
            # With a list, it was made without the umask, which can only be read by setting another.
            umask = os.umask(0o077)
            os.umask(umask)
            set_folder_mode(folder, 0o777 & ~umask)
            # Until then, those whom the list names could write into it.
            _check_new(folder, aside)
        inode = os.fstat(folder).st_ino
        with descent.held(aside, folder):
            try:
                yield descent.through(aside)
            except BaseException:
                place = Path(f"/proc/self/fd/{above}", aside.name)
                removal.discard(place, inode=inode)
                raise
    finally:
        os.close(folder)


def _check_new(folder: int, path: Path) -> None:
    """Raises FileExistsError where an open folder holds something."""
    if not descent.is_new(folder):
        reason = "it was replaced meanwhile"
        raise FileExistsError(errno.EEXIST, reason, str(path))


def _sync_all(folder: Path) -> None:
    """Gives all files of a folder the mode that the umask has given to it, and waits until they are
    on disk: after a crash, a folder with its name must have no empty files."""
    # Some libraries write files by mkstemp, which nobody else may read.
    mode = folder.stat().st_mode & 0o666
    for file in (*folder.rglob("*"), folder):
        if not file.is_dir():
            file.chmod(mode)
        _sync(file)


def _take_place(above: int, aside: Path, path: Path, replace: bool) -> None:
    """Renames a folder in an open one, and removes what had the name."""
    old = aside_of(path).name
    # One is there where an attempt ended right after it wrote the folder. No rename replaces a
    # folder that holds something.
    if replace:
        with contextlib.suppress(FileNotFoundError):
            os.rename(path.name, old, src_dir_fd=above, dst_dir_fd=above)
    os.rename(aside.name, path.name, src_dir_fd=above, dst_dir_fd=above)
    removal.discard(Path(f"/proc/self/fd/{above}", old))


def _sync(path: Path) -> None:
    """Waits until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
