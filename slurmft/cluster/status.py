"""The status of runs: by their own records and, where these do not say the end, by their jobs."""

import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

from slurmft.cluster import dependency, ending, pending
from slurmft.cluster import launcher as launchers
from slurmft.cluster.job_state import JobState, Phase, Report, by_record, combine
from slurmft.cluster.launcher import Launcher
from slurmft.cluster.slurm import commands
from slurmft.core import filesystem, fingerprint, permissions
from slurmft.core.decode import decode_leniently
from slurmft.core.run_files import Failure, Job, Metrics, Result, Transition
from slurmft.core.run_records import Warned
from slurmft.runs import origin, records
from slurmft.runs.disk_space import size_of
from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun

_MOST_WARNINGS = 10_000
_OUTCOMES = {
    Phase.PENDING: "pending",
    Phase.REQUEUED: "pending",
    Phase.RUNNING: "running",
    Phase.STOPPING: "running",
    Phase.UNKNOWN: "running",
    Phase.FINISHED: "finished",
    Phase.FAILED: "failed",
    Phase.CANCELLED: "failed",
    Phase.VANISHED: "failed",
}


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of one run."""

    run: MeasuredRun
    job_state: JobState
    cluster: str = ""
    job: str = ""
    """The id of its job; "" before there is one."""
    where: str = ""
    """The name of its Slurm cluster, or its host; "" where that is not recorded."""
    elsewhere: str = ""
    """Where its job is, in words, if not here: it cannot be queried or cancelled from here."""
    has_started: bool = True

    @property
    def state(self) -> Phase:
        return self.job_state.phase

    @property
    def reason(self) -> str:
        """Why it waits, failed or was cancelled: Slurm's words, or its own."""
        return self.job_state.reason

    @property
    def is_sure(self) -> bool:
        """False where the job's state matters, but its cluster did not answer or is elsewhere."""
        return self.job_state.is_sure

    @property
    def outcome(self) -> str:
        """finished, running, pending or failed."""
        return _OUTCOMES[self.state]

    @property
    def is_alive(self) -> bool:
        """The job waits or runs, or has yet to be submitted."""
        return self.outcome in ("running", "pending")

    @property
    def requeues(self) -> int:
        """How often its job was requeued since the run was last submitted."""
        # A resume is a new submission with a job of its own: requeues count from there.
        state = self.run.state
        starts = state.starts_since_submission()
        # A requeue away from hosts that are to be excluded happens before an attempt begins, so
        # no start shows it.
        requeues = sum(each.avoided for each in state.since_submission())
        if starts:
            requeues += len(starts) - 1
            # the start that this requeue leads to is to come
            if self.state is Phase.REQUEUED:
                requeues += 1
        return requeues


@dataclass(frozen=True, slots=True)
class _Place:
    """The job of a run, as the run's files have it."""

    run: MeasuredRun
    job: Job | None
    job_id: str
    elsewhere: str = ""
    """Where the job is, in words, if not here."""
    launcher: Launcher | None = None
    """None where nobody here can ask for the job, as for pods and ranks started by hand, or need
    not, as for a run that has finished."""

    @property
    def cluster(self) -> str:
        if self.job is not None:
            return self.job.cluster
        return str(self.run.config["job"].get("cluster", ""))

    @property
    def is_asked(self) -> bool:
        """The job's scheduler is to be asked: it is here, and the record does not decide."""
        return self.launcher is not None and not self.elsewhere and bool(self.job_id)


def run_statuses(runs: Iterable[MeasuredRun]) -> list[RunStatus]:
    """Returns the status of each run; Slurm is queried once for all of them."""
    places = _places(runs)
    on_slurm = [each for each in places if each.is_asked and each.cluster == "slurm"]
    # A run that has recorded its end is alive only if Slurm has queued its job again. The queue
    # shows that; accounting need not be asked about an end that is on record.
    ended = [each.job_id for each in on_slurm if each.run.has_ended]
    job_ids = [each.job_id for each in on_slurm]
    # One call for all: one for each run would load the controller.
    reports = commands.job_states(job_ids, only_queued=ended)
    return [_status(place, reports) for place in places]


def _places(runs: Iterable[MeasuredRun]) -> list[_Place]:
    # Each launcher is imported once, and tells its location once: Slurm's asks the controller.
    launcher_of = functools.cache(launchers.find)
    location = functools.cache(launchers.location)
    places = []
    for run in runs:
        files = RunDir(run.path)
        job = files.read_job()
        place = _Place(run, job, files.job_id())
        # Where the job of a finished run was, decides nothing.
        if not run.is_finished:
            elsewhere = ""
            if job and job.where:
                here = location(job.cluster)
                elsewhere = launchers.other_location(job.cluster, job.where, here)
            launcher = launcher_of(place.cluster)
            place = dataclasses.replace(place, launcher=launcher, elsewhere=elsewhere)
        places.append(place)
    return places


