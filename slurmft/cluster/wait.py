"""`slurmft follow`: streams a run's progress and ends with its result and the job's exit code."""

from __future__ import annotations

import contextlib
import math
import pwd
import re
import shlex
import sys
import time
from typing import Any

from slurmft.cluster import launcher as cluster_launcher
from slurmft.cluster.slurm.commands import JobState
from slurmft.core.errors import Exit, SlurmftError
from slurmft.core.files import read_json
from slurmft.runs import trackers
from slurmft.runs.log_times import split
from slurmft.runs.progress import result_table
from slurmft.runs.rundir import RunDir

RECORDS_EVERY_S = 0.3
_STATE_EVERY_S = 2.0
_STATE_AT_MOST_EVERY_S = 30.0
"""A job that waits for hours must not keep the controller busy."""
_FILE_LAG_S = 15
_HINTS = {
    "TIMEOUT": "ask for more time: --time",
    "OUT_OF_MEMORY": "ask for more memory (--mem), or lower --batch-size",
    "NODE_FAIL": "a node died",
    "PREEMPTED": "a job of higher priority took the nodes",
}

_REQUEUED = ("PREEMPTED", "NODE_FAIL", "REQUEUED")
_REQUEUE_S = 20
"""How long Slurm may call a job ended before it queues it again."""

_NO_FOLDER = 128 + 53
"""What Slurm ends a job with whose output file it cannot open."""

_LOST_AFTER_S = 60
"""How long neither queue nor accounting may know the job before it counts as lost."""


class JobWatch:
    """Asks how the job of a run stands: often at first, seldom where it waits for long."""

    def __init__(self, run: RunDir) -> None:
        """Raises SlurmftError where the run has no job, or one that cannot be asked from here."""
        self.run = run
        self.cluster, self.job_id = cluster_launcher.job_of(run)
        self._ended_elsewhere = cluster_launcher.recorded_elsewhere(run)
        self.state = JobState(name="UNKNOWN")
        """As of the last time that it was asked."""
        self._launcher = cluster_launcher.get(self.cluster)
        self._began = self._seen_at = time.monotonic()
        self._ask_at = -math.inf
        self._may_requeue_until = math.inf

    def has_ended(self) -> bool:
        """Whether the job has ended for good; asks if it is time to."""
        if time.monotonic() >= self._ask_at:
            self.state = self._ask()
            now = time.monotonic()
            pending_s = now - self._began if self.state.name == "PENDING" else 0.0
            every_s = min(max(_STATE_EVERY_S, pending_s / 10), _STATE_AT_MOST_EVERY_S)
            self._ask_at = now + every_s
        if self.state.ended or self.state.name == "LOST":
            return not self._may_requeue()
        self._may_requeue_until = math.inf
        return False

    def wait(self, timeout_s: float = math.inf) -> dict[str, Any]:
        """The result of the run, when its job has ended.

        Raises:
            SlurmftError: the run failed or was cancelled; its notes have tracebacks and last words.
            TimeoutError: the job has not ended by then.
        """
        while not self.has_ended():
            if time.monotonic() - self._began >= timeout_s:
                raise TimeoutError(f"the job {self.job_id} has not ended after {timeout_s:g} s")
            time.sleep(RECORDS_EVERY_S)
        return self.outcome()

    def await_result(self) -> None:
        """Waits for the result of a job that succeeded: a file system may show it here some seconds
        after the job's end."""
        deadline = time.monotonic() + _FILE_LAG_S
        while self.succeeded and not self.run.result.exists() and time.monotonic() < deadline:
            time.sleep(RECORDS_EVERY_S)

    @property
    def succeeded(self) -> bool:
        """Whether an ended job did so well."""
        return self.state.name == "COMPLETED" and self.state.exit_code == 0

    def outcome(self) -> dict[str, Any]:
        """The result of a job that has ended.

        Raises:
            SlurmftError: there is none; why not.
        """
        self.await_result()
        if self.succeeded and (result := read_json(self.run.result)) is not None:
            return result
        error = job_error(self.run, self.job_id, self.state)
        if self.state.ended:
            with contextlib.suppress(OSError):  # where the job could not say it itself
                name = "cancelled" if error.code == Exit.CANCELLED else "failed"
                self.run.set_state(name, error.message, error.code)
        raise error

    def conclude(self) -> int:
        """Shows how an ended job ended: its result, or its error; returns its exit code."""
        try:
            result = self.outcome()
        except SlurmftError as error:
            for text in (*getattr(error, "__notes__", ()), f"error: {error}"):
                print(text, file=sys.stderr)
            return int(error.code)
        print(result_table(result))
        print(f"model and records: {self.run.path}")
        print("".join(f"  {line}\n" for line in trackers.next_commands(self.run)), end="")
        return Exit.OK

    def _ask(self) -> JobState:
        state = self._ended_elsewhere or self._launcher.job_state(self.job_id, self.run)
        if state is not None:  # UNKNOWN, too: a controller that is down may know it
            self._seen_at = time.monotonic()
            return state
        if time.monotonic() - self._seen_at > _LOST_AFTER_S:
            return JobState(name="LOST", reason="neither queue nor accounting knows it")
        return JobState(name="UNKNOWN")

    def _may_requeue(self) -> bool:
        """Whether a job that a preemption or a dead node ended may yet be queued again."""
        if self.state.name not in _REQUEUED or not self.run.load_config().job.requeue:
            return False
        self._may_requeue_until = min(self._may_requeue_until, time.monotonic() + _REQUEUE_S)
        return time.monotonic() < self._may_requeue_until


