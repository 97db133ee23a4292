"""Runs as they were measured: the contents of their directories, for tables, plots and models.

Nothing here needs torch, numpy or the version of slurmft that made a run: files are read as the
JSON that they are, and what cannot be read is named, never dropped.
"""

import math
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmft.core import descent, trusted
from slurmft.core.config import STAMP
from slurmft.core.decode import decode, decode_or_none, read
from slurmft.core.errors import UsageError
from slurmft.core.files import is_number, other_kind, parse_json, read_text
from slurmft.core.filesystem import absolute
from slurmft.core.options import flag
from slurmft.core.program import OWN, PREDICT, trained_by
from slurmft.core.run_files import (
    CHECKED_OF_JOB,
    AnyConfig,
    Environment,
    Provenance,
    SampleLimits,
    State,
    StudyEntry,
)
from slurmft.core.run_records import Epoch
from slurmft.core.terminal import ProgressLine
from slurmft.core.text import counted, shown, some
from slurmft.runs.records import R, RecordReader
from slurmft.runs.rundir import RunDir, unreadable


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One run: raw contents of its files, and what most readers ask of them.

    `slurmft.Run` is what users have: it reads the files at each question, and can act.
    """

    path: Path
    config: dict[str, Any]
    """config.json, as any version wrote it: program, job, submission."""
    submission: Provenance
    state: State
    result: dict[str, Any] | None
    """result.json; None: the run has not finished."""
    environment: Environment
    """What its ranks ran on; nothing of it before they have met."""

    @classmethod
    def read(cls, path: Path, with_environment: bool = True) -> "MeasuredRun":
        """Reads a run directory, with or without what its ranks ran on; UsageError where files
        cannot be read, or are not those of a run."""
        files = RunDir(path)
        try:
            config = parse_json(read_text(files.config))
            checked = decode(config, AnyConfig)
        except OSError as error:
            raise UsageError(unreadable(repr(str(files.config)), error)) from None
        except ValueError as error:
            problem = f"{str(files.config)!r} is not the configuration of a run"
            raise UsageError(f"{problem}: {shown(str(error))}") from None
        result = files.read_result()
        # A damaged result must not pass for a run that has not finished.
        if result is None and os.path.lexists(files.result):
            problem = f"{str(files.result)!r} is not the result of a run"
            kind = other_kind(files.result)
            if kind is not None:
                problem += f": it is {kind}"
            raise UsageError(problem)
        environment = Environment()
        if with_environment:  # it has an entry for every rank: lists of runs do without
            environment = files.read_environment()
        submission = checked["submission"]
        return cls(path, config, submission, files.get_state(), result, environment)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_finished(self) -> bool:
        return self.result is not None and self.state.state == "finished"

    @property
    def has_ended(self) -> bool:
        return self.state.has_ended

    @property
    def study(self) -> StudyEntry | None:
        """The study that it belongs to, as `slurmft study run` wrote it."""
        return decode_or_none(self.submission.study, StudyEntry)

    @property
    def is_own_program(self) -> bool:
        """It is a run of a program of the user's own, not a training of slurmft's."""
        kind = self.config["program"]["kind"]
        return bool(kind == OWN)

    @property
    def is_prediction(self) -> bool:
        """It is a run of `slurmft predict`, which measures no training."""
        return bool(self.config["program"]["kind"] == PREDICT)

    @property
    def settings(self) -> dict[str, Any]:
        """The options of its program."""
        program = self.config["program"]
        settings: dict[str, Any] = program.get("settings", {})
        return settings

    def value(self, field: str) -> Any:
        """A field of the configuration, of its program or its job; None where it has none such."""
        value_of_job = self.config["job"].get(field)
        # Settings may be anybody's, and hold anything.
        if field in CHECKED_OF_JOB:
            return value_of_job
        return self.settings.get(field, value_of_job)

    def number(self, field: str) -> Any:
        """A field of the configuration that is a number; None where it is not set.

        Raises:
            TypeError: it is something else, in a file that was edited.
        """
        value = self.value(field)
        if value is not None and not is_number(value):
            raise TypeError(f"{field} is no number")
        return value

    @property
    def nodes(self) -> int | None:
        """Its number of nodes; of --nodes MIN-MAX, that of its last attempt."""
        most: int | None = self.value("nodes")
        if most is None:
            return None
        return RunDir(self.path).attempt_nodes(most, self.value("min_nodes"))

    @property
    def held_samples(self) -> dict[str, int]:
        """Option -> the most samples at a time that memory has held, of options that asked for
        more."""
        limits = read(RunDir(self.path).memory, SampleLimits) or SampleLimits()
        sizes = {
            "batch_size": limits.train_samples,
            "eval_batch_size": limits.evaluate_samples,
        }
        held = {}
        for name, samples in sizes.items():
            requested = self.value(name)
            if samples and is_number(requested) and samples < requested:
                held[name] = samples
        return held

    def held_in_words(self) -> str:
        """Returns words such as "2 samples at a time of --batch-size 8"; "" where memory has held
        all."""
        notes = []
        for name, samples in self.held_samples.items():
            notes.append(
                f"{counted(samples, 'sample')} at a time of {flag(name)} {self.value(name)}"
            )
        return some(notes)

    @property
    def code(self) -> str:
        """The code that submitted it: slurmft's version, and the commit where there was one."""
        version = self.submission.slurmft or "?"
        git = self.submission.git
        if git is None or not git.commit:
            return version
        suffix = ""
        if git.dirty:
            suffix = "-dirty"
        commit = git.commit[:10]
        return f"{version} {commit}{suffix}"

    @property
    def hosts(self) -> list[str]:
        """Where its ranks ran, in the order of the ranks, each once."""
        return self.environment.hosts

    @property
    def evaluations(self) -> int:
        """Evaluations that it made, of the whole validation data each; at least one."""
        config = self.settings
        epochs = config.get("epochs")
        may_end_early = config.get("early_stopping") or config.get("max_steps")
        # Runs of earlier versions lack it: they have one evaluation an epoch, too.
        is_each_epoch = config.get("evaluate_every", "epochs:1") == "epochs:1"
        if epochs and is_each_epoch and not may_end_early:
            return int(epochs)
        # A set: after a requeue an evaluation may be recorded again.
        evaluated_epochs = {record.epoch for record in self.records(Epoch)}
        return max(1, len(evaluated_epochs))

    @property
    def test_samples(self) -> int:
        """Samples of its test split, which was evaluated once, at the end; 0: there was none."""
        value: Any = (self.result or {}).get("test_samples")
        # A result that was edited may have anything there.
        return int(value) if is_number(value) else 0

    @property
    def validation_samples(self) -> float:
        """Samples of one evaluation of the validation data."""
        result = self.result or {}
        # A result counts the samples of all its evaluations, that of the test split among them.
        in_all = result["evaluate_samples"] - self.test_samples
        return float(in_all / self.evaluations)

    def records(self, kind: type[R]) -> Iterator[R]:
        """Yields the records of a kind; steps that were done again come twice."""
        return RecordReader(RunDir(self.path).records).read(kind)


