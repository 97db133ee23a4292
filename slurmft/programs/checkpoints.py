"""Checkpoints in a folder that only the program knows: which entries are some, and which are whole.

Programs name them as they like: `checkpoint-500/`, `epoch-3.pt`, `ckpt.pt`, `last.ckpt`. Beside
them lie logs, metrics and final models.
"""

import contextlib
import os
import re
import shlex
import stat
import time
from collections.abc import Collection, Iterator
from enum import IntEnum
from pathlib import Path

from slurmft.core import ownership, users, writers
from slurmft.programs.file_ends import is_cut_off, is_weights

_TEMPORARY = re.compile(
    r"^\.|~$|^_?tmp|^_?temp(?![a-z])|([._-])(te?mp|incomplete|lock)([._-]|$)|\.part(ial)?$"
)
_LOG_FOLDERS = {
    "log", "logs", "runs", "wandb", "mlruns", "lightning_logs", "tb_logs", "tensorboard",
    "events", "samples", "images", "plots", "figures", "code", "src",
}  # fmt: skip
"""Names of folders beside checkpoints, in lower case."""
_TEXTS = {
    ".json", ".jsonl", ".txt", ".log", ".csv", ".tsv", ".yaml", ".yml", ".toml", ".md",
    ".html", ".out", ".err", ".py", ".sh", ".png", ".jpg", ".svg", ".pdf",
}  # fmt: skip
"""What metrics, settings, logs and plots are written in."""
_SETTLED_S = 5
"""A file that has not changed for so long is not being written."""
_LONGEST_WAIT_S = 30
"""How long a file that goes on changing is waited for: all nodes wait meanwhile."""


class _Form(IntEnum):
    """What an entry looks like. Those of the first form that has a whole one are the checkpoints:
    beside numbered folders, a file is often the final model. Entries without weights come after
    all that have some: samples and logs have numbers, too."""

    NUMBERED_FOLDER = 0
    FILE = 1
    FOLDER = 2
    NUMBERED_TEXT = 3


def candidates(folder: Path, others: Collection[Path] = ()) -> dict[Path, int]:
    """Returns the entries of a folder that may be checkpoints, each with when it was written.

    Those of other users are none: see `foreign`.

    Args:
        others: entries that are no checkpoints, as results.

    Raises:
        OSError: the folder cannot be read.
    """
    times = {}
    for path in folder.iterdir():
        is_other = path in others or _is_foreign(path)
        if not is_other and _form(path) is not None:
            times[path] = written_ns(path)
    return times


def foreign(folder: Path) -> dict[Path, int]:
    """Returns the entries of a folder that look like checkpoints and are another user's, each with
    when it changed itself: what is in it, or behind a link, may be anything.

    Raises:
        OSError: the folder cannot be read.
    """
    times = {}
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # it is gone, or a link that leads nowhere
            if _is_foreign(path) and _form(path) is not None:
                times[path] = path.lstat().st_mtime_ns
    return times


def _is_foreign(path: Path) -> bool:
    """Returns whether a file or folder is neither this user's nor root's, or is gone."""
    try:
        status = ownership.status(path, follow_symlinks=False)
        return status.st_uid not in (0, os.geteuid())
    except FileNotFoundError:  # the program may remove old ones at any time
        return True


def refusal(path: Path) -> str | None:
    """Returns why a checkpoint is not loaded, and the cure; None: nobody else can have written it.

    A checkpoint is often a pickle, which executes what it likes.
    """
    for file in _entries(path):
        with contextlib.suppress(OSError):  # it is gone, or a link that leads nowhere
            # A link and what it leads to.
            for follow_symlinks in (False, True):
                status = ownership.status(file, follow_symlinks=follow_symlinks)
                if status.st_uid not in (0, os.geteuid()):
                    owner = users.owner(status.st_uid)
                    return f"{str(file)!r} belongs to {owner}; only your own are loaded"
            if writers.who_writes(file, status):
                mode = stat.S_IMODE(status.st_mode)
                return (
                    f"others can write {str(file)!r} (mode {mode:04o}); if you trust what is "
                    f"there: chmod -R go-w {shlex.quote(str(path))}"
                )
    return None


def _entries(path: Path) -> Iterator[Path]:
    """Yields a checkpoint, and after it what is in it."""
    yield path
    for folder, folders, names in os.walk(path):
        for name in folders + names:
            yield Path(folder, name)


def weights(folder: Path) -> list[Path]:
    """Returns the files of a folder that hold weights, by their formats."""
    return [path for path in folder.iterdir() if is_weights(path)]


def newest_first(times: dict[Path, int]) -> list[Path]:
    """Returns some candidates by their form, those of one form by when they were written."""

    def order(path: Path) -> tuple[bool, int, int, list[int], str]:
        # By time: of names, nobody knows whether step-900 sorts before step-1000. Those of the
        # same time are sorted by their numbers.
        numbers = [int(digits) for digits in re.findall(r"\d+", path.name)]
        has_weights = _pattern(path) in patterns_of_weights
        return has_weights, -forms[path], times[path], numbers, path.name

    forms = {}
    patterns_of_weights = set()
    for path in times:
        form = _form(path)
        if form is not None:
            forms[path] = form
            # The newest one may have none yet; those before it tell what it will have.
            if any(is_weights(file) for file in _files(path)):
                patterns_of_weights.add(_pattern(path))
    return sorted(forms, key=order, reverse=True)


