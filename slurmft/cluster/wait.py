"""Waits for the job of a run, and says how it ended; cancels it."""

import contextlib
import math
import os
import shlex
import time
from collections.abc import Iterator
from signal import Signals
from typing import Any

from slurmft.cluster import launcher as cluster_launcher
from slurmft.cluster.ending import cancelled_error
from slurmft.cluster.job_state import LOST, JobState, Report, by_record
from slurmft.cluster.slurm import commands
from slurmft.core import hooks, ownership, permissions, users
from slurmft.core.errors import Exit, SlurmftError
from slurmft.core.files import exists_now, read_end
from slurmft.runs.log_times import split
from slurmft.runs.rundir import RunDir

_LEAST_LOOK_S = 0.3
_MOST_LOOK_S = 2.0
"""How often the run's files are looked at: after news, and at most as seldom."""
_LEAST_ASK_S = 2.0
_MOST_ASK_S = 60.0
"""How often Slurm is asked: after news, and at most as seldom."""
_FILE_LAG_S = 15
"""How long NFS may take until a file that a node wrote is visible here."""
_REQUEUE_S = 20
"""How long Slurm may report a job as ended before it requeues it."""
_LOST_AFTER_S = 60
"""How long a job may be in neither queue nor accounting before it counts as lost."""
_EXCERPT_BYTES = 2**16
"""How much of a log its last lines are taken from."""
_NO_FOLDER = 128 + 53
"""The exit code of a job whose output file Slurm cannot open."""
_HINTS = {
    "TIMEOUT": "ask for more time: --time",
    "OUT_OF_MEMORY": "ask for more memory (--mem, --max-mem), or lower --batch-size",
    "NODE_FAIL": "a node died",
    "PREEMPTED": "a job of higher priority took the nodes",
}


_BY_SIGNAL = 128
"""An exit code above it: that signal, of so much less, has ended the job."""


