"""Two runs of programs that write the same files at once: each would take the other's checkpoints
and results for its own."""

import os
import shlex
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmft.core.config import RunConfig
from slurmft.core.errors import SlurmftWarning, UsageError
from slurmft.core.options import flag
from slurmft.core.program import OWN
from slurmft.runs.rundir import RunDir

if TYPE_CHECKING:
    from slurmft.cluster.status import RunStatus
    from slurmft.runs.scan import MeasuredRun


def check(config: RunConfig, run: RunDir | None = None) -> None:
    """Checks that no run which has not ended writes what this one is to write.

    Only the user's own runs in the same folder of runs are known. Of those of a study, the study
    itself makes sure that they differ.

    Args:
        run: the one that resumes.

    Raises:
        UsageError: another run writes the same file or folder.
    """
    if config.program.kind != OWN or config.submission.study is not None:
        return
    places = _outputs(config.program.settings)
    runs_dir = Path(config.job.runs_dir)
    if not places or not runs_dir.is_dir():
        return
    from slurmft.cluster.status import run_statuses  # 10 ms, for few jobs

    sharing = []
    options_shared = []
    for other in _unfinished(runs_dir, run):
        name = _shared(places, _outputs(other.settings))
        if name is not None:
            sharing.append(other)
            options_shared.append(name)
    # Asked about these alone: most submissions share nothing, and need no answer from Slurm.
    statuses = run_statuses(sharing)
    for status, name in zip(statuses, options_shared, strict=True):
        if status.is_alive:
            _refuse(status, f"{flag(name)} {places[name]!r}")


def _refuse(status: "RunStatus", output: str) -> None:
    """Raises UsageError for an output that a run writes, too; warns where that run may have ended.

    Args:
        status: of that run.
        output: the option and its value.
    """
    problem = (
        f"{output} is also that of the run {status.run.name!r}, which is "
        f"{status.elsewhere or status.state}"
    )
    # It may have ended long ago, where this machine cannot see it; or its submission was killed,
    # and no job will ever end it.
    if not status.is_sure or not status.job:
        warnings.warn(problem, SlurmftWarning, stacklevel=3)
        return
    run = shlex.quote(str(status.run.path))
    raise UsageError(
        f"{problem}: each would take the other's for its own",
        f"give another one; or wait for that run: slurmft follow {run}; or end it: slurmft cancel "
        f"{run}",
    )


def _unfinished(runs_dir: Path, run: RunDir | None) -> "Iterator[MeasuredRun]":
    """Yields the user's own runs of programs in a folder that have not recorded their end, but for
    the run that resumes."""
    from slurmft.runs import scan

    left_out = ""
    if run is not None:
        left_out = os.path.realpath(run.path)
    for path in scan.newest_first(runs_dir):
        is_left_out = os.path.realpath(path) == left_out
        # What others have written into a shared folder refuses nobody's work.
        if (
            is_left_out
            or RunDir(path).get_state().has_ended
            or not RunDir(path).is_own()
        ):
            continue
        for other in scan.read_each([path], [], with_environment=False):
            if other.is_own_program:
                yield other


def _outputs(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the real path of each file and folder of a program's that no other run may write, by
    the name of its option."""
    # 8 ms: no other program needs it
    from slurmft.programs.description import OWN_FILES

    places = {}
    folder = str(settings.get("folder", ""))
    for key in OWN_FILES:
        # A study without such a file has "" there.
        if settings.get(key):
            places[key] = os.path.realpath(os.path.join(folder, settings[key]))
    return places


def _shared(places: Mapping[str, str], others: Mapping[str, str]) -> str | None:
    """Returns the option whose place another program writes, too; None: they share nothing."""
    for name, place in places.items():
        if place in others.values():
            return name
    return None
