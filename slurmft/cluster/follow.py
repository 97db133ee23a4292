"""Shows the progress of a run until its job ends."""

import math

from slurmft.cluster.job_state import LOST
from slurmft.cluster.wait import JobWatch
from slurmft.core.program import kind_of
from slurmft.runs.logfiles import log_of_rank
from slurmft.runs.records import RecordReader
from slurmft.runs.rundir import read_log_head
from slurmft.show.progress import Progress


def follow(
    job: JobWatch, progress: Progress, only_new: bool = False, timeout_s: float = math.inf
) -> None:
    """Shows the last records of a run and those to come, or only these, by its run directory and
    its job's state; TimeoutError where the job has not ended by then."""
    run, reader, said = job.run, RecordReader(job.run.records), ""
    recent = reader.read_recent("start")
    attaches = kind_of(run.load_config().program).attaches
    # What the program prints, where it may record nothing.
    log = None if attaches or progress.only_bar else log_of_rank(run, 0)
    try:
        for record in () if only_new else recent:
            progress.show(record)
        for lives in job.looks(timeout_s):
            words = _waiting(job) if lives else ""
            if words not in ("", said):
                said = words
                progress.say(words)
            for record in reader.read():
                if log is None or record["event"] in ("preflight", "warning"):
                    progress.show(record)
            for line in log.lines(whole=False) if log else ():
                if not read_log_head(line.text):
                    progress.say(line.text)
    finally:
        progress.close()


def _waiting(job: JobWatch) -> str:
    """What a job does, and what it waits for; "": that is unknown."""
    report = job.state.report
    if report == LOST or (report.name == "UNKNOWN" and not report.reason):
        return ""
    reason = f" ({report.reason})" if report.reason else ""
    return f"job {job.job_id} is {report.name.lower()}{reason}"