def likely(times: dict[Path, int]) -> list[Path]:
    """Returns those of some candidates that are checkpoints as far as their names and files tell,
    as `newest_first` sorts them: a folder without number and weights may hold anything."""
    return [path for path in newest_first(times) if _is_likely(path)]


def _is_likely(path: Path) -> bool:
    if _form(path) is not _Form.FOLDER:
        return True
    return any(is_weights(file) for file in _files(path))


def _pattern(path: Path) -> str:
    """Returns the name of an entry without its numbers: those of a kind have the same."""
    return re.sub(r"\d+", "#", path.name)


def _form(path: Path) -> _Form | None:
    """Returns the form of an entry; None: it is no checkpoint."""
    name = path.name.lower()
    if _TEMPORARY.search(name) or ".tfevents." in name or _is_channel(path):
        return None
    has_number = bool(re.search(r"\d", name))
    if path.is_dir():
        if has_number:
            return _Form.NUMBERED_FOLDER
        if name in _LOG_FOLDERS:
            return None
        return _Form.FOLDER
    if path.suffix.lower() in _TEXTS:
        # A text without a number is a log, or settings.
        if not has_number:
            return None
        return _Form.NUMBERED_TEXT
    # A name without number and suffix, as of DeepSpeed's `latest`, only points to another one.
    if not has_number and not path.suffix:
        return None
    return _Form.FILE


def written_ns(path: Path) -> int:
    """Returns when a checkpoint was last written: of a folder, when the newest file in it was that
    is not another user's.

    A folder's own time stays where a file in it is written again. 0: it is gone.
    """
    newest = 0
    for file in [path, *_files(path)]:
        with contextlib.suppress(FileNotFoundError):
            if not _is_foreign(file):
                newest = max(newest, file.stat().st_mtime_ns)
    return newest


def changed_ns(path: Path) -> int:
    """Returns when a file of a program, which is no checkpoint, was last written. 0: it is gone; or
    another user has given it a time that is still to come."""
    try:
        changed = path.stat().st_mtime_ns
    except OSError:
        return 0
    if _is_foreign(path) and changed > time.time_ns():
        return 0
    return changed


def _files(path: Path) -> list[Path]:
    """Returns the files of a checkpoint."""
    if not path.is_dir():
        return [path]
    files = []
    for folder, _, names in os.walk(path):
        paths = [Path(folder, name) for name in names]
        files += [file for file in paths if not _is_channel(file)]
    return files


def _is_channel(path: Path) -> bool:
    """Returns whether a path is no file that can be read to its end: opening a FIFO would wait for
    whoever writes into it."""
    return path.is_fifo() or path.is_socket()


# --- whole or not ---------------------------------------------------------------------------------


def newest_whole(checkpoints: list[Path]) -> Path | None:
    """Returns the first of some checkpoints, as `newest_first` sorts them, that looks whole; None:
    none does."""
    half_written = _half_written(checkpoints)
    for path in checkpoints:
        if path not in half_written and _is_readable(path):
            return path
    return None


def _half_written(checkpoints: list[Path]) -> set[Path]:
    """Returns the folders that lack a file which those before them have: many programs write a
    marker last.

    A file that not every checkpoint has, as a mark of the best one, is missing in one of the two
    whole ones before, too.
    """
    half_written = set()
    previous: dict[str, set[str]] = {}
    whole: dict[str, list[set[str]]] = {}
    for path in reversed(checkpoints):
        pattern = _pattern(path)
        kinds = _kinds(path)
        before = whole.setdefault(pattern, [])
        common: set[str] = set()
        if before:
            common = set.intersection(*before[-2:])
        if kinds >= common or kinds >= previous[pattern]:
            before.append(kinds)
        else:
            half_written.add(path)
        previous[pattern] = kinds
    return half_written


def settle(path: Path) -> None:
    """Waits until a checkpoint has not changed for some seconds: a process that was not killed with
    the others, or the file server, may still write it."""
    deadline = time.monotonic() + _LONGEST_WAIT_S
    before = _sizes(path)
    # By the clock of the file server; of one that is ahead, the wait ends all the same.
    while time.time() - written_ns(path) / 1e9 < _SETTLED_S:
        if time.monotonic() > deadline:
            return
        time.sleep(1)
        now = _sizes(path)
        if now == before:
            return
        before = now


def _sizes(path: Path) -> dict[str, tuple[int, int]]:
    sizes = {}
    for file in _files(path):
        with contextlib.suppress(FileNotFoundError):
            about = file.stat()
            sizes[str(file)] = (about.st_size, about.st_mtime_ns)
    return sizes


def _kinds(path: Path) -> set[str]:
    """Returns the paths of the files in a folder without their numbers: there may be fewer ranks
    than before. A mark of the best checkpoint is none."""
    if not path.is_dir():
        return set()
    names = [str(file.relative_to(path)) for file in _files(path)]
    return {re.sub(r"\d+", "#", name) for name in names if "best" not in name.lower()}


def _is_readable(path: Path) -> bool:
    """Returns whether the files of a checkpoint are as long as their formats say."""
    files = _files(path)
    return bool(files) and not any(is_cut_off(file) for file in files)
