"""The folder of a study, STUDIES_DIR/NAME: its lock and files, and the status of the runs in it.

It holds run directories in `runs/`, copies of the study file and of the published figures, and the
scripts and logs of job arrays in `arrays/`. No status is stored: run directories say to which cell
they belong, and at most two calls of Slurm's commands give the states of all their jobs.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from slurmft import locks
from slurmft.cluster.status import RunStatus, run_statuses
from slurmft.core import descent, filesystem, permissions
from slurmft.core.credentials import redact
from slurmft.core.errors import UsageError, one_line
from slurmft.core.files import parse_toml, read_text, write_text
from slurmft.core.filesystem import absolute
from slurmft.core.run_files import Metrics
from slurmft.core.trusted import NotOwnError
from slurmft.plugins.studies import spec
from slurmft.plugins.studies.spec import Cell, RepeatKey, Study
from slurmft.runs import records, scan
from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun

RUNS = "runs"
"""Name of the folder with a study's runs, in that of the study."""


class HeldError(UsageError):
    """Another command holds the lock of the study's folder."""


def folder_of(study: Study, studies_dir: str) -> Path:
    """Returns the folder of a study: the one that it was read from, or STUDIES_DIR/NAME."""
    if study.is_in_own_folder:
        return descent.pinned(study.path.parent)
    return descent.pinned(absolute(studies_dir)) / study.name


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds the folder of a study, or one in it, for whoever acts on what is there: the study's own
    link may lead to a disk where a group can write, and rename.

    Raises:
        NotOwnError: it is another user's, or others can write it.
        OSError: it cannot be opened.
    """
    with spec.STUDY.folder(folder) as opened, descent.held(folder, opened):
        yield


@contextlib.contextmanager
def exclusive(folder: Path, share_with_group: bool = False) -> Iterator[None]:
    """Holds and locks the study's folder for the block: no other command, on any node, submits or
    cancels meanwhile, and no other folder takes its place.

    What this process writes from then on is private, or readable for the group.

    Raises:
        HeldError: another command holds it.
        UsageError: the folder cannot be written, or locked.
        NotOwnError: it is another user's, or others can write it.
    """
    with contextlib.ExitStack() as stack:
        try:
            permissions.make_folder(folder, share_with_group, exist_ok=True)
            permissions.settle(share_with_group)
            # Run directories hold what jobs start: no other user may have put the folder there.
            stack.enter_context(held(folder))
            runs = descent.through(folder) / RUNS
            permissions.make_folder(runs, share_with_group, exist_ok=True)
            stack.enter_context(held(folder / RUNS))
            stack.enter_context(locks.hold(folder / ".lock"))
        except BlockingIOError as holder:
            raise HeldError(
                f"another `slurmft study run` or `cancel` is at work in {str(folder)!r}: {holder}",
                "wait until it ends, or end it there; slurmft study status shows its progress",
            ) from None
        except OSError as error:
            reason = filesystem.reason(error, folder)
            raise UsageError(
                f"cannot write and lock the study folder {str(folder)!r}: {reason}",
                "give one that you can write, on a file system with POSIX locks: --studies-dir",
            ) from None
        yield


def check_name(study: Study, folder: Path) -> None:
    """Raises UsageError if the folder belongs to another study."""
    copy = folder / spec.FILE
    try:
        name = parse_toml(read_text(copy)).get("name")
    except (OSError, ValueError):
        # A new folder, or an unreadable copy, which `keep_copies` writes anew.
        return
    if name != study.name:
        raise UsageError(
            f"{str(folder)!r} is the folder of the study {name!r}, not {study.name!r}",
            "give another --studies-dir, or another name in the study file",
        )


def keep_copies(study: Study, folder: Path) -> None:
    """Copies the study file, and the published tables that it names, to the study's folder."""
    # A study that was read from its folder is the copy.
    copy = folder / spec.FILE
    if study.path != copy:
        # The folder may be readable for the group, and a setting may hold a token.
        write_text(copy, redact(study.text))
    if study.published:
        published_copy = folder / study.published.name
        if study.published != published_copy:
            write_text(published_copy, read_text(study.published))


def discard_cut_off(folder: Path) -> None:
    """Removes run directories whose submission was killed before it noted a job.

    If a job was submitted nevertheless, it ends at once: its script is gone.
    """
    runs, _ = find_runs(folder)
    for run in runs:
        has_started = (
            run.state.state not in ("submitted", "unknown") or run.result is not None
        )
        # A run that this study has not submitted was put there by somebody: it stays.
        if has_started or not run.study:
            continue
        # The job's id is noted right after its submission: without one, there was none, or its
        # submitter was killed in between.
        files = RunDir(run.path)
        if not files.job_id():
            files.discard()


# --- the status of its runs ----------------------------------------------------------------------

STATES = ("finished", "running", "pending", "failed", "missing")
"""States of a repeat, the furthest first; a repeat has the furthest of its tries' states."""


@dataclass(slots=True)
class Repeat:
    """One repeat of a cell, with all its tries, oldest first."""

    cell: Cell
    number: int
    tries: list[RunStatus] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        """The key of the repeat within its study: cell and number."""
        return spec.key_of(self.cell), self.number

    @property
    def best(self) -> RunStatus | None:
        """The try that got furthest; of several, the last."""
        # Of equal ones, min() takes the first.
        newest_first = reversed(self.tries)
        return min(
            newest_first,
            key=lambda run: STATES.index(run.outcome),
            default=None,
        )

    @property
    def state(self) -> str:
        best = self.best
        if best is None:
            return "missing"
        return best.outcome

    @property
    def failures(self) -> int:
        """Tries that failed; one that was cancelled before it started does not count."""
        failed = [run for run in self.tries if run.outcome == "failed"]
        return sum(run.has_started for run in failed)


