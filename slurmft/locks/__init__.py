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
import inspect
import json
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO
from weakref import WeakValueDictionary

from slurmft.core import filesystem
from slurmft.core.after_import import AfterImport
from slurmft.core.errors import SlurmftError, unknown
from slurmft.core.filesystem import LOCK_PRIMITIVES, FileSystem

VARIABLE = "SLURMFT_FILE_LOCKS"
"""The primitive, or auto, for processes that `environment` prepares."""

_TARGETS = ("filelock", "datasets.utils.filelock")
"""Modules with a UnixFileLock, which may be of a module below: datasets 2 brings its own copy."""

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


def unlock(fd: int, primitive: str, handle: Any) -> None:
    """Gives a lock up; `handle` is what `lock` returned."""
    if primitive == "flock":
        fcntl.flock(fd, fcntl.LOCK_UN)
    elif primitive == "lockf":
        fcntl.lockf(fd, fcntl.LOCK_UN)
    elif primitive == "ofd":
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_UNLCK))
    else:
        handle.release()


def hold(path: Path) -> TextIO:
    """Opens a file that only this process holds, on all nodes, until it is closed or the process
    ends.

    The lock is lockf's on all file systems: a server and the clients of its NFS see each other's.

    Raises:
        BlockingIOError: another process holds it; the text is what that process wrote into it.
        NotOwnError: another user's file or link has the name.
        OSError: it cannot be written, or there are no locks.
    """
    from slurmft.core.trusted import own_lock_file  # ranks need it not

    with contextlib.ExitStack() as opened:
        descriptor = own_lock_file(path)
        # Not "w", which would empty the file of whoever holds it.
        file = open(descriptor, "r+", encoding="utf-8", errors="replace")  # noqa: SIM115 - see below
        opened.enter_context(file)
        try:
            lock(file.fileno(), "lockf")
        except BlockingIOError:
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
    options: dict[str, Any] = {}
    # Not in versions before 3.11, where a refused option leaves half an object behind.
    if "thread_local" in inspect.signature(SoftFileLock.__init__).parameters:
        # Any thread may release it, as with the other primitives.
        options["thread_local"] = False
    soft_lock = SoftFileLock(path, **options)
    timeout_s = -1  # for ever
    if operation & fcntl.LOCK_NB:
        timeout_s = 0
    try:
        soft_lock.acquire(timeout=timeout_s)
    except Timeout:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
    return soft_lock


def _path_of(fd: int) -> str:
    os.stat(fd)  # of a closed one it says so, where the link is only absent
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
        record = json.loads(text)
    # RuntimeError: the home directory is not known, or there are brackets within brackets.
    except (OSError, ValueError, RuntimeError):
        return None
    if isinstance(record, dict) and record.get("primitive") in LOCK_PRIMITIVES:
        return record
    return None


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
    handle: Any
    """What `unlock` needs."""
    mutex: Any = None
    """Of the path, for lockf: no other thread opens the file until this lock's is closed."""


