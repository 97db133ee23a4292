"""scontrol and scancel."""

from __future__ import annotations

import getopt
import os
import signal
import time
from collections.abc import Callable, Sequence

from tests.support.fake_slurm import hostlist
from tests.support.fake_slurm.jobs import Job, RefusedError, Table, find
from tests.support.fake_slurm.queries import time_text
from tests.support.fake_slurm.schedule import schedule
from tests.support.fake_slurm.settings import (
    CLUSTER_NAME,
    MAX_ARRAY_SIZE,
    PARTITIONS,
    VERSION,
)

CONFIG = f"""\
ClusterName             = {CLUSTER_NAME}
EnforcePartLimits       = NO
JobRequeue              = 1
KillWait                = 10 sec
MaxArraySize            = {MAX_ARRAY_SIZE}
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
SLURM_VERSION           = {VERSION.split()[1]}
"""


def scontrol(keyword: str, *words: str) -> int:
    match keyword:
        case "show":
            return _show(*words)
        case "requeue":
            return _change(words[0].split(","), requeue)
        case "hold":
            return _change(words, hold)
        case "release":
            return _change(words, release)
        case "update":
            return _update(words)
        case "ping":
            return 0
    raise RefusedError(f"invalid keyword: {keyword}")


def scancel(*words: str) -> int:
    """Cancels jobs, or sends them a signal; those that are not there are nobody's concern."""
    long = ["signal=", "batch", "full", "user=", "state=", "name=", "me"]
    pairs, names = getopt.getopt(list(words), "s:bfu:t:n:", long)
    options = {key.lstrip("-"): value for key, value in pairs}
    number = _signal(options.get("signal") or options.get("s"))
    scope = "batch" if options.keys() & {"batch", "b"} else "steps"
    user = options.get("user") or options.get("u")
    table = Table.of_environment()
    with table.changing() as jobs:
        named = [job for job in jobs if any(job.is_named(name) for name in names)]
        chosen = [job for job in jobs if job.user == user] if user else named
        for job in chosen:
            if number:
                job.requests.append(["signal", number, scope])
            else:
                _cancel(job)
        schedule(table, jobs)
    return 0


def _cancel(job: Job) -> None:
    if job.has_ended:
        return
    job.cancelled_by = os.getuid()
    if job.is_pending:
        job.state = "CANCELLED"
        job.ended = time.time()
    else:
        job.state = "COMPLETING"
        job.requests.append(["end", "cancel"])


def _signal(name: str | None) -> int:
    if name is None:
        return 0
    return (
        int(name)
        if name.isdigit()
        else signal.Signals[f"SIG{name.removeprefix('SIG')}"]
    )


def requeue(job: Job) -> None:
    if job.is_pending:
        raise RefusedError(f"Job is pending execution for job {job.shown_id}")
    if not job.requeues:
        raise RefusedError(
            f"Requested operation is presently disabled for job {job.shown_id}"
        )
    if job.is_running:
        job.state = "COMPLETING"
        job.is_requeued = True
        job.requests.append(["end", "requeue"])
    else:
        job.state = "PENDING"
        job.restarts += 1


def hold(job: Job) -> None:
    job.held = True


def release(job: Job) -> None:
    job.held = False


def _change(names: Sequence[str], change: Callable[[Job], None]) -> int:
    table = Table.of_environment()
    with table.changing() as jobs:
        for name in names:
            for job in find(jobs, name):
                change(job)
        schedule(table, jobs)
    return 0


def _update(words: Sequence[str]) -> int:
    """Sets a job's Comment, ExcNodeList or MinMemoryNode: JobId=ID NAME=VALUE."""
    values = dict(word.split("=", 1) for word in words)
    table = Table.of_environment()
    with table.changing() as jobs:
        for job in find(jobs, values.pop("JobId")):
            for name, value in values.items():
                match name:
                    case "Comment":
                        job.comment = value
                    case "ExcNodeList":
                        job.excluded = hostlist.expand(value) if value else []
                    case "MinMemoryNode":
                        if not (job.is_pending or job.is_requeued):
                            raise RefusedError(
                                f"Job is no longer pending execution for job {job.shown_id}"
                            )
                        job.memory = f"{value}M"
                    case _:
                        raise RefusedError(
                            f"Update of this parameter is not supported: {name}"
                        )
        schedule(table, jobs)
    return 0


# --- what it shows --------------------------------------------------------------------------------


def _show(what: str, *words: str) -> int:
    match what:
        case "hostnames":
            print("\n".join(hostlist.expand(words[0])))
        case "config":
            print(CONFIG)
        case "job":
            _show_jobs(words[0])
        case "partition":
            for name in PARTITIONS:
                print(f"PartitionName={name}")
        case _:
            raise RefusedError(f"invalid entity:{what} for keyword:show ")
    return 0


def _show_jobs(name: str) -> None:
    in_memory = [
        job for job in Table.of_environment().read() if job.is_known_to_controller
    ]
    chosen = [job for job in in_memory if job.is_named(name)]
    if not chosen:
        raise RefusedError("slurm_load_jobs error: Invalid job id specified")
    for job in chosen:
        print(job_text(job))


def job_text(job: Job) -> str:
    """Returns what `scontrol show job` prints of a job."""
    place = f"ArrayJobId={job.array} ArrayTaskId={job.task} " if job.array else ""
    hosts = hostlist.compress(job.hosts)
    limit = f"{job.time_min // 60:02}:{job.time_min % 60:02}:00"
    excluded = hostlist.compress(job.excluded) or "(null)"
    wanted = hostlist.compress(job.node_list) or "(null)"
    comment = f"   Comment={job.comment} \n" if job.comment else ""
    nodes = job.allocated_nodes
    cpus = nodes * job.tasks_per_node * job.cpus_per_task
    memory = job.memory or "0"
    return f"""\
JobId={job.id} {place}JobName={job.name}
   UserId={job.user}({os.getuid()}) GroupId={job.user}({os.getgid()}) MCS_label=N/A
   Priority=4294901755 Nice={job.nice} Account={job.user} QOS=normal
   JobState={job.state} Reason={job.reason} Dependency={job.dependency or "(null)"}
   Requeue={int(job.requeues)} Restarts={job.restarts} BatchFlag=1 Reboot=0 \
ExitCode={job.exit_code}:{job.signal}
   RunTime=00:00:00 TimeLimit={limit} TimeMin=N/A
   SubmitTime={time_text(job.submitted)} EligibleTime={time_text(job.begin or job.submitted)}
   StartTime={time_text(job.started)} EndTime={time_text(job.ended)} Deadline=N/A
   Partition={job.partition} AllocNode:Sid=localhost:1
   MinCPUsNode={job.cpus_per_task} MinMemoryNode={memory} MinTmpDiskNode=0
   ReqNodeList={wanted} ExcNodeList={excluded}
   NodeList={hosts}
   NumNodes={nodes} NumCPUs={cpus} NumTasks={nodes} CPUs/Task={job.cpus_per_task}
   Command={job.command}
   WorkDir={job.work_dir}
{comment}   StdErr={job.error}
   StdIn=/dev/null
   StdOut={job.output}
   Power=
"""
