"""Shows the progress of a run until its job ends."""

import math
from collections import deque
from collections.abc import Collection

from slurmft.cluster.job_state import LOST
from slurmft.cluster.wait import JobWatch
from slurmft.core import filesystem
from slurmft.core.program import kind_of
from slurmft.core.run_records import Record, Start, Text
from slurmft.core.text import after_state
from slurmft.runs.logfiles import LogFile, log_of_rank
from slurmft.runs.records import RecordReader
from slurmft.runs.rundir import RunDir, read_log_head
from slurmft.show.progress import Progress

# More than a traceback has.
_LAST_LINES = 1000


def follow(
    job: JobWatch,
    progress: Progress,
    only_new: bool = False,
    timeout_s: float = math.inf,
) -> Collection[str]:
    """Shows the last records of a run and those to come, or only these, by its run directory and
    its job's state; TimeoutError where the job has not ended by then.

    Returns the last lines of the program's output that it has shown.
    """
    run = job.run
    reader = RecordReader(run.records)
    recent = reader.read_recent(Start)
    log = None
    kind = kind_of(run.load_config().program)
    # It may record nothing: then what it prints is its progress.
    if not kind.attaches and not progress.only_bar:
        log = log_of_rank(run, 0)
    restarts = _Restarts(run)
    last_news = ""
    last_problem = None
    output: deque[str] = deque(maxlen=_LAST_LINES)
    try:
        if not only_new:
            for record in recent:
                _show(record, progress, restarts)
        for is_alive in job.looks(timeout_s):
            news = ""
            # How a job has ended is shown by whoever called this.
            if is_alive:
                news = _news(job)
            if news not in ("", last_news):
                last_news = news
                progress.say(news)
            has_recorded = False
            for record in reader.read(Record):
                has_recorded = True
                # Beside its own lines, those of its records would say all twice.
                if log is None or isinstance(record, Text):
                    _show(record, progress, restarts)
            problem = None
            # What records has room: that is not asked of the file system at each look.
            if not has_recorded:
                problem = filesystem.full(run.path)
            # Once, until there is room again: it names the bytes that are free, which change.
            if problem is not None and last_problem is None:
                progress.say(f"warning: {problem}: the run can record nothing")
            last_problem = problem
            if log is not None:
                _show_lines(log, progress, output, restarts)
    finally:
        progress.close()
    return output


class _Restarts:
    """Tells why ranks have started again: of a rank that was killed, neither the records nor the
    output of another one say it."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._last_start: float | None = None

    def note(self, time: float, progress: Progress) -> None:
        """Notes a start of the ranks at a time (Unix seconds); shows what has ended the one
        before, where something failed."""
        before = self._last_start
        self._last_start = time
        if before is None:
            return
        for failure in self._run.all_failures():
            if not failure.secondary and before < failure.time <= time:
                progress.say(f"the ranks start again: {failure}")
                return


def _show(record: Record, progress: Progress, restarts: _Restarts) -> None:
    if isinstance(record, Start):
        restarts.note(record.time, progress)
    progress.show(record)


def _show_lines(
    log: LogFile, progress: Progress, output: deque[str], restarts: _Restarts
) -> None:
    for line in log.lines(whole=False):
        # The heads that slurmft writes at each start are no output of the program.
        if read_log_head(line.text):
            restarts.note(line.time, progress)
        else:
            progress.say(line.text)
            output.append(line.text.rstrip())


def _news(job: JobWatch) -> str:
    """Returns what a job does, and what it waits for; "" where that is unknown."""
    report = job.state.report
    is_silent = report.name == "UNKNOWN" and not report.reason
    if report == LOST or is_silent:
        return ""
    news = f"job {job.job_id} is {report.name.lower()}"
    reason = after_state(report.reason, report.name.lower())
    if reason:
        news += f" ({reason})"
    return news