class _Shim:
    """The `fcntl` that patched modules see, and what this process holds.

    lockf has two traps that the other primitives have not: a process never excludes itself, and
    closing any descriptor of a file drops its lock. So an inode that is held here by lockf counts
    as locked, and is not even opened; opening, locking and closing happen one at a time for each
    path. A file server that is down holds up nobody who locks elsewhere.
    """

    def __init__(self) -> None:
        self.primitive = "auto"
        self.calls = 0
        self.patched: set[str] = set()
        self._chosen: dict[int, str] = {}
        self._attempt = threading.local()
        self._forget()
        # A child inherits no POSIX lock.
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        # By __dict__: at the first call there is none, and `__getattr__` would look into fcntl.
        for entry in self.__dict__.get("held", {}).values():
            # Older releases of filelock would remove the file of the parent's lock.
            if entry.primitive == "soft":
                with contextlib.suppress(AttributeError):
                    entry.handle.release = _nothing
        # A thread that is not in the child may have had a mutex: so the child gets new ones.
        self._mutexes: WeakValueDictionary[str, Any] = WeakValueDictionary()
        # Guards the two tables, and nothing that may wait.
        self._tables = threading.RLock()
        self.held: dict[int, _Held] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(fcntl, name)

    def flock(self, fd: int, operation: int) -> None:
        """Locks or unlocks as `fcntl.flock` does, by the primitive for the file."""
        self.calls += 1
        if operation & fcntl.LOCK_UN:
            self._unlock(fd, operation)
            return
        match self.choose(fd):
            case "flock":
                fcntl.flock(fd, operation)
            case "lockf":
                mutex = self.mutex_of(_path_of(fd))
                with mutex:
                    # The kernel would grant it: lockf excludes other processes alone.
                    if self.holds(fd, but=fd):
                        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                    self._take(fd, "lockf", operation, mutex)
            # Without a name it is in nobody else's reach, and no second file can stand for it:
            # filelock 4.3 tries on such a one whether there is flock.
            case "soft" if os.stat(fd).st_nlink == 0:
                pass
            case primitive:
                self._take(fd, primitive, operation, None)

    def _take(self, fd: int, primitive: str, operation: int, mutex: Any) -> None:
        inode = _inode(fd)
        self._drop_closed(inode)
        earlier = self.held.get(fd)
        if earlier is not None and earlier.primitive == "soft":
            if primitive == "soft" and earlier.inode == inode:
                return  # as flock grants it to the descriptor that has it
            self._drop(fd, earlier)
        handle = lock(fd, primitive, operation)
        entry = _Held(primitive, inode, handle, mutex)
        self.held[fd] = entry
        taken = getattr(self._attempt, "taken", None)
        if taken is not None:
            taken[fd] = entry

    def _unlock(self, fd: int, operation: int) -> None:
        entry = self.held.get(fd)
        if entry is not None and entry.inode != _inode(fd):
            self._drop(fd, entry)
            entry = None
        if entry is None:  # by flock, or locked before the shim was installed
            fcntl.flock(fd, operation)
            return
        # Only then forgotten: who fails to unlock tries again.
        unlock(fd, entry.primitive, entry.handle)
        self._remove(fd, entry)

    def holds(self, file: str | int, but: int | None = None) -> bool:
        """Returns whether this process holds a lock file by lockf, with another descriptor than
        `but`."""
        try:
            inode = _inode(file)
        except OSError:
            return False
        self._drop_closed(inode)
        for fd, entry in list(self.held.items()):
            # The others exclude other descriptors of one process by themselves.
            if entry.inode == inode and entry.primitive == "lockf" and fd != but:
                return True
        return False

    def must_not_open(self) -> bool:
        """Returns whether there is a lock that the closing of another descriptor of its file
        drops."""
        return any(entry.primitive == "lockf" for entry in list(self.held.values()))

    def mutex_of(self, path: str) -> Any:
        """Returns the mutex of a path, which opens, locks and closes it for one thread at a time.

        It lasts while somebody has it, or holds the lock.
        """
        real_path = os.path.realpath(path)
        with self._tables:
            mutex = self._mutexes.get(real_path)
            if mutex is None:
                mutex = threading.RLock()
                self._mutexes[real_path] = mutex
            return mutex

    @contextlib.contextmanager
    def attempt(self) -> Iterator[dict[int, _Held]]:
        """Gathers the locks that this thread takes within."""
        outer = getattr(self._attempt, "taken", None)
        taken: dict[int, _Held] = {}
        self._attempt.taken = taken
        try:
            yield taken
        finally:
            self._attempt.taken = outer

    def drop(self, taken: dict[int, _Held]) -> None:
        """Forgets locks whose descriptors were closed without an unlock, by a failed acquire."""
        for fd, entry in taken.items():
            self._drop(fd, entry)

    def _drop_closed(self, inode: tuple[int, int]) -> None:
        """Forgets locks of a file whose descriptors are closed, or are another file's by now.

        Other files are not asked for: their server may be down.
        """
        for fd, entry in list(self.held.items()):
            if entry.inode == inode and not _is_open(fd, inode):
                self._drop(fd, entry)

    def _drop(self, fd: int, entry: _Held) -> None:
        if self._remove(fd, entry) and entry.primitive == "soft":
            entry.handle.release()

    def _remove(self, fd: int, entry: _Held) -> bool:
        """Removes an entry; returns whether it was there: another thread may have reused its
        number."""
        with self._tables:
            if self.held.get(fd) is not entry:
                return False
            del self.held[fd]
            return True

    def choose(self, file: str | int) -> str:
        """Returns the primitive for a file."""
        if self.primitive != "auto":
            return self.primitive
        device = os.stat(file).st_dev
        if device not in self._chosen:
            path = file
            if isinstance(path, int):
                path = _path_of(path)
            self._chosen[device] = primitive_for(path)
        return self._chosen[device]

    def use(self, primitive: str) -> None:
        self.primitive = primitive
        self._chosen.clear()


