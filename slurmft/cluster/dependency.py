"""Runs that start after others: `--after` and `--after-any`."""

import dataclasses
import shlex
from typing import Any

from slurmft.core.config import RunConfig
from slurmft.core.errors import UsageError
from slurmft.core.options import flag
from slurmft.runs import resolve
from slurmft.runs.rundir import RunDir

KINDS = {"after": "afterok", "after_any": "afterany"}
"""Option -> Slurm's name of the dependency."""


def settled(config: RunConfig, cluster: str, runs_dir: str | None) -> RunConfig:
    """The configuration with the paths of the runs that it waits for, and with their jobs in
    `submission["dependency"]`; a requeued job keeps its id, and of a resumed run it is the newest.
    """
    found = {k: [resolve.find(each, runs_dir) for each in getattr(config.job, k)] for k in KINDS}
    if not any(found.values()) and "dependency" not in config.submission:
        return config
    pairs = [(k, _awaited(run, flag(k), cluster)) for k, runs in found.items() for run in runs]
    text = ",".join(f"{KINDS[k]}:{job}" for k, job in pairs if job)
    paths: dict[str, Any] = {k: tuple(str(run.path) for run in runs) for k, runs in found.items()}
    job = dataclasses.replace(config.job, **paths)
    return dataclasses.replace(config, job=job, submission=config.submission | {"dependency": text})


def _awaited(run: RunDir, how: str, cluster: str) -> str:
    """The job whose end must be waited for; "": none, it has ended."""
    from slurmft.cluster.status import run_statuses  # 10 ms, for few jobs
    from slurmft.runs.scan import MeasuredRun

    status = run_statuses([MeasuredRun.read(run.path)])[0]
    words, name = f"{how} {run.path.name}: that run", shlex.quote(str(run.path))
    if status.state == "finished" or (not status.is_alive and how == "--after-any"):
        return ""
    if not status.is_alive:
        reason = f": {status.reason}" if status.reason else ""
        hint = f"resume it: slurmft resume {name}; or give --after-any"
        raise UsageError(f"{words} is {status.state}{reason}", hint)
    if cluster != "slurm" or status.cluster != "slurm" or status.elsewhere or not status.job:
        where = status.elsewhere or f"{status.state} ({status.cluster})"
        raise UsageError(
            f"{words} is {where}, and only a Slurm cluster's jobs can wait for each other",
            f"wait for it: slurmft follow {name}",
        )
    return status.job
