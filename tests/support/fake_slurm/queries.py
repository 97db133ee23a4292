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
    "M": "TIME", "R": "NODELIST(REASON)", "k": "COMMENT",
}  # fmt: skip


def time_text(moment: float) -> str:
    """Returns a time as Slurm prints it."""
    return datetime.fromtimestamp(moment).strftime("%Y-%m-%dT%H:%M:%S") if moment else "Unknown"


def limit_text(minutes: int) -> str:
    """Returns a time limit as squeue and sinfo print it: 10:00, 1:00:00."""
    hours, rest = divmod(minutes, 60)
    return f"{hours}:{rest:02}:00" if hours else f"{rest}:00"


# --- squeue ---------------------------------------------------------------------------------------


def squeue(*words: str) -> int:
    long = ["noheader", "jobs=", "format=", "array", "states=", "me", "user=", "name=", "help"]
    pairs, _ = getopt.getopt(list(words), "hj:o:rt:u:n:", long)
    options = {key.lstrip("-"): value for key, value in pairs}
    names = [name for name in (options.get("jobs") or options.get("j") or "").split(",") if name]
    states = options.get("states") or options.get("t") or ""
    text = options.get("format") or options.get("o") or "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
    known = [job for job in Table.of_environment().read() if job.is_known_to_controller]
    found = [job for job in known if not names or any(job.is_named(name) for name in names)]
    if not found and len(names) == 1:
        raise RefusedError("slurm_load_jobs error: Invalid job id specified")
    if states != "all":
        wanted = states.split(",") if states else ("PENDING", "RUNNING", "COMPLETING")
        found = [job for job in found if job.state in wanted]
    if not options.keys() & {"noheader", "h"}:
        print(re.sub(r"%(\.?\d*)(\w)", lambda match: _HEADERS[match[2]], text))
    is_each_task_shown = bool(options.keys() & {"array", "r"})
    for name, job in _rows(found, is_each_task_shown):
        print(re.sub(r"%(\.?\d*)(\w)", lambda match: _field(match[2], name, job), text))  # noqa: B023
    return 0


def _rows(jobs: Sequence[Job], is_each_task_shown: bool) -> Iterable[tuple[str, Job]]:
    """Job id and job of each line: an array's pending tasks have one in common, unless asked."""
    shown_arrays = set()
    for job in sorted(jobs, key=lambda job: (not job.is_pending, job.array or job.id, job.task)):
        if is_each_task_shown or not job.array or not job.is_pending:
            yield job.shown_id, job
        elif job.array not in shown_arrays:
            shown_arrays.add(job.array)
            yield _pending_tasks(job, jobs), job


def _pending_tasks(job: Job, jobs: Sequence[Job]) -> str:
    """Returns the tasks of an array that wait, such as 10_[2-3%2]."""
    tasks = [other.task for other in jobs if other.array == job.array and other.is_pending]
    at_most = f"%{job.at_most}" if job.at_most else ""
    return f"{job.array}_[{hostlist.compress_numbers(tasks)}{at_most}]"


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
        "D": str(job.nodes),
        "l": limit_text(job.time_min),
        "N": hosts,
        "o": job.command,
        "j": job.name,
        "u": job.user,
        "M": limit_text(int((time.time() - job.started) / 60)) if job.is_running else "0:00",
        "R": hosts or f"({job.reason})",
        "k": job.comment or "(null)",
    }
    return values[letter]


# --- sacct ----------------------------------------------------------------------------------------


def sacct(*words: str) -> int:
    long = ["noheader", "parsable2", "allocations", "duplicates", "jobs=", "format=", "starttime="]
    pairs, _ = getopt.getopt(list(words), "nPXDj:o:S:", long)
    options = {key.lstrip("-"): value for key, value in pairs}
    names = [name for name in (options.get("jobs") or options.get("j") or "").split(",") if name]
    default = "JobID,JobName,Partition,Account,AllocCPUS,State,ExitCode"
    fields = (options.get("format") or options.get("o") or default).split(",")
    if not options.keys() & {"noheader", "n"}:
        print("|".join(fields))
    jobs = [job for job in Table.of_environment().read() if _is_wanted(job, names)]
    jobs.sort(key=lambda job: (job.array or job.id, job.task))
    never_started = [job for job in jobs if job.array and not job.started]
    for job in jobs:
        if job in never_started:
            continue
        starts = _starts(job)
        for start in starts if options.keys() & {"duplicates", "D"} else starts[-1:]:
            print("|".join(_accounted(f, job.shown_id, job, start) for f in fields))
            if start.started and not options.keys() & {"allocations", "X"}:
                print("|".join(_accounted(f, f"{job.shown_id}.batch", job, start) for f in fields))
    for array in {job.array for job in never_started}:
        tasks = [job for job in never_started if job.array == array]
        if "CANCELLED" not in {job.state for job in tasks} or len(tasks) == tasks[0].array_tasks:
            name = _shared_name(tasks)
            print("|".join(_accounted(f, name, tasks[0], _starts(tasks[0])[0]) for f in fields))
    return 0


