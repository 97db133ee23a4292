"""Removes what runs leave behind and nobody needs any more (`slurmft clean`).

A run is left alone if its job waits or runs, if the state of its job is unknown here, as on another
cluster, or if it belongs to another user.
"""

import contextlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmft.cluster import status
from slurmft.cluster.status import RunStatus
from slurmft.core.errors import SlurmftError
from slurmft.core.files import ASIDE, aside_of
from slurmft.runs import resolve, token_cache
from slurmft.runs.disk_space import size_of
from slurmft.runs.rundir import RunDir

KINDS = ("runs", "checkpoints", "tokens", "leftovers", "token-cache")
"""runs: whole ones, which have not finished. checkpoints: the best one, which finished runs keep
beside the model. tokens: those of finished runs. leftovers: what a kill during a write or a removal
left behind, and damaged checkpoints. token-cache: what runs have left there for others."""

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


Found = tuple[str, Path, str]
"""Kind, path, and why it may be removed."""


def _in_run(found: RunStatus, older_s: float) -> Iterator[Found]:
    """What may be removed of a run; what is in a folder comes after the folder."""
    files, has_finished = RunDir(found.run.path), found.state == "finished"
    idle_s = time.time() - last_activity(found)
    if found.is_alive and idle_s <= older_s:  # it may be about to be submitted
        return
    if not has_finished and idle_s > older_s:
        word = found.state if found.job else "never submitted"
        yield "runs", files.path, f"{word}; no activity for {idle_s / 86400:.0f} days"
    if has_finished and files.model.is_dir() and files.checkpoints.is_dir():
        yield "checkpoints", files.checkpoints, "the run has finished; its model is kept"
    if has_finished and files.tokens.is_dir():
        yield "tokens", files.tokens, "the run has finished"
    for folder in (files.path, files.failures, files.submitit):
        yield from _asides(folder)
    for path in (*files.checkpoints.glob(".*"), *files.checkpoints.glob("bad-*")):
        is_bad = path.name.startswith("bad-")
        yield "leftovers", path, "a damaged checkpoint" if is_bad else "half written"


def _asides(folder: Path) -> Iterator[Found]:
    """What a kill during a write or a removal left in a folder."""
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(folder)):
            if ASIDE.fullmatch(name):
                yield "leftovers", folder / name, _LEFT


def plan(top: Path, kinds: Sequence[str], older_s: float) -> Plan:
    """What of these kinds may be removed from a folder of runs. `older_s` is the least time without
    activity of a run that is removed as a whole, and without use of an entry of the token cache."""
    made, problems = resolve.read_all(top)
    left_out = [resolve.problem_line(problems)] if problems else []
    found: list[Found] = []
    left = Counter[str]()
    for each in status.run_statuses(made):
        if each.is_alive and each.job:
            continue
        if not _is_own(each.run.path, top):
            left["run(s) of other users"] += 1
        elif each.elsewhere and not each.is_sure:
            left["run(s) of other clusters or hosts: clean them there"] += 1
        elif not each.is_sure:
            left["run(s) whose cluster does not report the state of their jobs"] += 1
        else:
            found += _of_kinds(_in_run(each, older_s), kinds)
    outside = list(_asides(top))
    for path, idle_s in token_cache.unused(token_cache.folder(), older_s):
        unused = f"no run has used it for {idle_s / 86400:.0f} days"
        outside.append(("token-cache", path, _LEFT if path.name.startswith(".") else unused))
    found += [each for each in _of_kinds(outside, kinds) if _is_own(each[1], each[1])]
    left_out += [f"{count} {words}" for words, count in left.items()]
    items = [Item(path, kind, why, size_of(path), _inode(path)) for kind, path, why in found]
    return Plan(items, left_out)


def _of_kinds(found: Iterable[Found], kinds: Sequence[str]) -> Iterator[Found]:
    """What is of these kinds, without what is in a folder that goes."""
    whole: list[Path] = []
    for kind, path, why in found:
        if kind in kinds and not any(folder in path.parents for folder in whole):
            whole.append(path)
            yield kind, path, why


def last_activity(found: RunStatus) -> float:
    """When a run last recorded something or was submitted (Unix seconds)."""
    files = RunDir(found.run.path)
    times = [found.run.state.time]
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
    SlurmftError where some of it could not be removed; the rest is gone."""
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
