"""Attempts: from the start of a job to its end or requeue, and what becomes of the run then."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slurmft.core import fingerprint
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.files import read_json
from slurmft.core.text import some
from slurmft.runs.records import RecordWriter
from slurmft.runs.rundir import RunDir, current_attempt


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of a run after an attempt."""

    state: str
    """finished, failed, cancelled or requeued."""
    reason: str
    code: int


class NotThisJobError(UsageError):
    """This job is not to run the run, which stays as it is: another one does, or it is over."""


@dataclass(frozen=True, slots=True)
class Start:
    """A start of a job, as it asks for an attempt."""

    job: str
    restarts: int = 0
    """How often Slurm had started the same job before."""
    where: str = ""
    """The Slurm cluster's name, or the host; "" where it is not known."""
    has_ended: Callable[[str], bool | None] = lambda job: True
    """Whether another job of the run has ended for good; None: that is unknown."""


def check_turn(run: RunDir, start: Start) -> None:
    """Checks that a job that starts is the one to run the run.

    There may be several: a second resume, a start that a dead node delayed for an hour.

    Raises:
        NotThisJobError: it is not.
    """
    if (state := run.get_state()["state"]) in ("finished", "cancelled"):
        verb = "has" if state == "finished" else "was"
        raise NotThisJobError(f"the job {start.job} ends at once: {run.path} {verb} {state}")
    if before := read_json(run.attempt):
        words = f"attempt {before['number']} of {run.path}, on {some(before['hosts'])}"
        other = Start(before["job"], before["restarts"], before["where"])
        _check_other(run, start, other, words)


def _check_other(run: RunDir, start: Start, other: Start, attempt: str) -> None:
    """Checks that the start of a job that has an attempt is over."""
    job = other.job
    if other.where != start.where:
        return  # `slurmft resume --cluster`: the user has said that the job there has ended
    if job == start.job:
        if other.restarts > start.restarts:  # this one's node was given up by Slurm, and lives
            raise NotThisJobError(f"the job {job} ends here: started again, it has {attempt}")
        return
    ended = start.has_ended(job)
    # Who submitted the run again has seen that the jobs before had ended.
    if ended is False or (ended is None and not run.awaits_begin()):
        still = "" if ended is False else ", or has had it: Slurm does not answer"
        raise NotThisJobError(
            f"the job {start.job} ends at once: the job {job} has {attempt}{still}"
        )


def _claim(run: RunDir, start: Start) -> int:
    """The number of the attempt that this start of a job has, and no other.

    A symbolic link is made by one process alone, and whole: on NFS, Lustre and GPFS, too, and where
    they have no locks. Nothing is to be released after a kill.
    """
    mine, number = f"{start.job} {start.restarts} {start.where}", run.attempt_number() + 1
    with contextlib.suppress(OSError):
        run.claims.mkdir(exist_ok=True)
    while True:
        link = run.claims / str(number)
        try:
            link.symlink_to(mine)
        except FileExistsError:
            owner = os.readlink(link)
            if owner != mine:
                job, restarts, where = owner.split(" ", 2)
                other = Start(job, int(restarts), where)
                _check_other(run, start, other, f"attempt {number} of {run.path}")
                number += 1
                continue  # it ended before it could begin
        except OSError:  # a full disk does not end a run
            pass
        return number


def begin(run: RunDir, hosts: list[str], start: Start) -> int:
    """Opens an attempt; returns its number.

    Raises:
        NotThisJobError: another job has the run, or it is over.
        SlurmftError: the attempts before made no progress.
    """
    check_turn(run, start)
    settings = run.load_config().job
    stalled = attempts_without_progress(run)
    if stalled > settings.max_requeues:  # Slurm requeues after a node's death without asking us
        outcome = _no_progress(stalled, "the last attempt ended without a word")
        run.set_state(outcome.state, outcome.reason, outcome.code)
        raise SlurmftError(outcome.reason, _resume_hint(run))
    number = _claim(run, start)
    now = {"number": number, "job": start.job, "restarts": start.restarts}
    now |= {"where": start.where, "hosts": hosts, "time": time.time()}
    if changed := _tell_changes(run, number):
        now["changed"] = changed
    where = f"on {some(hosts)}"
    run.tell(run.attempt, now, f"attempt {number} of job {start.job} {where}")
    restart = f"attempt {number} {where}" if number > 1 else where
    run.set_state("running", restart, attempt=number, checkpoint=newest_checkpoint(run))
    return number


