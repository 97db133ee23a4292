"""Attempts: from the start of a job to its end or requeue, and what becomes of the run then."""

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from slurmft.core import descent, fingerprint, removal
from slurmft.core.decode import read
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.program import kind_of
from slurmft.core.run_files import ATTEMPT, Attempt, Ended, Failure, current_attempt
from slurmft.core.text import some
from slurmft.runs.records import warn
from slurmft.runs.rundir import RunDir

_MAX_STARTS_ON_BAD_NODES = 2
"""Requeues at most for bad nodes that a preflight finds."""
_FILE_LAG_S = 10
"""On CephFS a file may be seen 5 s late: see tests/lab."""
_SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The next state of a run after an attempt."""

    state: str
    """finished, failed, cancelled, requeued or superseded."""
    reason: str
    code: int


_FROM_NOTHING = ": it will start again"
"""How the reason ends of a requeue without a checkpoint."""
SUPERSEDED = "superseded"
"""The state of an outcome that is not recorded: the run belongs to a later attempt."""


# --- the start ------------------------------------------------------------------------------------


def check_turn(run: RunDir, job: str, restarts: int = 0) -> None:
    """Checks that a starting job may execute the run: only the first job of a submission may. There
    are others where two resumes were typed at once, or where a dead node delayed a start.

    A symbolic link is made by one process alone, and whole: on NFS, Lustre and GPFS, too, and where
    they have no locks. Nothing is to be released after a kill. `restarts`: how often Slurm had
    started the same job before.

    Raises:
        UsageError: another job, or a later start of this one, has the run; or it is over. The run
            stays as it is.
    """
    state = run.get_state().state
    if state in ("finished", "cancelled"):
        raise UsageError(f"the job {job} ends at once: the run {run.path} is {state}")
    submission = run.submissions()
    owner = _claim(run, submission, job)
    last = run.read_attempt()
    if last is not None and last.submission == submission:
        # More restarts: Slurm has started this job again while a dead node delayed this start.
        if owner != job or last.restarts > restarts:
            where = f", in attempt {last.number} on {some(last.hosts)}"
            raise UsageError(
                f"the job {job} ends at once: the job {owner} has {run.path}{where}"
            )
    elif owner != job:
        raise UsageError(f"the job {job} ends at once: the job {owner} has {run.path}")


def _claim(run: RunDir, submission: int, job: str) -> str:
    """Claims a submission for a job; returns the job that has it."""
    claims = descent.through(run.claims)
    claim = claims / str(submission)
    owner = job
    # A full disk does not end a run: without a claim, each job that starts takes itself for the
    # owner.
    with contextlib.suppress(OSError):
        claims.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            claim.symlink_to(job)
        owner = os.readlink(claim)
    return owner


def begin(run: RunDir, hosts: list[str], job: str, restarts: int = 0) -> int:
    """Opens an attempt, which this process and those that it starts then belong to; returns its
    number. `check_turn` comes first.

    Raises:
        SlurmftError: the attempts before made no progress; or something has changed since the
            submission, with --strict; or others may have put in what the program executes.
    """
    number = run.attempt_number() + 1
    config = run.load_config()
    settings = config.job
    # Here as well as in the tasks: the packages of its Python are asked for below.
    try:
        kind_of(config.program).check_python()
    except SlurmftError as error:
        run.set_state("failed", error.message, Exit.FAILED)()
        raise
    stalled = attempts_without_progress(run)
    # Here as well as in `decide`: after a node's death Slurm requeues without asking us.
    if stalled > settings.max_requeues:
        outcome = _no_progress(stalled, "the last attempt ended without a word")
        run.set_state(outcome.state, outcome.reason, outcome.code)()
        path = shlex.quote(str(run.path))
        again = f"slurmft resume {path}"
        raise SlurmftError(outcome.reason, f"look into {run.logs}; then: {again}")
    changed = _report_changes(run, number)
    if changed and settings.strict:
        reason = f"changed since submission: {fingerprint.words(changed)} (--strict)"
        run.set_state("failed", reason, Exit.FAILED)()
        path = shlex.quote(str(run.path))
        again = f"slurmft resume {path} --no-strict"
        raise SlurmftError(reason, f"submit it anew, or: {again}")
    attempt = Attempt(
        number=number,
        job=job,
        hosts=hosts,
        time=time.time(),
        submission=run.submissions(),
        restarts=restarts,
        changed=changed,
    )
    where = f"on {some(hosts)}"
    summary = f"attempt {number} of job {job} {where}"
    # Before the state: a reader who sees "running" finds the attempt.
    run.tell(run.attempt, attempt, summary)
    reason = where
    if number > 1:
        reason = f"attempt {number} {where}"
    run.set_state("running", reason, attempt=number, checkpoint=run.newest_checkpoint())
    os.environ[ATTEMPT] = str(number)
    return number


def _report_changes(run: RunDir, number: int) -> dict[str, str]:
    """Warns, once, of what has changed since the run was submitted; returns all that ever had."""
    before: dict[str, str] = {}
    last = run.read_attempt()
    if last is not None:
        before = last.changed
    since = ""
    if number > 1:
        since = f", from attempt {number} on"
    new: dict[str, str] = {}
    # A warning is only told: where the files cannot be read, the job starts without it.
    with contextlib.suppress(OSError):
        differences = _record_packages(run, number)
        differences |= fingerprint.changes(run.load_config(), number > 1)
        for name, how in differences.items():
            if name not in before:
                new[name] = how + since
        if new:
            text = f"changed since submission: {fingerprint.words(new)}"
            print(f"slurmft: {text}", file=sys.stderr, flush=True)
            warn(run.records, text)
    return before | new


def _record_packages(run: RunDir, number: int) -> dict[str, str]:
    """Records the packages of the program's Python, where they are others than before; returns
    which of them the first attempt did not have so: name -> how they differ, in words."""
    config = run.load_config()
    if config.job.container is not None:  # its packages are its own
        return {}
    packages = fingerprint.packages(kind_of(config.program).python)
    if not packages:
        return {}
    by_attempt = read(run.packages, dict[str, dict[str, str]])
    if by_attempt is None:  # the first attempt, or a file that a full disk has damaged
        by_attempt = {}
    recorded = list(by_attempt.values())
    # A resume on the same nodes adds nothing: the file would grow with every attempt.
    if not recorded or recorded[-1] != packages:
        by_attempt[str(number)] = packages
        run.tell(run.packages, by_attempt, f"{len(packages)} packages")
    if not recorded:
        return {}
    first = recorded[0]
    differences = {}
    for name in sorted(first.keys() | packages.keys()):
        version_then = first.get(name, "none")
        version_now = packages.get(name, "none")
        if version_then != version_now:
            differences[name] = f"{version_then} -> {version_now}"
    return differences


# --- the end --------------------------------------------------------------------------------------


def end(run: RunDir, outcome: Outcome) -> Callable[[], None]:
    """Records what becomes of a run, while the run is this attempt's; returns what waits for
    plug-ins, as `RunDir.set_state` does."""
    if outcome.state == SUPERSEDED:
        print(f"slurmft: {outcome.reason}", file=sys.stderr)
        return lambda: None
    if outcome.state == "finished":
        _record_result(run)
    return run.set_state(outcome.state, outcome.reason, outcome.code)


def start_again(run: RunDir, reason: str, where: str) -> None:
    """Records that the next attempt begins at once, without a queue.

    Args:
        run: the run.
        reason: why the attempt has ended.
        where: the place of the next one, in words: "on the same nodes".
    """
    full_reason = f"{reason.removesuffix(_FROM_NOTHING)}; it starts again {where}"
    run.set_state("requeued", full_reason, Exit.STOPPED, in_allocation=True)
    print(f"slurmft: restart: {full_reason}", file=sys.stderr, flush=True)


def recovered(run: RunDir) -> Outcome | None:
    """Returns what became of a run whose last attempt is over, by what it left on disk; None: it
    left nothing that says so, or its end is on record.

    The process that decides at the end may be killed, as the tasks may, after model and result are
    written.
    """
    attempt = run.read_attempt()
    ended = read(run.ended, Ended)
    if attempt is None or ended is None or ended.attempt != attempt.number:
        return None
    if run.awaits_begin() or run.get_state().state not in ("running", "stopping"):
        return None
    outcome = decide(run, ended.code)
    if outcome.state != "requeued":
        return outcome
    reason = f"{outcome.reason}; its job was killed before it was queued again"
    return Outcome("failed", reason, Exit.STOPPED)


def timed_out(run: RunDir) -> Outcome:
    """Returns what becomes of a run whose job has come to its time limit."""
    reason = f"the time limit (--time) was reached; {saved(run)}"
    return Outcome("failed", reason, Exit.FAILED)


def _record_result(run: RunDir) -> None:
    """Writes the result of a program that does not record it by itself: what it has measured, and
    how long it took. To one that the program, or its library, has recorded, it adds what is in the
    program's own file."""
    config = run.load_config()
    try:
        metrics = kind_of(config.program).read_result()
    except LookupError as error:
        warn(run.records, str(error.args[0]))
        metrics = {}
    if metrics is None:
        return
    result = run.read_result()
    if result is not None:
        if metrics:
            result["metrics"] = result["metrics"] | metrics
            run.tell(run.result, result, f"result: {result}")
        return
    result = {
        "metrics": metrics,
        "primary_metric": next(iter(metrics), None),
        # Each rank has a log; but ranks of earlier attempts may have been more.
        "world_size": run.world_size() or len(list(run.logs.glob("rank-*.log"))),
        "steps": None,
        "phases_s": {},
        "nodes": run.attempt_nodes(config.job.nodes, config.job.min_nodes),
        "attempts": run.attempt_number(),
        "wall_s": time.time() - run.first_began_at(),
    }
    run.tell(run.result, result, f"result: {result}")


