"""Git: reads a work tree, and executes nothing that the repository names.

A repository that somebody else has made, or whose configuration a group can write, can name
programs: hooks, a file system monitor, filters, diff and text conversion drivers, transports. Git
runs them with the rights of whoever types `git status`. All calls of git go through this module.

What compares files with a commit would run filters. It works on a repository of this module's own,
which shares nothing but objects and index with that of the user, and so has no such configuration:
no list of what may be dangerous has to be complete, and nothing can change between a look and the
use. What only reads index and references has the known switches.
"""

import contextlib
import errno
import functools
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType

from slurmft.core import process
from slurmft.core.errors import UsageError
from slurmft.core.files import UnfitFileError, open_regular, read_bytes
from slurmft.core.trusted import temporary_place

_SAFE = (
    "--no-pager",
    # `git status` writes nothing into a repository that is only read.
    "--no-optional-locks",
    "-c", "core.fsmonitor=false",
    "-c", "core.hooksPath=/dev/null",
    # Git compares larger files without having them in memory, and says only that they differ.
    "-c", "core.bigFileThreshold=16m",
    # A folder of the work tree that looks like a repository is none.
    "-c", "safe.bareRepository=explicit",
)  # fmt: skip
_TIME_LIMIT_S = 60.0
"""Time limit of a git command: a FIFO among the files that it reads would keep it for ever."""
_READ_IN_FOLDERS = (".git", ".gitattributes", ".gitignore")
_NOT_READ = ("annex", "lfs")
"""Folders of a repository in which git opens nothing, and others keep very many files."""
_MONITOR = "fsmonitor--daemon.ipc"
"""The socket of git's own monitor of files; to open one does not wait."""
_MOST_ENTRIES = 1_000_000
"""Of how many files of a repository git's commands are run: a link may lead to any folder."""
_MOST_BYTES = 64 * 2**20
"""Size of the largest file of patterns that is copied; git itself reads no larger .gitattributes
than 100 MB."""
_MOST_INDEX_BYTES = 2**30
"""Size of the largest index that is copied, with the parts that it shares: several million
files."""
_MOST_OUTPUT_BYTES = 2**28
"""Largest output of a command: the names of several million files."""
_MOST_DIFF_BYTES = 16 * 2**20
CUT = f"\n\\ slurmft: cut here, the changes are larger than {_MOST_DIFF_BYTES // 2**20} MiB\n"
"""The end of changes that are larger."""
_BLOCK_BYTES = 2**20
_HINT = "or: --snapshot folder"
_OWN_VARIABLES = ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM")
"""The user's choice of configuration files. All other GIT_* variables may lead elsewhere."""
_MOST_DEPTH = 32
"""How deep submodules may lie in each other."""
_SUBMODULE = "160000"
"""The mode of a submodule in the output of `git ls-files --stage`."""
_KEPT = (
    r"^(core\.(filemode|symlinks|ignorecase|precomposeunicode|autocrlf|eol|trustctime|checkstat)"
    r"|extensions\.objectformat)$"
)
"""Settings of a repository by which files are compared. Their values are words."""


class CommandError(UsageError):
    """Git has refused a command."""


class AbsentError(CommandError):
    """There is no git, no repository with a work tree, or no commit."""


_ABSENT = (
    "not a git repository",
    "cannot use bare repository",
    "Needed a single revision",
)
"""What git says where one of them is absent."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit that a work tree is at."""

    commit: str
    dirty: bool
    """Tracked files differ from the commit."""


def head(folder: Path) -> Commit | None:
    """Returns the commit of the work tree that holds a folder; None without one, or without git.

    Raises:
        UsageError: as of `output`, where there is a repository.
    """
    try:
        # Not the usual limit: every submission waits for this, and can do without the answer.
        commit = output(folder, "rev-parse", "--verify", "HEAD", timeout_s=10)
        changes = status(folder, "-uno", timeout_s=10)
    except AbsentError:
        return None
    return Commit(commit.strip(), dirty=bool(changes))