def _status(place: _Place, reports: Mapping[str, Report]) -> RunStatus:
    files = RunDir(place.run.path)
    run = place.run
    has_started = run.is_finished or files.attempt.exists()
    report = None
    if place.is_asked and place.cluster == "slurm":
        report = reports.get(place.job_id)
    elif place.is_asked and place.launcher and not run.has_ended:
        report = place.launcher.job_state(place.job_id, files)
    may_have_ended = report is None or report.ended or report.name == "UNKNOWN"
    if place.is_asked and may_have_ended:
        # The run may have recorded its end since it was read: before the scheduler was asked.
        run = _read_again(run)
    if not run.is_finished and not run.has_ended and not place.job_id:
        # No scheduler can know of it, so there is nothing to be unsure of.
        report = Report(name="UNKNOWN")
        state = JobState(phase=Phase.PENDING, report=report, reason="not submitted yet")
    elif run.is_finished or not place.is_asked:
        state = by_record(
            run.state,
            has_result=run.result is not None,
            is_sure=not place.elsewhere,
            reason=place.elsewhere or "by its own records alone",
        )
    else:
        state = _combined(run, place, report, has_started)
        if ending.recover(files, state):
            run = _read_again(run)
            state = _combined(run, place, report, has_started)
        state = _with_names_of_others(run, state)
        # After the reason is complete: it becomes that of the recorded end.
        ending.record_cancelled(files, state, place.job_id)
    where = ""
    if place.job is not None:
        where = place.job.where
    return RunStatus(
        run,
        state,
        cluster=place.cluster,
        job=place.job_id,
        where=where,
        elsewhere=place.elsewhere,
        has_started=has_started or _must_have_started(state),
    )


def _combined(
    run: MeasuredRun, place: _Place, report: Report | None, has_started: bool
) -> JobState:
    return combine(
        run.state,
        report,
        is_process=launchers.is_process(place.cluster),
        has_result=run.result is not None,
        has_started=has_started,
        may_requeue=bool(run.value("requeue")),
    )


def _read_again(run: MeasuredRun) -> MeasuredRun:
    files = RunDir(run.path)
    result = files.read_result() or run.result
    return dataclasses.replace(run, state=files.get_state(), result=result)


def _must_have_started(state: JobState) -> bool:
    """A setup line may fail before anything of slurmft starts: that counts as a start, too."""
    return state.phase in (Phase.FAILED, Phase.VANISHED)


def _with_names_of_others(run: MeasuredRun, state: JobState) -> JobState:
    """Names the runs that a job waits for, or can never start after."""
    is_waiting = state.phase in (Phase.PENDING, Phase.REQUEUED)
    if is_waiting and state.report.reason == "Dependency":
        others = _others(run, *dependency.KINDS)
        if others:
            return dataclasses.replace(state, reason=f"waits for {others}")
    # Slurm cancels a job whose condition can never be met (--kill-on-invalid-dep), and names no
    # user then. After scancel the reason is "by 1000".
    is_unmet = state.report.reason in ("", "DependencyNeverSatisfied")
    if state.phase is Phase.CANCELLED and is_unmet and not run.has_ended:
        others = _others(run, "after")
        if others:
            reason = f"Slurm found that it can never start after {others}"
            return dataclasses.replace(state, reason=reason)
    return state


def _others(run: MeasuredRun, *options: str) -> str:
    """Returns the names of the runs that a run starts after."""
    names = []
    for option in options:
        for path in run.value(option) or ():
            names.append(Path(str(path)).name)
    return ", ".join(names)


# --- for programs ---------------------------------------------------------------------------------


class Described(TypedDict):
    """What a run is, by its configuration. null is what it does not have."""

    name: str
    path: str
    user: str | None
    task: str | None
    model: str | None
    data: str | None
    nodes: int | None


class Progress(TypedDict):
    """The progress of a run. null is what is not known."""

    steps_done: float | None
    steps_total: float | None
    epoch: float | None
    samples_per_s: float | None
    left_s: float | None
    """Seconds of training that are left, as the run has estimated them."""
    loss: float | None
    metrics: Metrics | None
    """Of the last evaluation."""


class RunSummary(Described, Progress):
    """One run of `slurmft list`. null is what is not known."""

    submitted: str | None
    """ISO time."""
    cluster: str | None
    """The launcher: slurm, local, ..."""
    where: str | None
    """The name of the Slurm cluster, or the host."""
    job: str | None
    """The id of the job that was submitted last."""
    state: Phase
    reason: str
    """Why it waits, failed or was cancelled: Slurm's words, or its own."""
    waiting: Annotated[dict[str, Any], pending.Waiting] | None
    """Why Slurm has the job wait."""
    expected_start: str | None
    """When Slurm expects the job to start, in local time."""
    requeues: int
    """How often the job was requeued since the run was last submitted."""


