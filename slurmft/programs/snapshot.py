"""The code of a program as it is when its job is submitted.

Jobs wait for days and are requeued for weeks; meanwhile their code is edited. So a run has a copy:
of the git work tree that holds the program, or of the program's folder. Files that are as in the
run before are hard links to those. Where links fail, a run has files of its own.
"""

import contextlib
import functools
import hashlib
import os
import re
import shlex
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from slurmft.core import filesystem, git
from slurmft.core.errors import UsageError, unknown
from slurmft.core.files import aside_of, read_json, write_bytes
from slurmft.core.text import in_bytes
from slurmft.runs import shapes
from slurmft.runs.disk_space import is_full, no_room
from slurmft.runs.rundir import RunDir

MODES = ("auto", "git", "folder", "none")
"""auto: git in a work tree, else folder; none of what is installed, or not in the current folder"""
LIMIT_MB, FILES_PER_MB = 100, 200


@dataclass(slots=True)
class Source:
    """What is to be copied: the files below `root`, by their paths there."""

    mode: str
    """git, folder or none."""
    root: Path
    files: dict[str, os.stat_result] = field(default_factory=dict)
    commit: str | None = None
    changed: int = 0
    """Files that are not as in the commit, untracked ones included."""
    diff: str = ""
    """Of tracked files, from the commit."""

    @property
    def bytes(self) -> int:
        return sum(about.st_size for about in self.files.values())

    def describe(self) -> str:
        """In a line: "git work tree /x at abc123456, 3 files changed, 120 files, 1.2 MiB"."""
        if self.mode == "none":
            return "not copied: the job runs what is there then"
        what = f"folder {self.root}"
        if self.mode == "git":
            what = f"git work tree {self.root} at {(self.commit or 'no commit')[:9]}"
            what += f", {self.changed:,} files changed" if self.changed else ""
        return f"{what}, {len(self.files):,} files, {in_bytes(self.bytes)}"


# --- what is to be copied -------------------------------------------------------------------------


def source(
    program: Path, mode: str = "auto", *, runs_dir: Path | None = None, limit_mb: int = LIMIT_MB
) -> Source:
    """What would be copied for a program.

    Args:
        program: its file; of a module, the folder that it is imported from.
        mode: one of MODES.
        runs_dir: the folder of run directories, which is never copied.
        limit_mb: the most that may be copied (MiB), with at most 200 files for each.
    """
    program = program.parent.resolve() / program.name
    found = Source(*choose(program, mode))
    if found.mode == "none":
        return found
    if found.root in (Path("/"), filesystem.absolute("~").resolve()):
        raise _too_large(found, limit_mb)
    left_out = functools.cache(functools.partial(_holds_no_code, runs_dir=runs_dir))
    names = (_in_git if found.mode == "git" else _in_folder)(found, left_out)
    own = os.path.relpath(program, found.root)
    try:
        for name in chain([own], islice(names, 5 * FILES_PER_MB * limit_mb)):  # ignored or not
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # deleted, in git
                about = os.lstat(found.root / name)
                if stat.S_ISREG(about.st_mode) or stat.S_ISLNK(about.st_mode):
                    found.files[name] = about
    except OSError as error:
        raise _unreadable(error) from None
    if found.bytes > limit_mb * 2**20 or len(found.files) > FILES_PER_MB * limit_mb:
        raise _too_large(found, limit_mb)
    if found.mode == "git":
        with contextlib.suppress(UsageError):  # there is no commit yet
            found.commit = git.output(found.root, "rev-parse", "--verify", "HEAD").strip()
            found.diff = git.diff(found.root)
    return found


def choose(program: Path, mode: str) -> tuple[str, Path]:
    """What auto means for a program; and the folder to copy."""
    if mode not in MODES:
        raise unknown("--snapshot", mode, list(MODES))
    folder, here = program if program.is_dir() else program.parent, Path.cwd()
    above = (folder, *folder.parents) if shutil.which("git") else ()
    top = next((path for path in above if os.path.lexists(path / ".git")), None)
    if mode == "git" and top is None:
        raise UsageError(f"no git work tree holds {str(program)!r}", "--snapshot folder needs none")
    if mode == "auto":
        parts = program.relative_to(here).parts if program.is_relative_to(here) else (".",)
        is_here = not any(part.startswith(".") for part in parts)
        mode = "folder" if is_here else "none"
        is_home = top == filesystem.absolute("~").resolve()  # which is kept in git, too
        if top and not is_home and (is_here or git.tracks(top, program)):
            mode = "git"
        if folder.name == "bin" and _is_environment(folder.parent):
            mode = "none"
    return mode, top if top and mode == "git" else folder


def _in_git(found: Source, left_out: Callable[[Path], bool]) -> Iterator[str]:
    """The files of a work tree that it does not ignore, and of its submodules."""
    for name in git.files(found.root):
        if os.path.isdir(path := found.root / name) and not os.path.islink(path):
            raise UsageError(
                f"the submodule {name!r} of {str(found.root)!r} is not there",
                f"git -C {shlex.quote(str(found.root))} submodule update --init",
            )
        yield name
    for entry in git.status(found.root, "-uall"):
        is_new, name = entry.startswith("??"), entry[3:]
        if is_new and any(map(left_out, (found.root / name).parents[: name.count("/")])):
            continue
        found.changed += 1
        if is_new:
            yield name


