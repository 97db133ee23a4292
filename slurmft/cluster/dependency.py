"""Runs that start after others: `--after` and `--after-any`."""

import dataclasses
import shlex
from typing import Any

from slurmft.cluster.slurm.sbatch_options import DEPENDENCIES
from slurmft.core.config import RunConfig
from slurmft.core.errors import UsageError
from slurmft.core.options import flag
from slurmft.runs.rundir import RunDir


def settled(config: RunConfig, cluster: str, runs_dir: str | None) -> RunConfig:
    """Returns the configuration with the paths of the runs that it waits for, and with their jobs
    in `submission.dependency`. A requeued job keeps its id; a resumed run has its newest."""
    names = {kind: getattr(config.job, kind) for kind in DEPENDENCIES}
    waits = any(names.values())
    # A resume that waits for nothing any more must still clear what it waited for before.
    if not waits and config.submission.dependency is None:
        return config
    from slurmft.runs import resolve  # 15 ms, which most jobs do without

    conditions = []
    paths: dict[str, Any] = {}
    for kind in DEPENDENCIES:
        runs = [resolve.find(name, runs_dir) for name in names[kind]]
        # Paths in place of names: `last` will soon be another run.
        paths[kind] = tuple(str(run.path) for run in runs)
        for run in runs:
            job_id = _awaited_job(run, flag(kind), cluster)
            if job_id:
                conditions.append(f"{DEPENDENCIES[kind]}:{job_id}")
    job = dataclasses.replace(config.job, **paths)
    # Without conditions "", which clears what the run waited for before.
    dependency = ",".join(conditions)
    submission = dataclasses.replace(config.submission, dependency=dependency)
    return dataclasses.replace(config, job=job, submission=submission)


def _awaited_job(run: RunDir, option: str, cluster: str) -> str:
    """Returns the job whose end must be waited for; "" where the run has ended as it should.
    UsageError where the end cannot be waited for, or was not what `option` asks."""
    from slurmft.cluster.status import run_statuses  # 10 ms, for few jobs
    from slurmft.runs.scan import MeasuredRun

    # Slurm knows jobs, and not for long: how a run has ended is in its own records.
    (status,) = run_statuses([MeasuredRun.read(run.path)])
    subject = f"{option} {run.path.name}: that run"
    path = shlex.quote(str(run.path))
    has_ended_somehow = not status.is_alive and option == "--after-any"
    if status.state == "finished" or has_ended_somehow:
        return ""
    if not status.is_alive:
        reason = ""
        if status.reason:
            reason = f": {status.reason}"
        hint = f"resume it: slurmft resume {path}; or give --after-any"
        raise UsageError(f"{subject} is {status.state}{reason}", hint)
    are_on_slurm = cluster == status.cluster == "slurm"
    is_same_cluster = are_on_slurm and not status.elsewhere
    if not is_same_cluster or not status.job:
        where = status.elsewhere or f"{status.state} ({status.cluster})"
        raise UsageError(
            f"{subject} is {where}, and only a Slurm cluster's jobs can wait for each other",
            f"wait for it: slurmft follow {path}",
        )
    return status.job
