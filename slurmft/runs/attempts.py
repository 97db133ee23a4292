"""Attempts: from the start of a job to its end or requeue, and what becomes of the run then."""

import contextlib
import itertools
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slurmft.core import fingerprint
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.files import is_number, read_json
from slurmft.core.text import some
from slurmft.plugins.notify import notification
from slurmft.programs.description import OwnProgram
from slurmft.runs.records import warn
from slurmft.runs.rundir import RunDir, current_attempt, failure_words


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of a run after an attempt."""

    state: str
    """finished, failed, cancelled or requeued."""
    reason: str
    code: int


def check_turn(run: RunDir, job: str, restarts: int = 0) -> None:
    """Checks that a job that starts is the one to run the run: the first of those that a submission
    has led to. Two resumes may have been at once; a dead node may have delayed a start for an hour.

    A symbolic link is made by one process alone, and whole: on NFS, Lustre and GPFS, too, and where
    they have no locks. Nothing is to be released after a kill. `restarts`: how often Slurm had
    started the same job before.

    Raises:
        UsageError: another job, or a later start of this one, has the run; or it is over. The run
            stays as it is.
    """
    if (state := run.get_state()["state"]) in ("finished", "cancelled"):
        raise UsageError(f"the job {job} ends at once: the run {run.path} is {state}")
    owner, submission = job, run.submissions()
    claim = run.claims / str(submission)
    with contextlib.suppress(OSError):  # a full disk does not end a run
        run.claims.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            claim.symlink_to(job)
        owner = os.readlink(claim)
    last = run.read_attempt() or {}
    has_begun = last.get("submission") == submission
    if owner != job or (has_begun and last.get("restarts", 0) > restarts):
        where = f", in attempt {last['number']} on {some(last['hosts'])}" if has_begun else ""
        raise UsageError(f"the job {job} ends at once: the job {owner} has {run.path}{where}")


def begin(run: RunDir, hosts: list[str], job: str, restarts: int = 0) -> int:
    """Opens an attempt; returns its number. `check_turn` comes first.

    Raises:
        SlurmftError: the attempts before made no progress.
    """
    number = run.attempt_number() + 1
    settings = run.load_config().job
    stalled = attempts_without_progress(run)
    if stalled > settings.max_requeues:  # Slurm requeues after a node's death without asking us
        outcome = _no_progress(stalled, "the last attempt ended without a word")
        run.set_state(outcome.state, outcome.reason, outcome.code)
        again = f"slurmft resume {shlex.quote(str(run.path))}"
        raise SlurmftError(outcome.reason, f"look into {run.logs}; then: {again}")
    now = {"number": number, "submission": run.submissions(), "job": job, "restarts": restarts}
    now |= {"hosts": hosts, "time": time.time()}
    if changed := _tell_changes(run, number):
        now["changed"] = changed
        if settings.strict:
            reason = f"changed since submission: {fingerprint.words(changed)} (--strict)"
            run.set_state("failed", reason, Exit.FAILED)
            raise SlurmftError(reason, "submit it anew, or: slurmft resume RUN --no-strict")
    where = f"on {some(hosts)}"
    run.tell(run.attempt, now, f"attempt {number} of job {job} {where}")
    restart = f"attempt {number} {where}" if number > 1 else where
    run.set_state("running", restart, attempt=number, checkpoint=run.newest_checkpoint())
    return number


def _tell_changes(run: RunDir, number: int) -> dict[str, str]:
    """Tells, once, what has changed since the run was submitted; returns all that ever had."""
    known: dict[str, str] = (run.read_attempt() or {}).get("changed", {})
    later = f", from attempt {number} on" if number > 1 else ""
    new: dict[str, str] = {}
    with contextlib.suppress(OSError):
        found = _note_packages(run, number) | fingerprint.changes(run.load_config())
        new = {name: how + later for name, how in found.items() if name not in known}
        if new:
            text = f"changed since submission: {fingerprint.words(new)}"
            print(f"slurmft: {text}", file=sys.stderr, flush=True)
            warn(run.records, text)
    return known | new


def _note_packages(run: RunDir, number: int) -> dict[str, str]:
    """Records the packages of the program's Python, where they are others than before; returns
    which of them the first attempt did not have so: name -> how they differ, in words."""
    config = run.load_config()
    own = OwnProgram.of(config.program)
    is_image = config.job.container is not None  # its packages are its own
    if is_image or not (now := fingerprint.packages(own.python if own else sys.executable)):
        return {}
    record = read_json(run.packages, {...: {...: str}}) or {}
    if now not in list(record.values())[-1:]:
        run.tell(run.packages, record | {str(number): now}, f"{len(now)} packages")
    first = next(iter(record.values()), now)
    differ = sorted(dict(first.items() ^ now.items()))
    return {name: f"{first.get(name, 'none')} -> {now.get(name, 'none')}" for name in differ}


def end(run: RunDir, outcome: Outcome) -> notification.Sending:
    """Records what becomes of a run, and tells the user."""
    if outcome.state == "finished":
        _note_result(run)
    run.set_state(outcome.state, outcome.reason, outcome.code)
    return notification.start(run)


def _note_result(run: RunDir) -> None:
    """Writes the result of a program of the user's own that has not told one: the numbers in its
    --result-file, and how long it took."""
    own = OwnProgram.of(run.load_config().program)
    if own is None or run.result.exists():
        return
    metrics = {}
    if own.result_file is not None:
        found = read_json(path, dict) if (path := own.result()) else None
        metrics = {k: v for k, v in (found or {}).items() if is_number(v)}
        if not metrics:
            warn(run.records, f"--result-file {own.result_file!r}: no numbers were written there")
    began = next((s["time"] for s in run.history() if s["state"] == "running"), time.time())
    result: dict[str, Any] = {"metrics": metrics, "primary_metric": next(iter(metrics), None)}
    result |= {"world_size": len(list(run.logs.glob("rank-*.log"))), "steps": None, "phases_s": {}}
    result |= {"nodes": run.load_config().job.nodes, "attempts": run.attempt_number()}
    result |= {"wall_s": time.time() - began}
    run.tell(run.result, result, f"result: {result}")


def decide(run: RunDir, code: int, restarts: int = 0) -> Outcome:
    """What becomes of a run, from the exit code of an attempt and the failures that it left.
    `restarts`: how often Slurm has started this job again."""
    failure = run.root_failure(current_attempt())
    if code == Exit.OK:
        return Outcome("finished", "", Exit.OK)
    if run.get_state()["state"] == "cancelled":
        return Outcome("cancelled", run.get_state()["reason"], Exit.CANCELLED)
    # Where ranks only lost their neighbours, a node may have gone without a word.
    own = failure is not None and not failure["retry"] and not failure["secondary"]
    if code != Exit.STOPPED and failure and own:
        return Outcome("failed", failure_words(failure), failure["code"])
    by_itself = failure is None and code not in (Exit.STOPPED, *range(128, 256))
    if by_itself and run.newest_checkpoint() is None:  # its tasks never came so far as to say why
        return Outcome("failed", f"the tasks ended with code {code}", code)
    reason = _reason(run, code, failure)
    if failure and failure.get("exclude"):
        since = {state.get("attempt") for state in _since_submission(run)}
        starts = len({f["attempt"] for f in run.all_failures() if f.get("exclude")} & since)
        if starts > _PREFLIGHTS:
            return Outcome("failed", f"{reason}; {starts} starts had bad nodes", Exit.FAILED)
    settings = run.load_config().job
    stalled = attempts_without_progress(run)
    if current_attempt() > run.attempt_number():  # a full disk took no record: Slurm has counted
        past = _since_submission(run)
        recorded = sum(1 for s in past if s["state"] == "running" or s.get("avoided"))
        stalled += max(0, restarts + 1 - recorded)
    if not settings.requeue:
        return Outcome("failed", f"{reason}; not requeued (--no-requeue)", Exit.STOPPED)
    if stalled > settings.max_requeues:
        return _no_progress(stalled, reason, failure["code"] if failure else Exit.FAILED)
    return Outcome("requeued", reason, Exit.STOPPED)


_PREFLIGHTS = 2
"""Requeues at most for bad nodes that a preflight finds."""


def _since_submission(run: RunDir) -> Iterator[dict[str, Any]]:
    """The states of a run since it was last submitted, the newest first."""
    return itertools.takewhile(lambda s: s["state"] != "submitted", reversed(run.history()))


def _reason(run: RunDir, code: int, failure: dict[str, Any] | None) -> str:
    """Why an attempt ended. That ranks have lost others tells less than how a task was killed."""
    words = failure_words(failure) if failure else ""
    if failure and not failure["secondary"]:
        return words
    if code == Exit.STOPPED:
        return f"stopped; {saved(run)}"
    if killed_by := _KILLS.get(code - 128):
        oom = " (out of memory?)" if killed_by == "SIGKILL" else ""
        return f"the task of a node was killed by {killed_by}{oom}"
    return words or f"the tasks ended with code {code}"


_KILLS = {number.value: number.name for number in signal.Signals}


def attempts_without_progress(run: RunDir) -> int:
    """How many attempts in a row, the last one included, have left no new checkpoint."""
    newest = run.newest_checkpoint()
    starts = (s for s in _since_submission(run) if s["state"] == "running")
    return len(list(itertools.takewhile(lambda s: s.get("checkpoint") == newest, starts)))


def saved(run: RunDir) -> str:
    """What a stopped run can resume from, in words."""
    if found := run.newest_checkpoint():
        return f"the newest checkpoint is {found}"
    own = OwnProgram.of(run.load_config().program)
    where = f" in --checkpoint-dir {own.checkpoint_dir!r}" if own and own.checkpoint_dir else ""
    return f"the newest checkpoint is none{where}: it will start again"


def _no_progress(stalled: int, reason: str, code: int = Exit.FAILED) -> Outcome:
    times = "in this attempt" if stalled == 1 else f"in {stalled} attempts"
    return Outcome("failed", f"{reason}; no new checkpoint {times} (--max-requeues)", code)


_FILE_LAG_S = 10
"""On CephFS a file may be seen 5 s late: see tests/lab."""


def await_failure(run: RunDir, code: int) -> None:
    """Gives a shared file system a moment to show why the tasks ended: of a killed process, other
    nodes tell only that they lost it."""
    deadline = time.monotonic() + _FILE_LAG_S
    while code not in (Exit.OK, Exit.STOPPED):
        failure = run.root_failure(current_attempt())
        if (failure and not failure["secondary"]) or time.monotonic() > deadline:
            return
        with contextlib.suppress(OSError):  # a change of its own makes NFS read the folder anew
            probe = run.failures / f".{os.getpid()}"
            probe.touch()
            probe.unlink()
        time.sleep(0.5)