def status(folder: Path, *options: str, timeout_s: float = _TIME_LIMIT_S) -> list[str]:
    """Returns the entries of `git status --porcelain`: two letters, a space and a path each.

    Raises:
        UsageError: as of `output`; or submodules lie too deep, or their work trees elsewhere.
    """
    return _status(folder, options, timeout_s, ())


def _status(
    folder: Path, options: Sequence[str], timeout_s: float, around: tuple[Path, ...]
) -> list[str]:
    """Returns the entries of a work tree.

    Args:
        around: the real paths of the work trees of which it is a submodule.
    """
    # -z: a NUL after each entry, as a path may hold a line break, and git would quote it.
    # Submodules are looked at below: git would start itself in each, with its configuration.
    command = (
        "status",
        "-z",
        "--porcelain",
        "--no-renames",
        "--ignore-submodules=dirty",
    )
    with _private(folder) as (top, variables):
        text = output(
            folder, *command, *options, timeout_s=timeout_s, variables=variables
        )
        # Behind the last NUL is nothing.
        entries = text.split("\0")[:-1]
        changed = {entry[3:] for entry in entries}
        around = _around(folder, top, around)
        for name in _submodules(around):
            if name not in changed and _status(top / name, options, timeout_s, around):
                # As git itself reports a submodule that has changes in its work tree.
                entries.append(f" M {name}")
    return entries


def files(folder: Path) -> list[str]:
    """Returns the paths of all tracked files of a work tree, those of its submodules included. A
    submodule that is not checked out is one of them.

    Raises:
        UsageError: as of `status`.
    """
    # In a conflict, a file has up to three entries.
    return list(dict.fromkeys(_files(folder, "", ())))


def _files(folder: Path, place: str, around: tuple[Path, ...]) -> Iterator[str]:
    """Yields the files of a work tree; for the arguments see `_diff`."""
    # Not --recurse-submodules: git would start itself in each, before it is looked at.
    entries = _entries(folder)
    around = _around(folder, _path(folder, "--show-toplevel"), around)
    for mode, name in entries:
        if _is_submodule(around[-1], mode, name):
            yield from _files(folder / name, f"{place}{name}/", around)
        else:
            yield place + name


def tracks(folder: Path, path: Path) -> bool:
    """Returns whether a work tree tracks a path; False if git refuses to read the tree.

    Raises:
        UsageError: as of `output`, otherwise.
    """
    try:
        # Literally: in a pathspec, * and [ stand for others.
        command = ("--literal-pathspecs", "ls-files", "--", str(path))
        return bool(output(folder, *command))
    except CommandError:
        return False


def diff(folder: Path) -> str:
    """Returns the changes of tracked files since the commit, those of submodules included; of more
    than `_MOST_DIFF_BYTES` the beginning, and `CUT`.

    Raises:
        UsageError: as of `status`.
    """
    text = ""
    with contextlib.closing(_diff(folder, "", ())) as parts:
        for part in parts:
            text += part
            if len(text) > _MOST_DIFF_BYTES:
                return text[:_MOST_DIFF_BYTES] + CUT
    return text


def _diff(
    folder: Path, place: str, around: tuple[Path, ...]
) -> Generator[str, None, None]:
    """Yields the changes of a work tree, and of its submodules.

    Args:
        place: where it is in that of which it is a submodule, with a slash at the end.
        around: the real paths of the work trees of which it is a submodule.
    """
    plain = ("--no-color", "--no-ext-diff", "--no-textconv", "--submodule=short")
    prefixes = (f"--src-prefix=a/{place}", f"--dst-prefix=b/{place}")
    command = ("diff", *plain, *prefixes, "--ignore-submodules=dirty", "HEAD")
    with _private(folder) as (top, variables):
        # One byte more tells whether there is more.
        changes, _ = _run(
            folder, command, variables=variables, most_bytes=_MOST_DIFF_BYTES + 1
        )
        yield changes
        around = _around(folder, top, around)
        for name in _submodules(around):
            yield from _diff(top / name, f"{place}{name}/", around)


