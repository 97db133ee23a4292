"""File locks that hold between the nodes of a shared file system.

`filelock`, and with it datasets, evaluate and huggingface_hub, uses `flock`, which GPFS and other
file systems keep local to each node. The shim makes every FileLock of a process use another
primitive where the file system is shared:

    import slurmft.locks
    slurmft.locks.install()

or, for any other script: `python -m slurmft.locks run -- script.py`. On the same file system, flock
and lockf do not see each other: every process that uses a cache must have the shim.
"""

import contextlib
import errno
import fcntl
import functools
import importlib.util
import json
import os
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

from slurmft.core import filesystem
from slurmft.core.after_import import AfterImport
from slurmft.core.errors import SlurmftError, unknown
from slurmft.core.filesystem import LOCK_PRIMITIVES, FileSystem

VARIABLE = "SLURMFT_FILE_LOCKS"
"""The primitive, or auto, for processes that `environment` prepares."""

# Modules that hold a UnixFileLock calling `fcntl.flock`; datasets 2 brings its own copy.
_TARGETS = ("filelock._unix", "datasets.utils.filelock")

_SHIM_FOLDER = str(Path(__file__).parent / "shim")


class LockShimError(SlurmftError):
    """The shim does not work with an installed library."""


# --- the primitives -------------------------------------------------------------------------------


def lock(
    fd: int, primitive: str, operation: int = fcntl.LOCK_EX | fcntl.LOCK_NB
) -> Any:
    """Locks a file as `flock(fd, operation)` would, by a primitive.

    Returns what `unlock` needs. `fd` must be writable for lockf and ofd.

    Raises:
        BlockingIOError: somebody else holds it.
        OSError: the file system does not have this primitive.
    """
    try:
        if primitive == "flock":
            fcntl.flock(fd, operation)
        elif primitive == "lockf":
            fcntl.lockf(fd, operation)
        elif primitive == "ofd":
            command = fcntl.F_OFD_SETLKW
            if operation & fcntl.LOCK_NB:
                command = fcntl.F_OFD_SETLK
            kind = fcntl.F_WRLCK
            if operation & fcntl.LOCK_SH:
                kind = fcntl.F_RDLCK
            # Python has no call for these locks: only fcntl itself takes them.
            fcntl.fcntl(fd, command, _whole_file(kind))
        else:
            return _soft(fd, operation)
    except OSError as error:
        # POSIX allows it in place of EAGAIN, for "held elsewhere".
        if error.errno == errno.EACCES:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
        raise
    return None


def unlock(fd: int, primitive: str, held: Any) -> None:
    """Gives up what `lock` returned."""
    if primitive == "flock":
        fcntl.flock(fd, fcntl.LOCK_UN)
    elif primitive == "lockf":
        fcntl.lockf(fd, fcntl.LOCK_UN)
    elif primitive == "ofd":
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_UNLCK))
    else:
        held.release()


def hold(path: Path) -> TextIO:
    """Opens a file that only this process holds, on all nodes, until it is closed or the process
    ends.

    The lock is lockf's on all file systems: a server and the clients of its NFS see each other's.

    Raises:
        BlockingIOError: another process holds it, with what that wrote into it of itself.
        OSError: it cannot be written, or there are no locks.
    """
    with contextlib.ExitStack() as opened:
        # Not "w", which would empty the file of whoever holds it.
        file = open(path, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115 - see below
        opened.enter_context(file)
        try:
            lock(file.fileno(), "lockf")
        except BlockingIOError:
            file.seek(0)
            raise BlockingIOError(file.read() or "another process") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}")
        file.flush()
        # From here on the caller closes it.
        opened.pop_all()
        return file


