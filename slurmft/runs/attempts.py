"""Attempts: from the start of a job to its end or requeue, and what becomes of the run then."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from dataclasses import dataclass

from slurmft.core.errors import Exit, SlurmftError
from slurmft.runs.rundir import RunDir


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of a run after an attempt."""

    state: str
    """finished, failed, cancelled or requeued."""
    reason: str
    code: int


def begin(run: RunDir, hosts: list[str], job: str) -> int:
    """Opens an attempt; returns its number.

    Raises:
        SlurmftError: the attempts before made no progress.
    """
    number = run.attempt_number() + 1
    settings = run.load_config().job
    stalled = attempts_without_progress(run)
    if stalled > settings.max_requeues:  # Slurm requeues after a node's death without asking us
        outcome = _no_progress(stalled, "the last attempt ended without a word")
        run.set_state(outcome.state, outcome.reason, outcome.code)
        raise SlurmftError(outcome.reason, _resume_hint(run))
    now = {"number": number, "job": job, "hosts": hosts, "time": time.time()}
    where = f"on {', '.join(hosts)}"
    run.tell(run.attempt, now, f"attempt {number} of job {job} {where}")
    restart = f"attempt {number} {where}" if number > 1 else where
    run.set_state("running", restart, attempt=number, checkpoint=newest_checkpoint(run))
    return number


def end(run: RunDir, code: int) -> Outcome:
    """Decides what becomes of a run whose tasks have ended, and records it."""
    outcome = decide(run, code)
    run.set_state(outcome.state, outcome.reason, outcome.code)
    return outcome


def decide(run: RunDir, code: int) -> Outcome:
    """What becomes of a run, from the exit code of an attempt and the failures that it left."""
    failure = run.root_failure()
    if code == Exit.OK:
        return Outcome("finished", "", Exit.OK)
    if run.get_state()["state"] == "cancelled":
        return Outcome("cancelled", run.get_state()["reason"], Exit.CANCELLED)
    # Where ranks only lost their neighbours, a node may have gone without a word.
    own = failure is not None and not failure["retry"] and not failure["secondary"]
    if code != Exit.STOPPED and failure and own:
        return Outcome("failed", f"{failure['where']}: {failure['message']}", failure["code"])
    by_itself = failure is None and code not in (Exit.STOPPED, *range(128, 256))
    if by_itself and newest_checkpoint(run) is None:  # its tasks never came so far as to say why
        return Outcome("failed", f"the tasks ended with code {code}", code)
    stopped = f"stopped; {saved(run)}"
    reason = stopped if code == Exit.STOPPED else f"the tasks ended with code {code}"
    if failure and (code != Exit.STOPPED or not failure["secondary"]):
        reason = f"{failure['where']}: {failure['message']}"
    settings = run.load_config().job
    stalled = attempts_without_progress(run)
    if not settings.requeue:
        return Outcome("failed", f"{reason}; not requeued (--no-requeue)", Exit.STOPPED)
    if stalled > settings.max_requeues:
        return _no_progress(stalled, reason, failure["code"] if failure else Exit.FAILED)
    return Outcome("requeued", reason, Exit.STOPPED)


def attempts_without_progress(run: RunDir) -> int:
    """How many attempts in a row, the last one included, have left no new checkpoint."""
    newest, count = newest_checkpoint(run), 0
    for state in reversed(run.history()):
        if state["state"] == "submitted":
            break
        if state["state"] == "running":
            if state.get("checkpoint") != newest:
                break
            count += 1
    return count


def saved(run: RunDir) -> str:
    """What a stopped run can resume from, in words."""
    return f"the newest checkpoint is {newest_checkpoint(run) or 'none: it will start again'}"


def newest_checkpoint(run: RunDir) -> str | None:
    return next(reversed(run.checkpoint_names()), None)


def _no_progress(stalled: int, reason: str, code: int = Exit.FAILED) -> Outcome:
    times = "in this attempt" if stalled == 1 else f"in {stalled} attempts"
    return Outcome("failed", f"{reason}; no new checkpoint {times} (--max-requeues)", code)


def _resume_hint(run: RunDir) -> str:
    return f"look into {run.logs}; then: slurmft resume {shlex.quote(str(run.path))}"


_FILE_LAG_S = 5


def await_failure(run: RunDir, code: int) -> None:
    """Gives a shared file system a moment to show what other nodes wrote."""
    deadline = time.monotonic() + _FILE_LAG_S
    while code not in (Exit.OK, Exit.STOPPED) and run.root_failure() is None:
        if time.monotonic() > deadline:
            return
        with contextlib.suppress(OSError):  # a change of its own makes NFS read the folder anew
            probe = run.failures / f".{os.getpid()}"
            probe.touch()
            probe.unlink()
        time.sleep(0.5)
