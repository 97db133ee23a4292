"""Two runs that write the same files, at once or one after another: of programs, each would take
the other's checkpoints and results for its own; of predictions, one would fail at its end."""

import contextlib
import os
import shlex
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmft.core.config import RunConfig
from slurmft.core.errors import SlurmftWarning, UsageError
from slurmft.core.options import flag
from slurmft.core.program import OWN, PREDICT
from slurmft.core.run_files import State
from slurmft.core.text import ago, counted
from slurmft.core.trusted import NotOwnError
from slurmft.runs import request
from slurmft.runs.rundir import RunDir

if TYPE_CHECKING:
    from slurmft.cluster.status import RunStatus
    from slurmft.runs.scan import MeasuredRun

_FOLDER = "checkpoint_dir"
"""Option of the folder of checkpoints."""
_MOST_WAIT_S = 60.0
"""How long a submission waits for another one, which may hang or be suspended."""
_MOST_RUNS = 1000
"""How many runs are read to name the one that has written a checkpoint: 0.3 ms each."""


@contextlib.contextmanager
def submitting(config: RunConfig, run: RunDir | None = None) -> Iterator[None]:
    """Checks a run, as `check` does, and lets no other such run be submitted within: of two that
    are submitted at once, neither would see the other."""
    with contextlib.ExitStack() as stack:
        if _may_share(config):
            # Another user's file of that name keeps nobody from submitting.
            with contextlib.suppress(NotOwnError, OSError):
                lock = Path(config.job.runs_dir, f".outputs-{os.getuid()}")
                stack.enter_context(request.alone_with(lock, _MOST_WAIT_S))
        check(config, run)
        yield


def check(config: RunConfig, run: RunDir | None = None) -> None:
    """Checks that no run which has not ended writes what this one is to write; and, of one that
    resumes, that no other one has written it since.

    Only the user's own runs in the same folder of runs are known. Of those of a study, the study
    itself makes sure that they differ.

    Args:
        run: the one that resumes.

    Raises:
        UsageError: another run writes the same file or folder, or has written it.
    """
    if not _may_share(config):
        return
    places = _outputs(config.program.kind, config.program.settings)
    from slurmft.cluster.status import run_statuses  # 10 ms, for few jobs

    sharing = []
    options_shared = []
    for other in _others(Path(config.job.runs_dir), run):
        name = _shared(places, _outputs_of(other))
        if name is not None:
            sharing.append(other)
            options_shared.append(name)
    # Asked about these alone: most submissions share nothing, and need no answer from Slurm.
    statuses = run_statuses(sharing)
    for status, name in zip(statuses, options_shared, strict=True):
        if status.is_alive:
            _refuse(status, f"{flag(name)} {places[name]!r}", config.program.kind)
        if run is not None:
            _refuse_files_of(status.run, config, run)
    if run is None:
        _warn_of_earlier_checkpoints(config)


def _may_share(config: RunConfig) -> bool:
    """Returns whether a run writes files that another one may write, too."""
    if config.submission.study is not None:
        return False
    return bool(_outputs(config.program.kind, config.program.settings))