def _is_open(fd: int, inode: tuple[int, int]) -> bool:
    try:
        return _inode(fd) == inode
    except OSError:
        return False


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

    from slurmft.core.trusted import temporary_place

    # Takes a lock, to see that it comes through the shim.
    calls_before = _shim.calls
    with (
        tempfile.TemporaryDirectory(dir=temporary_place()) as folder,
        filelock.FileLock(Path(folder) / "lock"),
    ):
        pass
    if _shim.calls == calls_before:
        raise LockShimError(
            f"the lock shim has no effect on filelock {filelock.__version__}: it does not call "
            "fcntl.flock as the versions from 3.4 to 4.3 do",
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
    if lock_class is not None:
        # Where it calls `fcntl.flock`: filelock's place for it changes from release to release, and
        # newer datasets re-export filelock's.
        module = sys.modules[lock_class.__module__]
    if module.__name__ in _shim.patched:
        return
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
        path = _path_of_lock(self)
        if not _is_by_lockf(path) and not _shim.must_not_open():
            _try_acquire(acquire, self, path)
            return
        with _shim.mutex_of(path):
            # To open and close a file that this process holds would drop its lock.
            if not _shim.holds(path):
                _try_acquire(acquire, self, path)

    return guarded


def _try_acquire(acquire: Callable[[Any], None], lock: Any, path: str) -> None:
    with _shim.attempt() as taken:
        try:
            acquire(lock)
        finally:  # also where Ctrl-C ends it
            if lock.is_locked:
                _look_again(Path(path).parent)
            else:
                _shim.drop(taken)


def _path_of_lock(lock: Any) -> str:
    """Returns the path that a lock opens: filelock 4 settles it when an acquire begins, earlier
    versions open the one that they were given, from the present folder."""
    return str(getattr(lock, "_lock_path", lock.lock_file))


def _is_by_lockf(path: str) -> bool:
    """Returns whether a file, which may not be there yet, is locked by lockf."""
    for place in (path, os.path.dirname(path) or os.curdir):
        with contextlib.suppress(OSError):
            return _shim.choose(place) == "lockf"
    return True  # unknown: the guard for lockf does no harm to other primitives


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
        entry = _shim.held.get(_descriptor_of(self))
        if entry is None or entry.mutex is None:
            release(self)
            return
        # Until the close, no other thread of this process takes the lock: the close would drop it.
        with entry.mutex:
            release(self)

    return guarded


def _descriptor_of(lock: Any) -> Any:
    """Returns the descriptor that a lock holds, in filelock since 3.11 and before."""
    context = getattr(lock, "_context", None)
    if context is not None:
        return context.lock_file_fd
    return lock._lock_file_fd