def output(
    folder: Path,
    *arguments: str,
    timeout_s: float = _TIME_LIMIT_S,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Returns what a git command prints in a folder.

    Args:
        arguments: the command, one that compares no files; and its arguments.
        timeout_s: its time limit.
        variables: of `_private`, in which all commands may be run.

    Raises:
        AbsentError: git is not installed, or there is no repository.
        CommandError: the command fails.
        UsageError: it takes longer than `timeout_s`, or prints more than `_MOST_OUTPUT_BYTES`; or
            something that it would read is no regular file.
    """
    text, is_whole = _run(folder, arguments, timeout_s, variables, _MOST_OUTPUT_BYTES)
    if not is_whole:
        problem = f"git {arguments[0]} in {str(folder)!r} prints more than "
        raise UsageError(f"{problem}{_MOST_OUTPUT_BYTES // 2**20} MiB", _HINT)
    return text


def _run(
    folder: Path,
    arguments: Sequence[str],
    timeout_s: float = _TIME_LIMIT_S,
    variables: Mapping[str, str] = MappingProxyType({}),
    most_bytes: int = _MOST_OUTPUT_BYTES,
) -> tuple[str, bool]:
    """Returns what a git command prints, as far as `most_bytes`, and whether that is all.

    Raises:
        UsageError: as of `output`.
    """
    _check_files(folder)
    try:
        child = subprocess.Popen(
            [_program(), *_SAFE, *arguments],
            cwd=folder,
            env=_environment() | dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        problem = f"git cannot be run in {str(folder)!r}: {error}"
        raise AbsentError(problem) from None
    with child:
        try:
            printed, errors = process.read_bounded(child, most_bytes, timeout_s)
            is_whole = len(printed) <= most_bytes
        except TimeoutError:
            problem = f"git {arguments[0]} in {str(folder)!r} took longer than {timeout_s:g} s"
            raise UsageError(problem, _HINT) from None
        finally:
            # Without effect where it has ended.
            child.kill()
    if is_whole and child.returncode:
        raise _refusal(folder, arguments[0], os.fsdecode(errors))
    return os.fsdecode(printed[:most_bytes]), is_whole


def _check_files(folder: Path) -> None:
    """Checks what git reads first: it would wait for the writer of a FIFO.

    Raises:
        UsageError: something of it is a FIFO, a socket or a device.
    """
    for place in (folder, *folder.absolute().parents):
        for name in _READ_IN_FOLDERS:
            # Not stat: git follows no links here.
            with contextlib.suppress(OSError):
                _check_kind(place / name, os.lstat(place / name).st_mode)
        if os.path.lexists(place / ".git"):
            _check_repository(place / ".git")
            return


@functools.cache
def _check_repository(repository: Path) -> None:
    """Checks all that git may open of a repository, and of those that it refers to. Once: what
    comes later meets the time limit.

    Args:
        repository: a folder, or a file that names one.

    Raises:
        UsageError: something of it is a FIFO, a socket or a device; or it is too large.
    """
    tops = [repository]
    if not repository.is_dir():
        tops = _named_in(repository)
    folders = list(tops)
    seen = set()
    left = _MOST_ENTRIES
    while folders:
        folder = folders.pop()
        # What cannot be read, git cannot read either.
        with contextlib.suppress(OSError):
            status = folder.stat()
            identity = (status.st_dev, status.st_ino)
            if identity in seen:
                continue
            seen.add(identity)
            for entry in os.scandir(folder):
                left -= 1
                if folder not in tops or entry.name not in _NOT_READ:
                    folders += _check_entry(folder, entry)
        if left < 0:
            problem = f"{str(repository)!r} holds more than {_MOST_ENTRIES:,} files"
            raise UsageError(problem, _HINT)


def _check_entry(folder: Path, entry: os.DirEntry[str]) -> list[Path]:
    """Checks something in a folder of a repository; returns the folders that are to be checked,
    too."""
    path = folder / entry.name
    # Links are followed: git follows them here.
    if entry.is_dir():
        return [path]
    if entry.is_file():
        if entry.name in ("commondir", "alternates"):
            return _named_in(path)
        return []
    # A link may lead to nothing.
    with contextlib.suppress(FileNotFoundError):
        if entry.name != _MONITOR:
            _check_kind(path, entry.stat().st_mode)
    return []


def _named_in(file: Path) -> list[Path]:
    """Returns the folders that a file of git's names: a `.git`, for a submodule or a linked work
    tree; `commondir`; `objects/info/alternates`."""
    # Paths are relative to the folder of the file, or, of alternates, to that of the objects.
    place = file.parent
    if file.name == "alternates":
        place = place.parent
    try:
        text = os.fsdecode(read_bytes(file))
    except OSError:
        return []
    names = [line.removeprefix("gitdir: ") for line in text.split("\n")]
    return [place / name for name in names if name]


def _check_kind(file: Path, mode: int) -> None:
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
        raise UsageError(f"git reads {str(file)!r}, which is no regular file", _HINT)


def _program() -> str:
    """Returns git's path; FileNotFoundError: there is none on the PATH.

    An empty or relative entry of the PATH would be looked for in the repository.
    """
    entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
    path = os.pathsep.join(filter(os.path.isabs, entries))
    program = shutil.which("git", path=path)
    if program is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "git")
    return program


def _environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name in _OWN_VARIABLES
    }
    # LC_ALL: `_refusal` reads the messages. No transport is allowed: a partial clone would fetch
    # what a diff needs, by its own command.
    return kept | {"LC_ALL": "C", "GIT_ALLOW_PROTOCOL": "", "GIT_NO_LAZY_FETCH": "1"}


def _refusal(folder: Path, command: str, printed: str) -> CommandError:
    # Git says why in one line; before it may stand warnings, behind it advice.
    _, _, last_error = printed.rpartition("fatal: ")
    reason, _, _ = last_error.partition("\n")
    hint = _HINT
    # "detected dubious ownership": git reads no repository of another user. To trust it would let
    # git, wherever it is called, run the programs that the other user names.
    if "ownership" in reason:
        hint = f"{_HINT}; or clone the repository, and submit in a clone of your own"
    problem = f"git {command} in {str(folder)!r}: {reason}"
    if reason.startswith(_ABSENT):
        return AbsentError(problem, hint)
    return CommandError(problem, hint)


@contextlib.contextmanager
def _private(folder: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Makes a repository that has the objects and the index of a folder's own one, for the block.

    Filters of the user's own configuration stay: without that of git-lfs, all its files would look
    changed.

    Yields:
        The top folder of the work tree, and the variables that lead git to the repository.

    Raises:
        UsageError: there is no repository, or git cannot read it.
    """
    top = _path(folder, "--show-toplevel")
    common = _path(folder, "--git-common-dir")
    index = _path(folder, "--git-path", "index")
    place = temporary_place()
    with tempfile.TemporaryDirectory(prefix="slurmft-git-", dir=place) as name:
        private = Path(name)
        # git takes a folder without `refs` for no repository.
        for part in ("refs", "info"):
            (private / part).mkdir()
        (private / "HEAD").write_text(_head(folder))
        (private / "config").write_text(_settings(folder))
        for part in ("attributes", "exclude", "sparse-checkout"):
            file = _path(folder, "--git-path", f"info/{part}")
            _copy(file, private / "info" / part, _MOST_BYTES)
        # With its times, by which git knows which files may have changed since.
        left_bytes = _MOST_INDEX_BYTES
        for file in (index, *index.parent.glob("sharedindex.*")):
            left_bytes -= _copy(file, private / file.name, left_bytes)
        variables = {
            "GIT_DIR": str(private),
            "GIT_WORK_TREE": str(top),
            # A linked work tree (`git worktree add`) has its objects in the main repository.
            "GIT_OBJECT_DIRECTORY": str(common / "objects"),
        }
        yield top, variables


def _path(folder: Path, *question: str) -> Path:
    printed = output(folder, "rev-parse", *question)
    # Not strip: the name of a folder may end with a space. It may be relative to the folder.
    return folder / printed.removesuffix("\n")


def _head(folder: Path) -> str:
    """Returns the content of HEAD: the commit, or a branch that has none yet."""
    try:
        return output(folder, "rev-parse", "--verify", "HEAD")
    except AbsentError:
        return "ref: refs/heads/main\n"


def _settings(folder: Path) -> str:
    """Returns the configuration by which files of a repository are compared."""
    try:
        listed = output(folder, "config", "-z", "--get-regexp", _KEPT)
    # Exit code 1: there is none.
    except CommandError:
        listed = ""
    settings = {"core.bare": "false", "core.repositoryformatversion": "0"}
    for setting in listed.split("\0")[:-1]:
        # With -z, the value stands in a line of its own.
        key, _, value = setting.partition("\n")
        # Other characters could end the line, and begin a setting of their own.
        if value.isalnum():
            settings[key] = value
    if "extensions.objectformat" in settings:
        # git refuses this extension in a repository of version 0.
        settings["core.repositoryformatversion"] = "1"
    lines = []
    for key, value in settings.items():
        section, _, name = key.partition(".")
        lines.append(f"[{section}]\n{name} = {value}\n")
    return "".join(lines)


def _copy(file: Path, place: Path, most_bytes: int) -> int:
    """Copies a file, with its times; nothing where there is none. Returns its size.

    Raises:
        UsageError: it is larger than `most_bytes`, has a hole, which would take room in the copy,
            or cannot be read.
    """
    size_bytes = 0
    try:
        with open_regular(file) as source:
            about = os.fstat(source.fileno())
            if _first_hole(source) < about.st_size:
                raise UnfitFileError(errno.EFBIG, "has holes", str(file))
            with open(place, "xb") as target:
                # It may grow meanwhile.
                while block := source.read(_BLOCK_BYTES):
                    size_bytes += len(block)
                    if size_bytes > most_bytes:
                        problem = f"larger than {most_bytes // 2**20} MiB"
                        raise UnfitFileError(errno.EFBIG, problem, str(file))
                    target.write(block)
            os.utime(place, ns=(about.st_atime_ns, about.st_mtime_ns))
    except FileNotFoundError:
        pass
    except OSError as error:
        problem = f"git's file {str(file)!r} cannot be copied: {error.strerror}"
        raise UsageError(problem, _HINT) from None
    return size_bytes


def _first_hole(file: BufferedReader) -> int:
    """Returns where a file, of which nothing is read yet, has its first hole, or its end.

    st_blocks would not tell: file systems compress.
    """
    try:
        return os.lseek(file.fileno(), 0, os.SEEK_HOLE)
    except OSError:  # an empty file, or a file system that does not tell
        return os.fstat(file.fileno()).st_size
    finally:
        os.lseek(file.fileno(), 0, os.SEEK_SET)


def _around(folder: Path, top: Path, around: tuple[Path, ...]) -> tuple[Path, ...]:
    """Returns the real paths of the work trees around the submodules of one, its own the last.

    Raises:
        UsageError: the work tree of a submodule is not its folder, as `core.worktree` may say, and
            so may hold it; or it lies deeper than `_MOST_DEPTH`.
    """
    real = top.resolve()
    if around and real != folder.resolve():
        problem = f"the work tree of the submodule {str(folder)!r} is {str(real)!r}"
        raise UsageError(problem, _HINT)
    if len(around) > _MOST_DEPTH:
        problem = f"more than {_MOST_DEPTH} submodules lie in each other: {str(real)!r}"
        raise UsageError(problem, _HINT)
    return (*around, real)


def _submodules(around: tuple[Path, ...]) -> list[str]:
    """Returns the paths of the submodules of a work tree that are checked out. Those that lie
    behind a link, or whose folder is not below the work tree, are none.

    Args:
        around: of `_around`.
    """
    top = around[-1]
    entries = _entries(top)
    return [name for mode, name in entries if _is_submodule(top, mode, name)]


def _entries(folder: Path) -> list[tuple[str, str]]:
    """Returns mode and path of each entry of the index."""
    entries = []
    for line in output(folder, "ls-files", "-z", "--stage").split("\0")[:-1]:
        about, _, name = line.partition("\t")
        mode, _, _ = about.partition(" ")
        entries.append((mode, name))
    return entries


def _is_submodule(top: Path, mode: str, name: str) -> bool:
    """Returns whether an entry of the index is a submodule that `_submodules` would return."""
    if mode != _SUBMODULE:
        return False
    folder = top / name
    is_below = top in folder.parents and folder.resolve() == folder
    return is_below and os.path.lexists(folder / ".git")
