"""Copies of a program's code, as it is when its job is submitted.

Jobs wait for days and are requeued for weeks; meanwhile their code is edited. So a run has a copy
of its own: of the git work tree that holds the program, or of the program's folder. Where the file
system can clone files (Btrfs, XFS), a copy takes no room until the original changes.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import shlex
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

from slurmft.core import filesystem, git, removal
from slurmft.core.decode import read
from slurmft.core.errors import UsageError, unknown
from slurmft.core.files import write_bytes
from slurmft.core.removal import aside_of
from slurmft.core.run_files import AnyConfig, Snapshot
from slurmft.core.text import in_bytes
from slurmft.runs import frozen_code
from slurmft.runs.disk_space import is_full, no_room
from slurmft.runs.rundir import RunDir

MODES = ("auto", "git", "folder", "none")
"""auto: git in a work tree, else folder; none for what is installed, or not in this folder"""
LIMIT_MB = 100
FILES_PER_MB = 200

_THREADS = 8
"""A file takes a millisecond on shared file systems, so several are copied at a time."""
_FICLONE = 0x40049409
"""The ioctl that clones a file (linux/fs.h)."""


@dataclass(slots=True)
class Source:
    """The files that are to be copied."""

    mode: str
    """git, folder or none."""
    root: Path
    files: dict[str, os.stat_result] = field(default_factory=dict)
    """Path below `root` -> its status."""
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
                parts.append(f"{self.changed:,} files changed")
        parts.append(f"{len(self.files):,} files")
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
    if source.mode == "git":
        all_names = _files_in_git(source, is_left_out)
    else:
        all_names = _files_in_folder(source, is_left_out)
    most_files = FILES_PER_MB * limit_mb
    # More than may be copied are listed, so that an error can name the largest folders.
    names = islice(all_names, 5 * most_files)
    program_name = os.path.relpath(program, source.root)  # git may ignore it
    try:
        for name in chain([program_name], names):
            _add(source, name)
    except OSError as error:
        raise _unreadable(error) from None
    if source.bytes > limit_mb * 2**20 or len(source.files) > most_files:
        raise _too_large(source, limit_mb)
    if source.mode == "git":
        # There may be no commit yet.
        with contextlib.suppress(UsageError):
            commit = git.output(source.root, "rev-parse", "--verify", "HEAD")
            source.commit = commit.strip()
            source.diff = git.diff(source.root)
    return source


def _add(source: Source, name: str) -> None:
    """Adds a file or link; what was deleted, but is in git, is left out."""
    try:
        # Not stat: a link is copied as a link, wherever it leads.
        about = os.lstat(source.root / name)
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISREG(about.st_mode) or stat.S_ISLNK(about.st_mode):
        source.files[name] = about


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
        if os.path.lexists(path / ".git"):
            return path
    return None


def _choose_auto(program: Path, folder: Path, top: Path | None) -> str:
    if folder.name == "bin" and _is_environment(folder.parent):  # an installed command
        return "none"
    here = Path.cwd()
    is_here = program.is_relative_to(here)
    if is_here:  # what is in a hidden folder, such as .venv, is installed there
        parts = program.relative_to(here).parts
        is_here = not any(part.startswith(".") for part in parts)
    is_home = top == filesystem.absolute("~").resolve()  # which some people keep in git
    if top is not None and not is_home and (is_here or git.tracks(top, program)):
        return "git"
    if is_here:
        return "folder"
    return "none"


def _files_in_git(source: Source, is_left_out: Callable[[Path], bool]) -> Iterator[str]:
    """Yields the files of a work tree that it does not ignore, and of its submodules. Counts those
    that are not as in the commit."""
    for name in git.files(source.root):
        path = source.root / name
        if os.path.isdir(path) and not os.path.islink(path):
            raise UsageError(
                f"the submodule {name!r} of {str(source.root)!r} is not there",
                f"git -C {shlex.quote(str(source.root))} submodule update --init",
            )
        yield name
    # -uall: each untracked file, not the folder that holds it.
    for entry in git.status(source.root, "-uall"):
        name = entry[3:]  # behind two letters of the status, and a space
        is_untracked = entry.startswith("??")
        path = source.root / name
        below_root = [path, *path.parents[: name.count("/")]]
        if is_untracked and any(is_left_out(each) for each in below_root):
            continue
        source.changed += 1
        if is_untracked:
            yield name


def _files_in_folder(
    source: Source, is_left_out: Callable[[Path], bool], below: str = ""
) -> Iterator[str]:
    """Yields the files that are neither hidden nor compiled."""
    with os.scandir(source.root / below) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name.endswith(".pyc"):
                continue
            if is_left_out(Path(entry.path)):
                continue
            if not entry.is_dir(follow_symlinks=False):
                yield below + entry.name
            else:
                inner = f"{below}{entry.name}/"
                yield from _files_in_folder(source, is_left_out, inner)


def _is_left_out(path: Path, runs_dir: Path | None, outputs: Collection[Path]) -> bool:
    """Returns whether a path is an output of the program, or a folder without code: a cache, a
    Python environment, a run, or the folder of runs."""
    if path.name == "__pycache__" or path == runs_dir or path in outputs:
        return True
    # By what it holds: the folder of a run may have any name.
    is_run = read(path / "config.json", AnyConfig) is not None
    return is_run or _is_environment(path)


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
        digest = frozen_code.record(run, _copy_all(source, aside))
        if source.diff:
            write_bytes(run.code_diff, os.fsencode(source.diff))
        # At once: a run has its whole code, or none.
        os.rename(aside, run.code)
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


def copy_of(path: Path, root: Path, run: RunDir) -> Path:
    """Returns where a path is in a run's copy of `root`; the path itself if the copy lacks it."""
    real = path.parent.resolve() / path.name  # a link itself is copied as a link
    if not real.is_relative_to(root):
        return path
    copy = run.code / os.path.relpath(real, root)
    if not os.path.lexists(copy):
        return path
    return copy


