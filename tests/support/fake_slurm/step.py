"""srun, inside of a job: a task on each node, or as many as asked."""

from __future__ import annotations

import getopt
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.fake_slurm import hostlist, processes
from tests.support.fake_slurm.jobs import Job, RefusedError, Table
from tests.support.fake_slurm.patterns import filled

FLAGS = ("unbuffered", "overlap", "quiet", "exclusive", "label")
WITH_VALUE = (
    "export", "kill-on-bad-exit", "wait", "open-mode", "output", "error", "nodes", "ntasks",
    "ntasks-per-node", "cpus-per-task", "nodelist", "mem", "time", "partition", "job-name",
)  # fmt: skip
SHORT = {
    "N": "nodes",
    "n": "ntasks",
    "c": "cpus-per-task",
    "w": "nodelist",
    "o": "output",
}


def srun(*words: str) -> int:
    """Runs a program as the next step of the job, and returns its highest exit code."""
    if words == ("--help",):
        print("Usage: srun [OPTIONS] executable [args...]")
        return 0
    long = [*FLAGS, *(f"{name}=" for name in WITH_VALUE)]
    try:
        pairs, program = getopt.getopt(list(words), "N:n:c:w:o:u", long)
    except getopt.GetoptError as error:
        raise RefusedError(f"srun: unrecognized option '--{error.opt}'") from None
    options = {
        SHORT.get(key.lstrip("-"), key.lstrip("-")): value for key, value in pairs
    }
    if "SLURM_JOB_ID" not in os.environ:
        raise RefusedError("srun: error: the fake Slurm runs steps of jobs alone")
    for ignored in (signal.SIGTERM, signal.SIGUSR2):  # the tasks have them, too
        signal.signal(ignored, lambda number, frame: None)
    return Step(options, program).run()


class Step:
    """A step of the job of this process."""

    def __init__(self, options: dict[str, str], program: list[str]) -> None:
        self.options = options
        self.program = program
        table = Table.of_environment()
        self.job = table.get(int(os.environ["SLURM_JOB_ID"]))
        self.number = _next_number(table, self.job)
        hosts = (
            hostlist.expand(options["nodelist"])
            if "nodelist" in options
            else self.job.hosts
        )
        count = int(options.get("nodes", "0").partition("-")[0]) or len(hosts)
        self.hosts = hosts[:count]
        per_node = int(options.get("ntasks-per-node", 0)) or self.job.tasks_per_node
        self.task_count = int(options.get("ntasks", 0)) or per_node * len(self.hosts)
        self.is_ended_by_first = options.get("kill-on-bad-exit", "0") != "0"

    def run(self) -> int:
        tasks = [self._start(rank) for rank in range(self.task_count)]
        worst = 0
        running = set(tasks)
        while running:
            for task in [task for task in running if task.poll() is not None]:
                running.remove(task)
                worst = max(worst, self._code_of(tasks.index(task), task.returncode))
                if task.returncode and self.is_ended_by_first:
                    self._terminate(running)
            time.sleep(0.02)
        return worst

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        node = rank * len(self.hosts) // self.task_count
        local = rank - -(-node * self.task_count // len(self.hosts))
        cpus = os.environ.get("SRUN_CPUS_PER_TASK") or self.options.get("cpus-per-task")
        env = os.environ | {
            "SLURMD_NODENAME": self.hosts[node],
            "SLURM_LOCALID": str(local),
            "SLURM_NNODES": str(len(self.hosts)),
            "SLURM_NODEID": str(node),
            "SLURM_NTASKS": str(self.task_count),
            "SLURM_PROCID": str(rank),
            "SLURM_STEPID": str(self.number),
            "SLURM_STEP_ID": str(self.number),
            "SLURM_STEP_NODELIST": hostlist.compress(self.hosts),
        }
        if cpus:
            env["SLURM_CPUS_PER_TASK"] = cpus
        output = self._file("output", rank)
        try:
            return subprocess.Popen(
                self.program,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=self._file("error", rank) if "error" in self.options else output,
                start_new_session=True,
            )
        except OSError as error:
            text = f"slurmstepd: error: execve(): {self.program[0]}: {error.strerror}"
            raise RefusedError(text, 2) from None

    def _file(self, option: str, rank: int) -> int | None:
        """The file of a task's stream; None: srun's own."""
        if option not in self.options:
            return None
        letters = {"t": str(rank), "s": str(self.number)}
        path = filled(self.options[option], self.job, **letters)
        flags = os.O_WRONLY | os.O_CREAT
        flags |= (
            os.O_APPEND if self.options.get("open-mode") == "append" else os.O_TRUNC
        )
        return os.open(path, flags, 0o666)

    def _code_of(self, rank: int, code: int) -> int:
        """Tells how a task has ended, as srun does; returns its exit code, 128 + its signal."""
        host = self.hosts[rank * len(self.hosts) // self.task_count]
        if code < 0:
            words = signal.strsignal(-code)
            print(
                f"srun: error: {host}: task {rank}: {words}",
                file=sys.stderr,
                flush=True,
            )
            return 128 - code
        if code:
            words = f"Exited with exit code {code}"
            print(
                f"srun: error: {host}: task {rank}: {words}",
                file=sys.stderr,
                flush=True,
            )
        return code

    def _terminate(self, running: set[subprocess.Popen[bytes]]) -> None:
        """SIGTERM to the other tasks and all that they have started."""
        for task in running:
            processes.send(signal.SIGTERM, {task.pid} | processes.descendants(task.pid))


def _next_number(table: Table, job: Job) -> int:
    """Counts the steps of a start of a job, in a file: its jobs' file need not change."""
    path = Path(table.folder, "spool", f"steps-{job.id}-{job.restarts}")
    with open(path, "ab") as file:
        file.write(b".")
        return file.tell() - 1
