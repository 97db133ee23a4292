"""Jobs on Slurm: one batch script, submitted by submitit, with one task per node under srun."""

import contextlib
import io
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Literal

from slurmft.cluster.job_state import Report
from slurmft.cluster.slurm import commands
from slurmft.cluster.submitit_logging import keeping_logging
from slurmft.core.config import EXPEDITED, JobConfig, RunConfig
from slurmft.core.errors import Exit, SlurmftError, UsageError
from slurmft.runs.rundir import RunDir

_EXPEDITES = (25, 11)
"""The first version of Slurm with --requeue=expedite."""

DESTINATION = "to Slurm: {} node(s)"
LOCATION_KIND: Literal["cluster"] = "cluster"
STARTS_RANKS = False

# Where a function imports, lists of runs need not: they only ask for jobs and locations.


def location() -> str:
    """Returns the name of the Slurm cluster; "" where its controller does not say it."""
    return commands.cluster_name()


def plan(config: RunConfig, run: RunDir) -> str:
    """Returns the batch script, and how it is submitted."""
    from slurmft.cluster.slurm.batch_script import sbatch_text

    lines = [
        "# sbatch script, submitted through submitit",
        sbatch_text(config, run),
        *notes(config),
    ]
    return "\n".join(lines)


def check_expedited(job: JobConfig) -> None:
    """Raises UsageError where a job is to be requeued before all others, by a Slurm that cannot."""
    if EXPEDITED not in [pair.lstrip("-") for pair in job.sbatch]:
        return
    version = ""
    with contextlib.suppress(SlurmftError):  # sbatch says why
        version = commands.version()
    numbers = re.search(r"(\d+)\.(\d+)", version)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < _EXPEDITES:
        raise UsageError(
            f"--sbatch {EXPEDITED}: this is {version}, and Slurm has it since 25.11",
            "leave it out",
        )


def notes(config: RunConfig) -> list[str]:
    """Returns what a dry run says of the nodes that Slurm would give a job."""
    from slurmft.cluster.slurm.sbatch_options import arguments, request
    from slurmft.node import granted_cpus

    job = config.job
    # Who asks for some GPUs of a node leaves the others, and their CPUs, to other jobs.
    if job.chooses_cpus or job.gpus_per_node:
        return []
    # Of a range, as many nodes as are always enough: sbatch does not say how many it would take.
    job = job.on_nodes(job.least_nodes)
    fewest = replace(config, job=job)
    grant = commands.grant(arguments(request(fewest).items()))
    if grant is None or grant.cpus >= grant.cpus_per_node * job.nodes:
        return []
    granted = grant.cpus // job.nodes
    text = granted_cpus.shortage(granted, grant.cpus_per_node, "each node")
    return [f"# note: {text}", ""]


def submit(config: RunConfig, run: RunDir) -> str:
    """Submits the job; returns its id. Of a refusal, the error has sbatch's own words."""
    from slurmft.cluster.slurm.batch_script import sbatch_text
    from slurmft.cluster.slurm.sbatch_options import all_options, arguments

    with keeping_logging():
        import submitit

    class Executor(submitit.SlurmExecutor):  # type: ignore[misc, unused-ignore]
        """submitit's executor with slurmft's script: its own lacks options and ports."""

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            return sbatch_text(config, run)

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            # On the command line too: SBATCH_* variables override a script's directives.
            return [
                "sbatch",
                *arguments(all_options(config, run)),
                commands.script_argument(submission_file_path),
            ]

        @classmethod
        def name(cls) -> str:
            return "slurm"

    try:
        executor = Executor(run.submitit)
        executor.update_parameters(nodes=config.job.nodes, ntasks_per_node=1)
        # submitit prints the error as well, which is shown once, by whoever called this.
        with contextlib.redirect_stderr(io.StringIO()):
            # os.getpid stands for nothing: submitit pickles a function, and the script loads none.
            return str(executor.submit(os.getpid).job_id)
    except submitit.core.utils.FailedJobError as error:
        cause = error.__cause__
        code = 1
        # submitit's own error has the words of sbatch, and its cause the exit code.
        if isinstance(cause, subprocess.CalledProcessError):
            code = cause.returncode
        raise commands.refusal(str(error), code) from None
    # There is no srun here, or sbatch printed no job id.
    except RuntimeError as error:
        message = f"submitit could not submit: {error}"
        raise SlurmftError(message, code=Exit.SUBMIT) from None


def job_state(job_id: str, run: RunDir) -> Report | None:
    """Returns what Slurm says of the job."""
    return commands.job_state(job_id)


def cancel(job_id: str, run: RunDir) -> None:
    """scancel; a job that it ends has no time to record that itself."""
    commands.cancel(job_id)
    # an operator may cancel what only others can write
    if os.access(run.path, os.W_OK):
        run.set_state("cancelled", "by slurmft cancel", Exit.CANCELLED)
