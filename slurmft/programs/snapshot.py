"""Copies of a program's code, as it is when its job is submitted.

Jobs wait for days and are requeued for weeks; meanwhile their code is edited. So a run has a copy
of its own: of the git work tree that holds the program, or of the program's folder. Where the file
system can clone files (Btrfs, XFS), a copy takes no room until the original changes.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import stat
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from slurmft.core import descent, filesystem, git, removal, trusted
from slurmft.core.below import BehindLinkError, Below, is_below
from slurmft.core.decode import read
from slurmft.core.errors import SlurmftWarning, UsageError, unknown
from slurmft.core.files import UnfitFileError, write_bytes
from slurmft.core.removal import aside_of
from slurmft.core.run_files import AnyConfig, Snapshot
from slurmft.core.text import counted, in_bytes
from slurmft.runs import frozen_code
from slurmft.runs.disk_space import is_full, no_room
from slurmft.runs.rundir import RunDir

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

MODES = ("auto", "git", "folder", "none")
"""auto: git in a work tree, else folder; none for what is installed, or not in this folder"""
LIMIT_MB = 100
FILES_PER_MB = 200

_THREADS = 8
"""A file takes a millisecond on shared file systems, so several are copied at a time."""
_FICLONE = 0x40049409
"""The ioctl that clones a file (linux/fs.h)."""
_BLOCK_BYTES = 2**20
# By how much a file may have grown since its size was counted against the limit.
_GROWTH_BYTES = 2**20


@dataclass(slots=True)
class Source:
    """The files that are to be copied."""

    mode: str
    """git, folder or none."""
    root: Path
    files: dict[str, os.stat_result] = field(default_factory=dict)
    """Path below `root` -> its status."""
    behind_links: list[str] = field(default_factory=list)
    """Paths on which a link lies: they are not copied."""
    commit: str | None = None
    changed: int = 0
    """Files that are not as in the commit, untracked ones included."""
    diff: str = ""
    """Changes of tracked files since the commit."""

    @property
    def bytes(self) -> int:
        return sum(about.st_size for about in self.files.values())

    def describe(self) -> str:
        """Returns a line: "git work tree /x at abc123456, 3 files changed, 120 files, 1.2 MiB"."""
        if self.mode == "none":
            return "not copied: the job runs what is there then"
        parts = [f"folder {self.root}"]
        if self.mode == "git":
            commit = self.commit or "no commit"
            parts = [f"git work tree {self.root} at {commit[:9]}"]
            if self.changed:
                parts.append(f"{counted(self.changed, 'file')} changed")
        parts.append(counted(len(self.files), "file"))
        parts.append(in_bytes(self.bytes))
        return ", ".join(parts)


# --- what is to be copied -------------------------------------------------------------------------


def source(
    program: Path,
    mode: str = "auto",
    *,
    runs_dir: Path | None = None,
    outputs: Collection[Path] = (),
    limit_mb: int = LIMIT_MB,
) -> Source:
    """Lists the files that would be copied for a program.

    Args:
        program: its file; for a module, the folder that it is imported from.
        mode: one of MODES.
        runs_dir: the folder of run directories, which is never copied.
        outputs: files and folders that the program writes: they are not copied, unless git tracks
            them.
        limit_mb: the most that may be copied (MiB), with at most 200 files for each.

    Raises:
        UsageError: there is too much, a file cannot be read, or git refuses.
    """
    if program.is_dir():
        program = program.resolve()
    # Only its folder: a script that is a link is copied as the link.
    program = program.parent.resolve() / program.name
    mode, root = choose(program, mode)
    source = Source(mode, root)
    if source.mode == "none":
        return source
    # Before it is listed, which would take minutes.
    if source.root in (Path("/"), filesystem.absolute("~").resolve()):
        raise _too_large(source, limit_mb)
    is_left_out = functools.cache(
        functools.partial(_is_left_out, runs_dir=runs_dir, outputs=set(outputs))
    )
    most_files = FILES_PER_MB * limit_mb
    try:
        with Below(source.root) as top:
            if source.mode == "git":
                all_names = _files_in_git(source, is_left_out)
            else:
                all_names = _files_in_folder(source, top.path(), is_left_out)
            # More than may be copied are listed, so that an error can name the largest folders.
            names = islice(all_names, 5 * most_files)
            if not program.is_dir():  # git may ignore it
                _add(source, top, os.path.relpath(program, source.root))
            for name in names:
                _add(source, top, name)
    except OSError as error:
        raise _unreadable(error) from None
    if source.bytes > limit_mb * 2**20 or len(source.files) > most_files:
        raise _too_large(source, limit_mb)
    if source.mode == "git":
        _compare(source)
    _warn_of_links(source)
    return source


def _compare(source: Source) -> None:
    """Adds the commit of a work tree, if there is one yet, and the changes since then."""
    with contextlib.suppress(git.AbsentError):
        commit = git.output(source.root, "rev-parse", "--verify", "HEAD")
        source.commit = commit.strip()
    if source.commit is None:
        return
    remark = ""
    try:
        source.diff = git.diff(source.root)
    except UsageError as error:
        remark = f"code.diff is not written: {error.message}"
    if source.diff.endswith(git.CUT):
        remark = "code.diff is cut: the changes since the commit are too large"
    if remark:
        warnings.warn(remark, SlurmftWarning, stacklevel=2)


def _add(source: Source, top: Below, name: str) -> None:
    """Adds a file or link; what was deleted, but is in git, is left out.

    Raises:
        UsageError: the name, which may be a stranger's, is none of something below the root; or
            it is a submodule that is not checked out.
        OSError: it cannot be examined.
    """
    if not is_below(name):
        raise UsageError(
            f"git lists {name!r} in {str(source.root)!r}, which may lead out of it; git itself "
            "makes no such entry",
            "ask whoever has made this repository; or: --snapshot folder",
        )
    try:
        # A link is copied as a link, wherever it leads.
        about = top.status(name)
    except BehindLinkError:
        source.behind_links.append(name)
        return
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISDIR(about.st_mode) and source.mode == "git":
        raise UsageError(
            f"the submodule {name!r} of {str(source.root)!r} is not there",
            f"git -C {shlex.quote(str(source.root))} submodule update --init",
        )
    if stat.S_ISREG(about.st_mode) or stat.S_ISLNK(about.st_mode):
        source.files[name] = about


def _warn_of_links(source: Source) -> None:
    """Names what git tracks, and has gone since a folder above it is a link."""
    if not source.behind_links:
        return
    first, *others = source.behind_links
    more = ""
    if others:
        more = f", and {len(others):,} more"
    warnings.warn(
        f"not copied, as a link is on the way: {str(source.root / first)!r}{more}",
        SlurmftWarning,
        stacklevel=2,
    )


def choose(program: Path, mode: str) -> tuple[str, Path]:
    """Returns the mode for a program, with auto resolved; and the folder to copy."""
    if mode not in MODES:
        raise unknown("--snapshot", mode, list(MODES))
    folder = program
    if not program.is_dir():
        folder = program.parent
    top = _work_tree(folder)
    if mode == "git" and top is None:
        raise UsageError(
            f"no git work tree holds {str(program)!r}", "--snapshot folder needs none"
        )
    if mode == "auto":
        mode = _choose_auto(program, folder, top)
    if mode == "git" and top is not None:
        return mode, top
    return mode, folder


def _work_tree(folder: Path) -> Path | None:
    """Returns the top of the git work tree that holds a folder; None: there is none, or no git."""
    if shutil.which("git") is None:
        return None
    for path in (folder, *folder.parents):
        # a file, in submodules and linked work trees
        repository = path / ".git"
        # Anybody may make one in a folder for all: everybody's programs below would be its files.
        if os.path.lexists(repository) and not trusted.planted_by(repository):
            return path
    return None


def _choose_auto(program: Path, folder: Path, top: Path | None) -> str:
    if folder.name == "bin" and _is_environment(folder.parent):  # an installed command
        return "none"
    is_here = any(_is_code_of(program, here) for here in descent.working_folder())
    is_home = top == filesystem.absolute("~").resolve()  # which some people keep in git
    if top is not None and not is_home and (is_here or git.tracks(top, program)):
        return "git"
    if is_here:
        return "folder"
    return "none"


def _files_in_git(source: Source, is_left_out: Callable[[Path], bool]) -> Iterator[str]:
    """Yields the files of a work tree that it does not ignore, and of its submodules. Counts those
    that are not as in the commit."""
    yield from git.files(source.root)
    # -uall: each untracked file, not the folder that holds it.
    for entry in git.status(source.root, "-uall"):
        name = entry[3:]  # behind two letters of the status, and a space
        is_untracked = entry.startswith("??")
        path = source.root / name
        below_root = [path, *path.parents[: name.count("/")]]
        if is_untracked and any(is_left_out(each) for each in below_root):
            continue
        source.changed += 1
        # Of a repository in it, git lists the folder alone.
        if is_untracked and not name.endswith("/"):
            yield name


def _files_in_folder(
    source: Source, opened: Path, is_left_out: Callable[[Path], bool], below: str = ""
) -> Iterator[str]:
    """Yields the files that are neither hidden nor compiled.

    Args:
        opened: a path through a descriptor of the folder.
    """
    with os.scandir(opened / below) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name.endswith(".pyc"):
                continue
            if is_left_out(source.root / below / entry.name):
                continue
            if not entry.is_dir(follow_symlinks=False):
                yield below + entry.name
            else:
                inner = f"{below}{entry.name}/"
                yield from _files_in_folder(source, opened, is_left_out, inner)


def _is_left_out(path: Path, runs_dir: Path | None, outputs: Collection[Path]) -> bool:
    """Returns whether a path is an output of the program, or a folder without code: a cache, a
    Python environment, a run, or the folder of runs."""
    if path.name == "__pycache__" or path == runs_dir or path in outputs:
        return True
    # By what it holds: the folder of a run may have any name.
    is_run = read(path / "config.json", AnyConfig) is not None
    return is_run or _is_environment(path)


def _is_code_of(program: Path, folder: Path) -> bool:
    """Returns whether a program lies below a folder, and not in a hidden one such as .venv, where
    it is installed."""
    if not program.is_relative_to(folder):
        return False
    parts = program.relative_to(folder).parts
    return not any(part.startswith(".") for part in parts)


def _is_environment(folder: Path) -> bool:
    return any(os.path.exists(folder / mark) for mark in ("pyvenv.cfg", "conda-meta"))


def _too_large(source: Source, limit_mb: int) -> UsageError:
    sizes = Counter[str]()
    for name, about in source.files.items():
        top_folder, slash, _ = name.partition("/")
        # A file of the folder itself.
        if not slash:
            top_folder = "."
        sizes[top_folder] += about.st_size
    descriptions = []
    for name, size in sizes.most_common(3):
        descriptions.append(f"{name} ({in_bytes(size)})")
    largest = ", ".join(descriptions)
    return UsageError(
        f"{str(source.root)!r} is too large to be copied for a job: {largest or 'a whole home'}; "
        f"the limit is {limit_mb} MiB and {FILES_PER_MB * limit_mb:,} files",
        "give the program a folder of its own; name in .gitignore what is no code; or: "
        "--snapshot none, --snapshot-limit-mb N",
    )


def _unreadable(error: OSError) -> UsageError:
    return UsageError(
        f"cannot copy the code: {error.filename!r}: {error.strerror}",
        "or: --snapshot none",
    )


# --- the copy -------------------------------------------------------------------------------------


def take(source: Source, run: RunDir) -> Snapshot:
    """Copies the files into a run.

    Raises:
        SlurmftError: there is no room, or a file cannot be read. The run has no copy then.
    """
    aside = aside_of(run.code)
    try:
        with descent.opened(run.path) as folder:
            digest = frozen_code.record(run, _copy_all(source, aside, folder))
            if source.diff:
                write_bytes(run.code_diff, os.fsencode(source.diff))
            # At once: a run has its whole code, or none.
            name = run.code.name
            os.rename(aside.name, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        if is_full(error):
            raise no_room(run, "the code", error, source.bytes) from None
        raise _unreadable(error) from None
    finally:
        removal.discard(aside)
    return Snapshot(
        mode=source.mode,
        root=os.fsencode(source.root).decode("utf-8", "backslashreplace"),
        files=len(source.files),
        bytes=source.bytes,
        sha256=digest,
        commit=source.commit,
        changed=source.changed,
    )


def stage(source: Source, into: Path) -> None:
    """Copies the files into a folder, as they are: links lead where they led, modes and times stay.

    Raises:
        UsageError: there is no room, or a file cannot be read.
    """
    folders = sorted(_with_parents(set(map(os.path.dirname, source.files))))
    try:
        with Below(source.root) as top, Below(into) as target:
            modes = {}
            for folder in folders[1:]:  # "." is the first
                modes[folder] = top.status(folder).st_mode
                target.make_folder(folder)
            copy = functools.partial(_stage, source, top, target)
            with _threads() as pool:
                list(pool.map(copy, source.files))
            for folder, mode in modes.items():
                # Whoever removes the copy needs to.
                os.chmod(target.path() / folder, stat.S_IMODE(mode) & 0o777 | 0o700)
    except OSError as error:
        raise _unreadable(error) from None


def _stage(source: Source, top: Below, target: Below, name: str) -> None:
    if stat.S_ISLNK(source.files[name].st_mode):
        target.link(name, top.target(name))
        return
    with top.open(name) as original, target.create(name) as copy:
        size_bytes = source.files[name].st_size
        _copy_file(original, copy, size_bytes, source.root / name)
        copy.flush()
        about = os.fstat(original.fileno())
        os.fchmod(copy.fileno(), stat.S_IMODE(about.st_mode) & 0o777)
        # rsync takes a file for the one that it has sent before by its size and time.
        os.utime(copy.fileno(), ns=(about.st_mtime_ns, about.st_mtime_ns))


def copy_of(path: Path, root: Path, run: RunDir) -> Path:
    """Returns where a path is in a run's copy of `root`; the path itself if the copy lacks it."""
    real = path.parent.resolve() / path.name  # a link itself is copied as a link
    if not real.is_relative_to(root):
        return path
    copy = run.code / os.path.relpath(real, root)
    if not os.path.lexists(copy):
        return path
    return copy


