"""The costs of runs: hours of nodes, GPUs and CPUs over all attempts, memory, energy; and a better
request for the next time. They are from Slurm's accounting, else from the run's own records."""

import contextlib
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

from slurmft.cluster.fact_types import Cost
from slurmft.cluster.slurm import commands
from slurmft.cluster.slurm.commands import JobUse
from slurmft.core.config import time_limit_min
from slurmft.core.decode import decode_leniently
from slurmft.core.errors import SlurmftError, UsageError
from slurmft.core.run_files import Result
from slurmft.core.run_records import Start, TrainingStart
from slurmft.core.text import duration, in_bytes, numbers
from slurmft.runs.records import RecordReader
from slurmft.runs.rundir import RunDir
from slurmft.runs.scan import MeasuredRun

_ROOM = 1.5
"""Memory to ask for, in peaks: Slurm measures it every half a minute."""
_MUCH_BYTES = 4 * 2**30
"""Advice is given where the request exceeds the need by more than this."""
_MOST_CLAIMS = 1000
"""Jobs of one run that accounting is asked about."""
_MUCH_TIME = 4
"""Advice is given where the limit is more than so many times the longest attempt."""
_MANY_STOPS = 3
"""From here on it is no accident that a job is stopped."""


def costs_of(runs: Sequence[MeasuredRun]) -> list[Cost]:
    """Returns what each run cost; Slurm's accounting is asked once for all of them."""
    slurm_runs = [run for run in runs if _is_slurm(run)]
    # Each cluster counts its jobs by itself: accounting here must not answer for the same number of
    # another.
    here = ""
    if slurm_runs:
        here = commands.cluster_name()
    jobs: dict[Path, list[str]] = {}
    job_ids: set[str] = set()
    if here:
        for run in slurm_runs:
            jobs[run.path] = _jobs(run, here)
            job_ids.update(jobs[run.path])
    uses: dict[str, list[JobUse]] = {}
    # Where a site keeps no accounting, the runs' own records have to do.
    with contextlib.suppress(SlurmftError):
        uses = commands.job_uses(job_ids)
    costs = []
    for run in runs:
        uses_of_run: list[JobUse] = []
        for job in jobs.get(run.path, ()):
            uses_of_run += uses.get(job, ())
        costs.append(_cost(run, uses_of_run))
    return costs


def _is_slurm(run: MeasuredRun) -> bool:
    job = RunDir(run.path).read_job()
    return job is not None and job.cluster == "slurm"


def _jobs(run: MeasuredRun, here: str) -> list[str]:
    """Returns the jobs that a run had on this Slurm cluster: of resumes, too."""
    job = RunDir(run.path).read_job()
    if job is None or job.where not in ("", here):
        return []
    claims = RunDir(run.path).claims
    jobs = {job.id}
    # Before its first job has started, a run has no such folder.
    with contextlib.suppress(OSError):
        # A link for each submission, which names its job: see `attempts.check_turn`.
        for name in sorted(os.listdir(claims))[:_MOST_CLAIMS]:
            jobs.add(os.readlink(claims / name))
    return sorted(jobs)


def _cost(run: MeasuredRun, uses: Sequence[JobUse]) -> Cost:
    recorded_peak_bytes = _recorded_peak(run)
    if not uses:
        return _by_records(run, recorded_peak_bytes)
    last = uses[-1]
    energy_j = sum(use.energy_j for use in uses)
    # Slurm samples, and may miss a short peak; ranks know the peaks of their own processes.
    peaks_bytes = [use.peak_bytes for use in uses]
    peak_bytes = max([recorded_peak_bytes or 0, *peaks_bytes])
    node_s = 0
    gpu_s = 0
    cpu_s = 0
    for use in uses:
        node_s += use.elapsed_s * use.nodes
        gpu_s += use.elapsed_s * use.gpus
        cpu_s += use.elapsed_s * use.cpus
    # Of the last start: a resume may have asked for more.
    memory_of_node_bytes = last.memory_bytes // max(1, last.nodes)
    return Cost(
        node_hours=node_s / 3600,
        gpu_hours=gpu_s / 3600,
        cpu_hours=cpu_s / 3600,
        # 0 is what Slurm did not measure.
        peak_memory_bytes=peak_bytes or None,
        asked_memory_bytes=memory_of_node_bytes or None,
        energy_j=energy_j or None,
        longest_s=max(use.elapsed_s for use in uses),
        source="Slurm's accounting",
    )