def _in_folder(found: Source, left_out: Callable[[Path], bool], below: str = "") -> Iterator[str]:
    """Files that are neither hidden nor compiled."""
    with os.scandir(found.root / below) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name.endswith(".pyc"):
                continue
            if not entry.is_dir(follow_symlinks=False):
                yield below + entry.name
            elif not left_out(Path(entry.path)):
                yield from _in_folder(found, left_out, f"{below}{entry.name}/")


def _holds_no_code(folder: Path, runs_dir: Path | None) -> bool:
    """Whether a folder is a cache, a Python environment, a run, or holds such."""
    is_named = folder.name == "__pycache__" or folder == runs_dir
    is_run = read_json(folder / "config.json", shapes.CONFIG) is not None
    return is_named or is_run or _is_environment(folder)


def _is_environment(folder: Path) -> bool:
    return any(os.path.exists(folder / mark) for mark in ("pyvenv.cfg", "conda-meta"))


def _too_large(found: Source, limit_mb: int) -> UsageError:
    sizes = Counter[str]()
    for name, about in found.files.items():
        sizes[name.partition("/")[0] if "/" in name else "."] += about.st_size
    largest = ", ".join(f"{name} ({in_bytes(size)})" for name, size in sizes.most_common(3))
    return UsageError(
        f"{str(found.root)!r} is too large to be copied for a job: {largest or 'a whole home'}; "
        f"the limit is {limit_mb} MiB and {FILES_PER_MB * limit_mb:,} files",
        "give the program a folder of its own; name in .gitignore what is no code; or: "
        "--snapshot none, --snapshot-limit-mb N",
    )


def _unreadable(error: OSError) -> UsageError:
    why = f"cannot copy the code: {error.filename!r}: {error.strerror}"
    return UsageError(why, "or: --snapshot none")


# --- the copy -------------------------------------------------------------------------------------


def take(found: Source, run: RunDir) -> dict[str, Any]:
    """Copies it into a run; returns mode, root, files, bytes, and the sha256 of names and contents;
    of git commit and changed, too.

    Raises:
        SlurmftError: there is no room, or a file cannot be read. The run has no copy then.
    """
    from concurrent.futures import ThreadPoolExecutor  # it brings logging: not for every command

    root = os.fsencode(found.root).decode("utf-8", "backslashreplace")
    facts: dict[str, Any] = {"mode": found.mode, "root": root, "files": len(found.files)}
    if found.mode == "git":
        facts |= {"commit": found.commit, "changed": found.changed}
    aside = aside_of(run.code)
    copy = functools.partial(_copy, found, aside, _code_before(run))
    try:
        for folder in {os.path.dirname(name) for name in found.files}:
            os.makedirs(aside / folder, exist_ok=True)
        with ThreadPoolExecutor(8) as pool:  # a file takes a millisecond on shared file systems
            lines = sorted(pool.map(copy, found.files))
        digest = hashlib.sha256(os.fsencode("\0".join(lines))).hexdigest()
        facts |= {"bytes": found.bytes, "sha256": digest}
        if found.diff:
            write_bytes(run.code_diff, os.fsencode(found.diff))
        os.rename(aside, run.code)
    except OSError as error:
        full = is_full(error)
        raise no_room(run, "the code", found.bytes) if full else _unreadable(error) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return facts


def copy_of(path: Path, root: Path, run: RunDir) -> Path:
    """Where a path is in the copy that a run has of `root`; itself where the copy lacks it."""
    real = path.parent.resolve() / path.name
    copied = run.code / os.path.relpath(real, root)
    return copied if real.is_relative_to(root) and os.path.lexists(copied) else path


def _code_before(run: RunDir) -> Path:
    """The code of the run before this one, of the same program: no folder, if there is none."""
    program = re.split(r"-\d{8}-\d{6}", run.path.name)[0]
    earlier = sorted(run.path.parent.glob(f"{program}-[0-9]*"), reverse=True)
    return next((code for p in earlier if os.path.isdir(code := RunDir(p).code)), Path(os.devnull))


def _copy(found: Source, into: Path, before: Path, name: str) -> str:
    """Copies a file, or a link; returns what it is, in a line."""
    path, target, about = found.root / name, into / name, found.files[name]
    if stat.S_ISREG(about.st_mode):
        mode = 0o555 if about.st_mode & 0o100 else 0o444
        return f"{mode:o} {_copy_file(path, target, mode, before / name)} {name}"
    goal = os.path.normpath(path.parent / os.readlink(path))
    below = os.path.relpath(goal, found.root)
    if below in found.files or (into / below).is_dir():
        goal = os.path.relpath(goal, path.parent)
    os.symlink(goal, target)
    return f"link {goal!r} {name}"


def _copy_file(path: Path, target: Path, mode: int, before: Path) -> str:
    """Copies a file, as a link to an equal one of the run before; returns its sha256."""
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    with contextlib.suppress(OSError):  # there is none, no links here, or too many
        about = before.lstat()
        is_own = (about.st_uid, about.st_mode) == (os.geteuid(), stat.S_IFREG | mode)
        if is_own and before.read_bytes() == content:
            os.link(before, target)
            return digest
    target.write_bytes(content)
    target.chmod(mode)
    return digest
