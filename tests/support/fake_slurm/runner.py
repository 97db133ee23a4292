"""The process that runs a job's batch script, as slurmd and slurmstepd do."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

from tests.support.fake_slurm import hostlist, processes
from tests.support.fake_slurm.jobs import Job, Start, Table
from tests.support.fake_slurm.patterns import filled
from tests.support.fake_slurm.schedule import schedule, start_in_background
from tests.support.fake_slurm.settings import (
    CLUSTER_NAME,
    CPUS_PER_NODE,
    KILL_WAIT_S,
    REQUEUE_DELAY_S,
)

_POLL_S = 0.02


def run(job_id: str) -> None:
    """Runs a job to its end, notes that, and lets the next ones start."""
    processes.adopt_orphans()
    table = Table.of_environment()
    with table.changing():  # whoever started this may not have written so yet
        pass
    Runner(table, table.get(int(job_id))).run()


class Runner:
    """One start of a job."""

    def __init__(self, table: Table, job: Job) -> None:
        self.table = table
        self.job = job
        self.ends_as = ""
        """Why the job is being ended: "cancel", "requeue", "preemption", "timeout"; "": it is
        not."""
        self.kill_at = float("inf")
        self.limit_at = job.started + 60 * job.time_min
        self.warn_at = self.limit_at - job.warning[1] if job.warning else float("inf")
        self.script: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        try:
            self.script = self._start_script()
        except OSError:
            self._finish(1)
            return
        seen = 0
        while self.script.poll() is None:
            if self.table.changed_at() != seen:
                seen = self.table.changed_at()
                self._serve_requests()
            self._watch_clock()
            time.sleep(_POLL_S)
        # Slurm kills what a batch script leaves behind.
        processes.send(signal.SIGKILL, processes.descendants(os.getpid()))
        self._finish(self.script.returncode)

    def _start_script(self) -> subprocess.Popen[bytes]:
        job = self.job
        mode = "ab" if job.append or job.restarts else "wb"
        output = open(filled(job.output, job), mode)  # noqa: SIM115
        error = output
        if job.error != job.output:
            error = open(filled(job.error, job), mode)  # noqa: SIM115
        return subprocess.Popen(
            [job.script, *job.arguments],
            cwd=job.work_dir,
            env=environment_of(job),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=error,
            start_new_session=True,
        )

    def _serve_requests(self) -> None:
        with self.table.changing() as jobs:
            job = next(job for job in jobs if job.id == self.job.id)
            requests = job.requests
            job.requests = []
        for kind, *details in requests:
            if kind == "end":
                self._end(details[0])
            else:
                number, scope = details
                processes.send(number, self._processes(scope))

    def _end(self, why: str) -> None:
        """SIGTERM at once, SIGKILL if that does not end it. A second reason changes nothing, but
        a cancelled job is not requeued."""
        if not self.ends_as or why == "cancel":
            self.ends_as = why
        self.kill_at = min(self.kill_at, time.time() + KILL_WAIT_S)
        scope = "steps" if why == "preemption" else "all"
        processes.send(signal.SIGCONT, self._processes(scope))
        processes.send(signal.SIGTERM, self._processes(scope))

    def _watch_clock(self) -> None:
        now = time.time()
        if now > self.warn_at:
            self.warn_at = float("inf")
            number, _, scope = self.job.warning
            processes.send(number, self._processes(scope))
        if now > self.limit_at:
            self.limit_at = float("inf")
            self._end("timeout")
        if now > self.kill_at:
            processes.send(signal.SIGKILL, self._processes("all"))

    def _processes(self, scope: str) -> set[int]:
        """Returns the processes of the batch script, of the steps, or of both."""
        alive = processes.descendants(os.getpid())
        if scope == "all":
            return alive
        assert self.script is not None
        batch = {pid for pid in alive if processes.session_of(pid) == self.script.pid}
        return batch if scope == "batch" else alive - batch

    def _finish(self, code: int) -> None:
        with self.table.changing() as jobs:
            job = next(job for job in jobs if job.id == self.job.id)
            for kind, *details in job.requests:
                if kind == "end":
                    self.ends_as = self.ends_as or details[0]
            _note_end(job, self.ends_as, code)
            if job.is_pending:
                start_in_background("timer", str(REQUEUE_DELAY_S))
            schedule(self.table, jobs)


def _note_end(job: Job, ends_as: str, code: int) -> None:
    job.ended = time.time()
    job.runner = 0
    job.is_requeued = False
    job.requests = []
    job.exit_code = max(code, 0)
    job.signal = max(-code, 0)
    match ends_as:
        case "requeue" | "preemption" if job.cancelled_by is None:
            state = "REQUEUED"
        case "cancel" | "requeue" | "preemption":
            state = "CANCELLED"
        case "timeout":
            state = "TIMEOUT"
        case _:
            state = "FAILED" if code else "COMPLETED"
    if ends_as:
        job.exit_code = 0
        job.signal = 0 if state == "REQUEUED" else signal.SIGTERM
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    job.starts.append(
        Start(
            state,
            job.started,
            job.ended,
            job.hosts,
            job.exit_code,
            job.signal,
            peak_kib,
        )
    )
    job.state = state
    job.reason = {"FAILED": "NonZeroExitCode", "TIMEOUT": "TimeLimit"}.get(
        state, "None"
    )
    if state == "REQUEUED":
        job.state = "PENDING"
        job.reason = "BeginTime"
        job.restarts += 1
        job.exit_code = job.signal = 0
        job.hosts = []
        job.begin = time.time() + REQUEUE_DELAY_S


def environment_of(job: Job) -> dict[str, str]:
    """Returns the environment of a job's batch script."""
    saved: dict[str, str] = json.loads(Path(job.environment).read_text())
    hosts = hostlist.compress(job.hosts)
    tasks = str(job.allocated_nodes * job.tasks_per_node)
    variables = saved | {
        "SLURMD_NODENAME": job.hosts[0],
        "SLURM_CLUSTER_NAME": CLUSTER_NAME,
        "SLURM_CPUS_ON_NODE": str(
            min(CPUS_PER_NODE, job.tasks_per_node * job.cpus_per_task)
        ),
        "SLURM_JOBID": str(job.id),
        "SLURM_JOB_ID": str(job.id),
        "SLURM_JOB_NAME": job.name,
        "SLURM_JOB_NODELIST": hosts,
        "SLURM_JOB_NUM_NODES": str(job.allocated_nodes),
        "SLURM_JOB_PARTITION": job.partition,
        "SLURM_JOB_USER": job.user,
        "SLURM_LOCALID": "0",
        "SLURM_NNODES": str(job.allocated_nodes),
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": hosts,
        "SLURM_NTASKS": tasks,
        "SLURM_NTASKS_PER_NODE": str(job.tasks_per_node),
        "SLURM_PROCID": "0",
        "SLURM_SUBMIT_DIR": job.work_dir,
    }
    if job.restarts:
        variables["SLURM_RESTART_COUNT"] = str(job.restarts)
    if job.array:
        variables |= {
            "SLURM_ARRAY_JOB_ID": str(job.array),
            "SLURM_ARRAY_TASK_ID": str(job.task),
            "SLURM_ARRAY_TASK_COUNT": str(job.array_tasks),
        }
    return variables


def wake(delay_s: str) -> None:
    """Lets jobs start whose time comes after a delay."""
    time.sleep(float(delay_s) + 0.05)
    table = Table.of_environment()
    with table.changing() as jobs:
        schedule(table, jobs)
