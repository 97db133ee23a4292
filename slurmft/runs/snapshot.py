"""The code of a program as it is when its job is submitted.

Jobs wait for days and are requeued for weeks; meanwhile their code is edited. So a run has a copy:
of the git work tree that holds the program, or of the program's folder. Its files are hard links to
those of a store beside the run directories, which has each content once. A file there with one link
is in no run; runs stay whole when it goes. Where links fail, or others could write the store, a run
has files of its own.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from slurmft.core import filesystem, permissions
from slurmft.core.errors import SlurmftError, UsageError, unknown
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
        git = f"git work tree {self.root} at {(self.commit or 'no commit')[:9]}"
        git += f", {self.changed:,} files changed" if self.changed else ""
        what = git if self.mode == "git" else f"folder {self.root}"
        return f"{what}, {len(self.files):,} files, {in_bytes(self.bytes)}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The copy that a run has of `root`."""

    root: Path
    copy: Path
    facts: dict[str, Any]
    """mode, root, files, bytes, sha256 (of names and contents); of git: commit, dirty, changed."""

    def of(self, path: Path) -> Path:
        """Where a path is in the copy; the path itself where the copy does not have it."""
        real = path.parent.resolve() / path.name
        copied = self.copy / os.path.relpath(real, self.root)
        return copied if real.is_relative_to(self.root) and os.path.lexists(copied) else path


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

    Raises:
        UsageError: no work tree, git refuses it, a submodule is missing, a file cannot be read, or
            there is too much.
    """
    program = program.parent.resolve() / program.name
    found = Source(*_choose(program, mode))
    if found.mode == "none":
        return found
    if found.root in (Path("/"), filesystem.absolute("~").resolve()):
        raise _too_large(found, limit_mb)
    left_out = functools.cache(functools.partial(_holds_no_code, runs_dir=runs_dir))
    names = (_in_git if found.mode == "git" else _in_folder)(found, "", left_out)
    own = [] if program.is_dir() else [os.path.relpath(program, found.root)]  # ignored or not
    try:
        for name in chain(own, islice(names, 5 * FILES_PER_MB * limit_mb)):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # deleted, in git
                about = os.lstat(os.path.join(found.root, name))
                if stat.S_ISREG(about.st_mode) or stat.S_ISLNK(about.st_mode):
                    found.files[name] = about
    except OSError as error:
        raise _unreadable(error) from None
    if found.bytes > limit_mb * 2**20 or len(found.files) > FILES_PER_MB * limit_mb:
        raise _too_large(found, limit_mb)
    return found


def _choose(program: Path, mode: str) -> tuple[str, Path]:
    """What auto means; and the folder to copy."""
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
        if top and not is_home and (is_here or _tracks(top, program)):
            mode = "git"
        if folder.name == "bin" and _is_environment(folder.parent):
            mode = "none"
    return mode, top if top and mode == "git" else folder


def _tracks(top: Path, program: Path) -> bool:
    with contextlib.suppress(UsageError):  # it is another user's
        return bool(_git(top, "--literal-pathspecs", "ls-files", "--", str(program)))
    return False


def _in_git(found: Source, below: str, left_out: Callable[[Path], bool]) -> Iterator[str]:
    """The files of a repository that it does not ignore; `found` gets commit and changes, too."""
    top = found.root / below  # a submodule ends with a slash
    for entry in _git(top, "ls-files", "--stage", "-z").split("\0")[:-1]:
        about, _, name = entry.partition("\t")
        if not about.startswith("160000"):
            yield below + name
        elif os.path.lexists(top / name / ".git"):
            yield from _in_git(found, f"{below}{name}/", left_out)
        else:
            raise UsageError(
                f"the submodule {below + name!r} of {str(found.root)!r} is not there",
                f"git -C {shlex.quote(str(top))} submodule update --init",
            )
    commit, edited, skip = None, 0, "--ignore-submodules=dirty"  # they are asked themselves
    flags = ["-z", "--porcelain=v2", "--branch", "-uall", "--no-renames", skip]
    for entry in _git(top, "status", *flags).split("\0"):
        kind, _, name = entry.partition(" ")
        if kind == "#" and name.startswith("branch.oid ") and "(initial)" not in name:
            commit = name.split()[1]
        elif kind == "?" and name.endswith("/"):  # another repository
            yield from _in_git(found, below + name, left_out)
        elif kind == "?" and not any(map(left_out, (top / name).parents[: name.count("/")])):
            found.changed += 1
            yield below + name
        edited += kind in ("1", "u")
    found.changed += edited
    found.commit = found.commit if below else commit
    if commit and edited:
        flags = ["--no-color", "--no-ext-diff", "--no-textconv", "--submodule=short", skip]
        flags += [f"--src-prefix=a/{below}", f"--dst-prefix=b/{below}", "HEAD"]
        found.diff += _git(top, "diff", *flags)


def _git(folder: Path, *arguments: str) -> str:
    """What git prints; it starts no hook or monitor of a repository, and writes nothing there."""
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", *arguments]
    places = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    env = {k: v for k, v in os.environ.items() if k not in places}
    env |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, check=False)
    if done.returncode:
        why = os.fsdecode(done.stderr).rpartition("fatal: ")[2].partition("\n")[0]
        trust = f"git config --global --add safe.directory {shlex.quote(str(folder))}"
        hint = f"if you trust it: {trust}" if "ownership" in why else "or: --snapshot folder"
        raise UsageError(f"git {arguments[0]} in {str(folder)!r}: {why}", hint)
    return os.fsdecode(done.stdout)


def _in_folder(found: Source, below: str, left_out: Callable[[Path], bool]) -> Iterator[str]:
    """Files that are neither hidden nor compiled."""
    with os.scandir(found.root / below) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name.endswith(".pyc"):
                continue
            if not entry.is_dir(follow_symlinks=False):
                yield below + entry.name
            elif not left_out(Path(entry.path)):
                yield from _in_folder(found, f"{below}{entry.name}/", left_out)


def _holds_no_code(folder: Path, runs_dir: Path | None) -> bool:
    """Whether a folder is a cache, a Python environment, a run, or holds such."""
    is_named = folder.name == "__pycache__" or folder in (runs_dir, store(folder.parent))
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
    why = f"{error.filename!r}: {error.strerror}"
    return UsageError(f"cannot copy the code: {why}", "or: --snapshot none")


# --- the copy -------------------------------------------------------------------------------------


def take(found: Source, run: RunDir) -> Snapshot:
    """Copies it into a run.

    Raises:
        SlurmftError: there is no room, or a file cannot be read. The run has no copy then.
    """
    root = os.fsencode(found.root).decode("utf-8", "backslashreplace")
    facts: dict[str, Any] = {"mode": found.mode, "root": root, "files": len(found.files)}
    if found.mode == "git":
        facts |= {"commit": found.commit, "dirty": found.changed > 0, "changed": found.changed}
    if found.mode == "none":
        return Snapshot(found.root, run.code, facts)
    aside = aside_of(run.code)
    try:
        facts |= {"bytes": found.bytes, "sha256": _fill(aside, found, run)}
        if found.diff:
            write_bytes(run.code_diff, os.fsencode(found.diff))
        os.rename(aside, run.code)
    except OSError as error:
        full = is_full(error)
        raise no_room(run, "the code", found.bytes) if full else _unreadable(error) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Snapshot(found.root, run.code, facts)


def _fill(into: Path, found: Source, run: RunDir) -> str:
    """Makes a folder with the files; returns the sha256 of their names and contents."""
    kept, like, folders, names = store(run.path.parent), run.path.stat(), {""}, list(found.files)
    with contextlib.suppress(OSError):
        kept.mkdir(mode=0o700)
    prefix = f"{kept}/{like.st_gid}-" if _is_own(kept) else ""
    for name in names:
        while (name := os.path.dirname(name)) not in folders:
            folders.add(name)
    for folder in sorted(folders):
        os.mkdir(os.path.join(into, folder))
    copied = folders | found.files.keys() | {"."}

    def copy(name: str) -> str:
        path, target = os.path.join(found.root, name), os.path.join(into, name)
        about = found.files[name].st_mode
        if stat.S_ISREG(about):
            mode = (0o555 if about & 0o100 else 0o444) & like.st_mode
            return f"{about & 0o100} {_copy_file(path, target, mode, prefix)} {name}"
        goal = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
        if os.path.relpath(goal, found.root) in copied:
            goal = os.path.relpath(goal, os.path.dirname(path))
        os.symlink(goal, target)
        return f"link {goal!r} {name}"

    # A file takes a millisecond on shared file systems. On local ones threads only cost time.
    count = 8 if filesystem.of(run.path).is_shared else 1
    with ThreadPoolExecutor(count) as pool:
        parts = pool.map(lambda start: [copy(n) for n in names[start::count]], range(count))
        lines = sorted(chain(*parts))
    return hashlib.sha256(os.fsencode("\0".join(lines))).hexdigest()


def _copy_file(path: str, target: str, mode: int, prefix: str) -> str:
    """Copies a file; with the prefix of a store, as a link into it. Returns the sha256 of it."""
    with open(path, "rb", buffering=0) as file:
        content = file.readall()
    digest = hashlib.sha256(content).hexdigest()
    kept = f"{prefix}{mode:o}-{digest}"
    with contextlib.suppress(OSError):  # not kept, no links here, or too many
        if prefix:
            os.link(kept, target, follow_symlinks=False)
            about = os.lstat(target)
            if (about.st_size, about.st_uid) == (len(content), os.geteuid()):
                return digest
            os.unlink(target)  # a crash has cut it short
            os.unlink(kept)
    with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    if prefix:
        with contextlib.suppress(OSError):
            os.link(target, kept)
    return digest


# --- the store ------------------------------------------------------------------------------------


def store(runs_dir: Path) -> Path:
    """Where the contents of this user's copies are kept."""
    return runs_dir / f".code-{os.geteuid()}"


def unused(runs_dir: Path) -> list[Path]:
    """The files of the store that are in no run."""
    kept = store(runs_dir)
    return [p for p in kept.iterdir() if p.lstat().st_nlink == 1] if _is_own(kept) else []


def _is_own(folder: Path) -> bool:
    """Whether a folder is there, and nobody else can have written in it."""
    with contextlib.suppress(OSError, SlurmftError):
        os.close(permissions.open_own(folder, is_folder=True))
        return True
    return False
