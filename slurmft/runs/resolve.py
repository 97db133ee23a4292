"""Which run a name means: a path, a --name, the first letters of a folder, a job's id, `last`."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from slurmft.core import descent, ownership, site
from slurmft.core.config import STAMP
from slurmft.core.errors import UsageError, nearest
from slurmft.core.filesystem import absolute
from slurmft.core.text import some
from slurmft.runs import scan
from slurmft.runs.job_ids import is_job_id
from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun

LAST = "last"
"""The name of the newest of one's own runs."""
_MOST_PROBLEMS = 20
"""Most folders that cannot be read of which each has a line."""


def find(name: str, runs_dir: str | Path | None = None) -> RunDir:
    """Returns the run that a name means.

    Args:
        name: a path; its --name, if no other run has that; a unique beginning of its folder's name;
            the id of its job; or `last`, the newest run of the user who asks.
        runs_dir: where to look; the site file's, or `runs`, where it is not given.
    """
    # "..": a folder too, without a slash in it. No shell is asked to expand "~".
    is_folder = name in ("", ".", "..")
    is_path = os.sep in name or is_folder or name.startswith("~")
    if is_path or RunDir(absolute(name)).exists():
        return RunDir.open(name)
    top = folder(runs_dir)
    # A folder by that very name needs no search of all. It may be a link to a run, too.
    if name != LAST and RunDir(top / name).exists():
        return RunDir(descent.pinned(top / name))
    paths, problems = look(top)
    if name == LAST:
        return RunDir(descent.pinned(_newest_own(top, paths)))
    matches = matching(name, paths)
    if len(matches) == 1:
        return RunDir(descent.pinned(matches[0]))
    if matches:
        raise _ambiguous(name, matches)
    raise _unknown(name, top, paths, problems)


def _ambiguous(name: str, matches: Sequence[Path]) -> UsageError:
    newest_first = sorted(matches, key=submitted, reverse=True)
    names = [path.name for path in newest_first]
    # Runs in two subfolders may have one name.
    if len(set(names)) < len(names):
        names = [str(path) for path in newest_first]
    message = f"{len(matches)} runs are called {name!r}"
    return UsageError(message, f"one of: {some(names)}")


def _unknown(
    name: str, top: Path, paths: Sequence[Path], problems: Sequence[str]
) -> UsageError:
    newest_first = sorted(paths, key=submitted, reverse=True)
    names = [path.name for path in newest_first]
    # Of the hints, the last that applies says most: a near name, else the newest runs.
    hint = "slurmft submit makes runs"
    if names:
        hint = f"the newest there: {some(names[:3])}"
    near = nearest(name, names)
    if near:
        hint = f"did you mean {near}?"
    if problems:
        hint += f"; {len(problems)} folder(s) could not be read: {problems[0]}"
    return UsageError(f"no run in {str(top)!r} is called {name!r}", hint)


def folder_of(name: str) -> str | Path:
    """Returns a folder as it is, and the folder of a run for the name of one."""
    if os.sep in name or absolute(name).is_dir():
        return name
    return find(name).path


def folder(runs_dir: str | Path | None = None) -> Path:
    """Returns the folder of run directories: the argument, else the site's, else `runs`."""
    return absolute(runs_dir or site.job_default("runs_dir"))


def look(top: Path) -> tuple[list[Path], list[str]]:
    """Returns the runs in a folder, at any depth, by their names; and a line for every folder that
    could not be read."""
    if not top.is_dir():
        raise UsageError(
            f"there is no folder {str(top)!r}",
            "go to the folder where you submitted, or give --runs-dir DIR, or a run's path",
        )
    problems: list[str] = []
    paths = [path for _, path in scan.folders(top, problems)]
    # By their names alone: in which subfolder a run lies does not matter.
    by_name = sorted(paths, key=lambda path: path.name)
    return by_name, problems


def read_all(top: Path) -> tuple[list[MeasuredRun], list[str]]:
    """Returns the runs in a folder, oldest submission first; and a line for every folder that
    cannot be read."""
    paths, problems = look(top)
    oldest_first = sorted(paths, key=submitted)
    runs = scan.read_each(oldest_first, problems, with_environment=False)
    return runs, problems


def problem_lines(problems: Sequence[str]) -> list[str]:
    """Returns a line for each folder that could not be read; of very many, for the first ones, and
    how many more there are."""
    lines = list(problems[:_MOST_PROBLEMS])
    more = len(problems) - len(lines)
    if more:
        lines.append(f"{more:,} more; slurmft list --json has all")
    return lines


def matching(name: str, paths: Sequence[Path]) -> list[Path]:
    """Returns the runs of that very name; else those with that job; else those that have it as
    their --name; else those whose name begins with it."""
    exact = [path for path in paths if path.name == name]
    if exact:
        return exact
    if is_job_id(name):
        # Each run's job.json is read: only now, for a name that can be an id.
        of_job = [path for path in paths if RunDir(path).job_id() == name]
        if of_job:
            return of_job
    # A folder is called NAME-TIME-RANDOM.
    named = []
    for path in paths:
        run_name, *_ = STAMP.split(path.name)
        if run_name == name:
            named.append(path)
    if named:
        return named
    return [path for path in paths if path.name.startswith(name)]


def _newest_own(top: Path, paths: Sequence[Path]) -> Path:
    """Returns the run that this user submitted last."""
    # The folder may be a group's, in which `last` must not be a colleague's run.
    own_paths = []
    for path in paths:
        if _owner(path) == os.getuid():
            own_paths.append(path)
    if not own_paths:
        which = "no run"
        if paths:
            which = f"none of the {len(paths)} run(s)"
        hint = "give --runs-dir DIR, or a run's name"
        raise UsageError(f"{which} in {str(top)!r} is yours", hint)
    return max(own_paths, key=submitted)


def submitted(path: Path) -> tuple[str, float]:
    """Returns a key that sorts runs by their submission, which is in the names of their folders."""
    changed_at = 0.0
    about = _stat(RunDir(path).config)
    if about is not None:
        changed_at = about.st_mtime
    # The time in the name has whole seconds; of two runs in one second the file's time decides. A
    # folder that was renamed may have no time in its name.
    stamp = STAMP.search(path.name)
    if stamp:
        return stamp[1], changed_at
    local_time = time.localtime(changed_at)
    return time.strftime("%Y%m%d-%H%M%S", local_time), changed_at


def _owner(path: Path) -> int | None:
    try:
        return ownership.status(path).st_uid
    except OSError:  # removed meanwhile, or closed to this user
        return None


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:  # removed meanwhile, or closed to this user
        return None
