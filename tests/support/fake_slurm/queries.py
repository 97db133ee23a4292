"""squeue, sacct, sinfo and sacctmgr."""

from __future__ import annotations

import getopt
import re
import time
from collections.abc import Iterable, Sequence
from datetime import datetime

from tests.support.fake_slurm import hostlist
from tests.support.fake_slurm.jobs import Job, RefusedError, Start, Table
from tests.support.fake_slurm.settings import (
    CPUS_PER_NODE,
    HOSTS,
    MEMORY_MB,
    PARTITIONS,
    VERSION,
)

_SHORT_STATES = {
    "PENDING": "PD", "RUNNING": "R", "COMPLETING": "CG", "COMPLETED": "CD", "FAILED": "F",
    "CANCELLED": "CA", "TIMEOUT": "TO",
}  # fmt: skip
_HEADERS = {
    "i": "JOBID", "T": "STATE", "t": "ST", "r": "REASON", "S": "START_TIME", "P": "PARTITION",
    "D": "NODES", "l": "TIME_LIMIT", "N": "NODELIST", "o": "COMMAND", "j": "NAME", "u": "USER",
    "M": "TIME", "R": "NODELIST(REASON)", "k": "COMMENT", "C": "CPUS",
}  # fmt: skip


def time_text(moment: float) -> str:
    """Returns a time as Slurm prints it."""
    return (
        datetime.fromtimestamp(moment).strftime("%Y-%m-%dT%H:%M:%S")
        if moment
        else "Unknown"
    )


def limit_text(minutes: int) -> str:
    """Returns a time limit as squeue and sinfo print it: 10:00, 1:00:00."""
    hours, rest = divmod(minutes, 60)
    return f"{hours}:{rest:02}:00" if hours else f"{rest}:00"


def time_left_text(job: Job) -> str:
    """Returns how long a job may still run, as squeue prints it: 9:59."""
    left_s = 60 * job.time_min
    if job.is_running:
        left_s = max(0, left_s - int(time.time() - job.started))
    minutes, seconds = divmod(left_s, 60)
    return limit_text(minutes).removesuffix("00") + f"{seconds:02}"


# --- squeue ---------------------------------------------------------------------------------------


def squeue(*words: str) -> int:
    long = [
        "noheader",
        "jobs=",
        "format=",
        "array",
        "states=",
        "me",
        "user=",
        "name=",
        "help",
    ]
    pairs, _ = getopt.getopt(list(words), "hj:o:rt:u:n:", long)
    options = {key.lstrip("-"): value for key, value in pairs}
    names = [
        name
        for name in (options.get("jobs") or options.get("j") or "").split(",")
        if name
    ]
    states = options.get("states") or options.get("t") or ""
    text = (
        options.get("format")
        or options.get("o")
        or "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
    )
    in_memory = [
        job for job in Table.of_environment().read() if job.is_known_to_controller
    ]
    shown = [
        job
        for job in in_memory
        if not names or any(job.is_named(name) for name in names)
    ]
    if not shown and len(names) == 1:
        raise RefusedError("slurm_load_jobs error: Invalid job id specified")
    if states != "all":
        listed_states = (states or "PENDING,RUNNING,COMPLETING").split(",")
        shown = [job for job in shown if job.state in listed_states]
    if not options.keys() & {"noheader", "h"}:
        print(re.sub(r"%(\.?\d*)(\w)", lambda match: _HEADERS[match[2]], text))
    is_each_task_shown = bool(options.keys() & {"array", "r"})
    for name, job in _rows(shown, is_each_task_shown):
        print(re.sub(r"%(\.?\d*)(\w)", lambda match: _field(match[2], name, job), text))  # noqa: B023
    return 0


def _rows(jobs: Sequence[Job], is_each_task_shown: bool) -> Iterable[tuple[str, Job]]:
    """Job id and job of each line: an array's pending tasks have one in common, unless asked."""
    shown_arrays = set()
    for job in sorted(
        jobs, key=lambda job: (not job.is_pending, job.array or job.id, job.task)
    ):
        if is_each_task_shown or not job.array or not job.is_pending:
            yield job.shown_id, job
        elif job.array not in shown_arrays:
            shown_arrays.add(job.array)
            yield (
                _tasks_text([j for j in jobs if j.array == job.array and j.is_pending]),
                job,
            )


