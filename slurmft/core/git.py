"""Git: reads a work tree, and executes nothing that the repository names.

A repository that somebody else has made can name programs in its configuration: hooks, a file
system monitor, filters, diff and text conversion drivers, transports. Git runs them with the rights
of whoever types `git status`. All calls of git go through this module, which switches them off.
"""

import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmft.core.errors import UsageError

# Without optional locks, `git status` writes nothing into a repository that is only read.
_SAFE = (
    "git", "--no-pager", "--no-optional-locks",
    "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null",
)  # fmt: skip
_FILTERS = r"^filter\..*\.(clean|smudge|process)$"
_OWN_VARIABLES = ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM")
"""The user's choice of configuration files. All other GIT_* variables may lead elsewhere."""
_SUBMODULE = "160000"
"""The mode of a submodule in the output of `git ls-files --stage`."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit that a work tree is at."""

    commit: str
    dirty: bool
    """Tracked files differ from the commit."""


def head(folder: Path) -> Commit | None:
    """Returns the commit of the work tree that holds a folder; None without one, or without git."""
    try:
        commit = output(folder, "rev-parse", "--verify", "HEAD", timeout_s=10)
        changes = status(folder, "-uno", timeout_s=10)
    except UsageError:
        return None
    return Commit(commit.strip(), dirty=bool(changes))


def status(folder: Path, *options: str, timeout_s: float | None = None) -> list[str]:
    """Returns the entries of `git status --porcelain`: two letters, a space and a path each."""
    # -z: a NUL after each entry, as a path may hold a line break, and git would quote it.
    command = ("status", "-z", "--porcelain", "--no-renames", *options)
    switches = _without_filters(folder)
    text = output(folder, *command, switches=switches, timeout_s=timeout_s)
    # Behind the last NUL is nothing.
    return text.split("\0")[:-1]


def files(folder: Path) -> list[str]:
    """Returns the paths of all tracked files of a work tree, those of its submodules included."""
    text = output(folder, "ls-files", "-z", "--recurse-submodules")
    return text.split("\0")[:-1]


def tracks(folder: Path, path: Path) -> bool:
    """Returns whether a work tree tracks a path; False if git refuses to read the tree."""
    try:
        # Literally: in a pathspec, * and [ stand for others.
        command = ("--literal-pathspecs", "ls-files", "--", str(path))
        return bool(output(folder, *command))
    except UsageError:
        return False


def diff(folder: Path) -> str:
    """Returns the changes of tracked files since the commit, as text."""
    plain = ("--no-color", "--no-ext-diff", "--no-textconv", "--submodule=short")
    return output(folder, "diff", *plain, "HEAD", switches=_without_filters(folder))


def output(
    folder: Path,
    *arguments: str,
    switches: Sequence[str] = (),
    timeout_s: float | None = None,
) -> str:
    """Returns what a git command prints in a folder.

    Raises:
        UsageError: git is not installed, fails, or takes longer than `timeout_s`.
    """
    try:
        done = subprocess.run(
            [*_SAFE, *switches, *arguments],
            cwd=folder,
            env=_environment(),
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"git cannot be run in {str(folder)!r}: {error}") from None
    if done.returncode:
        raise _refusal(folder, arguments[0], os.fsdecode(done.stderr))
    return os.fsdecode(done.stdout)


def _environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name in _OWN_VARIABLES
    }
    # LC_ALL: `_refusal` reads the messages. No transport is allowed: a partial clone would fetch
    # what a diff needs, by its own command.
    return kept | {"LC_ALL": "C", "GIT_ALLOW_PROTOCOL": "", "GIT_NO_LAZY_FETCH": "1"}


def _refusal(folder: Path, command: str, printed: str) -> UsageError:
    # Git says why in one line; before it may stand warnings, behind it advice.
    _, _, last_error = printed.rpartition("fatal: ")
    reason, _, _ = last_error.partition("\n")
    hint = "or: --snapshot folder"
    # "detected dubious ownership": git reads no repository of another user.
    if "ownership" in reason:
        trust = f"git config --global --add safe.directory {shlex.quote(str(folder))}"
        hint = f"if you trust it: {trust}"
    return UsageError(f"git {command} in {str(folder)!r}: {reason}", hint)


def _without_filters(folder: Path) -> list[str]:
    """Returns the options that switch off the filters of a repository and its submodules.

    Filters of the user's own configuration stay: without that of git-lfs, all its files would look
    changed.
    """
    options = []
    for name in sorted(_filters(folder)):
        for key in ("clean", "smudge", "process"):
            options += ["-c", f"{name}.{key}="]
        # Of a filter that is required and has no command, git makes an error.
        options += ["-c", f"{name}.required=false"]
    return options


def _filters(folder: Path) -> set[str]:
    names = set()
    command = ("config", "-z", "--show-scope", "--get-regexp", _FILTERS)
    try:
        listed = output(folder, *command)
    # Exit code 1: there is none.
    except UsageError:
        listed = ""
    fields = listed.split("\0")
    # Scope and setting by turns; the last field, behind the last NUL, is empty.
    for scope, setting in zip(fields[0::2], fields[1::2], strict=False):
        if scope in ("local", "worktree"):
            # With -z, the value stands in a line of its own.
            key, _, _ = setting.partition("\n")
            name, _, _ = key.rpartition(".")
            names.add(name)
    for path in _submodules(folder):
        names |= _filters(path)
    return names


def _submodules(folder: Path) -> list[Path]:
    printed = output(folder, "rev-parse", "--show-toplevel")
    # Not strip: the name of a folder may end with a space.
    top = Path(printed.removesuffix("\n"))
    listed = output(top, "ls-files", "-z", "--stage")
    paths = []
    for entry in listed.split("\0")[:-1]:
        about, _, name = entry.partition("\t")
        # One that was never checked out has no configuration that git could read.
        if about.startswith(_SUBMODULE) and os.path.lexists(top / name / ".git"):
            paths.append(top / name)
    return paths