def _whole_file(kind: int) -> bytes:
    """A struct flock of Linux: type, whence, start, length, pid (0 for these locks)."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)


def _soft(fd: int, operation: int) -> Any:
    """A lock by the existence of a file beside the lock file."""
    from filelock import SoftFileLock, Timeout

    path = _path_of(fd) + ".soft"
    try:
        # Any thread may release it, as with the other primitives.
        soft_lock = SoftFileLock(path, thread_local=False)
    except TypeError:  # before 3.11
        soft_lock = SoftFileLock(path)
    timeout_s = -1  # for ever
    if operation & fcntl.LOCK_NB:
        timeout_s = 0
    try:
        soft_lock.acquire(timeout=timeout_s)
    except Timeout:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
    return soft_lock


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


# --- which primitive for which file system --------------------------------------------------------


def primitive_for(path: str | Path) -> str:
    """Returns the primitive for a path: the one measured on its file system, else the default."""
    file_system = filesystem.of(path)
    record = recorded(file_system)
    if record is None:
        return default(file_system)
    return str(record["primitive"])


def default(file_system: FileSystem) -> str:
    """Returns lockf where other nodes may see the files; else flock, as processes without the shim
    use.

    OCFS2 is the other way round: its own cluster stack keeps lockf local to each node (tests/lab).
    """
    if file_system.is_shared and file_system.type != "ocfs2":
        return "lockf"
    return "flock"


def recorded(file_system: FileSystem) -> dict[str, Any] | None:
    """Reads what `slurmft doctor locks` measured on a file system; None: no readable record."""
    try:
        text = record_path(file_system).read_text(encoding="utf-8")
        record: dict[str, Any] = json.loads(text)
    # RuntimeError: the home directory is not known
    except (OSError, ValueError, RuntimeError):
        return None
    if record.get("primitive") not in LOCK_PRIMITIVES:
        return None
    return record


def record_path(file_system: FileSystem) -> Path:
    """Returns the path of a file system's record: in the user's cache, which nodes usually
    share."""
    import hashlib

    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    identity = f"{file_system.type}\0{file_system.source}\0{file_system.mount}"
    key = hashlib.sha256(identity.encode(errors="replace")).hexdigest()[:16]
    return Path(cache).expanduser() / "slurmft" / "locks" / f"{key}.json"


# --- the shim -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Held:
    """A lock that this process holds through the shim."""

    primitive: str
    inode: tuple[int, int]
    held: Any


class _Shim:
    """The `fcntl` that patched modules see, and what this process holds.

    lockf has two traps that flock has not: a process never excludes itself, and closing any
    descriptor of a file drops its lock. So an inode that is held here counts as locked, and is not
    even opened; opening, locking and closing happen one at a time.
    """

    def __init__(self) -> None:
        self.primitive = "auto"
        self.calls = 0
        self.patched: set[str] = set()
        self._chosen: dict[int, str] = {}
        self._forget()
        # a child inherits no POSIX lock
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        # By __dict__: at the first call there is none, and `__getattr__` would look into fcntl.
        for entry in self.__dict__.get("held", {}).values():
            # older ones would remove the file of the parent
            if entry.primitive == "soft":
                with contextlib.suppress(AttributeError):
                    entry.held.release = _nothing
        # A thread that is not in the child may have had the mutex: so the child gets a new one.
        self.mutex = threading.RLock()
        self.held: dict[int, _Held] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(fcntl, name)

    def flock(self, fd: int, operation: int) -> None:
        """Locks or unlocks as `fcntl.flock` does, by the primitive for the file."""
        self.calls += 1
        with self.mutex:
            if operation & fcntl.LOCK_UN:
                entry = self.held.pop(fd, None)
                if entry is None:  # locked before the shim was installed
                    fcntl.flock(fd, operation)
                else:
                    unlock(fd, entry.primitive, entry.held)
                return
            primitive = self._choose(fd, os.fstat(fd).st_dev)
            # The kernel would grant it: lockf excludes other processes alone.
            if self.holds(fd):
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            held = lock(fd, primitive, operation)
            self.held[fd] = _Held(primitive, _inode(fd), held)

    def holds(self, file: str | int) -> bool:
        """Tells if this process holds a lock file by a primitive other than flock."""
        if not self.held:
            return False
        try:
            inode = _inode(file)
        except OSError:
            return False
        for entry in self.held.values():
            # flock excludes other descriptors of one process by itself.
            if entry.inode == inode and entry.primitive != "flock":
                return True
        return False

    def drop_new(self, before: set[int]) -> None:
        """Forgets locks whose descriptors were closed without an unlock, by a failed acquire."""
        for fd in set(self.held) - before:
            entry = self.held.pop(fd)
            if entry.primitive == "soft":
                entry.held.release()

    def _choose(self, fd: int, device: int) -> str:
        if self.primitive != "auto":
            return self.primitive
        if device not in self._chosen:
            self._chosen[device] = primitive_for(_path_of(fd))
        return self._chosen[device]

    def use(self, primitive: str) -> None:
        self.primitive = primitive
        self._chosen.clear()


def _inode(file: str | int) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_dev, status.st_ino


def _nothing(*_: Any, **__: Any) -> None:
    pass


_shim = _Shim()


def install(primitive: str = "auto") -> None:
    """Makes every FileLock of this process, existing or new, use a primitive.

    Args:
        primitive: one of `LOCK_PRIMITIVES`, everywhere; or auto: on shared file systems what was
            measured to hold there (`slurmft doctor locks`), else lockf; elsewhere flock.

    Raises:
        UsageError: no such primitive.
        LockShimError: the installed filelock does not lock through the shim.
    """
    arm(primitive)
    if importlib.util.find_spec("filelock") is None:
        return  # a program's environment without it: nothing there locks so
    import tempfile

    import filelock

    # Takes a lock, to see that it comes through the shim.
    calls_before = _shim.calls
    with (
        tempfile.TemporaryDirectory() as folder,
        filelock.FileLock(Path(folder) / "lock"),
    ):
        pass
    if _shim.calls == calls_before:
        raise LockShimError(
            f"the lock shim has no effect on filelock {filelock.__version__}: it does not call "
            "fcntl.flock as the versions from 3.4 to 4 do",
            "install one of these versions",
        )


def arm(primitive: str = "auto") -> None:
    """Installs the shim without importing anything: modules that are not loaded yet are patched on
    import, and nothing is tried."""
    if primitive not in ("auto", *LOCK_PRIMITIVES):
        raise unknown("lock primitive", primitive, ["auto", *LOCK_PRIMITIVES])
    _shim.use(primitive)
    for name in _TARGETS:
        if name in sys.modules:
            _patch(sys.modules[name])
    _patch_on_import()


@functools.cache
def _patch_on_import() -> None:
    AfterImport(_TARGETS, _patch)


def installed() -> str | None:
    """Returns the primitive (or auto) of the shim in this process; None: not installed."""
    if not _shim.patched:
        return None
    return _shim.primitive


def environment(primitive: str, variables: dict[str, str]) -> dict[str, str]:
    """Returns variables that give the shim to every Python started with them, and to its
    children."""
    paths = variables.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in paths if path and path != _SHIM_FOLDER]
    # In front: Python imports the first sitecustomize that it finds.
    python_path = os.pathsep.join([_SHIM_FOLDER, *others])
    return {VARIABLE: primitive, "PYTHONPATH": python_path}


def _patch(module: ModuleType) -> None:
    """Puts the shim under the UnixFileLock of a module, and so under all its subclasses.

    Raises:
        LockShimError: the module differs from all versions that the shim knows.
    """
    lock_class = vars(module).get("UnixFileLock")
    if module.__name__ in _shim.patched:
        return
    if lock_class and lock_class.__module__ != module.__name__:
        return  # newer datasets re-export filelock's class
    if lock_class is None or "fcntl" not in vars(module):
        raise LockShimError(
            f"the lock shim does not know this version of {module.__name__}",
            "install another version of it",
        )
    module.fcntl = _shim  # type: ignore[attr-defined]
    lock_class._acquire = _guard_acquire(lock_class._acquire)
    lock_class._release = _guard_release(lock_class._release)
    _shim.patched.add(module.__name__)


def _guard_acquire(acquire: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(acquire)
    def guarded(self: Any) -> None:
        with _shim.mutex:
            if _shim.holds(self.lock_file):
                return  # taken; opening and closing the file would drop the lock
            before = set(_shim.held)
            try:
                acquire(self)
            finally:  # also where Ctrl-C ends it
                if self.is_locked:
                    _look_again(Path(self.lock_file).parent)
                else:
                    _shim.drop_new(before)

    return guarded


def _look_again(folder: Path) -> None:
    """Lets a process see what the holder before it made, beside the lock or in the hub's cache.

    NFS remembers up to a minute that a name was not there, and asks again when the folder is
    opened.
    """
    folders = [folder]
    if folder.parent.name == ".locks":  # the hub's locks of one repository
        folders.append(folder.parent.with_name(folder.name) / "blobs")
    for each in folders:
        with contextlib.suppress(OSError):
            os.close(os.open(each, os.O_RDONLY))


def _guard_release(release: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(release)
    def guarded(self: Any) -> None:
        with _shim.mutex:  # no thread takes the lock between the unlock and the close
            release(self)

    return guarded