def _tasks_text(tasks: Sequence[Job]) -> str:
    """Returns the tasks of an array as one, such as 10_[2-3%2]."""
    numbers = hostlist.compress_numbers([job.task for job in tasks])
    at_most = tasks[0].at_most
    limit = f"%{at_most}" if at_most else ""
    return f"{tasks[0].array}_[{numbers}{limit}]"


def _field(letter: str, name: str, job: Job) -> str:
    """Returns what squeue prints for a letter of its format."""
    hosts = hostlist.compress(job.hosts)
    has_start = job.started and not job.is_pending
    start = job.started if has_start else job.begin
    values = {
        "i": name,
        "T": job.state,
        "t": _SHORT_STATES.get(job.state, job.state),
        "r": job.reason,
        "S": time_text(start) if start else "N/A",
        "P": job.partition,
        "D": str(job.allocated_nodes),
        "C": str(job.allocated_nodes * job.cpus_per_task),
        "l": limit_text(job.time_min),
        "L": time_left_text(job),
        "e": time_text(job.started + 60 * job.time_min if job.is_running else 0),
        "N": hosts,
        "o": job.command,
        "j": job.name,
        "u": job.user,
        "M": limit_text(int((time.time() - job.started) / 60))
        if job.is_running
        else "0:00",
        "R": hosts or f"({job.reason})",
        "k": job.comment or "(null)",
    }
    return values[letter]


# --- sacct ----------------------------------------------------------------------------------------


def sacct(*words: str) -> int:
    long = [
        "noheader",
        "parsable2",
        "allocations",
        "duplicates",
        "jobs=",
        "format=",
        "starttime=",
    ]
    pairs, _ = getopt.getopt(list(words), "nPXDj:o:S:", long)
    options = {key.lstrip("-"): value for key, value in pairs}
    names = [
        name
        for name in (options.get("jobs") or options.get("j") or "").split(",")
        if name
    ]
    default = "JobID,JobName,Partition,Account,AllocCPUS,State,ExitCode"
    fields = (options.get("format") or options.get("o") or default).split(",")
    if not options.keys() & {"noheader", "n"}:
        print("|".join(fields))
    with_steps = not options.keys() & {"allocations", "X"}
    with_all_starts = bool(options.keys() & {"duplicates", "D"})

    jobs = Table.of_environment().read()
    if names:
        jobs = [job for job in jobs if any(job.is_named(name) for name in names)]
    jobs.sort(key=lambda job: (job.array or job.id, job.task))
    for row in _rows_of_jobs(jobs, with_all_starts, with_steps):
        print("|".join(row[field] for field in fields))
    return 0


Row = dict[str, str]
"""sacct's name of a field -> its value."""


def _rows_of_jobs(
    jobs: Sequence[Job], with_all_starts: bool, with_steps: bool
) -> Iterable[Row]:
    """Yields the lines of jobs, and of their batch steps. Tasks of an array that never started have
    a line in common, after all others."""
    started = [job for job in jobs if job.started or not job.array]
    for job in started:
        starts = _starts(job)
        if not with_all_starts:
            starts = starts[-1:]
        for start in starts:
            yield _job_row(job.shown_id, job, start)
            if with_steps and start.hosts:
                yield _step_row(job, start)
    for array in dict.fromkeys(job.array for job in jobs if job not in started):
        tasks = [job for job in jobs if job.array == array and job not in started]
        # A task that was cancelled alone is in no line.
        is_cancelled = any(job.state == "CANCELLED" for job in tasks)
        if not is_cancelled or len(tasks) == tasks[0].array_tasks:
            yield _job_row(_tasks_text(tasks), tasks[0], _starts(tasks[0])[0])


def _starts(job: Job) -> list[Start]:
    """Returns the starts of a job, with the one that goes on or is waited for."""
    if job.starts and (job.has_ended or job.is_pending):
        return job.starts
    if job.is_running:
        state = "RUNNING"
        # Accounting says at once that a job is cancelled, which still ends.
        if job.cancelled_by is not None:
            state = "CANCELLED"
        return [*job.starts, Start(state, job.started, 0.0, job.hosts)]
    # It never started: accounting has the moment of its end for both.
    return [Start(job.state, job.ended, job.ended, [])]


