"""Removes what runs leave behind and nobody needs any more (`slurmft clean`).

A run is left alone if its job waits or runs, if the state of its job is unknown here, as on another
cluster, or if it belongs to another user.
"""

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmft.cluster.job_state import Phase
from slurmft.cluster.status import RunStatus, run_statuses
from slurmft.core import hooks, ownership, removal, trusted
from slurmft.core.errors import SlurmftError
from slurmft.core.terminal import ProgressLine
from slurmft.runs import resolve
from slurmft.runs.disk_space import size_of
from slurmft.runs.rundir import (
    BAD_CHECKPOINT,
    CHECKPOINT,
    HALF_CHECKPOINT,
    RUN,
    RunDir,
)

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
    form: re.Pattern[str]
    """The form of its name."""
    inode: int | None
    """Of what was found there."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts of a folder of runs that may be removed."""

    items: list[Item]
    left_out: list[str]
    """A line for everything that may not be read or removed."""

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)


@dataclass(frozen=True, slots=True)
class _Candidate:
    kind: str
    """One of KINDS."""
    path: Path
    why: str
    """Why it may be removed."""
    form: re.Pattern[str]
    """The form of its name."""
    inode: int | None

    @classmethod
    def of(cls, kind: str, path: Path, why: str, form: re.Pattern[str]) -> "_Candidate":
        """Returns a candidate with its inode. That is taken first: who can rename may put another
        folder in the place of the one that is examined."""
        inode = None
        with contextlib.suppress(OSError):
            inode = path.lstat().st_ino
        return cls(kind, path, why, form, inode)


def _in_run(status: RunStatus, older_s: float) -> Iterator[_Candidate]:
    """Yields what may be removed of a run; what is in a folder comes after the folder."""
    files = RunDir(status.run.path)
    has_finished = status.state is Phase.FINISHED
    idle_s = time.time() - last_activity(status)
    # Alive without a job (`plan` passes over the others): it may be about to be submitted.
    if status.is_alive and idle_s <= older_s:
        return
    if not has_finished and idle_s > older_s:
        word = "never submitted"
        if status.job:
            word = status.state
        idle_days = idle_s / 86400
        why = f"{word}; no activity for {idle_days:.0f} days"
        yield _Candidate.of("runs", files.path, why, RUN)
    if has_finished and files.model.is_dir() and files.checkpoints.is_dir():
        why = "the run has finished; its model is kept"
        # A link to a larger disk stays, and in the folder there what slurmft has not made.
        if files.checkpoints.is_symlink():
            yield from _named("checkpoints", files.checkpoints, CHECKPOINT, why)
        else:
            form = removal.exactly(files.checkpoints.name)
            yield _Candidate.of("checkpoints", files.checkpoints, why, form)
    if has_finished and files.tokens.is_dir():
        form = removal.exactly(files.tokens.name)
        yield _Candidate.of("tokens", files.tokens, "the run has finished", form)
    for folder in (files.path, files.failures, files.submitit):
        yield from _named("leftovers", folder, removal.ASIDE, _LEFT)
    yield from _named("leftovers", files.checkpoints, HALF_CHECKPOINT, _LEFT)
    why = "a damaged checkpoint"
    yield from _named("leftovers", files.checkpoints, BAD_CHECKPOINT, why)


def _named(
    kind: str, folder: Path, form: re.Pattern[str], why: str
) -> Iterator[_Candidate]:
    """Yields what has a name of a form in a folder."""
    for path in removal.matching(folder, form):
        yield _Candidate.of(kind, path, why, form)