class JobWatch:
    """Watches the job of a run until it has ended, with few questions to Slurm.

    What the run records shows that it lives: its state, and records that grow. Slurm is asked at
    every change of the recorded state; then a running job once a minute, if its records have not
    grown for so long; a job in another state after 2 s, and later at intervals of a tenth of the
    time without news, up to a minute.
    """

    def __init__(self, run: RunDir) -> None:
        """Raises SlurmftError where the run has no job, or one that cannot be queried from here."""
        self.run = run
        self.job = cluster_launcher.job_of(run)
        cluster_launcher.check_reachable(run, self.job)
        self._is_process = cluster_launcher.is_process(self.job.cluster)
        # No question yet: the first is due at the first look.
        self.state = by_record(run.get_state())
        """As of the last query."""
        self._news_at = time.monotonic()
        self._grew_at = self._news_at
        self._asked_at = -math.inf
        self._recorded: tuple[str, float] | None = None
        self._size_bytes = 0
        self._missing_since = math.inf
        self._may_requeue_until = math.inf
        self._result_due_at: float | None = None

    @property
    def job_id(self) -> str:
        return self.job.id

    def has_ended(self) -> bool:
        """Returns whether the job has ended for good; queries its state if that is due."""
        if self._is_due():
            before = self.state
            self.state = self._ask()
            self._asked_at = time.monotonic()
            # A change is news, after which the next questions come sooner.
            if before.name != self.state.name:
                self._news_at = self._asked_at
        if not self.state.is_over:
            self._may_requeue_until = math.inf
            return False
        report = self.state.report
        # On its way from the queue to accounting, a job may be in neither for a moment.
        if report == LOST:
            return time.monotonic() - self._missing_since > _LOST_AFTER_S
        if not report.may_be_requeued:
            return True
        if not self.run.load_config().job.requeue:
            return True
        # A job that a preemption or a dead node ended may yet be requeued.
        now = time.monotonic()
        self._may_requeue_until = min(self._may_requeue_until, now + _REQUEUE_S)
        return now >= self._may_requeue_until

    def looks(
        self, timeout_s: float = math.inf, pause_s: float | None = None
    ) -> Iterator[bool]:
        """Yields True when the run's files are worth a look, and False once after the job's end.

        Args:
            timeout_s: how long at most; TimeoutError where the job has not ended by then.
            pause_s: between two looks; where not given, the longer the less is new.
        """
        deadline = time.monotonic() + timeout_s
        while not self.has_ended():
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"the job {self.job_id} has not ended after {timeout_s:g} s"
                )
            yield True
            time.sleep(pause_s or self._look_pause_s())
        self._await_result()
        yield False

    def _look_pause_s(self) -> float:
        quiet_s = time.monotonic() - self._news_at
        return min(max(_LEAST_LOOK_S, quiet_s / 20), _MOST_LOOK_S)

    def _is_due(self) -> bool:
        now = time.monotonic()
        recorded = self.run.get_state()
        # With the time: a run that is requeued twice records the same states again.
        mark = (recorded.state, recorded.time)
        if mark != self._recorded:
            self._recorded = mark
            self._news_at = now
            # The job notifies by itself; plug-ins on this side send what it has not, as where nodes
            # have no way out.
            hooks.state_changed(self.run, from_login=True)
            return True
        with contextlib.suppress(OSError):
            size_bytes = self.run.records.stat().st_size
            if size_bytes != self._size_bytes:
                self._size_bytes = size_bytes
                self._grew_at = now
        # To look for a process loads nobody: it needs no growing intervals.
        if self._is_process:
            return now - self._asked_at >= _LEAST_ASK_S
        if self.state.name == "RUNNING" and recorded.state == "running":
            last_sign_at = max(self._asked_at, self._grew_at)
            return now - last_sign_at >= _MOST_ASK_S
        quiet_s = now - self._news_at
        pause_s = min(max(_LEAST_ASK_S, quiet_s / 10), _MOST_ASK_S)
        return now - self._asked_at >= pause_s

    def wait(self, timeout_s: float = math.inf) -> dict[str, Any]:
        """Returns the result of the run, when its job has ended.

        Raises:
            SlurmftError: the run failed or was cancelled; its notes have tracebacks and last lines.
            TimeoutError: the job has not ended by then.
        """
        for _ in self.looks(timeout_s):
            pass
        return self.outcome()

    def _await_result(self) -> None:
        """Waits for the result of a job that succeeded: the file may become visible here seconds
        after the job's end. What has not come in that time is not waited for again."""
        if self._result_due_at is None:
            self._result_due_at = time.monotonic() + _FILE_LAG_S
        while self.state.succeeded and not exists_now(self.run.result):
            if time.monotonic() >= self._result_due_at:
                return
            time.sleep(_LEAST_LOOK_S)

    def outcome(self) -> dict[str, Any]:
        """Returns the result of a job that has ended, or raises the SlurmftError that says why
        there is none."""
        self._await_result()
        if self.state.succeeded:
            result = self.run.read_result()
            if result is not None:
                return result
        report = self.state.report
        is_unexplained = report.name == "CANCELLED" and not report.reason
        if is_unexplained and self.job.cluster == "slurm":
            # The controller does not say who cancelled it; accounting does, seconds later.
            report = commands.await_accounting(self.job_id, report)
        # Before the end is recorded: it reads what the run itself has recorded.
        error = job_error(self.run, self.job_id, report)
        if report.ended:
            self._record_end(error)
        raise error

    def _record_end(self, error: SlurmftError) -> None:
        """Records the end of the run: a job that was killed could not do that itself."""
        # Whoever follows the run of a colleague may read it, and records nothing.
        if not os.access(self.run.path, os.W_OK):
            return
        # A resume may have given the run another job meanwhile: its state is that job's.
        if cluster_launcher.job_of(self.run).id != self.job_id:
            return
        state = "failed"
        if error.code == Exit.CANCELLED:
            state = "cancelled"
        self.run.set_state(state, error.message, error.code)

    def _ask(self) -> JobState:
        state = cluster_launcher.job_state(self.run, self.job)
        if state.report == LOST:
            self._missing_since = min(self._missing_since, time.monotonic())
        else:  # NO_ANSWER, too: a controller that is down may know the job
            self._missing_since = math.inf
        return state


