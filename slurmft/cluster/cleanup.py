"""Removes what runs leave behind and nobody needs any more (`slurmft clean`).

A run is left alone if its job waits or runs, if the state of its job is unknown here, as on another
cluster, or if it belongs to another user.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmft.cluster import status
from slurmft.cluster.status import RunStatus
from slurmft.core.errors import SlurmftError
from slurmft.core.files import ASIDE, aside_of
from slurmft.runs import resolve, token_cache
from slurmft.runs.disk_space import size_of
from slurmft.runs.rundir import RunDir

"""Names under which files and folders are written or removed, as rundir.write_bytes has them."""
_LEFT = "half written or half removed"


@dataclass(frozen=True, slots=True)
class Item:
    """Something that may be removed."""

    path: Path
    kind: str
    """One of KINDS."""
    why: str
    bytes: int
    inode: int | None
    """Of what was found there."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What may be removed from a folder of runs."""

    items: list[Item]
    left_out: list[str]
    """A line for everything that may not be read or removed."""

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)


Finding = Iterator[tuple[Path, str]]
"""Path, and why it may be removed."""

Found = tuple[str, Path, str]
"""The same, with its kind."""


def checkpoints(found: RunStatus, idle_s: float, older_s: float) -> Finding:
    """The best checkpoint, which finished runs keep; their model is in the folder `model`."""
    files = RunDir(found.run.path)
    if found.state == "finished" and files.model.is_dir() and files.checkpoints.is_dir():
        yield files.checkpoints, "the run has finished; its model is kept"


def tokens(found: RunStatus, idle_s: float, older_s: float) -> Finding:
    """The tokens that the ranks of a run read."""
    files = RunDir(found.run.path)
    if found.state == "finished" and files.tokens.is_dir():
        yield files.tokens, "the run has finished"


def leftovers(found: RunStatus, idle_s: float, older_s: float) -> Finding:
    """What a kill during a write left behind, and damaged checkpoints."""
    files = RunDir(found.run.path)
    for folder in (files.path, files.failures, files.submitit):
        yield from asides(folder)
    for path in (*files.checkpoints.glob(".*"), *files.checkpoints.glob("bad-*")):
        yield path, "a damaged checkpoint" if path.name.startswith("bad-") else "half written"


def dead_runs(found: RunStatus, idle_s: float, older_s: float) -> Finding:
    """Whole runs that have not finished, after a time without activity."""
    if found.state != "finished" and idle_s > older_s:
        word = found.state if found.job else "never submitted"
        yield found.run.path, f"{word}; no activity for {idle_s / 86400:.0f} days"