def plan(top: Path, kinds: Sequence[str], older_s: float) -> Plan:
    """Returns what of these kinds may be removed from a folder of runs. `older_s` is the least time
    without activity of a run that is removed as a whole, and without use of an entry of the token
    cache."""
    runs, problems = resolve.read_all(top)
    candidates: list[_Candidate] = []
    skipped = Counter[str]()
    for status in run_statuses(runs):
        # Not even named: nobody expects anything of it to go.
        if status.is_alive and status.job:
            continue
        inode = _guarded_inode(status.run.path)
        if not _is_own(status.run.path, top):
            skipped["run(s) of other users"] += 1
        elif inode is None:
            skipped["run(s) that others can have written: remove them yourself"] += 1
        elif status.elsewhere and not status.is_sure:
            skipped["run(s) of other clusters or hosts: clean them there"] += 1
        elif not status.is_sure:
            skipped["run(s) whose cluster does not report the state of their jobs"] += 1
        else:
            checkpoints = RunDir(status.run.path).checkpoints
            of_run = list(_of_kinds(_in_run(status, older_s), kinds))
            # Another folder has its name by now: these are not what was examined.
            if _guarded_inode(status.run.path) != inode:
                continue
            if trusted.is_open_to_renames(checkpoints):
                of_run = [each for each in of_run if each.path.parent != checkpoints]
                skipped[
                    "`checkpoints` that lead to where others can rename: remove them yourself"
                ] += 1
            candidates += of_run
            if checkpoints.is_symlink():
                skipped[
                    "`checkpoints` that are links: what slurmft has not made there"
                ] += 1
    leftovers = [*_named("leftovers", top, removal.ASIDE, _LEFT)]
    # Others may have given these names, or that of a folder above, to what is this user's.
    can_others_rename = trusted.renaming_in(top) is not None
    if can_others_rename or trusted.is_open_to_renames(top):
        if leftovers and "leftovers" in kinds:
            where = f"in {str(top)!r}, where others can rename"
            skipped[f"leftover(s) {where}: remove them yourself"] = len(leftovers)
        leftovers = []
    outside = [*leftovers, *_in_shared_caches(older_s)]
    # Others write into a shared folder of runs, and into a shared cache.
    for candidate in _of_kinds(outside, kinds):
        if _is_own(candidate.path, candidate.path):
            candidates.append(candidate)
    # Sizes last: each costs a walk through a folder, and most candidates are dropped above.
    items: list[Item] = []
    progress = ProgressLine()
    for candidate in candidates:
        progress.show(f"counting bytes: {len(items)} of {len(candidates)} things")
        items.append(_item(candidate))
    progress.clear()
    left_out = resolve.problem_lines(problems)
    for reason, count in skipped.items():
        left_out.append(f"{count} {reason}")
    return Plan(items, left_out)


def _item(candidate: _Candidate) -> Item:
    return Item(
        path=candidate.path,
        kind=candidate.kind,
        why=candidate.why,
        bytes=size_of(candidate.path),
        form=candidate.form,
        # `remove` compares it again after the rename.
        inode=candidate.inode,
    )


def _in_shared_caches(older_s: float) -> Iterator[_Candidate]:
    for cache in hooks.shared_caches():
        for path, idle_s in cache.unused(older_s):
            idle_days = idle_s / 86400
            why = f"no run has used it for {idle_days:.0f} days"
            # Under this name an entry is written, until it is whole.
            if path.name.startswith("."):
                why = _LEFT
            # The cache has chosen it by its name.
            form = removal.exactly(path.name)
            yield _Candidate.of("token-cache", path, why, form)


def _of_kinds(
    candidates: Iterable[_Candidate], kinds: Sequence[str]
) -> Iterator[_Candidate]:
    """Yields what is of these kinds, without what is in a folder that goes as a whole."""
    # Candidates come in an order in which folders stand before what is in them: see `_in_run`.
    whole: list[Path] = []
    for candidate in candidates:
        is_below = any(folder in candidate.path.parents for folder in whole)
        if candidate.kind in kinds and not is_below:
            whole.append(candidate.path)
            yield candidate


def last_activity(status: RunStatus) -> float:
    """Returns when a run last recorded something or was submitted, in Unix seconds."""
    files = RunDir(status.run.path)
    # Each file is written at another moment of a run's life: the newest counts.
    paths = (files.config, files.records, files.job, files.attempt, files.path)
    times = [status.run.state.time]
    for path in paths:
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times)


def _is_own(path: Path, top: Path) -> bool:
    """Returns whether a path is this user's, and all between it and `top`: a link there may be
    another's, to what this user keeps elsewhere."""
    between = [folder for folder in path.parents if top in folder.parents]
    user = os.getuid()
    try:
        for each in (path, *between):
            if ownership.status(each, follow_symlinks=False).st_uid != user:
                return False
        return True
    # What cannot be looked at is not removed.
    except OSError:
        return False


def _guarded_inode(run: Path) -> int | None:
    """Returns the inode of a run of which nobody else can have written what makes it one; None:
    others can have, and its checkpoints and tokens may be other things of this user's."""
    try:
        return RunDir(run).inode_of_own()
    except (trusted.NotOwnError, OSError):
        return None


def remove(item: Item) -> str | None:
    """Removes an item, atomically for readers; returns the error, if any."""
    try:
        removal.remove(item.path, item.form, at_once=True, inode=item.inode)
    # Somebody else has removed it.
    except FileNotFoundError:
        return None
    except OSError as error:
        path = error.filename or str(item.path)
        return f"{path!r} could not be removed: {error.strerror or error}"
    return None


def remove_all(before: Plan, now: Plan) -> list[Item]:
    """Removes what may be removed both before and now: meanwhile a run may have been resumed.
    SlurmftError where some of it could not be removed; the rest is gone."""
    # Sizes and reasons may differ between the two plans.
    present = {(item.path, item.inode) for item in now.items}
    removed: list[Item] = []
    problems: list[str] = []
    for item in before.items:
        if (item.path, item.inode) in present:
            problem = remove(item)
            if problem:
                problems.append(problem)
            else:
                removed.append(item)
    if problems:
        raise SlurmftError("\n".join(problems), f"{len(removed)} other(s) were removed")
    return removed