def job_error(run: RunDir, job_id: str, state: JobState) -> SlurmftError:
    """Why a job did not finish: the rank or node that failed first, else the scheduler's words.

    Its notes are what else helps to understand it: a traceback, the end of the job's logs.
    """
    failure = run.root_failure()
    if state.name == "CANCELLED":
        return SlurmftError(
            f"the job {job_id} was cancelled{_by(state.reason)}", None, Exit.CANCELLED
        )
    # When the scheduler ends a job, its ranks may lose each other before they are gone.
    if failure is not None and not (failure["secondary"] and state.name != "FAILED"):
        return _failure_error(failure)
    recorded = run.get_state()
    if recorded["state"] == "cancelled":
        return SlurmftError(f"the job {job_id} was cancelled", _resume(run), Exit.CANCELLED)
    error = _ended_error(run, job_id, state)
    if failure is None and state.name == "FAILED" and (words := _last_words(run, job_id)):
        error.add_note("\n".join(words))
    return error


def _ended_error(run: RunDir, job_id: str, state: JobState) -> SlurmftError:
    """Why a job ended of which no process said so: the run's own words, else the scheduler's."""
    recorded = run.get_state()
    if recorded["state"] == "failed" and recorded["reason"]:
        return SlurmftError(recorded["reason"], _resume(run), recorded["exit_code"] or Exit.FAILED)
    message = f"the job {job_id} ended as {state.name}"
    if state.reason:
        message += f": {state.reason}"
    if state.name == "COMPLETED":
        message += ", but left no result"
    hint = _HINTS.get(state.name, f"logs: {run.logs} and {run.submitit}")
    if run.checkpoint_names():
        hint += f"; {_resume(run)}"
    if state.exit_code == _NO_FOLDER:
        hint = f"can every node see and write {run.submitit}?"
    return SlurmftError(message, hint, state.exit_code or Exit.FAILED)


def _resume(run: RunDir) -> str:
    return f"to go on from the last checkpoint: slurmft resume {shlex.quote(str(run.path))}"


def _by(reason: str) -> str:
    """ " by jane", from accounting's "by 1000"."""
    if not (match := re.fullmatch(r"by (\d+)", reason)):
        return ""
    try:
        return f" by {pwd.getpwuid(int(match[1])).pw_name}"
    except KeyError:
        return f" by user {match[1]}"


def _last_words(run: RunDir, job_id: str) -> list[str]:
    """The end of what the job's script and tasks wrote, before any rank could say more."""
    words = []
    for log in (*sorted(run.submitit.glob(f"{job_id}_*_log.err")), run.logs / "job.log"):
        with contextlib.suppress(OSError):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            lines = [f"  {split(line)[1]}" for line in lines[-8:]]
            words += [f"end of {log}:", *lines] if lines else []
    return words


def _failure_error(failure: dict[str, Any]) -> SlurmftError:
    message = f"{failure['where']}: {failure['message']}"
    error = SlurmftError(message, failure["hint"], failure["code"])
    if failure["traceback"]:
        error.add_note(failure["traceback"].rstrip())
    return error


def cancel(run: RunDir) -> JobState | None:
    """Ends the job of a run; returns how it had ended, if it had.

    Raises:
        SlurmftError: there is no job, or it is not this user's to end, or not from here.
    """
    run.settle_permissions()
    cluster, job_id = cluster_launcher.job_of(run)
    launcher = cluster_launcher.get(cluster)
    state = cluster_launcher.recorded_elsewhere(run) or launcher.job_state(job_id, run)
    if state is not None and state.ended:
        return state
    try:
        launcher.cancel(job_id, run)
    except PermissionError:
        raise SlurmftError(
            f"the job {job_id} of {str(run.path)!r} belongs to {_owner(run)}",
            "ask them to cancel it",
        ) from None
    return None


def _owner(run: RunDir) -> str:
    try:
        return run.path.owner()
    except (KeyError, OSError):
        return "somebody else"
