"""Where a job runs: each launcher submits a run, reports the state of its job, and cancels it."""

import os
from typing import Literal, Protocol

from slurmft.cluster import ending
from slurmft.cluster.job_state import JobState, Report, by_record, combine
from slurmft.cluster.slurm.commands import available
from slurmft.core import plugins
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.files import write_json
from slurmft.core.run_files import Job
from slurmft.runs.rundir import RunDir


class Launcher(Protocol):
    """A launcher: a module or an object, declared as an entry point of `slurmft.launchers`."""

    DESTINATION: str
    """Where a job goes, as said after its submission: "to Slurm: {} node(s)"."""
    LOCATION_KIND: Literal["cluster", "host"]
    """What `location` names. On a host, a job is a process: nobody but the run itself records how
    it ended. On a cluster, the scheduler knows that."""
    STARTS_RANKS: bool
    """True if it starts every rank itself, without torchrun and without the task of a node, in
    which programs for a node, and preflights, run."""

    def location(self) -> str:
        """Returns where a job runs that is submitted from here, and where alone it can be asked
        about: the name of the cluster, or of this host. "" where that is not known: jobs then
        count as being here."""

    def plan(self, config: RunConfig, run: RunDir) -> str:
        """Returns the job as text, for a dry run."""

    def submit(self, config: RunConfig, run: RunDir) -> str:
        """Starts the job of a run; returns its id."""

    def job_state(self, job_id: str, run: RunDir) -> Report | None:
        """Asks the scheduler for the job; None where it does not know it any more.

        A report with the name "UNKNOWN" says that the scheduler does not answer: `slurmft list`
        asks for many jobs, and an exception would end it.
        """

    def cancel(self, job_id: str, run: RunDir) -> None:
        """Cancels the job."""


# A Protocol has its attributes among the annotations, and its functions in its namespace.
_MEMBERS = [
    *Launcher.__annotations__,
    *(name for name in vars(Launcher) if not name.startswith("_")),
]


def choose(cluster: str) -> str:
    """Returns the launcher's name: the one asked for, or Slurm's where there is one.

    Raises:
        UsageError: there is no such launcher.
        SlurmftError: Slurm was asked for and is not here.
    """
    if cluster == "auto":
        if available():
            return "slurm"
        return "local"
    # Before a run directory is made.
    if cluster == "slurm" and not available():
        raise SlurmftError(
            "--cluster slurm, but sbatch is not on the PATH",
            "log in to a Slurm login node, or use --cluster local",
            Exit.SUBMIT,
        )
    plugins.get(plugins.LAUNCHERS, cluster, "--cluster")
    return cluster


def get(cluster: str) -> Launcher:
    """Returns the launcher of that name; SlurmftError where there is none: for pods, or a damaged
    run directory."""
    entry = plugins.find(plugins.LAUNCHERS, cluster)
    if entry is None:
        raise SlurmftError(f"no command here knows the jobs of {cluster!r}")
    launcher: Launcher = entry.load()
    # At the first use: a function that is missing would show when a job is to be cancelled.
    entry.check(launcher, "launcher", _MEMBERS)
    return launcher


def destination(cluster: str, job: JobConfig) -> str:
    """Returns where a job goes, in words."""
    count = job.node_range
    # Others start on a fixed number of hosts.
    if job.spare_nodes and cluster == "slurm":
        count += f" + {job.spare_nodes} spare"
    # Simulated nodes are always free.
    if cluster == "local":
        count = str(job.nodes)
    return get(cluster).DESTINATION.format(count)


def find(cluster: str) -> Launcher | None:
    """Returns the launcher of that name; None where nobody here can ask for its jobs: they are
    pods, or its package is missing or damaged."""
    # A list of runs must not end at a package that one of them was submitted with.
    try:
        return get(cluster)
    except SlurmftError:
        return None


def location(cluster: str) -> str:
    """Returns where a job of a launcher runs that is submitted from here; "" where that is not
    known, or there is no such launcher."""
    launcher = find(cluster)
    if launcher is None:
        return ""
    return launcher.location()


def is_process(cluster: str) -> bool:
    """Returns whether a job of a launcher is a process of one host, without a scheduler."""
    return get(cluster).LOCATION_KIND == "host"


def note_job(run: RunDir, cluster: str, job_id: str, where: str) -> None:
    """Records the job of a run. `where` is its `location`, determined before the submission:
    whoever is interrupted after the submission must not lose the id."""
    write_json(run.job, Job(cluster=cluster, id=job_id, where=where))


def other_location(cluster: str, where: str, here: str) -> str:
    """Returns the location of a job in words, if it is another one than `here`; "" where they are
    the same, or where one of the two is not known."""
    if not where or not here or where == here:
        return ""
    return f"on the {get(cluster).LOCATION_KIND} {where}; seen from {here}"


def elsewhere(run: RunDir) -> str:
    """Returns where the job of a submitted run is, in words; "" where it can be queried and
    cancelled from here."""
    job = run.read_job()
    if job is None or not job.where:
        return ""
    return other_location(job.cluster, job.where, location(job.cluster))


def job_of(run: RunDir) -> Job:
    """Returns the job of a submitted run; raises SlurmftError where it was never submitted."""
    job = run.read_job()
    if job is None:
        raise SlurmftError(f"the run {str(run.path)!r} was never submitted")
    return job


def check_reachable(run: RunDir, job: Job) -> None:
    """Checks that the scheduler of a job can be asked from here, or need not be asked.

    Raises:
        UsageError: the job is elsewhere, and the run has recorded no end.
        SlurmftError: there is no such launcher here.
    """
    # Raises where nobody here could be asked.
    get(job.cluster)
    place = elsewhere(run)
    # An end on record is the same everywhere.
    if place and not run.get_state().has_ended:
        raise UsageError(
            f"the job {job.id} of {run.path.name} is {place}",
            "do it there; slurmft status and slurmft logs show its files here, too",
        )


def job_state(run: RunDir, job: Job) -> JobState:
    """Asks the scheduler for a job of a run, and returns its state; see `job_state.combine`. Raises
    as `check_reachable`."""
    check_reachable(run, job)
    if elsewhere(run):
        return by_record(run.get_state())
    # The scheduler first, then the record: an end that is recorded between the two is seen.
    report = get(job.cluster).job_state(job.id, run)
    may_requeue = False
    if report is not None and report.may_be_requeued:
        may_requeue = run.load_config().job.requeue

    def combined() -> JobState:
        return combine(
            run.get_state(),
            report,
            is_process=is_process(job.cluster),
            has_started=os.path.exists(
                run.attempt
            ),  # False while its file system fails
            may_requeue=may_requeue,
        )

    state = combined()
    if ending.recover(run, state):
        # It has recorded the end of the run, which is another state.
        state = combined()
    return state
