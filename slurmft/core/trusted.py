"""The door: what will be executed, imported, unpacked or resumed is opened here, and nowhere else.

Whoever can write such a file decides what runs as this user. So each is opened by descriptors,
folder by folder, through no link that somebody else can lead elsewhere, and what was opened is
examined: it belongs to this user or to root, nobody else can write it, and it is a regular file.
What is used afterwards is the descriptor: whatever is put in the place of the name meanwhile is not
read.

A group may write in the folders above, as in those of projects; everybody may not, unless they are
sticky, as /tmp is.

Each purpose is a `Door` of its own: the table in docs/security.md is made of them.
"""

import contextlib
import errno
import os
import re
import shlex
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from slurmft.core import descent, ownership, removal
from slurmft.core.errors import SlurmftError
from slurmft.core.files import MOST_BYTES, UnfitFileError
from slurmft.core.permissions import make_folder
from slurmft.core.text import in_bytes
from slurmft.core.users import owner, user_name
from slurmft.core.writers import OTHERS_WRITE, who_renames

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO would wait for a writer.
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_FILE = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK_BYTES = 2**20
MARK = ".slurmft-folder"
"""A file in each folder that `Door.place` makes: others may have given its name to another folder
of this user's. `slurmft pull` fetches none of this name."""
_TEMPORARY_PLACES = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))


class NotOwnError(SlurmftError):
    """A file or folder that others have written, or could have."""