@dataclass(frozen=True, slots=True)
class StudyStatus:
    """The status of a study's runs, and what else is in its folder."""

    repeats: list[Repeat]
    others: list[RunStatus]
    """Runs of cells that the study file does not have, or of another study. Those that wait or run
    disturb measurements as well."""
    problems: list[str]
    """A line for every directory that could not be read."""

    def by_cell(self) -> list[tuple[Cell, list[Repeat]]]:
        """Returns every cell with its repeats, in the order of the study file."""
        groups: dict[str, tuple[Cell, list[Repeat]]] = {}
        for repeat in self.repeats:
            cell_key, _ = repeat.key
            _, members = groups.setdefault(cell_key, (repeat.cell, []))
            members.append(repeat)
        return list(groups.values())

    def tries(self) -> list[RunStatus]:
        """Returns the runs of all repeats."""
        tries: list[RunStatus] = []
        for repeat in self.repeats:
            tries += repeat.tries
        return tries

    def alive(self) -> list[RunStatus]:
        """Returns the runs whose jobs wait or run on this cluster, of this study file or not. Runs
        elsewhere disturb nothing here, and no job here can wait for their end."""
        runs = (*self.tries(), *self.others)
        alive = []
        for run in runs:
            if run.is_alive and run.job and not run.elsewhere:
                alive.append(run)
        return alive

    def count(self, state: str) -> int:
        """Returns how many repeats are in a state."""
        return sum(repeat.state == state for repeat in self.repeats)


def study_status(study: Study, folder: Path) -> StudyStatus:
    """Reads the runs in a study's folder, and asks for the states of their jobs."""
    runs, problems = find_runs(folder)
    # None is the key of a run of no study, which no repeat has.
    repeats: dict[RepeatKey | None, Repeat] = {}
    for number, cell in spec.rounds(study):
        repeat = Repeat(cell, number)
        repeats[repeat.key] = repeat
    others: list[RunStatus] = []
    for status in run_statuses(runs):
        entry = status.run.study
        key = spec.repeat_of(status.run)
        # A run of this study may be of a cell that its file no longer has; and one of another
        # study, which somebody put here, may be of a cell that this one has.
        if entry and entry.name == study.name and key in repeats:
            repeats[key].tries.append(status)
        else:
            others.append(status)
    return StudyStatus(list(repeats.values()), others, problems)


def own_runs(folder: Path) -> tuple[list[MeasuredRun], list[str]]:
    """Returns the runs in a study's folder whose jobs a command may end, and a line for each other
    one: what somebody else has written names a job of anybody's."""
    runs, problems = find_runs(folder)
    own = []
    for run in runs:
        try:
            RunDir(run.path).inode_of_own()
        except (NotOwnError, OSError) as error:
            problems.append(one_line(error))
            continue
        own.append(run)
    return own, problems


def find_runs(folder: Path) -> tuple[list[MeasuredRun], list[str]]:
    """Returns the runs in a study's folder, oldest first, and what could not be read."""
    top = folder / RUNS
    # Before the first submission there is no such folder, which `scan.find` takes for a mistake.
    if not top.is_dir():
        return [], []
    return scan.find([top], may_be_none=True)


class StepFacts(TypedDict):
    """Optimizer steps."""

    done: float
    total: float


def last_step(repeat: Repeat) -> StepFacts | None:
    """Returns the optimizer steps of a running repeat, done and in all; None where they are
    unknown."""
    best = repeat.best
    # What an earlier attempt recorded says nothing of a run that waits again.
    if best is None or best.outcome != "running":
        return None
    # Before its first step, and of a program of the user's own that records none, there is none.
    latest = records.latest(best.run.path)
    if latest.steps_done is None or latest.steps_total is None:
        return None
    return StepFacts(done=latest.steps_done, total=latest.steps_total)


class RepeatFacts(TypedDict):
    """A repeat of a cell of a study. All fields are there in any state."""

    cell: dict[str, Any]
    """Option -> value."""
    repeat: int
    state: str
    reason: str
    run: str | None
    """The directory of its best try."""
    job: str | None
    metrics: Metrics | None
    steps: StepFacts | None
    """Of a try that runs."""
    tries: list[str]
    """Run directories."""


class StudyFacts(TypedDict):
    """The status of a study."""

    name: str
    title: str
    folder: str
    totals: dict[str, int]
    """State -> how many repeats are in it."""
    repeats: list[RepeatFacts]
    other_runs: list[str]
    """Runs in the folder of the study that belong to none of its cells."""
    problems: list[str]
    """A line for everything that could not be read."""


def status_json(study: Study, folder: Path, status: StudyStatus) -> StudyFacts:
    """Returns the status of a study as `slurmft study status --json` prints it."""
    return StudyFacts(
        name=study.name,
        title=study.title,
        folder=str(folder),
        totals={state: status.count(state) for state in STATES},
        repeats=[_repeat_json(repeat) for repeat in status.repeats],
        other_runs=[str(other.run.path) for other in status.others],
        problems=status.problems,
    )


def _repeat_json(repeat: Repeat) -> RepeatFacts:
    fields = RepeatFacts(
        cell=repeat.cell,
        repeat=repeat.number,
        state=repeat.state,
        reason="",
        run=None,
        job=None,
        metrics=None,
        steps=last_step(repeat),
        tries=[str(status.run.path) for status in repeat.tries],
    )
    best = repeat.best
    if best:
        fields["reason"] = best.reason
        fields["run"] = str(best.run.path)
        fields["job"] = best.job
        if best.run.result:
            fields["metrics"] = best.run.result["metrics"]
    return fields
