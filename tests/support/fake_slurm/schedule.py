"""Which pending job starts next, and why the others wait."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.support import CHECKOUT
from tests.support.fake_slurm.jobs import Job, Table
from tests.support.fake_slurm.settings import CPUS_PER_NODE, HOSTS, PARTITIONS

TEST_MARK = "SLURMFT_TEST"
"""tests.support.reaping.MARK; that module needs packages, which these programs do without."""

PROGRAM = (
    f"import sys; sys.path.insert(0, {str(CHECKOUT)!r}); "
    "from tests.support.fake_slurm.program import main; main()"
)


def command(*words: str) -> list[str]:
    """Returns what to run for a command of the fake Slurm."""
    return [sys.executable, "-S", "-E", "-B", "-c", PROGRAM, *words]


def start_in_background(*words: str) -> int:
    """Starts a process of the fake Slurm that outlives the command; returns its id.

    It outlives the test, too, where the jobs are a module's, see tests/support/reaping.py.
    """
    return subprocess.Popen(
        command(*words),
        cwd="/",
        env={name: value for name, value in os.environ.items() if name != TEST_MARK},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ).pid


def schedule(table: Table, jobs: list[Job]) -> None:
    """Starts the jobs that can start, and notes of the others why they wait; while `changing`."""
    pending = [job for job in jobs if job.is_pending]
    pending.sort(key=_order)
    is_first_without_room = True
    for job in pending:
        job.reason = _reason_to_wait(job, jobs)
        if job.reason == "DependencyNeverSatisfied" and job.kill_on_invalid_dependency:
            job.state = "CANCELLED"
            job.ended = time.time()
        if job.reason != "None":
            continue
        hosts = _hosts_with_room(job, jobs)
        if len(hosts) >= job.nodes:
            _start(job, hosts[: max(job.nodes, job.most_nodes)])
            continue
        _preempt_for(job, jobs)
        job.reason = "Resources" if is_first_without_room else "Priority"
        is_first_without_room = False


def _order(job: Job) -> tuple[int, int, int, int]:
    return -PARTITIONS[job.partition].tier, job.nice, job.array or job.id, job.task


def _start(job: Job, hosts: list[str]) -> None:
    job.state = "RUNNING"
    job.reason = "None"
    job.hosts = hosts
    job.started = time.time()
    job.requests = []
    job.runner = start_in_background("runner", str(job.id))


def _reason_to_wait(job: Job, jobs: Sequence[Job]) -> str:
    """Returns why a job may not start even if all nodes were free; "None" if it may."""
    partition = PARTITIONS[job.partition]
    if job.held:
        return "JobHeldUser"
    if job.nodes > len(HOSTS):
        return "PartitionNodeLimit"
    if job.time_min > partition.max_time_min:
        return "PartitionTimeLimit"
    if job.begin > time.time():
        return "BeginTime"
    if reason := _dependency(job, jobs):
        return reason
    running = [other for other in jobs if other.array == job.array and other.is_running]
    if job.array and job.at_most and len(running) >= job.at_most:
        return "JobArrayTaskLimit"
    return "None"


def _dependency(job: Job, jobs: Sequence[Job]) -> str:
    """Returns Slurm's reason while a job's dependencies keep it waiting, else ""."""
    waits = False
    for condition in filter(None, job.dependency.split(",")):
        kind, *names = condition.split(":")
        awaited = [other for name in names for other in jobs if other.is_named(name)]
        if not all(other.has_ended for other in awaited):
            waits = True
        if kind == "afterok" and any(
            o.has_ended and o.state != "COMPLETED" for o in awaited
        ):
            return "DependencyNeverSatisfied"
    return "Dependency" if waits else ""


def _hosts_with_room(job: Job, jobs: Sequence[Job]) -> list[str]:
    running = [other for other in jobs if other.is_running]
    needed_cpus = (
        CPUS_PER_NODE if job.exclusive else job.tasks_per_node * job.cpus_per_task
    )
    free_hosts = []
    for host in job.node_list or HOSTS:
        here = [other for other in running if host in other.hosts]
        used = sum(other.tasks_per_node * other.cpus_per_task for other in here)
        is_taken = any(other.exclusive for other in here) or (job.exclusive and here)
        if (
            host not in job.excluded
            and not is_taken
            and used + needed_cpus <= CPUS_PER_NODE
        ):
            free_hosts.append(host)
    return free_hosts


def _preempt_for(job: Job, jobs: Sequence[Job]) -> None:
    """Has the running jobs of lower tiers stop and requeue, all of them: tests have few."""
    tier = PARTITIONS[job.partition].tier
    for other in jobs:
        if other.state == "RUNNING" and PARTITIONS[other.partition].tier < tier:
            other.state = "COMPLETING"
            other.requests.append(["end", "preemption"])
