"""Ends that nobody of a job could record: whoever looks next records them.

The process that should have was killed, or the job was cancelled while it waited in the queue, when
no process of it existed.
"""

import os
import re

from slurmft.cluster.job_state import JobState, Phase, Report
from slurmft.core import users
from slurmft.core.errors import Exit, SlurmftError
from slurmft.runs import attempts
from slurmft.runs.rundir import RunDir


def recover(run: RunDir, state: JobState) -> bool:
    """Records the end of a run by what its last attempt left, if its job is over and the process
    was killed that should have done so; returns whether it did."""
    if not _may_record(run, state):
        return False
    outcome = attempts.recovered(run)
    if outcome is None:
        return False
    # The tasks were killed at the time limit, and could not know why.
    if outcome.state == "failed" and state.report.name == "TIMEOUT":
        outcome = attempts.timed_out(run)
    attempts.end(run, outcome)
    return True


def record_cancelled(run: RunDir, state: JobState, job_id: str) -> None:
    """Records that the job of a run was cancelled, if the job could not do so itself."""
    if state.phase is Phase.CANCELLED and _may_record(run, state):
        error = cancelled_error(job_id, state.report)
        # Slurm itself cancels what can never start; then the reason has more words.
        is_by_slurm = state.reason not in (str(state.report), "cancelled", "")
        reason = error.message
        if is_by_slurm:
            reason += f": {state.reason}"
        run.set_state("cancelled", reason, Exit.CANCELLED)


def _may_record(run: RunDir, state: JobState) -> bool:
    """Returns whether a job is over for sure, and its run is this user's and has no end yet."""
    is_over = state.is_over and state.is_sure and not state.report.may_be_requeued
    if not is_over or run.get_state().has_ended or _is_being_submitted(run):
        return False
    # Whoever looks at the run of a colleague, as root may, records nothing.
    return run.is_own() and os.access(run.path, os.W_OK)


def _is_being_submitted(run: RunDir) -> bool:
    """Returns whether a resume has not recorded its job yet: the one on record is the job before,
    whose end is not that of the run."""
    if run.get_state().state != "submitted":
        return False
    try:
        # Times of one file server: its clock may not be that of this machine.
        return run.job.stat().st_mtime_ns < run.state.stat().st_mtime_ns
    except OSError:
        return True


def cancelled_error(job_id: str, report: Report) -> SlurmftError:
    """Returns the error of a job that was cancelled, with the user who did it, if that is known."""
    message = f"the job {job_id} was cancelled"
    by_user_id = re.fullmatch(r"by (\d+)", report.reason)  # as accounting writes it
    if by_user_id:
        user = users.user_name(int(by_user_id[1]))
        message += f" by {user}"
    return SlurmftError(message, None, Exit.CANCELLED)
