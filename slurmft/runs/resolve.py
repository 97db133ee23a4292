"""Which run a name means: a path, a --name, the first letters of a folder, a job's id, `last`."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from slurmft.core import site
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


def find(name: str, runs_dir: str | Path | None = None) -> RunDir:
    """The run that a name means.

    Args:
        name: a path; its --name, if no other run has that; a unique beginning of its folder's name;
            the id of its job; or `last`, the newest run of the user who asks.
        runs_dir: where to look; the site file's, or `runs`, where it is not given.
    """
    is_path = os.sep in name or name in ("", ".", "..") or name.startswith("~")
    if is_path or RunDir(absolute(name)).exists():
        return RunDir.open(name)
    top = folder(runs_dir)
    if name != LAST and RunDir(top / name).exists():  # a link to a run, too
        return RunDir(top / name)
    paths, problems = look(top)
    if name == LAST:
        return RunDir(_newest_own(top, paths))
    matches = matching(name, paths)
    if len(matches) == 1:
        return RunDir(matches[0])
    newest_first = sorted(matches or paths, key=submitted, reverse=True)
    names = [path.name for path in newest_first]
    if matches:
        distinct = names if len(set(names)) == len(names) else [str(path) for path in newest_first]
        raise UsageError(f"{len(names)} runs are called {name!r}", f"one of: {some(distinct)}")
    hint = f"the newest there: {some(names[:3])}" if names else "slurmft submit makes runs"
    if near := nearest(name, names):
        hint = f"did you mean {near}?"
    if problems:
        hint += f"; {len(problems)} folder(s) could not be read: {problems[0]}"
    raise UsageError(f"no run in {str(top)!r} is called {name!r}", hint)


def folder_of(given: str) -> str | Path:
    """What a folder, or a run's name where there is no such folder, stands for."""
    if os.sep in given or absolute(given).is_dir():
        return given
    return find(given).path


def folder(runs_dir: str | Path | None = None) -> Path:
    """The folder of run directories: the one given, else the site's, else `runs`."""
    return absolute(runs_dir or site.job_default("runs_dir"))


def look(top: Path) -> tuple[list[Path], list[str]]:
    """The runs in a folder, at any depth, by their names; and a line for every folder that could
    not be read.
    """
    if not top.is_dir():
        raise UsageError(
            f"there is no folder {str(top)!r}",
            "go to the folder where you submitted, or give --runs-dir DIR, or a run's path",
        )
    problems: list[str] = []
    paths = [path for _, path in scan.folders(top, problems)]
    return sorted(paths, key=lambda path: path.name), problems


def read_all(top: Path) -> tuple[list[MeasuredRun], list[str]]:
    """The runs in a folder by when they were submitted, and a line for what cannot be read."""
    paths, problems = look(top)
    runs = scan.read_each(sorted(paths, key=submitted), problems, with_environment=False)
    return runs, problems


def problem_line(problems: Sequence[str]) -> str:
    """What could not be read, in one line."""
    return problems[0] if len(problems) == 1 else f"{len(problems)} folders, such as: {problems[0]}"


def matching(name: str, paths: Sequence[Path]) -> list[Path]:
    """The runs of that very name; else those with that job; else those that were given that name;
    else those whose name so begins."""
    if exact := [path for path in paths if path.name == name]:
        return exact
    if is_job_id(name) and (of_job := [p for p in paths if RunDir(p).job_id() == name]):
        return of_job
    given = [path for path in paths if STAMP.split(path.name)[0] == name]
    return given or [path for path in paths if path.name.startswith(name)]


def _newest_own(top: Path, paths: Sequence[Path]) -> Path:
    """The run that this user submitted last."""
    own = [p for p in paths if (about := _stat(p)) and about.st_uid == os.getuid()]
    if not own:
        words = f"none of the {len(paths)} run(s)" if paths else "no run"
        hint = "give --runs-dir DIR, or a run's name"
        raise UsageError(f"{words} in {str(top)!r} is yours", hint)
    return max(own, key=submitted)


def submitted(path: Path) -> tuple[str, float]:
    """What sorts runs by when they were submitted, which their folders' names tell."""
    about = _stat(RunDir(path).config)
    made = about.st_mtime if about else 0.0
    stamp = STAMP.search(path.name)
    return stamp[1] if stamp else time.strftime("%Y%m%d-%H%M%S", time.localtime(made)), made


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