def decide(run: RunDir, code: int, restarts: int = 0, killed_by: str = "") -> Outcome:
    """Decides what becomes of a run, by the exit code of an attempt and the failures that it left.

    Nothing is recorded yet: see `end`.

    Args:
        run: the run.
        code: of all tasks together.
        restarts: how often Slurm has started this job again.
        killed_by: which signal has ended which task, in words, where that is known better than by
            the code.
    """
    if run.is_superseded(current_attempt()):
        return Outcome(SUPERSEDED, "a later attempt has begun", code)
    if code == Exit.OK:
        return Outcome("finished", "", Exit.OK)
    state = run.get_state()
    if state.state == "cancelled":
        return Outcome("cancelled", state.reason, Exit.CANCELLED)
    failure = run.root_failure(current_attempt())
    # After a stop ranks may fail as their neighbours leave: a stopped run is requeued all the same.
    was_stopped = code == Exit.STOPPED
    if failure is not None and not was_stopped and _is_of_the_run(failure):
        return Outcome("failed", str(failure), failure.code)
    # as a shell and srun report it: 128 and the signal's number
    is_by_signal = 128 <= code <= 255
    has_reason = failure is not None or was_stopped or is_by_signal
    # They ended before slurmft could record anything, and would end so again.
    if not has_reason and run.newest_checkpoint() is None:
        return Outcome("failed", f"the tasks ended with code {code}", code)
    reason = _reason(run, code, failure, killed_by)
    # Bad nodes are excluded from the next start. A cluster that has ever more of them would keep
    # the job going round.
    if failure and failure.exclude:
        starts = _starts_on_bad_nodes(run)
        if starts > _MAX_STARTS_ON_BAD_NODES:
            reason += f"; {starts} starts had bad nodes"
            return Outcome("failed", reason, Exit.FAILED)
    settings = run.load_config().job
    if not settings.requeue:
        reason += "; not requeued (--no-requeue)"
        # Not `FAILED`: a requeue would have helped, and so does a resume by hand.
        return Outcome("failed", reason, Exit.STOPPED)
    stalled = attempts_without_progress(run) + _unrecorded_starts(run, restarts)
    if stalled > settings.max_requeues:
        if failure is None:
            return _no_progress(stalled, reason)
        return _no_progress(stalled, reason, failure.code)
    is_lost = was_stopped and run.newest_checkpoint() is None
    if is_lost and (failure is None or failure.secondary):
        reason += _FROM_NOTHING
    return Outcome("requeued", reason, Exit.STOPPED)