def _tell_changes(run: RunDir, number: int) -> dict[str, str]:
    """Tells, once, what has changed since the run was submitted; returns all that ever had."""
    known: dict[str, str] = (read_json(run.attempt) or {}).get("changed", {})
    later = f", from attempt {number} on" if number > 1 else ""
    found = fingerprint.changes(run.load_config()).items()
    new = {name: how + later for name, how in found if name not in known}
    if new:
        text = f"changed since submission: {fingerprint.words(new)}"
        print(f"slurmft: {text}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            RecordWriter(run.records).write({"event": "warning", "text": text})
    return known | new


def end(run: RunDir, code: int) -> Outcome:
    """Decides what becomes of a run whose tasks have ended, and records it."""
    outcome = decide(run, code)
    run.set_state(outcome.state, outcome.reason, outcome.code)
    return outcome


def decide(run: RunDir, code: int, restarts: int = 0) -> Outcome:
    """What becomes of a run, from the exit code of an attempt and the failures that it left.

    Args:
        restarts: how often Slurm has started this job again.
    """
    failure = run.root_failure(current_attempt())
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
    reason = _reason(run, code, failure)
    settings = run.load_config().job
    stalled = attempts_without_progress(run)
    if current_attempt() > run.attempt_number():  # a full disk took no record: Slurm has counted
        stalled += max(0, restarts + 1 - _recorded_starts(run))
    if not settings.requeue:
        return Outcome("failed", f"{reason}; not requeued (--no-requeue)", Exit.STOPPED)
    if stalled > settings.max_requeues:
        return _no_progress(stalled, reason, failure["code"] if failure else Exit.FAILED)
    return Outcome("requeued", reason, Exit.STOPPED)


def _reason(run: RunDir, code: int, failure: dict[str, Any] | None) -> str:
    """Why an attempt ended. That ranks have lost others tells less than how a task was killed."""
    if failure and not failure["secondary"]:
        return f"{failure['where']}: {failure['message']}"
    if code == Exit.STOPPED:
        return f"stopped; {saved(run)}"
    if killed_by := _KILLS.get(code - 128):
        oom = " (out of memory?)" if killed_by == "SIGKILL" else ""
        return f"the task of a node was killed by {killed_by}{oom}"
    if failure:
        return f"{failure['where']}: {failure['message']}"
    return f"the tasks ended with code {code}"


_KILLS = {number.value: number.name for number in signal.Signals}


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


def _recorded_starts(run: RunDir) -> int:
    """How many starts of its last job a run has on record."""
    states = itertools.takewhile(lambda s: s["state"] != "submitted", reversed(run.history()))
    return sum(1 for s in states if s["state"] == "running" or s.get("avoided"))


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


_FILE_LAG_S = 10
"""On CephFS a file may be seen 5 s late: see tests/lab."""


def await_failure(run: RunDir, code: int) -> None:
    """Gives a shared file system a moment to show why the tasks ended: of a killed process, other
    nodes tell only that they lost it."""
    deadline = time.monotonic() + _FILE_LAG_S
    while code not in (Exit.OK, Exit.STOPPED):
        failure = run.root_failure(current_attempt())
        if failure is not None and not failure["secondary"]:
            return
        if time.monotonic() > deadline:
            return
        with contextlib.suppress(OSError):  # a change of its own makes NFS read the folder anew
            probe = run.failures / f".{os.getpid()}"
            probe.touch()
            probe.unlink()
        time.sleep(0.5)