def _is_wanted(job: Job, names: Sequence[str]) -> bool:
    """Accounting finds no task of an array by its own id that never started."""
    if not names:
        return True
    return any(job.is_named(name) for name in names)


def _shared_name(tasks: Sequence[Job]) -> str:
    at_most = f"%{tasks[0].at_most}" if tasks[0].at_most else ""
    return f"{tasks[0].array}_[{hostlist.compress_numbers([t.task for t in tasks])}{at_most}]"


def _starts(job: Job) -> list[Start]:
    """Returns the starts of a job, the one that goes on or waits included."""
    if job.has_ended and job.starts:
        return job.starts
    now = Start(job.state, job.started if not job.is_pending else 0.0, 0.0, job.hosts)
    if job.state == "COMPLETING":
        now.state = "RUNNING"
    if job.has_ended:  # it never started
        now.started = now.ended = job.ended
    return [*job.starts, *([] if job.is_pending and job.starts else [now])]


def _accounted(field: str, name: str, job: Job, start: Start) -> str:
    """Returns a field of sacct, of a start or of its batch step."""
    is_step = "." in name
    cpus = job.nodes * job.tasks_per_node * job.cpus_per_task
    memory = _total(job.memory or f"{MEMORY_MB}M", job.nodes)
    requested = f"billing={cpus},cpu={cpus},mem={memory},node={job.nodes}"
    end = start.ended or time.time()
    values = {
        "JobID": name,
        "JobName": "batch" if is_step else job.name,
        "Partition": "" if is_step else job.partition,
        "Account": job.user,
        "State": _accounted_state(start, job, is_step),
        "ExitCode": _accounted_code(start),
        "Start": time_text(start.started),
        "End": time_text(start.ended),
        "ElapsedRaw": str(int(end - start.started) if start.started else 0),
        "AllocCPUS": str(cpus if start.hosts else 0),
        "NodeList": hostlist.compress(start.hosts) or "None assigned",
        "ReqTRES": "" if is_step else requested,
        "AllocTRES": f"cpu={cpus},mem={memory},node={job.nodes}" if start.hosts else "",
        "MaxRSS": f"{start.peak_kib}K" if is_step and start.ended else "",
        "ConsumedEnergyRaw": "0" if is_step else "",
    }
    return values[field]


def _total(memory: str, nodes: int) -> str:
    """Returns the memory of all nodes: "4G" for "2G" on two."""
    unit = memory[-1] if memory[-1].isalpha() else "M"
    return f"{int(memory.rstrip('KMGT')) * nodes}{unit}"


def _accounted_code(start: Start) -> str:
    """Accounting has no signal of a job that Slurm itself has ended."""
    number = 0 if start.state in ("CANCELLED", "TIMEOUT") else start.signal
    return f"{start.exit_code}:{number}"


def _accounted_state(start: Start, job: Job, is_step: bool) -> str:
    if start.state == "CANCELLED" and job.cancelled_by is not None and not is_step:
        return f"CANCELLED by {job.cancelled_by}"
    if is_step and start.state in ("REQUEUED", "TIMEOUT"):
        return "CANCELLED"
    return start.state


# --- sinfo, sacctmgr ------------------------------------------------------------------------------


def sinfo(*words: str) -> int:
    long = ["noheader", "format=", "Node", "nodes=", "partition=", "version"]
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
    busy = {host for job in Table.of_environment().read() if job.is_running for host in job.hosts}
    is_by_node = bool(options.keys() & {"Node", "N"})
    groups = [[host] for host in hosts] if is_by_node else [hosts]
    for group in groups:
        for partition in partitions:
            state = "mixed" if set(group) & busy else "idle"
            values = {
                "R": partition.name, "P": partition.name, "a": "up",
                "l": limit_text(partition.max_time_min), "D": str(len(group)),
                "c": str(CPUS_PER_NODE), "N": hostlist.compress(group), "T": state, "t": state,
                "E": "none",
            }  # fmt: skip
            print(re.sub(r"%(\w)", lambda match: values[match[1]], text))  # noqa: B023
    return 0


def sacctmgr(*words: str) -> int:
    """Shows that the user's account has no limits, field by field as asked."""
    fields = next(w for w in words if w.startswith("format=")).removeprefix("format=").split(",")
    known = {"Account": "root", "QOS": "normal"}
    print("|".join(known.get(field, "") for field in fields))
    return 0
