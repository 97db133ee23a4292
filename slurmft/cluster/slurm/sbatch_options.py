"""The options of sbatch that a run needs: for #SBATCH lines, and for the command line."""

import shlex
from collections.abc import Callable, Iterable

from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.options import options
from slurmft.runs.rundir import RunDir


def all_options(config: RunConfig, run: RunDir) -> list[tuple[str, str | None]]:
    """All sbatch options of a run: what it requests, and where its output goes."""
    log = f"{run.submitit}/%j_0_log"
    return [*request(config).items(), ("output", f"{log}.out"), ("error", f"{log}.err")]


def request(config: RunConfig) -> dict[str, str | None]:
    """The sbatch options that do not depend on the run: the user's, and those slurmft needs."""
    job, pairs = config.job, (pair.lstrip("-").partition("=") for pair in config.job.sbatch)
    more = {key: value if equals else None for key, equals, value in pairs}
    if after := config.submission.get("dependency"):
        more["dependency"] = ",".join(filter(None, (more.get("dependency"), after)))
        more["kill-on-invalid-dep"] = "yes"  # many sites let such a job wait for ever
    return {
        **of_fields(job, (name for name, each in options(JobConfig).items() if each.sbatch)),
        "job-name": job.project,
        **more,
        # Slurm itself does it when a node dies.
        "requeue" if job.requeue else "no-requeue": None,
        # To the processes of the step, not to the batch script.
        "signal": f"USR2@{job.lead_s}",
        "ntasks-per-node": "1",
        "open-mode": "append",
    }


def of_fields(job: JobConfig, names: Iterable[str]) -> dict[str, str | None]:
    """Fields of a job as options of sbatch, salloc and srun: option -> value, None for options that
    take none."""
    known = options(JobConfig)
    given = {str(known[name].sbatch): getattr(job, name) for name in names}
    return {k: None if v is True else str(v) for k, v in given.items() if v not in (None, False)}


def directives(options: Iterable[tuple[str, str | None]]) -> list[str]:
    return [f"#SBATCH {_option(k, v, shlex.quote)}" for k, v in options]


def arguments(options: Iterable[tuple[str, str | None]]) -> list[str]:
    """Options on sbatch's command line, where they take precedence over SBATCH_* variables."""
    return [_option(k, v) for k, v in options]


def _option(key: str, value: str | None, quote: Callable[[str], str] = str) -> str:
    return f"--{key}" if value is None else f"--{key}={quote(value)}"
