"""What is known of a run: for programs, and for those who show it."""

import contextlib
import dataclasses
from collections import deque
from typing import Any

from slurmft.cluster import pending
from slurmft.cluster.fact_types import (
    Checkpoint,
    CostAndAdvice,
    Described,
    FailureFacts,
    Progress,
    RunFacts,
    RunSummary,
)
from slurmft.cluster.job_state import Phase
from slurmft.cluster.slurm import commands
from slurmft.cluster.status import RunStatus, run_statuses
from slurmft.core import descent, filesystem, fingerprint, ownership, users
from slurmft.core.decode import decode_leniently
from slurmft.core.run_files import Failure, Result
from slurmft.core.run_records import Warned
from slurmft.core.trusted import NotOwnError
from slurmft.runs import origin, records
from slurmft.runs.disk_space import size_of
from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun

_MOST_WARNINGS = 10_000


def described(run: MeasuredRun) -> Described:
    """Returns what a run is, by its configuration: the first values of `summary`."""
    return Described(
        name=run.name,
        path=str(run.path),
        user=run.submission.user,
        task=run.value("task"),
        model=run.value("model"),
        data=run.value("data"),
        nodes=run.nodes,
    )


def summary(status: RunStatus) -> RunSummary:
    """Returns a run as `slurmft list --json` prints it."""
    return RunSummary(
        **described(status.run),
        **_progress(status),
        submitted=status.run.submission.time or None,
        cluster=status.cluster or None,
        where=status.where or None,
        job=status.job or None,
        state=status.state,
        reason=status.reason,
        waiting=_waiting(status),
        expected_start=status.job_state.report.expected_start or None,
        requeues=status.requeues,
    )


def _waiting(status: RunStatus) -> dict[str, Any] | None:
    """Returns why Slurm has a job wait; None where it does not, or gives an unknown reason."""
    if status.cluster != "slurm" or status.job_state.name != "PENDING":
        return None
    waiting = pending.explain(status.job_state.report.reason or "None", status.job)
    if waiting is None:
        return None
    return dataclasses.asdict(waiting)


def _progress(status: RunStatus) -> Progress:
    """Returns the progress of a run: of a finished one by its result, else by its latest
    records."""
    result = status.run.result
    if status.state is Phase.FINISHED and result is not None:
        numbers = decode_leniently(result, Result)
        return Progress(
            steps_done=numbers.steps,
            steps_total=numbers.total_steps or numbers.steps,
            epoch=numbers.epochs,
            samples_per_s=numbers.train_samples_per_s,
            left_s=0.0,
            loss=numbers.loss,
            metrics=numbers.metrics,
        )
    latest = records.latest(status.run.path)
    left_s = latest.left_s
    # It will never end what it was estimated to.
    if not status.is_alive:
        left_s = None
    return Progress(
        steps_done=latest.steps_done,
        steps_total=latest.steps_total,
        epoch=latest.epoch,
        samples_per_s=latest.samples_per_s,
        left_s=left_s,
        loss=latest.loss,
        metrics=latest.metrics,
    )


def run_facts(run: RunDir) -> RunFacts:
    """Returns all that is known of a run, as `slurmft status --json` prints it."""
    # 5 ms, which `slurmft list` need not pay
    from slurmft.cluster import cost, time_use

    (status,) = run_statuses([MeasuredRun.read(run.path)])
    facts = summary(status)
    # A job whose run directory took no record left its reason as the comment of the Slurm job.
    is_unrecorded = status.state is Phase.FAILED and not status.run.has_ended
    if is_unrecorded and status.cluster == "slurm":
        facts["reason"] = commands.noted(status.job) or status.reason
    inode = _inode_if_own(run)
    latest = records.latest(run.path)
    (costs,) = cost.costs_of([status.run])
    # Ranks that only lost another one explain nothing.
    failures = []
    for failure in run.all_failures():
        if not failure.secondary:
            failures.append(_failure_facts(failure))
    # The newest: a program may warn at each step.
    warnings = deque[str](maxlen=_MOST_WARNINGS)
    for record in status.run.records(Warned):
        warnings.append(record.text)
    # A prediction, or a program of the user's own, leaves none.
    model_path = None
    if run.model.is_dir():
        model_path = str(run.model)
    return RunFacts(
        **facts,
        queue=_queue(status),
        cost=CostAndAdvice(**costs, advice=cost.advice(costs, status.run)),
        time_use=time_use.of_status(status),
        owner=_owner(run),
        is_own=inode is not None,
        inode=inode,
        origin=_origin(run),
        program=status.run.config["program"],
        job_options=status.run.config["job"],
        submission=status.run.config["submission"],
        hosts=status.run.hosts,
        history=status.run.state.history,
        changed=_changes(run, status),
        attempts=run.attempt_number(),
        last_record=latest.last_record,
        disk=_full_disk(status),
        evaluating=latest.evaluating,
        checkpoints=checkpoints(run),
        warnings=list(warnings),
        failures=failures,
        result=status.run.result,
        model_path=model_path,
        logs=str(run.logs),
    )


def _queue(status: RunStatus) -> list[str]:
    """Returns lines about the queue in which a run's job waits."""
    if status.cluster != "slurm" or status.job_state.name != "PENDING":
        return []
    from slurmft.cluster.slurm import queue_facts  # of a pending job alone

    return queue_facts.of_job(status.job, status.job_state.report).lines()


def _full_disk(status: RunStatus) -> str | None:
    """Returns why the disk of a run that is alive takes no records any more; None: it does."""
    if not status.is_alive:
        return None
    return filesystem.full(status.run.path)


def _inode_if_own(run: RunDir) -> int | None:
    # What is another user's, or came from elsewhere, has none.
    with contextlib.suppress(NotOwnError, origin.ForeignRunError, OSError), run.held():
        if run.is_own():
            return descent.through(run.path).stat().st_ino
    return None


def _owner(run: RunDir) -> str:
    return users.user_name(ownership.status(run.config).st_uid)


def _origin(run: RunDir) -> dict[str, Any] | None:
    came_from = origin.origin_of(run.path)
    if came_from is None:
        return None
    return dataclasses.asdict(came_from)


def _failure_facts(failure: Failure) -> FailureFacts:
    return FailureFacts(
        where=failure.where,
        message=failure.message,
        hint=failure.hint,
        attempt=failure.attempt,
        time=failure.time,
    )


def _changes(run: RunDir, status: RunStatus) -> dict[str, str]:
    """Returns what has changed since submission: as the last attempt recorded it, and, where
    another is to begin, as it is now."""
    attempt = run.read_attempt()
    recorded: dict[str, str] = {}
    if attempt is not None:
        recorded = attempt.changed
    if not status.is_alive:
        return recorded
    # The paths are those of whoever submitted it: a colleague's may be of any length and kind.
    if not run.is_own():
        return recorded
    if status.state is Phase.REQUEUED or run.awaits_begin():
        has_run = run.attempt_number() > 0
        return fingerprint.changes(run.load_config(), has_run) | recorded
    return recorded


def checkpoints(run: RunDir) -> list[Checkpoint]:
    """Returns the checkpoints, oldest first."""
    checkpoints: list[Checkpoint] = []
    for name in run.checkpoint_names():
        path = run.checkpoints / name
        with contextlib.suppress(OSError):  # one that is just being removed
            written_at = path.stat().st_mtime
            size_bytes = size_of(path)
            checkpoint = Checkpoint(name=name, bytes=size_bytes, time=written_at)
            checkpoints.append(checkpoint)
    return checkpoints
