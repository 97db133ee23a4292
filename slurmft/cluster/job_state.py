"""The state of a run's job: one answer from the run's record, the controller and accounting.

`combine` decides; it asks nobody. Accounting learns of an end seconds after the controller, so
`slurm.commands` asks the controller first. Three rules are not obvious:

- Only Slurm knows why a job got SIGTERM: by scancel, the time limit, a preemption. So a run that
  recorded "failed" or "cancelled" is over only when its job is, and Slurm's word is kept.
- That a run has finished needs no answer from Slurm: a machine that only sees the file system gets
  none. A job that starts after that, as by `scontrol requeue`, ends at once.
- A job in COMPLETING only awaits the epilogs of its nodes. It is over if its run recorded an end.
"""

import enum
from dataclasses import dataclass

from slurmft.core.run_files import State

# As in "JOB STATE CODES" of squeue(1). A job in one of them may still be requeued: see
# `Report.may_be_requeued`.
_ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
}
_NAMES_OF_RECORDS = {
    "finished": "COMPLETED",
    "failed": "FAILED",
    "cancelled": "CANCELLED",
}
"""What a scheduler would call the end that a run has recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The answer of a scheduler about a job."""

    name: str
    """Slurm's name of the state: PENDING, RUNNING, COMPLETED, CANCELLED, ..."""
    reason: str = ""
    """Why it is pending, or who cancelled it."""
    exit_code: int = 0
    """Of an ended job; 128 + the signal, if one ended it."""
    expected_start: str = ""
    """When Slurm expects a pending job to start, as it prints it; "": unknown."""
    partition: str = ""
    """Of a pending job: one, or several with commas; "": unknown."""
    nodes: int = 0
    """How many a pending job asks for; 0: unknown."""

    @property
    def ended(self) -> bool:
        return self.name in _ENDED

    @property
    def may_be_requeued(self) -> bool:
        """The controller calls jobs so for a moment before it queues them again."""
        return self.name in ("PREEMPTED", "NODE_FAIL", "REQUEUED")

    def __str__(self) -> str:
        """ "timeout", "cancelled by 1000" """
        return f"{self.name.lower()} {self.reason}".strip()


NO_ANSWER = Report(name="UNKNOWN", reason="Slurm does not answer")
NO_ACCOUNTING = Report(
    name="UNKNOWN", reason="it left the queue; accounting does not answer"
)
"""The job is over, but it is not known how."""
LOST = Report(name="LOST", reason="neither queue nor accounting knows it")


class Phase(enum.StrEnum):
    """The state of a run in one word."""

    PENDING = "pending"
    """The job waits, or was not submitted yet."""
    REQUEUED = "requeued"
    """The job ran, and waits to resume."""
    RUNNING = "running"
    STOPPING = "stopping"
    """The ranks save."""
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    VANISHED = "vanished"
    """The job is gone, and the run recorded no end."""
    UNKNOWN = "unknown"
    """The run recorded no end, and Slurm does not answer."""


_ALIVE_BY_RECORD = (Phase.REQUEUED, Phase.RUNNING, Phase.STOPPING)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """The state of a run's job."""

    phase: Phase
    report: Report
    """The scheduler's word, or the run's record in the same terms where that decides."""
    reason: str = ""
    """Why it waits, failed or was cancelled: Slurm's words, or the run's own."""
    is_over: bool = False
    """No process of the job runs any more. Slurm may yet requeue it: see `Report`."""
    is_sure: bool = True
    """False where the job's state matters, but its cluster did not answer or is elsewhere."""

    @property
    def name(self) -> str:
        return self.report.name

    @property
    def has_left_queue(self) -> bool:
        """The job can be submitted again."""
        return self.is_over or self.report == NO_ACCOUNTING

    @property
    def succeeded(self) -> bool:
        return self.report.name == "COMPLETED" and self.report.exit_code == 0


def combine(
    recorded: State,
    report: Report | None,
    *,
    is_process: bool = False,
    has_result: bool = True,
    has_started: bool = True,
    may_requeue: bool = False,
) -> JobState:
    """Combines what a run has recorded with what its scheduler reports.

    Args:
        recorded: the record, read after the scheduler was asked: it may be newer.
        report: the scheduler's answer; None where neither queue nor accounting knows the job.
        is_process: the job is a process of one host, not one that a scheduler brings to an end.
        has_result: the run has a result.json.
        has_started: an attempt of the run has begun.
        may_requeue: the job may be requeued (--requeue).
    """
    # Nobody knows what became of it: neither Slurm nor the run itself.
    if report is None and not recorded.has_ended:
        return _vanished(recorded, LOST)
    if report is None:
        return by_record(recorded, has_result=has_result)
    # Before all that reads the report: no answer is neither an end nor a life.
    if report.name == "UNKNOWN":
        return _unanswered(recorded, report, has_result)
    # The job may just be ending: the run's own record counts, unless Slurm has queued it again.
    if recorded.has_ended and report.name != "PENDING":
        return _ended_by_record(recorded, report, is_process, has_result)
    # Slurm shows preempted jobs, and those of dead nodes, as ended until it requeues them.
    lives_on = not report.ended or (report.may_be_requeued and may_requeue)
    if not lives_on:
        return _ended_by_scheduler(recorded, report, is_process)
    if report.name != "PENDING" and not report.may_be_requeued:
        return _running(recorded, report)
    # The job of a resumed run waits for the first time, whatever jobs came before.
    is_again = has_started and recorded.state != "submitted"
    phase = Phase.PENDING
    if is_again:
        phase = Phase.REQUEUED
    return JobState(
        phase=phase, report=report, reason=report.reason, is_over=report.ended
    )


