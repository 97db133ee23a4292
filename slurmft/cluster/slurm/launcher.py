"""Jobs on Slurm: one sbatch script, submitted by submitit, with one task a node under srun."""

from __future__ import annotations

import contextlib
import io
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from slurmft.cluster import container, launcher
from slurmft.cluster.slurm import batch_script, commands
from slurmft.cluster.slurm.commands import JobState
from slurmft.core import permissions
from slurmft.core.config import JobConfig, RunConfig, options
from slurmft.core.errors import Exit, SlurmftError
from slurmft.node import staged_env
from slurmft.node.task import NodeTask
from slurmft.runs.rundir import RunDir


def sbatch_text(config: RunConfig, run: RunDir) -> str:
    """The sbatch script of a run."""
    options = all_options(config, run)
    program = [sys.executable, "-u", "-m", "slurmft.node.submitit_worker", str(run.submitit)]
    lines = ["#!/bin/bash", "", *directives(options), ""]
    return "\n".join([*lines, *job_lines(config, run, program)]) + "\n"


def inside_text(config: RunConfig, run: RunDir, job: str = "%j") -> str:
    """What a job runs that was submitted without submitit: the same, but nothing is pickled.

    `job` is what the names of its logs begin with, as Slurm writes it.
    """
    program = [sys.executable, "-u", "-m", "slurmft.node.task", str(run.path)]
    return "\n".join(["#!/bin/bash", *job_lines(config, run, program, job)]) + "\n"


def job_lines(config: RunConfig, run: RunDir, program: list[str], job: str = "%j") -> list[str]:
    """The shell lines of a job, which Slurm runs on its first node; `program` is a node's task."""
    python, path = shlex.quote(sys.executable), shlex.quote(str(run.path))
    script = f"{python} -m slurmft.cluster.slurm.batch_script"
    log = f"{run.submitit}/{job}_%t_log"
    # sbatch may have kept the environment of the submission from this script (--export=NONE).
    srun = ["srun", "--export=ALL", "--unbuffered", "--kill-on-bad-exit=1", "--wait=60"]
    srun += ["--open-mode=append"]
    srun += ["--output", f"{log}.out", "--error", f"{log}.err"]
    lines = [f"umask {permissions.text(config.job.share_with_group)}"]
    if config.job.setup:
        lines += ["set -e", *config.job.setup, "set +e"]
    if config.job.cpus_per_task:
        lines += ["# srun takes no --cpus-per-task from sbatch since Slurm 22.05"]
        lines += ['export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"']
    if config.job.container and (caches := container.caches()):
        lines += [shlex.join(["mkdir", "-p", *caches])]
    lines += [
        "# this script runs on the first node, where the others will meet",
        f"found=$({script} begin {path}); code=$?",
        f"[ $code = {batch_script.AVOID} ] && exec {script} avoid {path}",
        "[ $code = 0 ] || exit $code",
        "export $found SUBMITIT_EXECUTOR=slurm",
        "trap : USR2 TERM  # bash waits for srun: the last line decides",
    ]
    task = shlex.join([*srun, *container.wrap(config, run, program)])
    end = f"exec {script} end {path}"
    if not config.job.stage_env:
        return [*lines, task, f'{end} "$?"']
    return [
        *lines,
        "# the Python environment on the nodes' own disks; without it they use the shared one",
        f"if archive=$({python} -m slurmft.cluster.slurm.stage_env send {path}); then",
        f'  export {staged_env.ARCHIVE}="$archive"',
        "fi",
        task,
        "code=$?",
        f'if [ -n "${{archive-}}" ] && [ $code != 0 ] && [ $code != {int(Exit.STOPPED)} ]; then',
        f'  {python} -m slurmft.cluster.slurm.stage_env clean "$archive"  # what killed tasks left',
        "fi",
        f"{end} $code",
    ]


