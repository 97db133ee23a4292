"""Shows the progress of a run until its job ends."""

import math
import time

from slurmft.cluster.wait import JobWatch
from slurmft.core.own_program import OwnProgram
from slurmft.runs.logfiles import log_of_rank
from slurmft.runs.progress import Progress
from slurmft.runs.records import RecordReader
from slurmft.runs.rundir import RunDir, read_log_head


class Follower:
    """Follows one run from the login node, by its run directory and its job's state."""

    def __init__(
        self, run: RunDir, only_new: bool = False, progress: Progress | None = None
    ) -> None:
        """Shows the last records of the run and those to come, or only these."""
        self.run = run
        self.job = JobWatch(run)
        self.progress = progress or Progress()
        self._records = RecordReader(run.records)
        recent = self._records.read_recent("start")
        self._recent = [] if only_new else recent
        is_own = OwnProgram.of(run.load_config().program) is not None
        self._log = log_of_rank(run, 0) if is_own and not self.progress.only_bar else None
        self._said = ""

    def follow(self, timeout_s: float = math.inf) -> None:
        """Shows progress until the job ends; TimeoutError where it has not by then."""
        deadline = time.monotonic() + timeout_s
        try:
            for record in self._recent:
                self.progress.show(record)
            while not self.job.has_ended():
                if time.monotonic() >= deadline:
                    raise TimeoutError(self.job.late(timeout_s))
                self._say_waiting()
                self.job.pause()
                self._show_records()
            self.job.await_result()
            self._show_records()
        finally:
            self.progress.close()

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
