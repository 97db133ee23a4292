"""slurmft for scripts and notebooks: `from slurmft import Run, run, submit`.

They call the functions that the commands call, and import no torch. `submit` is the trainer's:
`slurmft.train.api`.
"""

import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmft.cluster import facts, launcher
from slurmft.cluster import follow as cluster_follow
from slurmft.cluster import submit as cluster_submit
from slurmft.cluster import wait as cluster_wait
from slurmft.cluster.fact_types import RunFacts
from slurmft.cluster.status import run_statuses
from slurmft.core import site
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import UsageError
from slurmft.core.options import Option, options, unknown_option
from slurmft.core.program import PREDICT, trained_by
from slurmft.core.terminal import plain
from slurmft.programs import submission
from slurmft.programs.description import FLAGS
from slurmft.runs import records as runs_records
from slurmft.runs import resolve
from slurmft.runs.log_text import LogText
from slurmft.runs.logfiles import Choice
from slurmft.runs.records import RecordReader
from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun
from slurmft.show.progress import Progress


class Run:
    """A run that was submitted: its status and results, and what can be done with it.

    Nothing is cached: every call reads the run directory, and asks the cluster if necessary.
    """

    def __init__(
        self,
        name: str | os.PathLike[str] = resolve.LAST,
        runs_dir: str | Path | None = None,
    ) -> None:
        """Opens an existing run.

        Args:
            name: its path; its `name`, if no other run has that; a unique beginning of its
                folder's name; the id of its job; or "last", the newest of one's own.
            runs_dir: the folder where to look for names; the site file's, or "runs".

        Raises:
            UsageError: no run has that name, or several have.
        """
        # A Path is the place itself. A text may be a name, the id of a job, or a path.
        if isinstance(name, str):
            self._files = resolve.find(name, runs_dir)
        else:
            self._files = RunDir.open(Path(name))

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._files.path

    @property
    def name(self) -> str:
        """The name of the run directory."""
        return self.path.name

    @property
    def model(self) -> Path:
        """The folder of the model that it has trained, as transformers loads it; of a prediction,
        that of the model which predicts.

        Raises:
            UsageError: there is none, or none yet.
        """
        program = self.config.program
        files = self._files
        if program.kind == PREDICT:
            files = RunDir(Path(trained_by(program.settings)))
        if not files.model.is_dir():
            raise UsageError(
                f"the run {str(files.path)!r} has no model: it is {files.get_state().state}",
                "a training has one when it has finished",
            )
        return files.model

    @property
    def job(self) -> str:
        """The id of the run's job.

        Raises:
            SlurmftError: the run was never submitted.
        """
        return launcher.job_of(self._files).id

    @property
    def config(self) -> RunConfig:
        """The configuration: the program (`.program`), where it runs (`.job`), and who submitted it
        (`.submission`)."""
        return self._files.load_config()

    @property
    def state(self) -> str:
        """pending, requeued, running, stopping, finished, failed, cancelled, vanished or unknown:
        by its own records, and by what the cluster says of its job."""
        # Without the environment: it has an entry for every rank, and no word about the state.
        run = MeasuredRun.read(self.path, with_environment=False)
        (status,) = run_statuses([run])
        return status.state

    def status(self) -> RunFacts:
        """Returns all that is known of the run, under the keys of `slurmft status --json`."""
        return facts.run_facts(self._files)

    @property
    def metrics(self) -> dict[str, float | None]:
        """The metrics of the last evaluation; empty before the first."""
        result = self.result or {}
        metrics = result.get("metrics")
        # It has not finished: its records have those of the last evaluation.
        if not metrics:
            metrics = runs_records.latest(self.path).metrics
        return dict(metrics or {})

    @property
    def result(self) -> dict[str, Any] | None:
        """The content of result.json: metrics, loss, steps, phases_s, train_samples_per_s, ...;
        None where the run has not finished."""
        return self._files.read_result()

    def records(self, event: str | None = None) -> Iterator[dict[str, Any]]:
        """Yields the records of the run, oldest first: those of one event ("step", "epoch",
        "warning", ...), or all.

        Steps that were done again after a fault are there twice. After step 10,000 a record stands
        for the number of steps that it has as `steps`, with their mean loss.
        """
        return RecordReader(self._files.records).read_values(event)

    def logs(
        self,
        rank: int | Iterable[int] | None = None,
        node: str | int = "",
        attempt: int | None = None,
        tail: int | None = None,
    ) -> str:
        """Returns the text that `slurmft logs` prints: what failed first, then the logs of all
        ranks, nodes and Slurm, merged by their times; "" before anybody wrote.

        Args:
            rank: lines of this rank alone, or of these.
            node: lines of this host, or of the node of this number.
            attempt: lines of this start of the job.
            tail: only so many lines, the last ones.

        Raises:
            UsageError: the run has no such rank or attempt, or the tail is negative.
        """
        # Whoever gives one rank need not make a list of it.
        if isinstance(rank, int):
            rank = (rank,)
        choice = Choice(tuple(rank or ()), str(node), attempt)
        text = LogText(self._files, choice, tail)
        # A notebook shows it as it is: what programs have printed must not command the terminal.
        return plain("".join(text.until_now()))

    def wait(
        self, timeout_s: float | None = None, bar: bool | None = None
    ) -> dict[str, Any]:
        """Waits until the job has ended, requeues and all; returns the result.

        Args:
            timeout_s: how long at most.
            bar: whether stderr has a bar of the steps; where not given, on a terminal.

        Raises:
            SlurmftError: it failed or was cancelled: what happened, where, and what to do. Its
                notes have the traceback of the rank, or the end of the logs. Or its job is on
                another cluster or host, and has not ended.
            TimeoutError: it has not ended in so many seconds; the job keeps running.
        """
        if bar is None:
            bar = sys.stderr.isatty()
        # On stderr: stdout is the script's own.
        progress = Progress(sys.stderr, bar, only_bar=True)
        return self._follow(timeout_s, progress)

    def follow(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Waits as `wait` does, and prints the progress as `slurmft follow` does."""
        return self._follow(timeout_s, Progress())

    def _follow(self, timeout_s: float | None, progress: Progress) -> dict[str, Any]:
        job = cluster_wait.JobWatch(self._files)
        limit_s = math.inf
        if timeout_s is not None:
            limit_s = timeout_s
        cluster_follow.follow(job, progress, timeout_s=limit_s)
        return job.outcome()

    def cancel(self) -> bool:
        """Ends the job; returns False where it had ended already.

        Raises:
            SlurmftError: it has no job, or not one of this user, or one on another cluster or host.
        """
        return cluster_wait.cancel(self._files) is None

    def resume(self, **where: Any) -> "Run":
        """Submits it again, to resume from its newest checkpoint; returns itself.

        Args:
            where: what is to be different, by the names of `slurmft resume`'s flags: nodes=2.

        Raises:
            UsageError: it has finished, or its job has not ended, or is on another cluster or host
                and no `cluster` is given, or another process resumes it; or an option cannot be
                right.
            SlurmftError: the job was refused; or the run is another user's, or others can write it.
        """
        allowed = dict(options(JobConfig))
        # A run stays where it is.
        del allowed["runs_dir"]
        flags = checked_options("resume()", where, allowed)
        provenance = cluster_submit.provenance_of(call_text("Run.resume", where))
        cluster_submit.resume(self._files, flags, provenance)
        return self


def run(*words: str | os.PathLike[str], **given: Any) -> Run:
    """Submits a program of your own, as `slurmft run` does; returns at once.

        slurmft.run("train.py", "--epochs", "3", nodes=4, checkpoint_dir="out")

    Args:
        words: the program and its arguments.
        given: options by the names of the command's flags; `slurmft run --help` lists them.

    Raises:
        UsageError: no such program or option, or a value that cannot be right.
        SlurmftError: the job was refused.
    """
    command = [os.fspath(word) for word in words]
    known = options(JobConfig) | FLAGS
    flags = checked_options("run()", given, known)
    config = submission.configure(command, flags, known)
    return submit_config(config, call_text("run", given, command), flags, known)


def submit_config(
    config: RunConfig, call: str, flags: Iterable[str], known: Mapping[str, Option]
) -> Run:
    """Submits the job of a configuration.

    Args:
        call: the Python call, for the records.
        flags: names of the options in it.
        known: name -> declaration of the options that it can have.
    """
    # Before the provenance, which reads the commit and all of slurmft's modules.
    cluster = cluster_submit.check(config)
    cluster_submit.warn_of_unread(config, cluster, flags, known)
    provenance = cluster_submit.provenance_of(call)
    return Run(cluster_submit.submit_with(config, cluster, provenance).path)


def checked_options(
    where: str, given: dict[str, Any], known: Mapping[str, Option]
) -> dict[str, Any]:
    """Returns options as their fields have them; tuples and paths may stand for lists and texts.

    Raises:
        UsageError: `known` lacks an option, or a value is of another type.
    """
    values = {}
    for name, value in given.items():
        if name not in known:
            raise unknown_option(f"option of {where}", name, known)
        # None stands for a flag that is not given.
        if value is not None:
            values[name] = _as_in_toml(value)
    return site.typed_values(where, values, known)


def _as_in_toml(value: Any) -> Any:
    """Returns a value as a site file would have it: paths are texts, tuples are lists."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (tuple, list)):
        return [_as_in_toml(each) for each in value]
    return value


def call_text(name: str, given: dict[str, Any], words: Iterable[str] = ()) -> str:
    """Returns a call as it was written, for the records."""
    arguments = [repr(word) for word in words]
    arguments += [f"{option}={value!r}" for option, value in given.items()]
    return f"slurmft.{name}({', '.join(arguments)})"
