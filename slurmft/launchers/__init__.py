"""Where a job runs: each launcher submits a run, says how it stands, and cancels it."""

from __future__ import annotations

import importlib
from typing import Protocol

from slurmft.config import RunConfig
from slurmft.errors import Exit, SlurmftError
from slurmft.rundir import RunDir, read_json
from slurmft.slurm import JobState, available


class Launcher(Protocol):
    """What a launcher module provides."""

    def plan(self, config: RunConfig, run: RunDir) -> str:
        """What would be submitted, for people to read."""

    def submit(self, config: RunConfig, run: RunDir) -> str:
        """Starts the job of a run; returns its id."""

    def never_starts(self, job_id: str) -> str | None:
        """Why a submitted job will wait for ever; None: no reason to think so."""

    def job_state(self, job_id: str, run: RunDir) -> JobState | None:
        """How the job stands; None where nothing knows it any more."""

    def cancel(self, job_id: str, run: RunDir) -> None:
        """Ends the job."""


def choose(cluster: str) -> str:
    """The launcher's name: the one asked for, or Slurm's where there is one.

    Raises:
        SlurmftError: Slurm was asked for and is not here.
    """
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
    """The launcher of that name (imported here: submitit takes 90 ms)."""
    launcher: Launcher = importlib.import_module(f"slurmft.launchers.{cluster}")
    return launcher


def recorded_state(run: RunDir) -> JobState | None:
    """The end of a run by its own record; None: it has not ended."""
    state = run.get_state()
    name = {"finished": "COMPLETED", "failed": "FAILED", "cancelled": "CANCELLED"}.get(
        state["state"]
    )
    if name is None:
        return None
    return JobState(name=name, reason=state["reason"], exit_code=state["exit_code"] or 0)


def job_of(run: RunDir) -> tuple[str, str]:
    """Cluster and job id of a submitted run.

    Raises:
        SlurmftError: the run was never submitted.
    """
    job = read_json(run.job)
    if job is None:
        raise SlurmftError(f"the run {str(run.path)!r} was never submitted")
    return job["cluster"], job["id"]