def _refuse(status: "RunStatus", output: str, kind: str) -> None:
    """Raises UsageError for an output that a run writes, too; warns where that run may have ended.

    Args:
        status: of that run.
        output: the option and its value.
        kind: of the program that is refused.
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
    effect = "each would take the other's for its own"
    if kind == PREDICT:
        effect = "only one of them could write it"
    raise UsageError(
        f"{problem}: {effect}",
        f"give another one; or wait for that run: slurmft follow {run}; or end it: slurmft cancel "
        f"{run}",
    )


def _refuse_files_of(other: "MeasuredRun", config: RunConfig, run: RunDir) -> None:
    """Raises UsageError where a run that resumes would take files for its own that another one has
    written since this one was submitted last."""
    # 8 ms: no other program needs it
    from slurmft.programs.description import OwnProgram

    program = OwnProgram.of(config.program)
    began_at = _began_since(other.state, _submitted_at(run))
    if program is None or began_at is None:
        return
    since_ns = int(began_at * 1e9)
    # A time of the files themselves: the clock of their server may be another one.
    marked_ns = other.settings.get("since_ns", 0)
    if marked_ns > program.since_ns:
        since_ns = marked_ns
    places = _outputs_of(other).values()
    # What cannot be read here is taken by nobody here.
    with contextlib.suppress(OSError):
        for path in program.written_after(since_ns):
            # The others are this run's: what it wrote before it was submitted last.
            if not any(_overlap(os.path.realpath(path), place) for place in places):
                continue
            raise UsageError(
                f"{str(path)!r} was written by the run {other.name!r} after this one was "
                "submitted: it would be taken for this run's",
                "move what that run has written elsewhere, then resume; or start anew: slurmft run",
            )


def _warn_of_earlier_checkpoints(config: RunConfig) -> None:
    """Warns where --checkpoint-dir of a new run holds checkpoints: its program may overwrite them,
    or take them for its own."""
    # 8 ms: no other program needs it
    from slurmft.programs import checkpoints
    from slurmft.programs.description import OwnProgram

    program = OwnProgram.of(config.program)
    if program is None:
        return
    earlier: list[Path] = []
    # What cannot be read here is taken by nobody here.
    with contextlib.suppress(OSError):
        earlier = program.earlier_checkpoints()
    if not earlier:
        return
    newest = earlier[0]
    amount = counted(len(earlier), "checkpoint")
    age = ago(checkpoints.written_ns(newest) / 1e9)
    lines = [
        f"{flag(_FOLDER)} {program.checkpoint_dir!r} holds {amount} already; the newest, "
        f"{newest.name!r}, was written {age}",
        "this run starts from its beginning; its program may overwrite them, or take them for its "
        "own",
    ]
    cure = "to keep them, give this run another folder, here and in the program's arguments"
    last_run = _newest_run_in(str(newest.parent), Path(config.job.runs_dir))
    if last_run is not None:
        state = last_run.state.state
        lines[0] += f"; the last run with this folder is {last_run.name!r} ({state})"
        if state != "finished":
            cure += f"; to go on with that run: slurmft resume {shlex.quote(str(last_run.path))}"
    lines.append(f"hint: {cure}")
    warnings.warn("\n".join(lines), SlurmftWarning, stacklevel=3)


def _newest_run_in(folder: str, runs_dir: Path) -> "MeasuredRun | None":
    """Returns the newest of the user's own runs whose folder of checkpoints is this one, or in or
    above it; None: none of the newest ones is."""
    from slurmft.runs import scan

    place = os.path.realpath(folder)
    for path in scan.newest_first(runs_dir)[:_MOST_RUNS]:
        if not RunDir(path).is_own():
            continue
        for run in scan.read_each([path], [], with_environment=False):
            other = _outputs_of(run).get(_FOLDER)
            if other is not None and _overlap(place, other):
                return run
    return None


def _submitted_at(run: RunDir) -> float:
    """Returns when a run was submitted last, in Unix seconds."""
    times = [each.time for each in run.get_state().history if each.state == "submitted"]
    return max(times, default=0.0)


def _began_since(state: State, time: float) -> float | None:
    """Returns when a run first started after a time; None: it has not."""
    for each in state.history:
        if each.state == "running" and each.time > time:
            return each.time
    return None


def _others(runs_dir: Path, run: RunDir | None) -> "Iterator[MeasuredRun]":
    """Yields the user's own runs in a folder that have not recorded their end, but for the run that
    resumes; and those that have run since that one was submitted."""
    from slurmft.runs import scan

    left_out = ""
    submitted_at = 0.0
    if run is not None:
        left_out = os.path.realpath(run.path)
        submitted_at = _submitted_at(run)
    for path in scan.newest_first(runs_dir):
        if os.path.realpath(path) == left_out:
            continue
        state = RunDir(path).get_state()
        is_over = state.has_ended
        if run is not None and _began_since(state, submitted_at) is not None:
            is_over = False
        # What others have written into a shared folder refuses nobody's work.
        if is_over or not RunDir(path).is_own():
            continue
        yield from scan.read_each([path], [], with_environment=False)


def _outputs_of(run: "MeasuredRun") -> dict[str, str]:
    return _outputs(run.config["program"]["kind"], run.settings)


def _outputs(kind: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the real path of each file and folder of a program's that no other run may write, by
    the name of its option. Trainings write into their runs alone."""
    keys: tuple[str, ...] = ()
    if kind == OWN:
        # 8 ms: no other program needs it
        from slurmft.programs.description import OWN_FILES

        keys = OWN_FILES
    elif kind == PREDICT:
        keys = ("output",)
    places = {}
    folder = str(settings.get("folder", ""))
    for key in keys:
        # A study without such a file has "" there.
        if settings.get(key):
            places[key] = os.path.realpath(os.path.join(folder, settings[key]))
    return places


def _shared(places: Mapping[str, str], others: Mapping[str, str]) -> str | None:
    """Returns the option whose place another program writes, too; None: they share nothing."""
    for name, place in places.items():
        if place in others.values():
            return name
    # What lies in a folder of checkpoints may be taken for one: also the folder of another run.
    folder = places.get(_FOLDER)
    other_folder = others.get(_FOLDER)
    if folder and other_folder and _overlap(folder, other_folder):
        return _FOLDER
    return None


def _overlap(path: str, other: str) -> bool:
    """Returns whether two paths are the same, or one is in the other."""
    return os.path.commonpath([path, other]) in (path, other)