def _running(recorded: State, report: Report) -> JobState:
    phase = Phase.RUNNING
    if recorded.state == "stopping":
        phase = Phase.STOPPING
    reason = ""
    # CONFIGURING while nodes boot, SUSPENDED, ...
    if report.name != "RUNNING":
        reason = report.name.lower()
    return JobState(phase=phase, report=report, reason=reason)


def by_record(
    recorded: State, *, has_result: bool = True, is_sure: bool = True, reason: str = ""
) -> JobState:
    """Returns the state of a run by its own record: how it ended, or where it was when it last
    wrote one.

    Args:
        recorded: the record.
        has_result: the run has a result.json.
        is_sure: a recorded end needs no answer of a scheduler.
        reason: why no scheduler is asked, for a run without an end.
    """
    if not recorded.has_ended:
        phase = Phase.PENDING
        if recorded.in_allocation:
            phase = Phase.RUNNING
        elif recorded.state in _ALIVE_BY_RECORD:
            phase = Phase(recorded.state)
        elif recorded.problem:
            phase = Phase.UNKNOWN
        return JobState(
            phase=phase,
            report=Report(name="UNKNOWN"),
            reason=recorded.problem or reason,
            is_sure=False,
        )
    phase, reason = _recorded_end(recorded, has_result)
    report = Report(
        name=_NAMES_OF_RECORDS[recorded.state],
        reason=recorded.reason,
        exit_code=recorded.exit_code or 0,
    )
    return JobState(
        phase=phase, report=report, reason=reason, is_over=True, is_sure=is_sure
    )


def _recorded_end(recorded: State, has_result: bool) -> tuple[Phase, str]:
    match recorded.state:
        case "finished" if has_result:
            return Phase.FINISHED, ""
        case "cancelled":
            return Phase.CANCELLED, recorded.reason or "cancelled"
        case _:  # "failed", or "finished" without a result.json
            return Phase.FAILED, recorded.reason or "failed"


def _vanished(recorded: State, report: Report) -> JobState:
    cause = report.reason
    if report == LOST:
        cause = "neither queue nor accounting knows its job"
    # What cannot be read may be its end.
    cause = recorded.problem or cause
    return JobState(
        phase=Phase.VANISHED, report=report, reason=f"vanished: {cause}", is_over=True
    )


def _unanswered(recorded: State, report: Report, has_result: bool) -> JobState:
    if not recorded.has_ended:
        return JobState(
            phase=Phase.UNKNOWN, report=report, reason=report.reason, is_sure=False
        )
    phase, reason = _recorded_end(recorded, has_result)
    # That a run has finished needs no answer; a failed one may have been requeued.
    is_sure = phase is Phase.FINISHED
    if recorded.state == "finished" or report == NO_ACCOUNTING:
        return by_record(recorded, has_result=has_result, is_sure=is_sure)
    return JobState(phase=phase, report=report, reason=reason, is_sure=is_sure)


def _ended_by_record(
    recorded: State, report: Report, is_process: bool, has_result: bool
) -> JobState:
    is_finished = recorded.state == "finished"
    # A process has no epilog: one that is completing still runs.
    is_completing = report.name == "COMPLETING" and not is_process
    awaits_epilog = is_completing and recorded.state != "cancelled"
    if awaits_epilog or (is_finished and report.ended):
        return by_record(recorded, has_result=has_result)
    phase, reason = _recorded_end(recorded, has_result)
    return JobState(phase=phase, report=report, reason=reason, is_over=report.ended)


def _ended_by_scheduler(recorded: State, report: Report, is_process: bool) -> JobState:
    if report.name == "CANCELLED":
        phase = Phase.CANCELLED
    elif is_process and report.name == "FAILED":
        # It records its end itself: one that did not was killed.
        return _vanished(recorded, report)
    else:
        phase = Phase.FAILED
    return JobState(phase=phase, report=report, reason=str(report), is_over=True)
