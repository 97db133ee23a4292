"""What runs cost: hours of nodes, GPUs and CPUs over all attempts, memory, energy; and what to ask
for next time. Slurm's accounting says it, else a run's own records."""

import contextlib
import math
import os
import time
from collections.abc import Sequence
from typing import Any

from slurmft.cluster.slurm import commands
from slurmft.cluster.slurm.commands import JobUse
from slurmft.core.config import time_limit_min
from slurmft.core.decode import decode_leniently
from slurmft.core.errors import SlurmftError
from slurmft.core.run_files import Result
from slurmft.core.text import duration, in_bytes
from slurmft.node.hardware import numbers
from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun

_ROOM = 1.5
"""Memory to ask for, in peaks: Slurm measures it every half a minute."""
_MUCH_BYTES, _MUCH_TIME = 4 * 2**30, 4


def costs_of(runs: Sequence[MeasuredRun]) -> list[dict[str, Any]]:
    """What each run cost; Slurm's accounting is asked once for all of them.

    Returns:
        For each run node_hours, gpu_hours, cpu_hours, peak_memory_bytes and asked_memory_bytes (of
        a node), energy_j, longest_s (of its attempts), source. None is what is not known.
    """
    here = commands.cluster_name() if any(_is_slurm(run) for run in runs) else ""
    jobs = [_jobs(run, here) if here and _is_slurm(run) else [] for run in runs]
    used: dict[str, list[JobUse]] = {}
    with contextlib.suppress(SlurmftError):  # there is no accounting
        used = commands.job_uses({job for found in jobs for job in found})
    both = zip(runs, jobs, strict=True)
    return [_cost(run, [use for job in found for use in used.get(job, ())]) for run, found in both]


def _is_slurm(run: MeasuredRun) -> bool:
    job = RunDir(run.path).read_job()
    return job is not None and job.cluster == "slurm"


def _jobs(run: MeasuredRun, here: str) -> list[str]:
    """The jobs that a run had on this Slurm cluster: of resumes, too."""
    job = RunDir(run.path).read_job()
    if job is None or job.where not in ("", here):
        return []
    claims = RunDir(run.path).claims
    found = {job.id}
    with contextlib.suppress(OSError):
        found |= {os.readlink(claims / name) for name in os.listdir(claims)}
    return sorted(found)


def _cost(run: MeasuredRun, uses: Sequence[JobUse]) -> dict[str, Any]:
    own = _own_peak(run)
    if not uses:
        return _by_records(run) | {"peak_memory_bytes": own}
    energy = sum(use.energy_j for use in uses)
    peak = max([own or 0, *(use.peak_bytes for use in uses)])
    return {
        "node_hours": sum(use.elapsed_s * use.nodes for use in uses) / 3600,
        "gpu_hours": sum(use.elapsed_s * use.gpus for use in uses) / 3600,
        "cpu_hours": sum(use.elapsed_s * use.cpus for use in uses) / 3600,
        "peak_memory_bytes": peak or None,
        "asked_memory_bytes": uses[-1].memory_bytes // max(1, uses[-1].nodes) or None,
        "energy_j": energy or None,
        "longest_s": max(use.elapsed_s for use in uses),
        "source": "Slurm's accounting",
    }


def _by_records(run: MeasuredRun) -> dict[str, Any]:
    """By the times of its attempts, and what its ranks said of their nodes."""
    past = run.state.history
    times = []
    for number, entry in enumerate(past):
        if entry.state == "running":
            rest = past[number + 1 :]
            after = (e.time for e in rest if e.state not in ("running", "stopping"))
            now = entry.time if run.has_ended else time.time()
            times.append(next(after, now) - entry.time)
    hours = sum(times) / 3600
    ranks = RunDir(run.path).read_environment().ranks
    nodes = {rank.host: rank.hardware for rank in ranks if isinstance(rank.hardware, dict)}
    # Simulated nodes are one machine.
    count = 1 if run.value("cluster") == "local" or not _is_slurm(run) else run.value("nodes") or 1
    gpus = sum(len(n.get("gpus", ())) for n in nodes.values())
    cpus = sum(len(numbers(str(n.get("cpus") or ""))) for n in nodes.values())
    is_known = len(nodes) == count
    return {
        "node_hours": hours * count,
        "gpu_hours": hours * gpus if is_known else None,
        "cpu_hours": hours * cpus if is_known else None,
        "asked_memory_bytes": None,
        "energy_j": None,
        "longest_s": max(times, default=0.0),
        "source": "its own records",
    }


def _own_peak(run: MeasuredRun) -> int | None:
    """The most that the ranks of a node took, by their own account (bytes)."""
    each = decode_leniently(run.result, Result).peak_memory_bytes
    ranks = RunDir(run.path).read_environment().ranks
    if each is None or len(each) != len(ranks):
        return None
    hosts: dict[str, int] = {}
    for rank, size in zip(ranks, each, strict=True):
        hosts[rank.host] = hosts.get(rank.host, 0) + int(size)
    return max(hosts.values(), default=None)


def advice(cost: dict[str, Any], run: MeasuredRun) -> str:
    """What to ask for next time; "" where it fits, or is not known."""
    peak, asked, limit = cost["peak_memory_bytes"], cost["asked_memory_bytes"], run.value("time")
    found = []
    if run.value("mem") and peak and asked and asked - _ROOM * peak > _MUCH_BYTES:
        enough = math.ceil(_ROOM * peak / 2**30)
        found.append(
            f"asked for {in_bytes(asked)} a node, used {in_bytes(peak)}: --mem {enough}G would do"
        )
    if run.is_finished and isinstance(limit, str):
        limit_s, longest_s = 60 * time_limit_min(limit), cost["longest_s"]
        if limit_s >= 3600 and limit_s > _MUCH_TIME * longest_s:
            used = duration(longest_s)
            found.append(f"asked for --time {limit}, ran {used}: a shorter one may start sooner")
    return "; ".join(found)