def _copy_all(source: Source, into: Path) -> list[str]:
    """Copies all files into a folder; returns their lines in the list of sums."""
    # Here: it imports logging, which takes time that other commands need not spend.
    from concurrent.futures import ThreadPoolExecutor

    for folder in {os.path.dirname(name) for name in source.files}:
        os.makedirs(into / folder, exist_ok=True)
    modules = {name for name in source.files if name.endswith(".py")}
    frozen_code.make_cache_folders({os.path.dirname(into / name) for name in modules})
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(functools.partial(_copy, source, into), source.files))


def _copy(source: Source, into: Path, name: str) -> str:
    """Copies a file, or a link; returns its line in the list of sums."""
    path = source.root / name
    target = into / name
    about = source.files[name]
    if stat.S_ISREG(about.st_mode):
        # Read-only, so that the recorded sha256 stays that of what the job runs.
        mode = 0o444
        if about.st_mode & stat.S_IXUSR:
            mode = 0o555
        digest = _copy_file(path, target, mode)
        return frozen_code.line(f"{mode:o}", digest, name)
    goal = os.path.normpath(path.parent / os.readlink(path))
    below = os.path.relpath(goal, source.root)
    # A link to what is copied leads to the copy, other links to where they led.
    if below in source.files or (into / below).is_dir():
        goal = os.path.relpath(goal, path.parent)
    os.symlink(goal, target)
    return frozen_code.line("link", frozen_code.of_link(goal), name)


def _copy_file(path: Path, target: Path, mode: int) -> str:
    """Copies a file, as a clone where the file system can; returns its sha256."""
    with open(path, "rb") as original, open(target, "x+b") as copy:
        try:
            fcntl.ioctl(copy, _FICLONE, original.fileno())
            content = copy.read()
        except OSError:  # another file system, or one without clones
            content = original.read()
            copy.write(content)
        os.fchmod(copy.fileno(), mode)
    return hashlib.sha256(content).hexdigest()