class Checkpoint(TypedDict):
    """A checkpoint that a run can resume from."""

    name: str
    bytes: int
    time: float
    """Unix seconds."""


class FailureFacts(TypedDict):
    """An error that ended a process of a run, and that no other process has caused."""

    where: str
    """The process, in words: rank 3 on n1."""
    message: str
    hint: str | None
    attempt: int
    time: float
    """Unix seconds."""


class Cost(TypedDict):
    """What a run cost, over all attempts. null is what is not known."""

    node_hours: float
    gpu_hours: float | None
    cpu_hours: float | None
    peak_memory_bytes: int | None
    """Of a node."""
    asked_memory_bytes: int | None
    """Of a node."""
    energy_j: float | None
    longest_s: float
    """The longest attempt."""
    source: str
    """Slurm's accounting, or the run's own records."""


class CostAndAdvice(Cost):
    """What a run cost, over all attempts, and a better request for the next time."""

    advice: str
    """Empty where the request fits, or its use is unknown."""


class TimeParts(TypedDict):
    """Seconds of a run, by what they were spent on. They add up to all of its time."""

    steps_s: float
    """Steps that count: none of them had to be done again."""
    queue_s: float
    """From a submission or a requeue to the start of the job."""
    start_s: float
    """From the start of a job until the ranks train; after a failure, until they train again, or
    the job is over."""
    lost_s: float
    """Steps and evaluations after the checkpoint that the run went on from."""
    saves_s: float
    """While the ranks wait for a checkpoint; at a stop and at the end, until the job is over."""
    evaluations_s: float
    waits_s: float
    """Of an average rank for the slowest one, in forward passes."""
    hangs_s: float
    """From the last sign of ranks that hung until the watchdog ended them."""
    program_s: float
    """A program ran that does not tell its steps, or a prediction predicted."""


class AttemptTime(TimeParts):
    """Where the time of one attempt went, with the queue before it."""

    attempt: int


class TimeUse(TimeParts):
    """Where the time of a run went, from its submission to its end, or until now."""

    total_s: float
    ettr: float | None
    """The share of steps that count, from 0 to 1. null: a program ran that does not tell its steps,
    and `steps_s` is the least they took; or the run is a prediction, which has none."""
    attempts: list[AttemptTime]


class RunFacts(RunSummary):
    """All that is known of a run. null is what is not known."""

    queue: list[str]
    """Lines about the queue of a pending job."""
    cost: CostAndAdvice
    time_use: TimeUse
    owner: str
    """The user whom the configuration belongs to."""
    is_own: bool
    """Nobody else can have written the run."""
    origin: Annotated[dict[str, Any], origin.Origin] | None
    """Where the run was fetched from."""
    program: dict[str, Any]
    """The program as config.json has it."""
    job_options: dict[str, Any]
    """Options of the job as config.json has them: name -> value."""
    submission: dict[str, Any]
    """When, where, by whom and from which code it was submitted, as config.json has it."""
    hosts: list[str]
    """By rank, each once."""
    history: list[Transition]
    """Oldest first."""
    changed: dict[str, str]
    """What has changed since the submission: path or package -> how, in words."""
    attempts: int
    """How often a job of the run has started."""
    last_record: float | None
    """When the run last wrote a record, in Unix seconds."""
    disk: str | None
    """Why the disk of a run that is alive takes no records any more."""
    evaluating: tuple[int, int] | None
    """Samples done and in all, of an evaluation under way."""
    checkpoints: list[Checkpoint]
    """Oldest first."""
    warnings: list[str]
    failures: list[FailureFacts]
    result: dict[str, Any] | None
    """result.json of a finished run."""
    model_path: str | None
    """The folder of the trained model."""
    logs: str
    """The folder of the logs."""


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
    from slurmft.cluster import (
        cost,
        time_use,
    )  # 5 ms, which `slurmft list` need not pay

    (status,) = run_statuses([MeasuredRun.read(run.path)])
    facts = summary(status)
    # A job whose run directory took no record left its reason as the comment of the Slurm job.
    is_unrecorded = status.state is Phase.FAILED and not status.run.has_ended
    if is_unrecorded and status.cluster == "slurm":
        facts["reason"] = commands.noted(status.job) or status.reason
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
        is_own=run.is_own(),
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


def _owner(run: RunDir) -> str:
    return permissions.user_name(run.config.stat().st_uid)


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