def all_options(config: RunConfig, run: RunDir) -> list[tuple[str, str | None]]:
    """Every sbatch option of a run: what it requests, and where its output goes."""
    log = f"{run.submitit}/%j_0_log"
    return [*request(config.job).items(), ("output", f"{log}.out"), ("error", f"{log}.err")]


def request(job: JobConfig) -> dict[str, str | None]:
    """The sbatch options that do not depend on the run: what the user asked for, and what slurmft
    needs."""
    return {
        **sbatch_options(job),
        # After a node's death, too, by Slurm itself.
        "requeue" if job.requeue else "no-requeue": None,
        # To the steps' processes, not to this script.
        "signal": f"USR2@{job.lead_s}",
        "ntasks-per-node": "1",
        "open-mode": "append",
    }


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


def directives(options: Iterable[tuple[str, str | None]]) -> list[str]:
    """The #SBATCH lines of options."""
    return [f"#SBATCH {_option(k, v, shlex.quote)}" for k, v in options]


def arguments(options: Iterable[tuple[str, str | None]]) -> list[str]:
    """Options on sbatch's command line, where they win over its variables."""
    return [_option(k, v) for k, v in options]


def _option(key: str, value: str | None, quote: Callable[[str], str] = str) -> str:
    return f"--{key}" if value is None else f"--{key}={quote(value)}"


def plan(config: RunConfig, run: RunDir) -> str:
    """The sbatch script, headed by how it is submitted."""
    return f"# sbatch script, submitted through submitit\n{sbatch_text(config, run)}"


def submit(config: RunConfig, run: RunDir) -> str:
    """Submits the job; returns its id.

    Raises:
        SlurmftError: sbatch refused it; the message has sbatch's own words.
    """
    import submitit

    class Executor(submitit.SlurmExecutor):  # type: ignore[misc, unused-ignore]
        """submitit's executor with our script: its own knows neither our options nor the ports."""

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            return sbatch_text(config, run)

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            # On the command line too: SBATCH_* variables override a script's directives.
            return ["sbatch", *arguments(all_options(config, run)), str(submission_file_path)]

        @classmethod
        def name(cls) -> str:
            return "slurm"

    try:
        executor = Executor(run.submitit)
        executor.update_parameters(nodes=config.job.nodes, ntasks_per_node=1)
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what we raise
            return str(executor.submit(NodeTask(str(run.path))).job_id)
    except submitit.core.utils.FailedJobError as error:
        cause = error.__cause__
        code = cause.returncode if isinstance(cause, subprocess.CalledProcessError) else 1
        raise commands.refusal(str(error), code) from None
    except RuntimeError as error:  # no srun here, or an answer of sbatch that names no job
        raise SlurmftError(f"submitit could not submit: {error}", code=Exit.SUBMIT) from None


def never_starts(job_id: str) -> str | None:
    """Why a job that sbatch took will wait for ever; None: no reason to think so."""
    return commands.never_starts(job_id)


def job_state(job_id: str, run: RunDir) -> JobState | None:
    """How the job stands in Slurm, or by its own record where Slurm knows it no more.

    A job that only awaits the nodes' epilogs has ended if it says so itself. But only Slurm knows
    why a job got SIGTERM: scancel, time limit, preemption. That a run has finished needs no answer
    of Slurm, which a machine that only sees the file system does not get.
    """
    state, recorded = commands.job_state(job_id), launcher.recorded_state(run)
    if state is None or recorded is None or recorded.name == "CANCELLED":
        return state or recorded
    has_finished = state.name == "UNKNOWN" and recorded.name == "COMPLETED"
    return recorded if has_finished or state.name == "COMPLETING" else state


def cancel(job_id: str, run: RunDir) -> None:
    """scancel; a job that it ends has no time to say so itself."""
    commands.cancel(job_id)
    with contextlib.suppress(PermissionError):  # an operator may cancel what only others can write
        run.set_state("cancelled", "by slurmft cancel", Exit.CANCELLED)