def _by_records(run: MeasuredRun, peak_bytes: int | None) -> Cost:
    """Returns the cost by the times of the attempts, and the hardware that the ranks recorded."""
    attempts = _attempt_times(run)
    attempts_s = [end - begin for begin, end in attempts]
    ranks = RunDir(run.path).read_environment().ranks
    # The ranks of a node record the same hardware.
    nodes = {}
    for rank in ranks:
        if isinstance(rank.hardware, dict):
            nodes[rank.host] = rank.hardware
    node_count = 1
    node_hours = sum(attempts_s) / 3600
    # Simulated nodes are one machine.
    if _is_slurm(run) and run.value("cluster") != "local":
        node_count = run.nodes or 1
        node_hours = _node_hours(run, attempts, node_count)
        # Spare nodes are paid for, too.
        node_hours += (run.value("spare_nodes") or 0) * sum(attempts_s) / 3600
    gpus = 0
    cpus = 0
    gpu_hours = None
    cpu_hours = None
    # Whatever has written the file: what is no hardware is not known.
    with contextlib.suppress(TypeError, ValueError):
        for node in nodes.values():
            gpus += len(node.get("gpus", ()))
            cpu_list = str(node.get("cpus") or "")
            cpus += len(numbers(cpu_list))
        # Of some nodes alone, the sum would be too small.
        if len(nodes) == node_count:
            gpu_hours = node_hours * gpus / node_count
            cpu_hours = node_hours * cpus / node_count
    return Cost(
        node_hours=node_hours,
        gpu_hours=gpu_hours,
        cpu_hours=cpu_hours,
        peak_memory_bytes=peak_bytes,
        asked_memory_bytes=None,
        energy_j=None,
        longest_s=max(attempts_s, default=0.0),
        source="its own records",
    )


def _node_hours(
    run: MeasuredRun, attempts: Sequence[tuple[float, float]], nodes_of_last: int
) -> float:
    """Returns the hours of all nodes. An attempt has those that the start of its training has
    recorded; where it has recorded none, as many as the last one."""
    starts: list[Start] = []
    # Of one attempt, the number is known.
    if len(attempts) > 1:
        starts += RecordReader(RunDir(run.path).records).read(Start)
    node_s = 0.0
    for begin, end in attempts:
        nodes = nodes_of_last
        for start in starts:
            if isinstance(start, TrainingStart) and begin <= start.time <= end:
                nodes = start.nodes
        node_s += nodes * (end - begin)
    return node_s / 3600


def _attempt_times(run: MeasuredRun) -> list[tuple[float, float]]:
    """Returns the begin and the end of each attempt; one without a recorded end lasts until now,
    and one whose next begins on the same nodes until that one begins: the job has them."""
    attempts = []
    started_at: float | None = None
    for transition in run.state.history:
        if transition.state == "running":
            if started_at is not None:  # the attempt before ended without a record
                attempts.append((started_at, transition.time))
            started_at = transition.time
        elif transition.in_allocation:
            continue
        elif transition.state != "stopping" and started_at is not None:
            attempts.append((started_at, transition.time))
            started_at = None
    if started_at is not None and not run.has_ended:
        attempts.append((started_at, time.time()))
    return attempts


def _recorded_peak(run: MeasuredRun) -> int | None:
    """Returns the most memory that the ranks of one node held, by their own account (bytes)."""
    result = decode_leniently(run.result, Result)
    peaks = result.peak_memory_bytes
    ranks = RunDir(run.path).read_environment().ranks
    if peaks is None or len(peaks) != len(ranks):
        return None
    # Ranks of a node add up. Their peaks need not come together: the sum is at most too large.
    by_host: dict[str, int] = {}
    for rank, peak_bytes in zip(ranks, peaks, strict=True):
        before_bytes = by_host.get(rank.host, 0)
        by_host[rank.host] = before_bytes + int(peak_bytes)
    return max(by_host.values(), default=None)


def advice(cost: Cost, run: MeasuredRun) -> str:
    """Returns a better request for the next time; "" where this one fits, or its use is unknown."""
    peak_bytes = cost["peak_memory_bytes"]
    request_bytes = cost["asked_memory_bytes"]
    advice = []
    # Without --mem, the site chose the memory: no request of the user's would be smaller.
    is_known = run.value("mem") and peak_bytes and request_bytes
    peak_bytes = peak_bytes or 0
    request_bytes = request_bytes or 0
    if is_known and request_bytes - _ROOM * peak_bytes > _MUCH_BYTES:
        enough = math.ceil(_ROOM * peak_bytes / 2**30)
        requested = in_bytes(request_bytes)
        used = in_bytes(peak_bytes)
        advice.append(
            f"asked for {requested} a node, used {used}: --mem {enough}G would do"
        )
    limit_s = _limit_s(run)
    longest_s = cost["longest_s"]
    # Of less than an hour there is little to gain.
    is_long = limit_s >= 3600 and limit_s > _MUCH_TIME * longest_s
    if run.is_finished and is_long:
        used = duration(longest_s)
        limit = run.value("time")
        advice.append(
            f"asked for --time {limit}, ran {used}: a shorter one may start sooner"
        )
    # Preemptions come at any time: then no attempt has lasted about as long as it may.
    stops = sum(each.state == "stopping" for each in run.state.history)
    is_at_limit = limit_s / 2 <= longest_s <= limit_s
    if stops >= _MANY_STOPS and is_at_limit and limit_s < 3600:
        limit = run.value("time")
        advice.append(
            f"stopped {stops} times, at the limit of --time {limit}: of a longer one less goes "
            "into starts and saves"
        )
    return "; ".join(advice)


def _limit_s(run: MeasuredRun) -> int:
    """Returns the time limit of a run in seconds; 0 where its configuration has none."""
    try:
        return 60 * time_limit_min(str(run.value("time")))
    # Whoever wrote the configuration may have written anything.
    except UsageError:
        return 0