def trainings(runs: Sequence[MeasuredRun], name: str) -> list[MeasuredRun]:
    """Returns the runs that are no predictions.

    Args:
        name: of the folders that they are in, for messages.

    Raises:
        UsageError: all of them are predictions.
    """
    measured = [run for run in runs if not run.is_prediction]
    if runs and not measured:
        raise UsageError(
            f"{name!r} holds no training, but {len(runs)} prediction(s)",
            f"give the run that trained the model: {trained_by(runs[-1].settings)}",
        )
    return measured


def what_now(runs: Sequence[MeasuredRun]) -> str:
    """Returns what to do about runs of which none has finished, by the newest one's record."""
    newest = max(runs, key=lambda run: run.submission.time)
    path = shlex.quote(str(newest.path))
    if newest.has_ended:
        return f"resume one: slurmft resume {path}"
    return f"wait for one: slurmft follow {path}"


def find(
    paths: Sequence[str | Path], may_be_none: bool = False
) -> tuple[list[MeasuredRun], list[str]]:
    """The runs in run directories, or in folders that hold such at any depth, oldest first; and a
    line for every directory that could not be read.

    Links are followed; a run that can be reached in several ways is one run.

    Args:
        paths: the directories.
        may_be_none: folders without runs are no error.

    Raises:
        UsageError: a path is no folder, or no run can be read.
    """
    problems: list[str] = []
    paths_by_place: dict[str, Path] = {}
    hint = "give a run directory, or a folder of some"
    for path in paths:
        top = absolute(path)
        if not top.is_dir():
            raise UsageError(f"{str(path)!r} is not a folder", hint)
        # A folder that cannot be read has its own line: "holds no run" would not be known.
        problem_count = len(problems)
        below = dict(folders(top, problems))
        is_read = len(problems) == problem_count
        if not below and is_read and not may_be_none:
            raise UsageError(f"{str(path)!r} holds no run", hint)
        for place, run_path in below.items():
            paths_by_place.setdefault(place, run_path)
    runs = read_each(paths_by_place.values(), problems)
    if paths and not runs and not may_be_none:
        raise UsageError(f"no run can be read: {problems[0]}", hint)
    return sorted(runs, key=_submission_order), problems