def _job_row(name: str, job: Job, start: Start) -> Row:
    cpus = job.allocated_nodes * job.tasks_per_node * job.cpus_per_task
    memory = _memory_of_all_nodes(job)
    row = _common_row(job, start) | {
        "JobID": name,
        "JobName": job.name,
        "Partition": job.partition,
        "State": start.state,
        "ReqTRES": f"billing={cpus},cpu={cpus},mem={memory},node={job.nodes}",
        "AllocTRES": "",
        "AllocCPUS": "0",
        "MaxRSS": "",
        "ConsumedEnergyRaw": "",
    }
    if start.hosts:
        row["AllocTRES"] = f"cpu={cpus},mem={memory},node={job.allocated_nodes}"
        row["AllocCPUS"] = str(cpus)
    if start.state == "CANCELLED" and job.cancelled_by is not None:
        row["State"] = f"CANCELLED by {job.cancelled_by}"
    return row


def _step_row(job: Job, start: Start) -> Row:
    """The line of the batch step, which has the memory that was used."""
    row = _common_row(job, start) | {
        "JobID": f"{job.shown_id}.batch",
        "JobName": "batch",
        "Partition": "",
        "State": start.state,
        "ReqTRES": "",
        "AllocTRES": f"cpu={job.tasks_per_node * job.cpus_per_task},node=1",
        "AllocCPUS": str(job.tasks_per_node * job.cpus_per_task),
        "MaxRSS": "",
        "ConsumedEnergyRaw": "0",
    }
    if start.ended:
        row["MaxRSS"] = f"{start.peak_kib}K"
    if start.state in ("REQUEUED", "TIMEOUT"):
        row["State"] = "CANCELLED"
    return row


def _common_row(job: Job, start: Start) -> Row:
    signal = start.signal
    # accounting has no signal of what Slurm ends
    if start.state in ("CANCELLED", "TIMEOUT"):
        signal = 0
    elapsed_s = 0.0
    if start.started:
        elapsed_s = (start.ended or time.time()) - start.started
    return {
        "Account": job.user,
        "ExitCode": f"{start.exit_code}:{signal}",
        "Start": time_text(start.started),
        "End": time_text(start.ended),
        "ElapsedRaw": str(int(elapsed_s)),
        "NodeList": hostlist.compress(start.hosts) or "None assigned",
    }


def _memory_of_all_nodes(job: Job) -> str:
    """Returns "4G" for --mem=2G on two nodes."""
    amount, unit = re.fullmatch(
        r"(\d+)([KMGT]?)", job.memory or f"{MEMORY_MB}M"
    ).groups()  # type: ignore[union-attr]
    return f"{int(amount) * job.allocated_nodes}{unit or 'M'}"


# --- sinfo, sacctmgr ------------------------------------------------------------------------------


def sinfo(*words: str) -> int:
    long = ["noheader", "format=", "Node", "nodes=", "partition=", "version", "exact"]
    pairs, _ = getopt.getopt(list(words), "ho:Np:n:V", long)
    options = {key.lstrip("-"): value for key, value in pairs}
    if options.keys() & {"version", "V"}:
        print(VERSION)
        return 0
    text = options.get("format") or options.get("o") or "%R %a %l %D %T %N"
    names = options.get("nodes") or options.get("n") or ""
    hosts = hostlist.expand(names) if names else list(HOSTS)
    wanted = options.get("partition") or options.get("p")
    partitions = [p for p in PARTITIONS.values() if wanted in (None, p.name)]
    busy = {
        host
        for job in Table.of_environment().read()
        if job.is_running
        for host in job.hosts
    }
    is_by_node = bool(options.keys() & {"Node", "N"})
    groups = [[host] for host in hosts] if is_by_node else [hosts]
    for group in groups:
        for partition in partitions:
            state = "mixed" if set(group) & busy else "idle"
            values = {
                "R": partition.name, "P": partition.name, "a": "up",
                "l": limit_text(partition.max_time_min), "D": str(len(group)),
                "c": str(CPUS_PER_NODE), "N": hostlist.compress(group), "T": state, "t": state,
                "E": "none", "m": str(MEMORY_MB),
            }  # fmt: skip
            print(re.sub(r"%(\w)", lambda match: values[match[1]], text))  # noqa: B023
    return 0


def sacctmgr(*words: str) -> int:
    """Shows that the user's account has no limits, field by field as asked."""
    fields = (
        next(w for w in words if w.startswith("format="))
        .removeprefix("format=")
        .split(",")
    )
    known = {"Account": "root", "QOS": "normal"}
    print("|".join(known.get(field, "") for field in fields))
    return 0
