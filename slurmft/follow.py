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

from slurmft import launchers, tracking
from slurmft.cli import Parser
from slurmft.errors import Exit, SlurmftError
from slurmft.progress import Progress, result_table
from slurmft.rundir import RecordReader, RunDir, read_json
from slurmft.slurm import JobState

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
  slurmft follow runs/emotion-20261120-093012-a1b2
"""


class Follower:
    """Follows one run from the login node, by its run directory and its job's state."""

    def __init__(self, run: RunDir, only_new: bool = False) -> None:
        """Shows the run's records from its beginning, or only those that are still to come."""
        self.run = run
        self.cluster, self.job_id = launchers.job_of(run)
        self.launcher = launchers.get(self.cluster)
        self.progress = Progress()
        self._records = RecordReader(run.records)
        if only_new:
            list(self._records.read())
        self._said = ""
        self._seen_at = time.monotonic()
        self._may_requeue_until = math.inf

    def follow(self) -> int:
        """Shows progress until the job ends; returns the exit code of the job."""
        try:
            state = self._until_ended()
            self._show_records()
        except KeyboardInterrupt:
            self.progress.close()
            print(
                f"\nno longer following; the job {self.job_id} goes on. {next_commands(self.run)}"
            )
            return 130
        finally:
            self.progress.close()
        return self._conclude(state)

    def _until_ended(self) -> JobState:
        began, asked, every_s = time.monotonic(), -math.inf, _STATE_EVERY_S
        while True:
            self._show_records()
            if time.monotonic() - asked >= every_s:
                state = self._state()
                if (state.ended or state.name == "LOST") and not self._may_requeue(state):
                    return state
                if not state.ended:
                    self._may_requeue_until = math.inf
                self._say_waiting(state)
                asked = time.monotonic()
                pending_s = asked - began if state.name == "PENDING" else 0.0
                every_s = min(max(_STATE_EVERY_S, pending_s / 10), _STATE_AT_MOST_EVERY_S)
            time.sleep(_RECORDS_EVERY_S)

    def _state(self) -> JobState:
        state = self.launcher.job_state(self.job_id, self.run)
        if state is not None:  # UNKNOWN, too: a controller that is down may know it
            self._seen_at = time.monotonic()
            return state
        if time.monotonic() - self._seen_at > _LOST_AFTER_S:
            return JobState(name="LOST", reason="neither queue nor accounting knows it")
        return JobState(name="UNKNOWN")

    def _may_requeue(self, state: JobState) -> bool:
        """Whether a job that a preemption or a dead node ended may yet be queued again."""
        if state.name not in _REQUEUED or not self.run.load_config().job.requeue:
            return False
        self._may_requeue_until = min(self._may_requeue_until, time.monotonic() + _REQUEUE_S)
        return time.monotonic() < self._may_requeue_until

    def _show_records(self) -> None:
        for record in self._records.read():
            self.progress.show(record)

    def _say_waiting(self, state: JobState) -> None:
        """Says once what the job does, and what it waits for."""
        text = f"job {self.job_id} is {state.name.lower()}"
        if state.reason:
            text += f" ({state.reason})"
        if state.name in ("PENDING", "RUNNING", "SUSPENDED", "REQUEUED") and text != self._said:
            self._said = text
            self.progress.say(text)

    def _conclude(self, state: JobState) -> int:
        if state.name == "COMPLETED" and state.exit_code == 0:
            result = self._await_result()
            if result is not None:
                print(result_table(result))
                print(f"model and records: {self.run.path}")
                print("".join(f"  {line}\n" for line in tracking.next_commands(self.run)), end="")
                return Exit.OK
        error = job_error(self.run, self.job_id, state)
        if state.ended:
            with contextlib.suppress(OSError):  # where the job could not say it itself
                name = "cancelled" if error.code == Exit.CANCELLED else "failed"
                self.run.set_state(name, error.message, error.code)
        print(f"error: {error}", file=sys.stderr)
        return int(error.code)

    def _await_result(self) -> dict[str, Any] | None:
        """The result; a file system may show it here some seconds after the job's end."""
        deadline = time.monotonic() + _FILE_LAG_S
        while (result := read_json(self.run.result)) is None and time.monotonic() < deadline:
            time.sleep(_RECORDS_EVERY_S)
        self._show_records()
        self.progress.close()
        return result


def job_error(run: RunDir, job_id: str, state: JobState) -> SlurmftError:
    """Why a job did not finish: the rank or node that failed first, else the scheduler's words."""
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
    if failure is None and state.name == "FAILED":
        for line in _last_words(run, job_id):
            print(line, file=sys.stderr)
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
            words += [f"end of {log}:", *(f"  {line}" for line in lines[-8:])] if lines else []
    return words


def _failure_error(failure: dict[str, Any]) -> SlurmftError:
    if failure["traceback"]:
        print(failure["traceback"].rstrip(), file=sys.stderr)
    message = f"{failure['where']}: {failure['message']}"
    return SlurmftError(message, failure["hint"], failure["code"])


def next_commands(run: RunDir) -> str:
    """The commands that a user types next, with this run's names in them."""
    path = shlex.quote(str(run.path))
    python = "python -m slurmft"
    return (
        f"Next:\n"
        f"  {python} follow {path}   # progress, and the result at the end\n"
        f"  {python} cancel {path}   # end the job\n"
        f"  {python} resume {path}   # go on after a stop or a failure\n"
        f"  tail -F {shlex.quote(str(run.rank_log(0)))}"
    )


def follow_main(argv: list[str]) -> int:
    """`slurmft follow RUN_DIR`"""
    parser = Parser(prog="slurmft follow", description=__doc__, epilog=EXAMPLES)
    parser.add_argument("run_dir", help="run directory that `slurmft submit` printed")
    run = RunDir.open(parser.parse(argv).run_dir)
    run.settle_permissions()
    return Follower(run).follow()


def cancel_main(argv: list[str]) -> int:
    """`slurmft cancel RUN_DIR`"""
    parser = Parser(prog="slurmft cancel", description="Ends the job of a run.")
    parser.add_argument("run_dir", help="run directory that `slurmft submit` printed")
    run = RunDir.open(parser.parse(argv).run_dir)
    run.settle_permissions()
    cluster, job_id = launchers.job_of(run)
    state = launchers.get(cluster).job_state(job_id, run)
    if state is not None and state.ended:
        print(f"the job {job_id} has already ended ({state.name.lower()})")
        return Exit.OK
    launchers.get(cluster).cancel(job_id, run)
    print(f"the job {job_id} is being cancelled")
    return Exit.OK