@dataclass(frozen=True, slots=True)
class Door:
    """Opens files and folders for one purpose, if nobody else can have written them.

    With an access control list, the group's bits of a mode are the most that anybody but owner and
    others may do: a mode without them denies writing to all whom the list names.
    """

    what: str
    """What is opened, as docs/security.md calls it."""
    where: str
    """Where it lies."""
    becomes: str
    """What it decides."""
    cure: str = "take a copy of your own"
    """Advice where it belongs to somebody else."""

    # --- files ------------------------------------------------------------------------------------

    def read(self, path: Path, most_bytes: int = MOST_BYTES) -> bytes:
        """Reads a file that nobody else can have written.

        Raises:
            NotOwnError: the file or its folder is another user's or may be written by others; or
                everybody may rename what lies in a folder above, or another user's link leads
                there; or it is no regular file.
            UnfitFileError: it is larger than `most_bytes`.
            OSError: the file cannot be read.
        """
        with self.folder(path.parent) as folder:
            descriptor = self.open(path, folder)
        # By the descriptor that was examined: another file may have the name by now.
        with open(descriptor, "rb") as file:
            # Not by its size: the file may grow.
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise UnfitFileError(
                errno.EFBIG, f"larger than {in_bytes(most_bytes)}", str(path)
            )
        return content

    def open(self, path: Path, folder: int) -> int:
        """Opens a regular file by its name in an open folder; returns a descriptor of it.

        Raises:
            NotOwnError, OSError: as `read` does.
        """
        descriptor = self._opened(path.name, _FILE, folder, path)
        try:
            self._check_file(path, ownership.status(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def open_in_shared(self, path: Path) -> int:
        """Opens a regular file in a folder where others may make files, as /tmp is; returns a
        descriptor of it.

        Raises:
            NotOwnError, OSError: as `read` does; or the file has another name, too, and may be one
                of this user's that somebody else has linked here.
        """
        # Not by `folder`, which refuses a folder that others can write, as /tmp.
        descriptor = self._opened(str(path), _FILE, None, path)
        self._check_alone(path, descriptor)
        return descriptor

    def _check_alone(self, path: Path, descriptor: int) -> None:
        """Raises NotOwnError, and closes a file, where others can have written it, or linked it
        from elsewhere."""
        try:
            status = ownership.status(descriptor)
            self._check_file(path, status)
            # fs.protected_hardlinks denies others such links, where a system has set it.
            if status.st_nlink != 1:
                raise NotOwnError(
                    f"{_refused()}: {str(path)!r} has {status.st_nlink} names",
                    self.cure,
                )
        except BaseException:
            os.close(descriptor)
            raise

    # --- folders ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def folder(self, path: Path) -> Iterator[int]:
        """Opens a folder in which nobody else can have written; own links may lead there.

        Yields:
            A descriptor of the folder.

        Raises:
            NotOwnError, OSError: as `read` does.
        """
        with self._descended(path) as descriptor:
            self._check(path, ownership.status(descriptor))
            yield descriptor

    @contextlib.contextmanager
    def _descended(self, path: Path) -> Iterator[int]:
        with contextlib.ExitStack() as stack:
            try:
                descriptor = stack.enter_context(descent.opened(path, _check_above))
            except descent.ForeignLinkError as error:
                raise self._foreign(path, error) from None
            yield descriptor

    def _foreign(self, path: Path, error: descent.ForeignLinkError) -> NotOwnError:
        return NotOwnError(
            f"{_refused()}: the link {str(error.link)!r} belongs to "
            f"{owner(error.user)}, who can lead it elsewhere",
            f"give the path itself: {os.path.realpath(path)}",
        )

    def tree(
        self, path: Path, only: Collection[str] | None = None
    ) -> Iterator[tuple[str, int]]:
        """Yields a folder and the folders in it: the name below `path`, "" for itself, and a
        descriptor, which is open until the next one is asked for.

        Args:
            only: names of the folders below `path` to go into; None: all.

        Raises:
            NotOwnError, OSError: as `read` does, of any of the folders.
        """
        with self.folder(path) as top:
            yield from self._tree(path, "", top, only)

    def _tree(
        self, path: Path, below: str, folder: int, only: Collection[str] | None
    ) -> Iterator[tuple[str, int]]:
        yield below, folder
        with os.scandir(folder) as entries:
            # Names alone are kept: what each of them is, shows when it is opened.
            names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
        for name in names:
            inner = os.path.join(below, name)
            if only is not None and inner not in only:
                continue
            descriptor = self._opened(name, _FOLDER, folder, path / inner)
            try:
                self._check(path / inner, ownership.status(descriptor))
                yield from self._tree(path, inner, descriptor, only)
            finally:
                os.close(descriptor)

    def check_place(self, path: Path, opened: Path) -> None:
        """Checks that a folder is one that `place` has made, where others can rename.

        Args:
            path: the folder.
            opened: a path through a descriptor of it.

        Raises:
            NotOwnError: it may be another folder of this user's.
        """
        if renaming_on_the_way(path) is not None and not _is_marked(opened):
            raise NotOwnError(
                f"{self.what} {str(path)!r}: slurmft has not made this folder{descent.OR_INODE}, "
                "and others can rename what is there",
                self.cure,
            )

    def read_private(self, path: Path) -> bytes:
        """Reads a file that is this user's alone, in whichever folder: others cannot read it.

        Raises:
            NotOwnError, OSError: as `open_in_shared`; or others can read it.
        """
        # A link of the user's own is followed.
        try:
            descriptor = descent.open_file(path, _FILE, _check_above)
        except descent.ForeignLinkError as error:
            raise self._foreign(path, error) from None
        self._check_alone(path, descriptor)
        with open(descriptor, "rb") as file:
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
            if mode & 0o077:
                raise NotOwnError(
                    f"{self.what} {str(path)!r} is open to others (mode {mode:04o})",
                    f"chmod 600 {shlex.quote(str(path))}",
                )
            return file.read(MOST_BYTES)

    @contextlib.contextmanager
    def private(self, path: Path) -> Iterator[Path]:
        """Opens a folder that is this user's alone: others cannot even look into it.

        Yields:
            A path that leads through this process's descriptor of it; see `for_children`.

        Raises:
            NotOwnError: the folder is another user's, or open to others.
            OSError: there is none, or it is a link.
        """
        descriptor = os.open(path, _FOLDER)
        try:
            status = ownership.status(descriptor)
            mode = stat.S_IMODE(status.st_mode)
            if status.st_uid != os.geteuid():
                raise NotOwnError(
                    f"{self.what} {str(path)!r} belongs to {owner(status.st_uid)}",
                    self.cure,
                )
            if mode & 0o077:
                raise NotOwnError(
                    f"{self.what} {str(path)!r} is open to others (mode {mode:04o})",
                    "if nobody else has written there: chmod go-rwx "
                    f"{shlex.quote(str(path))}",
                )
            # Through the descriptor: what takes the folder's place meanwhile is not used.
            yield Path(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)

    def place(
        self, path: Path, denied: int = 0o077, share_with_group: bool = False
    ) -> Path:
        """Returns a folder of this user's, made where there is none.

        It is `path`, or has its name with a random ending where another user has been first: nobody
        can keep it from this user by its name. Where others can rename, it holds a mark.

        Args:
            denied: bits that its mode must not have.
            share_with_group: of one that is made: its group can read it.

        Raises:
            OSError: it cannot be made.
        """
        path.parent.stat()  # what is absent is for others to make
        if not os.path.lexists(path) and _make_place(path, share_with_group):
            return path
        # Another process may have been faster, or another user.
        place = _place_of(path, denied)
        if place is not None:
            return place
        place = path.with_name(f"{path.name}-{os.urandom(4).hex()}")
        if _make_place(place, share_with_group):
            return place
        raise FileExistsError(errno.EEXIST, "others put something there", str(path))

    # --- what was opened --------------------------------------------------------------------------

    def _opened(self, name: str, flags: int, folder: int | None, path: Path) -> int:
        """Opens a name in a folder; NotOwnError where it is a link."""
        try:
            return os.open(name, flags, dir_fd=folder)
        except OSError as error:
            is_link = error.errno == errno.ELOOP
            # With O_DIRECTORY, the kernel calls a link no directory.
            if error.errno == errno.ENOTDIR:
                with contextlib.suppress(OSError):
                    status = os.lstat(name, dir_fd=folder)
                    is_link = stat.S_ISLNK(status.st_mode)
            if not is_link:
                # With dir_fd, the error has the bare name. Messages name the path.
                error.filename = str(path)
                raise
        raise NotOwnError(
            f"{_refused()}: {str(path)!r} is a link",
            "if you trust what it leads to, put that itself there",
        )

    def _check(self, path: Path, status: os.stat_result) -> None:
        """Raises NotOwnError where others can have written what was opened."""
        # What root writes need not be feared: root can do all that this user can.
        if status.st_uid not in (0, os.geteuid()):
            raise NotOwnError(
                f"{_refused()}: {str(path)!r} belongs to {owner(status.st_uid)}",
                self.cure,
            )
        if status.st_mode & OTHERS_WRITE:
            raise _writable(path, status, "go-w")

    def _check_file(self, path: Path, status: os.stat_result) -> None:
        self._check(path, status)
        if not stat.S_ISREG(status.st_mode):
            raise NotOwnError(f"{str(path)!r} is not a regular file", "remove it")


def _place_of(path: Path, denied: int) -> Path | None:
    """Returns the folder of this user's that `Door.place` has made before; None: there is none."""
    needs_mark = renaming_on_the_way(path) is not None
    with os.scandir(path.parent) as entries:
        endings = [e.path for e in entries if e.name.startswith(f"{path.name}-")]
    for candidate in (path, *map(Path, sorted(endings))):
        # It may be gone by now.
        with contextlib.suppress(OSError):
            status = ownership.status(candidate, follow_symlinks=False)
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            is_closed = not status.st_mode & denied
            if is_own and is_closed and (not needs_mark or _is_marked(candidate)):
                return candidate
    return None


def _make_place(path: Path, share_with_group: bool) -> bool:
    """Makes a folder with a mark, visible at once; returns False where another has its name."""
    aside = removal.aside_of(path)
    make_folder(aside, share_with_group)
    descriptor = os.open(aside, _FOLDER)
    try:
        # Others may have put another folder there, theirs or one of this user's.
        is_own = ownership.status(descriptor).st_uid == os.geteuid()
        if not is_own or not descent.is_new(descriptor):
            return False
        mark = os.open(MARK, _NEW_FILE, 0o600, dir_fd=descriptor)
        with open(mark, "w", encoding="utf-8") as file:
            file.write(_mark_of(os.fstat(descriptor)))
        # No rename replaces a folder that holds something; but it does an empty one.
        if not os.path.lexists(path):
            with contextlib.suppress(OSError):
                os.rename(aside, path)
                return True
        inode = os.fstat(descriptor).st_ino
    finally:
        os.close(descriptor)
    with contextlib.suppress(OSError):
        removal.remove(aside, removal.ASIDE, inode=inode)
    return False


def _is_marked(folder: Path) -> bool:
    """Returns whether slurmft has made a folder, by its mark."""
    try:
        descriptor = os.open(folder / MARK, _FILE)
        with open(descriptor, encoding="utf-8") as file:
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            return is_file and file.read(_CHUNK_BYTES) == _mark_of(folder.stat())
    except (OSError, ValueError):
        return False


def _mark_of(status: os.stat_result) -> str:
    """Returns the content of a folder's mark. Whoever has made the content of another folder, as of
    an archive that was unpacked, did not know the number which that folder has here."""
    return f"{status.st_ino}\n"


def _check_above(path: Path, status: os.stat_result) -> None:
    """Raises NotOwnError where everybody may rename what lies in a folder."""
    mode = status.st_mode
    # In a sticky folder only the owner of a file renames it.
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise _writable(path, status, "o-w")


def _writable(path: Path, status: os.stat_result, change: str) -> NotOwnError:
    try:
        ownership.check_kept(path)
    except PermissionError as error:
        return NotOwnError(
            f"{_refused()}: {str(path)!r}: {error.strerror}", "use a folder elsewhere"
        )
    mode = stat.S_IMODE(status.st_mode)
    problem = f"{_refused()}: others can write {str(path)!r} (mode {mode:04o})"
    command = f"chmod {change} {shlex.quote(str(path))}"
    if os.geteuid() in (0, status.st_uid):
        return NotOwnError(problem, f"if you trust what is there: {command}")
    return NotOwnError(
        problem,
        f"use a folder elsewhere; or ask {owner(status.st_uid)}, who can: {command}",
    )


def _refused() -> str:
    return f"refused, as it would decide what runs as {user_name(os.geteuid())}"


@dataclass(frozen=True, slots=True)
class Renaming:
    """Somebody else who can rename what lies in a folder, and so put theirs in its place."""

    folder: Path
    mode: int
    who: str
    """As "the group lab"."""
    is_own: bool
    """The folder is this user's."""


class _RenamingError(Exception):
    """Somebody else can rename on a way."""

    def __init__(self, renaming: Renaming) -> None:
        super().__init__(renaming.who)
        self.renaming = renaming


def renaming_on_the_way(path: Path) -> Renaming | None:
    """Returns who else can rename a file or folder, one above it, or a link that leads there; None:
    nobody can.

    Whoever alone can write a folder may: they decide anyway what is found there.
    """
    return _renaming_of(path, includes_end=False)


def renaming_in(folder: Path) -> Renaming | None:
    """Returns who else can rename what lies in a folder, the folder itself, or what leads there;
    None: nobody can."""
    return _renaming_of(folder, includes_end=True)


def _renaming_of(path: Path, includes_end: bool) -> Renaming | None:
    try:
        descent.examine_way(path, _check_renaming, includes_end)
    except _RenamingError as error:
        return error.renaming
    except descent.ForeignLinkError as error:
        # Whoever has made a link can lead it elsewhere.
        holder = Path(error.link.parent)
        return _renaming(holder, ownership.status(holder), owner(error.user))
    except OSError:  # it is to be made, and for nobody else to write
        return None
    return None


def _check_renaming(folder: Path, status: os.stat_result) -> None:
    who = who_renames(folder, status)
    if who:
        raise _RenamingError(_renaming(folder, status, who))


def _renaming(folder: Path, status: os.stat_result, who: str) -> Renaming:
    is_own = status.st_uid == os.geteuid()
    return Renaming(folder, stat.S_IMODE(status.st_mode), who, is_own)


def temporary_place() -> Path:
    """Returns a folder for temporary folders in which nobody else can rename: what they are used
    for by their names, and what is removed with them, would be other things of this user's. It is
    Python's, if that is one."""
    import tempfile  # not for every command

    usual = Path(tempfile.gettempdir())
    for place in (usual, *_TEMPORARY_PLACES):
        can_write = os.access(place, os.W_OK | os.X_OK)
        if can_write and renaming_in(place) is None:
            return place
    return usual


def is_open_to_renames(folder: Path) -> bool:
    """Returns whether somebody else can give the names in a folder to other things of this user's:
    what has only a name of slurmft's is not removed then. False where the folder is absent."""
    try:
        status = ownership.status(folder)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    if status.st_uid not in (0, os.geteuid()) or who_renames(folder, status):
        return True
    # Another folder may take the place of what a link leads to.
    return folder.is_symlink() and renaming_on_the_way(folder) is not None


def is_own(path: Path) -> bool:
    """Returns whether a file, folder or link itself is this user's or root's."""
    try:
        status = ownership.status(path, follow_symlinks=False)
        return status.st_uid in (0, os.geteuid())
    except OSError:
        return False


def other_owner(path: Path, users: Collection[int] = ()) -> str:
    """Returns the other user in words whose a file is, or the link that leads to it; "": it is
    this user's, root's, one of some more users', or absent."""
    with contextlib.suppress(OSError):
        for follow_symlinks in (False, True):
            status = ownership.status(path, follow_symlinks=follow_symlinks)
            if status.st_uid not in (0, os.geteuid(), *users):
                return owner(status.st_uid)
    return ""


def planted_by(path: Path) -> str:
    """Returns the other user in words who has put a file into a folder that is not theirs, as into
    /tmp or a scratch disk that is for all; "": it is in its owner's folder, or this user's, root's,
    or absent."""
    with contextlib.suppress(OSError):
        return other_owner(path, [ownership.status(path.parent).st_uid])
    return ""


def check_meant(what: str, name: str, otherwise: str) -> None:
    """Checks a name that means something else where no such file is in the present folder: whoever
    may write there decides what it means, and so what is executed.

    Args:
        what: the option, as "--metric".
        otherwise: what it means without the file, as "a name of the hub".

    Raises:
        NotOwnError: there is one, and it is another user's.
    """
    path = Path(os.path.abspath(os.path.expanduser(name)))
    other = other_owner(path)
    if other:
        raise NotOwnError(
            f"{what} {name!r} is {otherwise}, and {str(path)!r}, which belongs to {other}",
            f"if you mean that: ./{name}; for the other, work in another folder",
        )


_LOCK = re.compile(rb"(process \d+ on [^\n]+)?")
"""What is in a lock: nothing, or who holds it (`locks.hold`)."""
_MOST_LOCK_BYTES = 1000


def own_lock_file(path: Path) -> int:
    """Opens a file to lock it, in a folder where others may make files; makes it where there is
    none. Returns its descriptor.

    Raises:
        NotOwnError: another user's file or link has the name, or a file that is no lock: others may
            have given it to one of this user's.
        OSError: it cannot be opened.
    """
    try:
        with descent.opened(path.parent) as folder:
            descriptor = os.open(path.name, _LOCK_FILE, 0o600, dir_fd=folder)
    except OSError as error:
        error.filename = str(path)
        with contextlib.suppress(OSError):
            status = ownership.status(path, follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode) or status.st_uid != os.geteuid():
                raise _in_the_way(path, status) from None
        raise error
    status = ownership.status(descriptor)
    is_own_file = status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)
    if is_own_file and _LOCK.fullmatch(os.pread(descriptor, _MOST_LOCK_BYTES, 0)):
        return descriptor
    os.close(descriptor)
    if is_own_file:
        raise NotOwnError(
            f"{str(path)!r} has the name of a lock, and is none", "rename it"
        )
    raise _in_the_way(path, status)


def _in_the_way(path: Path, status: os.stat_result) -> NotOwnError:
    return NotOwnError(
        f"{str(path)!r}, which belongs to {owner(status.st_uid)}, has the name of a lock",
        "have it removed; or give another folder for runs: --runs-dir",
    )


def for_children(path: Path) -> str:
    """Returns a path through a descriptor of this process as its children can use it."""
    return str(path).replace("/proc/self/", f"/proc/{os.getpid()}/", 1)


def sha256_of(descriptor: int, is_stopping: Callable[[], bool] = bool) -> str:
    """Returns the sha256 of an open file from its beginning, wherever it has been read to.

    Args:
        is_stopping: True where the result is of no use any more.
    """
    import hashlib  # not for every command

    digest = hashlib.sha256()
    position = 0
    while not is_stopping():
        chunk = os.pread(descriptor, _CHUNK_BYTES, position)
        if not chunk:
            break
        digest.update(chunk)
        position += len(chunk)
    return digest.hexdigest()
