"""Where a job runs: each launcher submits a run, reports the state of its job, and cancels it."""

import importlib
import os
from typing import Protocol

from slurmft.cluster.slurm.commands import JobState, available, cluster_name
from slurmft.core.config import RunConfig
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.core.files import write_json
from slurmft.core.run_files import Job
from slurmft.runs.rundir import RunDir

_MODULES = {
    "slurm": "slurmft.cluster.slurm.launcher",
    "local": "slurmft.cluster.local",
    "mpirun": "slurmft.cluster.mpirun",
}


class Launcher(Protocol):
    """What a launcher module provides."""

    def plan(self, config: RunConfig, run: RunDir) -> str:
        """What would be submitted, as text."""

    def submit(self, config: RunConfig, run: RunDir) -> str:
        """Starts the job of a run; returns its id."""

    def job_state(self, job_id: str, run: RunDir) -> JobState | None:
        """The state of the job; None where nothing knows it any more."""

    def cancel(self, job_id: str, run: RunDir) -> None:
        """Cancels the job."""


def choose(cluster: str) -> str:
    """The launcher's name: the one asked for, or Slurm's where there is one; SlurmftError where
    Slurm was asked for and is not here."""
    if cluster == "auto":
        return "slurm" if available() else "local"
    if cluster == "slurm" and not available():
        raise SlurmftError(
            "--cluster slurm, but sbatch is not on the PATH",
            "log in to a Slurm login node, or use --cluster local",
            Exit.SUBMIT,
        )
    return cluster


def get(cluster: str) -> Launcher:
    """The launcher of that name (imported here: submitit takes 90 ms); SlurmftError where there is
    none: for pods, or a damaged run directory."""
    if cluster not in _MODULES:
        raise SlurmftError(f"no command here knows the jobs of {cluster!r}")
    launcher: Launcher = importlib.import_module(_MODULES[cluster])
    return launcher


def recorded_state(run: RunDir) -> JobState | None:
    """How a run ended, by its own record; None: it has not ended."""
    state = run.get_state()
    name = {"finished": "COMPLETED", "failed": "FAILED", "cancelled": "CANCELLED"}.get(state.state)
    if name is None:
        return None
    return JobState(name=name, reason=state.reason, exit_code=state.exit_code or 0)


def location(cluster: str) -> str:
    """Where a job runs that is submitted from here: the Slurm cluster's name, or this host's; ""
    where that is not known."""
    if cluster == "slurm":
        return cluster_name()
    return os.uname().nodename if cluster in ("local", "mpirun") else ""


def note_job(run: RunDir, cluster: str, job_id: str, where: str) -> None:
    """Records the job of a run. `where` is its `location`, determined before the submission:
    whoever is interrupted after the submission must not lose the id."""
    write_json(run.job, Job(cluster=cluster, id=job_id, where=where))


def other_location(cluster: str, where: str, here: str) -> str:
    """The location of a job in words, if it is another one than `here`; "" where they are the same,
    or where one of the two is not known."""
    if not where or not here or where == here:
        return ""
    kind = "cluster" if cluster == "slurm" else "host"
    return f"on the {kind} {where}; seen from {here}"


def elsewhere(run: RunDir) -> str:
    """The same, of a submitted run: its job cannot be queried or cancelled from here."""
    job = run.read_job()
    if job is None or not job.where:
        return ""
    return other_location(job.cluster, job.where, location(job.cluster))


def recorded_elsewhere(run: RunDir) -> JobState | None:
    """How the job of a run elsewhere ended, by the run's own record; None: the job is here.
    UsageError where it is elsewhere, and the record does not say that it has ended."""
    if not (words := elsewhere(run)):
        return None
    if recorded := recorded_state(run):
        return recorded
    raise UsageError(
        f"the job {job_of(run)[1]} of {run.path.name} is {words}",
        "do it there; slurmft status and slurmft logs show its files here, too",
    )


def job_of(run: RunDir) -> tuple[str, str]:
    """Cluster and job id of a submitted run; SlurmftError where it was never submitted."""
    job = run.read_job()
    if not job:
        raise SlurmftError(f"the run {str(run.path)!r} was never submitted")
    return job.cluster, job.id