def job_error(run: RunDir, job_id: str, report: Report) -> SlurmftError:
    """Returns why a job did not finish: the failure that ended the run, else the scheduler's
    reason.

    The error's notes help to understand it: a traceback, the end of the job's logs.
    """
    if report.name == "CANCELLED":
        return cancelled_error(job_id, report)
    failure = run.root_failure()
    recorded = run.get_state()
    # When the scheduler ends a job, or a process is killed, ranks lose each other.
    says_why = recorded.state == "failed" or report.name != "FAILED"
    is_effect = failure is not None and failure.secondary and says_why
    if failure is not None and not is_effect:
        hint = failure.hint
        if failure.is_loss_of_peer:
            hint = _after_loss(run)
        error = SlurmftError(str(failure), hint, failure.code)
        if failure.traceback:
            error.add_note(failure.traceback.rstrip())
        return error
    if recorded.state == "cancelled":
        message = f"the job {job_id} was cancelled"
        return SlurmftError(message, _resume(run), Exit.CANCELLED)
    error = _ended_error(run, job_id, report)
    has_lost_peer = failure is not None and failure.is_loss_of_peer
    if has_lost_peer and str(failure) in error.message:
        error.hint = _after_loss(run)
    # Perhaps a setup line has failed, before any rank began: only the logs say it.
    if failure is None and report.name == "FAILED":
        lines = _last_lines(run, job_id)
        if lines:
            error.add_note("\n".join(lines))
    return error


def _ended_error(run: RunDir, job_id: str, report: Report) -> SlurmftError:
    """Returns why a job ended without a recorded failure: the run's reason, else the
    scheduler's."""
    recorded = run.get_state()
    if recorded.state == "failed" and recorded.reason:
        return SlurmftError(
            recorded.reason, _resume(run), recorded.exit_code or Exit.FAILED
        )
    message = f"the job {job_id} ended as {report.name}"
    # Nobody could record why: the batch script itself was killed.
    if report.exit_code > _BY_SIGNAL:
        with contextlib.suppress(ValueError):
            message += f", by {Signals(report.exit_code - _BY_SIGNAL).name}"
    comment = ""
    if cluster_launcher.job_of(run).cluster == "slurm":
        comment = commands.noted(job_id)  # left where the run directory took no record
    if comment:
        message = comment.removeprefix("failed: ")
    elif report.reason:
        message += f": {report.reason}"
    if report.name == "COMPLETED":
        message += ", but left no result"
    logs = f"logs: {run.logs} and {run.submitit}"
    hint = _HINTS.get(report.name, logs)
    if run.newest_checkpoint():
        hint += f"; {_resume(run)}"
    # In place of the hint above, whose logs could not be opened.
    if report.exit_code == _NO_FOLDER:
        hint = f"can every node see and write {run.submitit}?"
    return SlurmftError(message, hint, report.exit_code or Exit.FAILED)


def _after_loss(run: RunDir) -> str:
    """Returns what to do where ranks have lost one of them, and nothing says why."""
    logs = f"slurmft logs {shlex.quote(str(run.path))} --tail 50"
    return f"what ranks, nodes and Slurm wrote last: {logs}; {_resume(run)}"


def _resume(run: RunDir) -> str:
    command = f"slurmft resume {shlex.quote(str(run.path))}"
    if run.newest_checkpoint():
        return f"to resume from the last checkpoint: {command}"
    return f"to start it again from its beginning: {command}"


def _last_lines(run: RunDir, job_id: str) -> list[str]:
    """Returns the last lines that the job's script and tasks wrote before any rank started."""
    logs = sorted(run.submitit.glob(f"{job_id}_*_log.err"))
    logs.append(run.logs / "job.log")  # of a job without Slurm
    excerpts: list[str] = []
    for log in logs:
        with contextlib.suppress(OSError):  # only one of the two kinds is there
            lines = (
                read_end(log, _EXCERPT_BYTES).decode("utf-8", "replace").splitlines()
            )
            if not lines:
                continue
            excerpts.append(f"end of {log}:")
            for line in lines[-8:]:
                _, text = split(line)
                excerpts.append(f"  {text}")
    return excerpts


def cancel(run: RunDir) -> JobState | None:
    """Cancels the job of a run; returns its state, if it has ended already.

    Raises:
        NotOwnError: the run is another user's, or others can write it: its job may be any.
        SlurmftError: there is no job, or this user may not cancel it, or not from here.
    """
    permissions.settle(run.load_own_config().job.share_with_group)
    job = cluster_launcher.job_of(run)
    try:
        # By its descriptor: where others can rename, theirs would say which job or process ends.
        with run.held():
            job = cluster_launcher.job_of(run)
            launcher = cluster_launcher.get(job.cluster)
            state = cluster_launcher.job_state(run, job)
            if state.report.ended:
                return state
            launcher.cancel(job.id, run)
    except PermissionError:
        owner = users.user_name(ownership.status(run.path).st_uid)
        raise SlurmftError(
            f"the job {job.id} of {str(run.path)!r} belongs to {owner}",
            "ask them to cancel it",
        ) from None
    return None