def _copy_all(source: Source, into: Path, above: int) -> list[str]:
    """Copies all files into a new folder in an open one; returns their lines in the list of
    sums."""
    folders = {os.path.dirname(name) for name in source.files}
    for name in source.files:
        if name.endswith(".py"):
            folders.add(frozen_code.cache_folder(os.path.dirname(name)))
    os.mkdir(into.name, dir_fd=above)
    with Below(source.root) as top, Below(into, above) as target:
        for folder in sorted(filter(None, folders)):
            target.make_folder(folder)
        copy = functools.partial(_copy, source, top, target, _with_parents(folders))
        with _threads() as pool:
            return list(pool.map(copy, source.files))


def _threads() -> "ThreadPoolExecutor":
    # Here: it imports logging, which takes time that other commands need not spend.
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(_THREADS)


def _with_parents(folders: Collection[str]) -> set[str]:
    """Returns the paths of folders, and of the folders that hold them; "." is the root."""
    all_folders = {"."}
    for folder in folders:
        while folder:
            all_folders.add(folder)
            folder = os.path.dirname(folder)
    return all_folders


def _copy(
    source: Source, top: Below, target: Below, folders: Collection[str], name: str
) -> str:
    """Copies a file, or a link; returns its line in the list of sums."""
    about = source.files[name]
    if stat.S_ISREG(about.st_mode):
        # Read-only, so that the recorded sha256 stays that of what the job runs.
        mode = 0o444
        if about.st_mode & stat.S_IXUSR:
            mode = 0o555
        with top.open(name) as original, target.create(name) as copy:
            digest = _copy_file(original, copy, about.st_size, source.root / name)
            os.fchmod(copy.fileno(), mode)
        return frozen_code.line(f"{mode:o}", digest, name)
    path = source.root / name
    goal = os.path.normpath(path.parent / top.target(name))
    below = os.path.relpath(goal, source.root)
    # A link to what is copied leads to the copy, other links to where they led.
    if below in source.files or below in folders:
        goal = os.path.relpath(goal, path.parent)
    target.link(name, goal)
    return frozen_code.line("link", frozen_code.of_link(goal), name)


def _copy_file(original: BinaryIO, copy: BinaryIO, size_bytes: int, path: Path) -> str:
    """Copies a file, as a clone where the file system can; returns its sha256.

    Raises:
        UnfitFileError: it is much larger than `size_bytes`, which was counted.
    """
    # A log that another job writes grows by lines; it is copied as long as it is now.
    left_bytes = os.fstat(original.fileno()).st_size
    if left_bytes > size_bytes + _GROWTH_BYTES:
        raise UnfitFileError(errno.EFBIG, "it has grown meanwhile", str(path))
    is_clone = True
    try:
        fcntl.ioctl(copy, _FICLONE, original.fileno())
    except OSError:  # another file system, or one without clones
        is_clone = False
    source = original
    if is_clone:
        os.ftruncate(copy.fileno(), left_bytes)
        source = copy
    digest = hashlib.sha256()
    while block := source.read(min(_BLOCK_BYTES, left_bytes)):
        left_bytes -= len(block)
        digest.update(block)
        if not is_clone:
            copy.write(block)
    return digest.hexdigest()
