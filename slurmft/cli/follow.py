"""Streams the progress of a run until its job ends; then shows its result, or its error, and exits
with the exit code of the job.

examples:
  slurmft follow last
  slurmft follow emotion-2026              first letters of its name, where only one begins so
  slurmft follow 8123                      the id of its job
  slurmft follow runs/emotion-20261120-093012-a1b2c3
"""

import sys

from slurmft.cli import next_commands
from slurmft.cli.parser import Parser, add_run
from slurmft.cluster.wait import JobWatch
from slurmft.core.errors import Exit, SlurmftError
from slurmft.core.own_program import OwnProgram
from slurmft.runs import trackers
from slurmft.runs.logfiles import log_of_rank
from slurmft.runs.progress import Progress, result_table
from slurmft.runs.records import RecordReader
from slurmft.runs.rundir import RunDir, read_log_head


class Follower:
    """Follows one run from the login node, by its run directory and its job's state."""

    def __init__(self, run: RunDir, only_new: bool = False) -> None:
        """Shows the last records of the run and those to come, or only these."""
        self.run = run
        self.job = JobWatch(run)
        self.progress = Progress()
        self._records = RecordReader(run.records)
        recent = self._records.read_recent("start")
        self._recent = [] if only_new else recent
        is_own = OwnProgram.of(run.load_config().program) is not None
        self._log = log_of_rank(run, 0) if is_own else None
        self._said = ""

    def follow(self) -> int:
        """Shows progress until the job ends; returns the exit code of the job."""
        try:
            for record in self._recent:
                self.progress.show(record)
            while not self.job.has_ended():
                self._say_waiting()
                self.job.pause()
                self._show_records()
            self.job.await_result()
            self._show_records()
        except KeyboardInterrupt:
            self.progress.close()
            job_id = self.job.job_id
            print(f"\nno longer following; job {job_id} continues. {next_commands(self.run.path)}")
            return 130
        finally:
            self.progress.close()
        return show_outcome(self.job)

    def _show_records(self) -> None:
        for record in self._records.read():
            if self._log is None or record["event"] in ("preflight", "warning"):
                self.progress.show(record)
        if self._log is not None:  # what a program of the user's own prints: it may record nothing
            for line in self._log.lines(whole=False):
                if not read_log_head(line.text):
                    self.progress.say(line.text)

    def _say_waiting(self) -> None:
        """Says once what the job does, and what it waits for."""
        state = self.job.state
        text = f"job {self.job.job_id} is {state.name.lower()}"
        if state.reason:
            text += f" ({state.reason})"
        if (state.name != "UNKNOWN" or state.reason) and text != self._said:
            self._said = text
            self.progress.say(text)


def show_outcome(job: JobWatch) -> int:
    """Shows how an ended job ended: its result, or its error; returns its exit code."""
    try:
        result = job.outcome()
    except SlurmftError as error:
        for text in (*getattr(error, "__notes__", ()), f"error: {error}"):
            print(text, file=sys.stderr)
        return int(error.code)
    print(result_table(result))
    print(f"model and records: {job.run.path}")
    print("".join(f"  {line}\n" for line in trackers.next_commands(job.run)), end="")
    return Exit.OK


def parser() -> Parser:
    command = Parser("slurmft follow", __doc__)
    add_run(command)
    return command


def main(argv: list[str]) -> int:
    _, run = parser().parse_run(argv)
    run.settle_permissions()
    return Follower(run).follow()
