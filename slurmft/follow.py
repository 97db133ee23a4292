"""`slurmft follow`: streams a run's progress and ends with its result and the job's exit code."""

from __future__ import annotations

import contextlib
import math
import pwd
import re
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

from slurmft import launchers, push, selection, tracking
from slurmft.cli import Parser
from slurmft.errors import Exit, SlurmftError
from slurmft.progress import Progress, result_table
from slurmft.rundir import RecordReader, RunDir, read_json, to_json
from slurmft.slurm import JobState
from slurmft.stamps import split

_RECORDS_EVERY_S = 0.3
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

EXAMPLES = """\
examples:
  slurmft follow last
  slurmft follow emotion-2026              first letters of its name, where only one begins so
  slurmft follow 8123                      the id of its job
  slurmft follow runs/emotion-20261120-093012-a1b2
"""


class JobWatch:
    """Asks how the job of a run stands: often at first, seldom where it waits for long."""

    def __init__(self, run: RunDir) -> None:
        """Raises SlurmftError where the run has no job, or one that cannot be asked from here."""
        self.run = run
        self.cluster, self.job_id = launchers.job_of(run)
        self._ended_elsewhere = launchers.recorded_elsewhere(run)
        self.state = JobState(name="UNKNOWN")
        """As of the last time that it was asked."""
        self._launcher = launchers.get(self.cluster)
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
            time.sleep(_RECORDS_EVERY_S)
        return self.outcome()

    def await_result(self) -> None:
        """Waits for the result of a job that succeeded: a file system may show it here some seconds
        after the job's end."""
        deadline = time.monotonic() + _FILE_LAG_S
        while self.succeeded and not self.run.result.exists() and time.monotonic() < deadline:
            time.sleep(_RECORDS_EVERY_S)

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
        print("".join(f"  {line}\n" for line in tracking.next_commands(self.run)), end="")
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


class Follower:
    """Follows one run from the login node, by its run directory and its job's state."""

    def __init__(self, run: RunDir, only_new: bool = False) -> None:
        """Shows the run's records from its beginning, or only those that are still to come."""
        self.run = run
        self.job = JobWatch(run)
        self.progress = Progress()
        self._records = RecordReader(run.records)
        if only_new:
            list(self._records.read())
        self._said = ""

    def follow(self) -> int:
        """Shows progress until the job ends; returns the exit code of the job."""
        try:
            self._until_ended()
        except KeyboardInterrupt:
            self.progress.close()
            job_id = self.job.job_id
            print(f"\nno longer following; the job {job_id} goes on. {next_commands(self.run)}")
            return 130
        finally:
            self.progress.close()
        return self.job.conclude()

    def _until_ended(self) -> None:
        self._show_records()
        while not self.job.has_ended():
            self._say_waiting(self.job.state)
            time.sleep(_RECORDS_EVERY_S)
            self._show_records()
        self.job.await_result()
        self._show_records()

    def _show_records(self) -> None:
        for record in self._records.read():
            self.progress.show(record)

    def _say_waiting(self, state: JobState) -> None:
        """Says once what the job does, and what it waits for."""
        text = f"job {self.job.job_id} is {state.name.lower()}"
        if state.reason:
            text += f" ({state.reason})"
        worth_it = state.name in ("PENDING", "RUNNING", "SUSPENDED", "REQUEUED")
        if worth_it and text != self._said:
            self._said = text
            self.progress.say(text)


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
    if failure is not None and not (failure["echo"] and state.name != "FAILED"):
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


_NEXT = {
    "follow": "progress, and the result at the end",
    "watch": "live: speed, loss, ranks",
    "logs": "of all ranks, what failed first before them",
    "status": "how it stands",
    "cancel": "end the job",
    "resume": "go on after a stop or a failure",
    "report": "what it measured",
}


_USUAL = ("follow", "watch", "logs", "cancel", "resume")


def next_commands(run: RunDir, which: Sequence[str] = _USUAL) -> str:
    """The commands that a user types next, with this run's names in them."""
    path = shlex.quote(str(run.path))
    lines = [f"  python -m slurmft {name} {path}   # {_NEXT[name]}" for name in which]
    return "\n".join(["Next:", *lines])


def cancel(run: RunDir) -> JobState | None:
    """Ends the job of a run; returns how it had ended, if it had.

    Raises:
        SlurmftError: there is no job, or it is not this user's to end, or not from here.
    """
    run.settle_permissions()
    cluster, job_id = launchers.job_of(run)
    launcher = launchers.get(cluster)
    state = launchers.recorded_elsewhere(run) or launcher.job_state(job_id, run)
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


def follow_main(argv: list[str]) -> int:
    """`slurmft follow RUN`"""
    parser = Parser(prog="slurmft follow", description=__doc__, epilog=EXAMPLES)
    selection.add_argument(parser)
    push.add_flag(parser)
    arguments = parser.parse(argv)
    push.check(arguments.push_to_hub, follows=True)
    run = selection.find(arguments.run, arguments.runs_dir)
    run.settle_permissions()
    return push.after(Follower(run).follow(), run, arguments.push_to_hub)


def cancel_main(argv: list[str]) -> int:
    """`slurmft cancel RUN`"""
    parser = Parser(prog="slurmft cancel", description="Ends the job of a run.")
    selection.add_argument(parser)
    parser.add_argument("--json", action="store_true", help="print run, job, cancelled, state")
    arguments = parser.parse(argv)
    run = selection.find(arguments.run, arguments.runs_dir)
    state, job_id = cancel(run), launchers.job_of(run)[1]
    if arguments.json:
        told = {"run": str(run.path), "job": job_id, "cancelled": state is None}
        print(to_json(told | {"state": state.name.lower() if state else "cancelled"}, indent=2))
    elif state is not None:
        print(f"the job {job_id} of {run.path.name} has already ended ({state.name.lower()})")
    else:
        print(f"the job {job_id} of {run.path.name} is being cancelled")
    return Exit.OK