def asides(folder: Path) -> Finding:
    """What a kill during a write or a removal left in a folder."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        if ASIDE.fullmatch(name):
            yield folder / name, _LEFT


def folder_leftovers(top: Path, older_s: float) -> Finding:
    """The same, in the folder of runs."""
    yield from asides(top)


def kept_tokens(top: Path, older_s: float) -> Finding:
    """What runs have left in the token cache for others, and none has used for some time."""
    for path, idle_s in token_cache.unused(token_cache.folder(), older_s):
        left = _LEFT if path.name.startswith(".") else ""
        yield path, left or f"no run has used it for {idle_s / 86400:.0f} days"


_OF_RUNS: dict[str, Callable[[RunStatus, float, float], Finding]] = {
    "runs": dead_runs,
    "checkpoints": checkpoints,
    "tokens": tokens,
    "leftovers": leftovers,
}
"""Kind -> finds it in a run. What is in a folder that is removed is not listed again."""

_OF_FOLDERS: dict[str, Callable[[Path, float], Finding]] = {
    "leftovers": folder_leftovers,
    "token-cache": kept_tokens,
}
"""Kind -> finds it outside of runs: in the folder of runs, or shared by runs."""

KINDS = tuple(dict.fromkeys([*_OF_RUNS, *_OF_FOLDERS]))


def plan(top: Path, kinds: Sequence[str], older_s: float) -> Plan:
    """What may be removed.

    Args:
        top: the folder of runs.
        kinds: what to look for.
        older_s: the least time without activity of a run that is removed as a whole, and without
            use of an entry of the token cache.

    Raises:
        UsageError: there is no such folder.
    """
    made, problems = resolve.read_all(resolve.look(top))
    left_out = [resolve.problem_line(problems)] if problems else []
    theirs = unsure = elsewhere = 0
    found: list[Found] = []
    for each in status.run_statuses(made):
        if each.is_alive and each.job:
            continue
        if not _is_own(each.run.path, top):
            theirs += 1
        elif each.elsewhere and not each.is_sure:
            elsewhere += 1
        elif not each.is_sure:
            unsure += 1
        else:
            found += _of_run(each, kinds, older_s)
    for kind, finder in _OF_FOLDERS.items():
        if kind in kinds:
            found += [
                (kind, path, why) for path, why in finder(top, older_s) if _is_own(path, path)
            ]
    if theirs:
        left_out.append(f"{theirs} run(s) of other users")
    if elsewhere:
        left_out.append(f"{elsewhere} run(s) of other clusters or hosts: clean them there")
    if unsure:
        left_out.append(f"{unsure} run(s) whose cluster does not report the state of their jobs")
    items = [Item(path, kind, why, size_of(path), _inode(path)) for kind, path, why in found]
    return Plan(items, left_out)


def _of_run(each: RunStatus, kinds: Sequence[str], older_s: float) -> Iterator[Found]:
    idle_s = time.time() - last_activity(each)
    if each.is_alive and idle_s <= older_s:  # it may be about to be submitted
        return
    whole: list[Path] = []
    for kind, finder in _OF_RUNS.items():
        for path, why in finder(each, idle_s, older_s) if kind in kinds else ():
            if not any(folder in path.parents for folder in whole):
                whole.append(path)
                yield kind, path, why


def last_activity(found: RunStatus) -> float:
    """When a run last recorded something or was submitted (Unix seconds)."""
    files = RunDir(found.run.path)
    times = [float(found.run.state.get("time") or 0)]
    for path in (files.config, files.records, files.job, files.attempt, files.path):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times)


def _is_own(path: Path, top: Path) -> bool:
    """Whether a path is this user's, and all between it and `top`: a link there may be another's,
    to what this user keeps elsewhere."""
    between = [p for p in path.parents if top in p.parents]
    try:
        return all(p.lstat().st_uid == os.getuid() for p in (path, *between))
    except OSError:
        return False


def _inode(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return path.lstat().st_ino
    return None


def remove(item: Item) -> str | None:
    """Removes an item, atomically for readers; returns the error, if any."""
    aside = aside_of(item.path)
    try:
        os.rename(item.path, aside)
    except FileNotFoundError:
        return None  # somebody else has removed it
    except OSError as error:
        return f"{str(item.path)!r} could not be removed: {error.strerror or error}"
    if _inode(aside) != item.inode:  # another link or folder leads elsewhere now
        os.rename(aside, item.path)
        return f"{str(item.path)!r} was replaced meanwhile: it stays"
    try:
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside)
        else:
            aside.unlink()
    except OSError as error:
        return f"{str(aside)!r} could not be removed: {error.strerror or error}"
    return None


def remove_all(found: Plan, again: Plan) -> list[Item]:
    """Removes what may be removed both before and now: meanwhile a run may have been resumed.

    Raises:
        SlurmftError: some of it could not be removed; the rest is gone.
    """
    still = {item.path for item in again.items}
    removed, problems = [], []
    for item in found.items:
        if item.path in still:
            problem = remove(item)
            problems += [problem] if problem else []
            removed += [] if problem else [item]
    if problems:
        raise SlurmftError("\n".join(problems), f"{len(removed)} other(s) were removed")
    return removed
