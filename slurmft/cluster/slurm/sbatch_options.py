"""The options of sbatch that a run needs: for #SBATCH lines, and for the command line."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable

from slurmft.core.config import JobConfig, RunConfig, options
from slurmft.runs.rundir import RunDir


def all_options(config: RunConfig, run: RunDir) -> list[tuple[str, str | None]]:
    """All sbatch options of a run: what it requests, and where its output goes."""
    log = f"{run.submitit}/%j_0_log"
    return [*request(config.job).items(), ("output", f"{log}.out"), ("error", f"{log}.err")]


def request(job: JobConfig) -> dict[str, str | None]:
    """The sbatch options that do not depend on the run: the user's, and those slurmft needs."""
    return {
        **_of_config(job),
        # Slurm itself does it when a node dies.
        "requeue" if job.requeue else "no-requeue": None,
        # To the processes of the step, not to the batch script.
        "signal": f"USR2@{job.lead_s}",
        "ntasks-per-node": "1",
        "open-mode": "append",
    }


def _of_config(job: JobConfig) -> dict[str, str | None]:
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
    """Options on sbatch's command line, where they take precedence over SBATCH_* variables."""
    return [_option(k, v) for k, v in options]


def _option(key: str, value: str | None, quote: Callable[[str], str] = str) -> str:
    return f"--{key}" if value is None else f"--{key}={quote(value)}"
