"""`slurmft clean`: removes what runs leave behind and nobody needs any more.

Never of a run whose job waits or runs, or of which nobody here says whether it does, as on another
cluster; never what belongs to somebody else.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmft.cluster import status
from slurmft.cluster.status import Standing
from slurmft.core.errors import SlurmftError
from slurmft.runs import resolve, token_cache
from slurmft.runs.rundir import RunDir

_ASIDE = re.compile(r"\..+\.\d+\.[0-9a-f]{4}(\.old)?")
"""Names under which files and folders are written or removed, as rundir.write_bytes has them."""
_LEFT = "half written or half removed"


@dataclass(frozen=True, slots=True)
class Item:
    """Something that may go."""

    path: Path
    kind: str
    """One of KINDS."""
    why: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What may go from a folder of runs."""

    items: list[Item]
    left_out: list[str]
    """A line for everything that may not be looked at or touched."""

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)


Finding = Iterator[tuple[Path, str]]
"""Path, and why it may go."""

Found = tuple[str, Path, str]
"""The same, with its kind."""


def checkpoints(found: Standing, idle_s: float, older_s: float) -> Finding:
    """The best checkpoint, which finished runs keep; their model is in the folder `model`."""
    files = RunDir(found.run.path)
    if found.state == "finished" and files.model.is_dir() and files.checkpoints.is_dir():
        yield files.checkpoints, "the run has finished; its model stays"


def tokens(found: Standing, idle_s: float, older_s: float) -> Finding:
    """The tokens that the ranks of a run read."""
    files = RunDir(found.run.path)
    if found.state == "finished" and files.tokens.is_dir():
        yield files.tokens, "the run has finished"


def leftovers(found: Standing, idle_s: float, older_s: float) -> Finding:
    """What a kill during a write left behind, and damaged checkpoints."""
    files = RunDir(found.run.path)
    for folder in (files.path, files.failures, files.submitit):
        yield from asides(folder)
    for path in (*files.checkpoints.glob(".*"), *files.checkpoints.glob("bad-*")):
        yield path, "a damaged checkpoint" if path.name.startswith("bad-") else "half written"


def dead_runs(found: Standing, idle_s: float, older_s: float) -> Finding:
    """Whole runs that did not finish, after some time."""
    if found.state != "finished" and idle_s > older_s:
        word = found.state if found.job else "never submitted"
        yield found.run.path, f"{word}; nothing happened for {idle_s / 86400:.0f} days"


def asides(folder: Path) -> Finding:
    """What a kill during a write or a removal left in a folder."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for name in names:
        if _ASIDE.fullmatch(name):
            yield folder / name, _LEFT


def folder_leftovers(top: Path, older_s: float) -> Finding:
    """The same, in the folder of runs."""
    yield from asides(top)


def kept_tokens(top: Path, older_s: float) -> Finding:
    """What runs have left in the token cache for others, and none has used for some time."""
    for path, idle_s in token_cache.unused(token_cache.folder(), older_s):
        left = _LEFT if path.name.startswith(".") else ""
        yield path, left or f"no run has used it for {idle_s / 86400:.0f} days"


_OF_RUNS: dict[str, Callable[[Standing, float, float], Finding]] = {
    "runs": dead_runs,
    "checkpoints": checkpoints,
    "tokens": tokens,
    "leftovers": leftovers,
}
"""Kind -> what of it a run has. What lies in a folder that goes is not named again."""

_OF_FOLDERS: dict[str, Callable[[Path, float], Finding]] = {
    "leftovers": folder_leftovers,
    "token-cache": kept_tokens,
}
"""Kind -> what of it belongs to no run: what lies in the folder of runs, or is shared by runs."""

KINDS = tuple(dict.fromkeys([*_OF_RUNS, *_OF_FOLDERS]))


def plan(top: Path, kinds: Sequence[str], older_s: float) -> Plan:
    """What may go.

    Args:
        top: the folder of runs.
        kinds: what to look for.
        older_s: for how long nothing may have happened in a run that goes as a whole, and no run
            may have used an entry of the token cache.

    Raises:
        UsageError: there is no such folder.
    """
    made, problems = resolve.read_all(resolve.look(top))
    left_out = [resolve.problem_line(problems)] if problems else []
    theirs = unsure = apart = 0
    found: list[Found] = []
    for each in status.stand(made):
        if each.is_alive and each.job:
            continue
        if not _is_mine(each.run.path):
            theirs += 1
        elif each.apart and not each.is_sure:
            apart += 1
        elif not each.is_sure:
            unsure += 1
        else:
            found += _of_run(each, kinds, older_s)
    for kind, finder in _OF_FOLDERS.items():
        if kind in kinds:
            found += [(kind, path, why) for path, why in finder(top, older_s) if _is_mine(path)]
    if theirs:
        left_out.append(f"{theirs} run(s) of others")
    if apart:
        left_out.append(f"{apart} run(s) of other clusters or hosts: clean them there")
    if unsure:
        left_out.append(f"{unsure} run(s) whose cluster does not say how their jobs stand")
    return Plan([Item(path, kind, why, size_of(path)) for kind, path, why in found], left_out)


def _of_run(each: Standing, kinds: Sequence[str], older_s: float) -> Iterator[Found]:
    idle_s = time.time() - last_change(each)
    if each.is_alive and idle_s <= older_s:  # it may be about to be submitted
        return
    whole: list[Path] = []
    for kind, finder in _OF_RUNS.items():
        for path, why in finder(each, idle_s, older_s) if kind in kinds else ():
            if not any(folder in path.parents for folder in whole):
                whole.append(path)
                yield kind, path, why


def last_change(found: Standing) -> float:
    """When a run last said anything, or was asked for anything (Unix seconds)."""
    files = RunDir(found.run.path)
    times = [float(found.run.state.get("time") or 0)]
    for path in (files.config, files.records, files.job, files.attempt, files.path):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times)


def _is_mine(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    try:
        return total if path.is_dir() else path.lstat().st_size
    except OSError:  # somebody else was faster
        return total


def remove(item: Item) -> str | None:
    """Removes something, at once for whoever looks; returns what went wrong."""
    aside = item.path.with_name(f".{item.path.name}.{os.getpid()}.{secrets.token_hex(2)}")
    try:
        os.rename(item.path, aside)
    except FileNotFoundError:
        return None  # somebody else was faster
    except OSError as error:
        return f"{str(item.path)!r} could not be removed: {error.strerror or error}"
    try:
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside)
        else:
            aside.unlink()
    except OSError as error:
        return f"{str(aside)!r} could not be removed: {error.strerror or error}"
    return None


def remove_all(found: Plan, again: Plan) -> list[Item]:
    """Removes what may go now as it might before: meanwhile a run may have been resumed.

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