def _is_of_the_run(failure: Failure) -> bool:
    """Returns whether a requeue would fail in the same way. Where ranks only lost their neighbours,
    a node may have gone without a word."""
    return not failure.retry and not failure.secondary


def _starts_on_bad_nodes(run: RunDir) -> int:
    """Returns in how many attempts since the last submission a preflight found bad nodes."""
    transitions = run.get_state().since_submission()
    # Only "running" has one; the None of other states matches no failure.
    recent_attempts = {each.attempt for each in transitions}
    attempts_with_bad_nodes = set()
    for failure in run.all_failures():
        if failure.exclude:
            attempts_with_bad_nodes.add(failure.attempt)
    return len(attempts_with_bad_nodes & recent_attempts)


def _unrecorded_starts(run: RunDir, restarts: int) -> int:
    """Returns how many starts of this job a full disk has not recorded: Slurm has counted them."""
    if current_attempt() <= run.attempt_number():
        return 0
    state = run.get_state()
    recorded = len(state.starts_since_submission())
    # One that avoided bad nodes ended before it was "running".
    recorded += sum(each.avoided for each in state.since_submission())
    starts = restarts + 1  # Slurm counts the starts after the first
    return max(0, starts - recorded)


def _reason(run: RunDir, code: int, failure: Failure | None, killed_by: str) -> str:
    """Returns why an attempt ended. That ranks have lost others explains less than how a task was
    killed."""
    if failure and not failure.secondary:
        return str(failure)
    if code == Exit.STOPPED:
        return f"stopped; {saved(run)}"
    if killed_by:
        return killed_by
    signal_name = _SIGNAL_NAMES.get(code - 128)
    if signal_name:
        reason = f"the task of a node was killed by {signal_name}"
        # The kernel kills what exceeds the memory of its cgroup with SIGKILL, without a word.
        if signal_name == "SIGKILL":
            reason += " (out of memory?)"
        return reason
    if failure:
        return str(failure)
    return f"the tasks ended with code {code}"


