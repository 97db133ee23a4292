"""Jobs on Slurm: one sbatch script, submitted by submitit, with one task a node under srun."""

from __future__ import annotations

import contextlib
import io
import shlex
import subprocess
import sys
from typing import Any

from slurmft import launchers, rendezvous, slurm
from slurmft.config import JobConfig, RunConfig, options, time_limit_min
from slurmft.node import NodeTask
from slurmft.rundir import RunDir
from slurmft.slurm import JobState


def sbatch_text(config: RunConfig, run: RunDir) -> str:
    """The sbatch script of a run."""
    python = shlex.quote(sys.executable)
    log = f"{run.submitit}/%j_%t_log"
    directives: dict[str, str | None] = {
        # A run starts from its beginning: Slurm must not do that behind its user's back.
        "no-requeue": None,
        **sbatch_options(config.job),
        "ntasks-per-node": "1",
        "output": f"{run.submitit}/%j_0_log.out",
        "error": f"{run.submitit}/%j_0_log.err",
        "open-mode": "append",
    }
    srun = ["srun", "--unbuffered", "--kill-on-bad-exit=1", "--wait=60"]
    srun += ["--output", f"{log}.out", "--error", f"{log}.err"]
    lines = ["#!/bin/bash", "", *(_directive(k, v) for k, v in directives.items()), ""]
    lines += config.job.setup
    if config.job.cpus_per_task:
        lines += ["# srun takes no --cpus-per-task from sbatch since Slurm 22.05"]
        lines += ['export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"']
    lines += [
        "# this script runs on the first node, where the others will meet",
        f"{rendezvous.PORT_VARIABLE}=$({python} -m slurmft.rendezvous) || exit",
        f"export {rendezvous.PORT_VARIABLE} SUBMITIT_EXECUTOR=slurm",
        f"{shlex.join(srun)} {python} -u -m submitit.core._submit {shlex.quote(str(run.submitit))}",
    ]
    return "\n".join(lines) + "\n"


def sbatch_options(job: JobConfig) -> dict[str, str | None]:
    """sbatch option -> value, None for options that take none."""
    found: dict[str, str | None] = {}
    for name, option in options(JobConfig).items():
        value = getattr(job, name)
        if "sbatch" in option.metadata and value not in (None, False):
            found[option.metadata["sbatch"]] = None if value is True else str(value)
    for pair in job.sbatch:
        key, equals, value = pair.lstrip("-").partition("=")
        found[key] = value if equals else None
    return found


def _directive(key: str, value: str | None) -> str:
    return f"#SBATCH --{key}" if value is None else f"#SBATCH --{key}={shlex.quote(value)}"


def plan(config: RunConfig, run: RunDir) -> str:
    """The sbatch script, headed by how it is submitted."""
    return f"# sbatch script, submitted through submitit\n{sbatch_text(config, run)}"


def submit(config: RunConfig, run: RunDir) -> str:
    """Submits the job; returns its id.

    Raises:
        SlurmftError: sbatch refused it, or Slurm would never start it; in their own words.
    """
    import submitit

    class Executor(submitit.SlurmExecutor):  # type: ignore[misc]
        """submitit's executor with our script: hers knows neither our options nor the port."""

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            return sbatch_text(config, run)

        @classmethod
        def name(cls) -> str:
            return "slurm"

    executor = Executor(run.submitit)
    parameters: dict[str, Any] = {"nodes": config.job.nodes, "ntasks_per_node": 1}
    if config.job.time:
        parameters["time"] = time_limit_min(config.job.time)
    executor.update_parameters(**parameters)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what we raise
            job_id = str(executor.submit(NodeTask(str(run.path))).job_id)
    except submitit.core.utils.FailedJobError as error:
        cause = error.__cause__
        code = cause.returncode if isinstance(cause, subprocess.CalledProcessError) else 1
        raise slurm.refusal(str(error), code) from None
    slurm.refuse_hopeless(job_id)
    return job_id


def job_state(job_id: str, run: RunDir) -> JobState | None:
    """How the job stands in Slurm; one that only awaits the nodes' epilogs has ended."""
    state = slurm.job_state(job_id)
    if state is not None and state.name == "COMPLETING":
        return launchers.recorded_state(run) or state
    return state


def cancel(job_id: str, run: RunDir) -> None:
    """scancel."""
    slurm.cancel(job_id)