def _submission_order(run: MeasuredRun) -> tuple[str, str]:
    # The path decides between two of one second: reports must not change from call to call.
    return run.submission.time, str(run.path)


def read_each(
    paths: Iterable[Path], problems: list[str], with_environment: bool = True
) -> list[MeasuredRun]:
    """The runs in run directories; `problems` takes a line for each that cannot be read."""
    runs = []
    progress = ProgressLine()
    for number, path in enumerate(paths, start=1):
        progress.show(f"reading runs: {number:,}")
        try:
            runs.append(MeasuredRun.read(path, with_environment))
        except UsageError as error:
            problems.append(error.message)
    progress.clear()
    return runs


def folders(top: Path, problems: list[str]) -> Iterator[tuple[str, Path]]:
    """Real path and path of the run directories in a folder, at any depth that people use; links
    are followed, and what is below a run is not searched. `problems` takes a line for every folder
    that cannot be read."""
    # By its real path, a run that links lead to several times is one run, and links may lead back.
    seen = set()
    progress = ProgressLine()
    unread = [(top, 0, os.path.realpath(top), _Patience(top, math.inf))]
    while unread:
        folder, depth, place, patience = unread.pop()
        if place in seen:
            continue
        seen.add(place)
        progress.show(f"searching {str(top)!r} for runs: {len(seen):,} folders")
        try:
            if _is_run(folder):
                yield place, folder
            elif patience.is_over(problems):
                continue
            elif depth < _MOST_DEPTH:
                # The first comes out first.
                for below, is_link in reversed(_below(folder)):
                    place_below = os.path.join(place, below.name)
                    if is_link:
                        place_below = os.path.realpath(below)
                    patience_below = patience
                    if not (patience.is_limited or trusted.is_own(below)):
                        patience_below = _Patience(below, _MOST_FOLDERS_OF_OTHERS)
                    unread.append((below, depth + 1, place_below, patience_below))
            else:
                problems.append(
                    f"{str(folder)!r} is not searched: it is {depth} folders down"
                )
        except OSError as error:
            problems.append(f"{str(folder)!r} cannot be read: {error.strerror}")
    progress.clear()


_MOST_FOLDERS_OF_OTHERS = 1000
"""How many folders without a run are searched of one that somebody else has made: a link of theirs
may lead to all that the machine has."""


@dataclass(slots=True)
class _Patience:
    """How many more folders without a run are searched in one, and below it."""

    folder: Path
    left: float

    @property
    def is_limited(self) -> bool:
        return self.left < math.inf

    def is_over(self, problems: list[str]) -> bool:
        """Counts a folder without a run; adds a line for the first one that is not searched."""
        self.left -= 1
        if self.left == -1:
            problems.append(
                f"{str(self.folder)!r}, which another user has made, is not searched to its end: "
                f"{_MOST_FOLDERS_OF_OTHERS:,} folders in it hold no run"
            )
        return self.left < 0


def newest_first(runs_dir: Path) -> list[Path]:
    """Returns the folders in a folder that are named as runs are, the newest first."""
    try:
        names = os.listdir(runs_dir)
    except OSError:  # no run has made it yet
        return []
    stamps = {}
    for name in names:
        match = STAMP.search(name)
        if match is not None:
            stamps[name] = match[0]
    newest = sorted(stamps, key=lambda name: stamps[name], reverse=True)
    return [runs_dir / name for name in newest]


_MOST_DEPTH = 32
"""Of folders in each other: in thousands, each is slower than the one before."""


def _is_run(folder: Path) -> bool:
    """Returns whether a folder has a configuration, were it one that cannot be read: such a run is
    named."""
    try:
        # lstat: a link that leads nowhere is a configuration, too, and one that cannot be read.
        descent.through(RunDir(folder).config).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _below(folder: Path) -> list[tuple[Path, bool]]:
    """Returns the folders in a folder that may hold runs, and whether each is a link."""
    below = []
    with os.scandir(descent.through(folder)) as entries:
        for entry in entries:
            # `slurmft clean` gives a run that it removes a name with a dot.
            if not entry.name.startswith(".") and _is_folder(entry):
                below.append(entry)
    # Links last: a run that has a link beside it comes by its own name.
    below.sort(key=lambda entry: (entry.is_symlink(), entry.name))
    return [(folder / entry.name, entry.is_symlink()) for entry in below]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False
