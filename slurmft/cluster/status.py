"""The status of runs: by their own records and, where these do not say the end, by their jobs."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmft.cluster import ending
from slurmft.cluster import launcher as launchers
from slurmft.cluster.job_state import JobState, Phase, Report, by_record, combine
from slurmft.cluster.launcher import Launcher
from slurmft.cluster.slurm import commands
from slurmft.cluster.slurm.sbatch_options import DEPENDENCIES
from slurmft.core.run_files import Job
from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun

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
    can_be_read = not run.state.problem
    if not run.is_finished and not run.has_ended and not place.job_id and can_be_read:
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
        others = _others(run, *DEPENDENCIES)
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