def attempts_without_progress(run: RunDir) -> int:
    """Returns how many attempts in a row, the last one included, have left no new checkpoint."""
    newest = run.newest_checkpoint()
    stalled = 0
    for transition in reversed(run.get_state().since_submission()):
        if transition.state != "running":
            continue
        # `begin` records the checkpoint that an attempt starts from.
        if transition.checkpoint != newest:
            break
        stalled += 1
    return stalled


def saved(run: RunDir) -> str:
    """Returns the checkpoint that a stopped run can resume from, in words."""
    checkpoint = run.newest_checkpoint()
    if checkpoint:
        return f"the newest checkpoint is {checkpoint}"
    place = kind_of(run.load_config().program).checkpoint_place()
    if place:
        return f"there is no checkpoint in {place}"
    return "there is no checkpoint"


def _no_progress(stalled: int, reason: str, code: int = Exit.FAILED) -> Outcome:
    times = f"in {stalled} attempts"
    if stalled == 1:
        times = "in this attempt"
    reason += f"; no new checkpoint {times} (--max-requeues)"
    return Outcome("failed", reason, code)


def await_failure(run: RunDir, code: int) -> None:
    """Waits a moment until a shared file system shows why the tasks ended: of a killed process,
    other nodes record only that they lost it."""
    if code in (Exit.OK, Exit.STOPPED):
        return
    deadline = time.monotonic() + _FILE_LAG_S
    while True:
        failure = run.root_failure(current_attempt())
        is_explained = failure is not None and not failure.secondary
        if is_explained or time.monotonic() > deadline:
            return
        # a change of its own makes NFS read the folder anew
        with contextlib.suppress(OSError):
            probe = descent.through(run.failures) / f".{os.getpid()}"
            probe.touch()
            removal.remove(probe, removal.exactly(probe.name))
        time.sleep(0.5)
