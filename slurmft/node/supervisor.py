"""Supervises the child process of a node's task: torchrun, or one rank where mpirun starts them.

Stop signals are passed on to the child. A child that hangs is killed, and so is one whose attempt
is over. Why it failed is recorded.
"""

import contextlib
import os
import random
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import NoReturn

from slurmft.core import process
from slurmft.core.credentials import redact
from slurmft.core.errors import Exit, SlurmftError
from slurmft.core.files import open_to_append
from slurmft.core.run_files import Failure, current_attempt
from slurmft.node import signals
from slurmft.node.hardware import host_name
from slurmft.node.memory_kills import MemoryKills
from slurmft.node.peers import FAILED, HANG, WAIT, Peers
from slurmft.node.watchdog import Watchdog
from slurmft.runs import hung_collective, log_times
from slurmft.runs.records import warn
from slurmft.runs.rundir import RunDir, log_head

TASK_FAILED = "a task has failed"
"""Reason of the state "stopping" where srun stops the tasks that one has left."""

_POLL_S = 0.5
# How often the head looks into the run directory.
_HEAD_LOOKS_EVERY_S = 2.0
# How often all other tasks together look into the run directory.
_LOOKS_PER_S = 1
_CAUSE_WAIT_S = 5
# How much longer than this node others may take to write what their ranks tell.
_OTHERS_S = 5
# The usual soft limit, 1024, is less than the connections of a job of a thousand ranks.
_OPEN_FILES = 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class Child:
    """The process that a task starts and supervises."""

    command: list[str]
    """The command line. The first word is the Python interpreter."""
    record_failure: Callable[[int, Path, int], int]
    """Records why the child failed, by its exit code, its log, and the byte at which its output
    begins there; returns the exit code of the task."""
    tasks: int
    """Number of tasks of the job."""
    others: int
    """Number of other tasks that the head of the job waits for before it ends."""
    rdzv_timeout_s: float
    """How long a task may take to reach the head."""
    records_stop: bool
    """True for the one task that records in the run directory that the job is stopping."""
    ends_with_others: bool = True
    """True if the failure of another node ends this one, too: srun sends it a stop signal then."""
    pass_fds: tuple[int, ...] = ()


class Supervisor:
    """Runs the child of a task, from the task's start on: a stop may come before the child."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.peers = Peers()
        """The other tasks of the job, once they are connected."""
        self.stop_signal = 0
        """The first stop signal that came; 0: none."""
        self.memory_kills = MemoryKills.now()
        """The kernel's counters before anything ran."""
        self._has_recorded_stop = False
        self._told_waits: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def stop(self, signal_number: int, sender: int = 0) -> None:
        """Passes a stop signal on to the child: not every sender sends it to all processes."""
        self.stop_signal = self.stop_signal or signal_number
        if self._process is not None:
            self._process.send_signal(signals.RELAYED)

    def supervise(
        self,
        child: Child,
        environment: Mapping[str, str],
        node_rank: int,
        watchdog: Watchdog,
    ) -> int:
        """Runs the child until it ends or is killed; returns the exit code of the task."""
        log_path = self.run.logs / f"node-{node_rank:03d}.log"
        with open_to_append(log_path) as log:
            start = log.tell()
            head = log_head(f"node {node_rank}", host_name())
            log_times.StampedLog(log.fileno()).write(f"{head}\n".encode())
            self._process = process.start(
                child.command,
                env=environment,
                stdout=log,
                stderr=log,
                pass_fds=child.pass_fds,
            )
            code = self._watch(self._process, child, watchdog)
        if code is None:  # a hang, a later attempt, or another node's failure
            process.end(self._process)
            # The files of a later attempt are its own.
            if not self.run.is_superseded(current_attempt()):
                watchdog.keep_last_calls(self.run)
            return int(Exit.FAILED)
        if code != 0:
            # Of ranks that have lost others, which they waited for.
            watchdog.keep_last_calls(self.run)
            return child.record_failure(code, log_path, start)
        self._await_others(child)
        # The child ends with 0 in both cases; its ranks know that they have stopped early.
        if (watchdog.folder / "stopped").exists():
            return int(Exit.STOPPED)
        # Slurm reports that memory ran out of a task in which a process was killed for it, and no
        # exit code: also where the ranks have started again, and finished.
        if self.memory_kills.more() is not False:
            # Without the mark, at worst, the run starts once more.
            with contextlib.suppress(OSError):
                self.run.ended_well(current_attempt(), node_rank).touch()
        return int(Exit.OK)

    def _watch(
        self, running: subprocess.Popen[bytes], child: Child, watchdog: Watchdog
    ) -> int | None:
        """Waits for the child's exit code; None: the child must be killed."""
        look_at = time.monotonic() + look_pause_s(child.tasks, self.peers.is_head)
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = running.wait(_POLL_S)
                # A child may end of the signal before anybody has looked.
                if self.stop_signal and child.records_stop:
                    self._record_stopping()
                return code
            if time.monotonic() >= look_at:
                process.reap_orphans(running)
                look_at = time.monotonic() + look_pause_s(
                    child.tasks, self.peers.is_head
                )
                if self._is_superseded():
                    return None
                self._look_for_failed_tasks()
            if self.peers.take(HANG):
                watchdog.dump(self.run)
            if self.stop_signal:
                # again: the child may just have started
                running.send_signal(signals.RELAYED)
                if child.records_stop:
                    self._record_stopping()
                if child.ends_with_others and self.peers.heard(FAILED):
                    return None
            if watchdog.check() and self._record_hang(watchdog):
                return None
            if self.peers.take(WAIT) or watchdog.has_new_wait():
                self._tell_wait(watchdog)

    def _await_others(self, child: Child) -> None:
        """Waits as the head until the other tasks have connected: a program may end before another
        node has started, whose task would find no head."""
        deadline = time.monotonic() + child.rdzv_timeout_s
        while self.peers.is_head and not self.peers.have_come(child.others, _POLL_S):
            if self.stop_signal or time.monotonic() > deadline:
                return

    def _is_superseded(self) -> bool:
        """Looks into the run directory: has a later attempt begun?"""
        if not self.run.is_superseded(current_attempt()):
            return False
        print(f"{self.run.path}: a later attempt has begun", file=sys.stderr)
        return True

    def _look_for_failed_tasks(self) -> None:
        """As the head, looks for tasks that failed before they were connected, and tells the
        others."""
        if not self.peers.is_head or not self.stop_signal:
            return
        failures = self.run.all_failures("node-*")
        if any(failure.attempt == current_attempt() for failure in failures):
            self.peers.tell(FAILED)

    def _record_stopping(self) -> None:
        """Records once that the job is stopping."""
        if not self._has_recorded_stop and self.run.get_state().state == "running":
            self._has_recorded_stop = True
            reason = f"the job received {Signals(self.stop_signal).name}"
            # Then the signal is srun's, which stops the tasks that are left.
            if self.peers.heard(FAILED):
                reason = TASK_FAILED
            self.run.set_state("stopping", reason)

    def _tell_wait(self, watchdog: Watchdog) -> None:
        """Warns, as the head, that ranks wait long in a collective; each node writes what its ranks
        tell of theirs."""
        self.peers.tell(WAIT)
        watchdog.keep_present_calls(self.run)
        if self.peers.is_head:
            # The other nodes have begun when this one did.
            time.sleep(_OTHERS_S)
            ranks = self.run.all_rank_calls(current_attempt())
            wait = hung_collective.explain(ranks)
            if wait is not None and wait.key not in self._told_waits:
                self._told_waits.add(wait.key)
                warn(self.run.records, f"ranks wait for each other: {wait.text}")
        self.peers.take(WAIT)

    def _record_hang(self, watchdog: Watchdog) -> bool:
        """Records where the ranks of this node hang. False: they have moved meanwhile."""
        self.peers.tell(HANG)
        watchdog.dump(self.run)
        hang = watchdog.check()
        if hang is None:
            # Ranks here, or on other nodes, may hang later.
            self.peers.take(HANG)
            return False
        host = host_name()
        error = SlurmftError(
            f"rank {hang.rank} hangs: {hang.description}",
            f"where its threads are: {self.run.stacks(hang.rank)}",
        )
        # Ranks that wait for the one that hangs look alike: only a stopped process is certain.
        where = f"node {host}"
        is_effect = not hang.certain
        failure = Failure.of(
            where,
            error,
            secondary=is_effect,
            bad_host=host,
            hang_s=hang.seconds,
        )
        self.run.add(failure)
        print(f"error: {error}", file=sys.stderr, flush=True)
        if not hang.certain:
            await_cause(self.peers)
        return True


def look_pause_s(tasks: int, is_head: bool) -> float:
    """Returns the time until a task looks again: many tasks together look no more often than
    few."""
    if is_head:
        return _HEAD_LOOKS_EVERY_S
    # At random, so that tasks that started together do not look together.
    pause_s = random.uniform(0.5, 1.5) * tasks / _LOOKS_PER_S
    return max(_HEAD_LOOKS_EVERY_S, pause_s)


def await_cause(peers: Peers) -> bool:
    """Gives the node where the failure began a moment to record it; True: it says that it failed.

    Ranks here only lost their peers, or wait for them. The end of this task makes srun end that
    node's task, too.
    """
    return peers.heard(FAILED, _CAUSE_WAIT_S)


def run_task(run_dir: str, task: Callable[[Supervisor], int]) -> NoReturn:
    """Runs a task under a supervisor; ends this process with the task's exit code."""
    # First of all: a stop that comes before it kills.
    signals.block()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _OPEN_FILES:
        # Only root may go beyond the hard limit.
        higher = min(hard, _OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (higher, hard))
    # A program's own children would outlive it where it is killed and no scheduler looks for them.
    process.adopt_orphans()
    supervisor = Supervisor(RunDir(Path(run_dir)))
    signals.listen(supervisor.stop)
    try:
        code = task(supervisor)
    except Exception as error:
        code = record_error(supervisor.run, error)
    # After the failure is recorded: others wait for this word (`await_cause`), then read it.
    if code not in (Exit.OK, Exit.STOPPED):
        supervisor.peers.tell(FAILED)
    process.end_descendants()
    # Not by SystemExit: Python's shutdown takes time in which a signal would make this task's
    # exit code, and so the job's, that of a signal.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def record_error(run: RunDir, error: Exception) -> int:
    """Records an error of the task itself; returns the exit code."""
    trace = None
    if not isinstance(error, SlurmftError):  # nobody foresaw it
        trace = traceback.format_exc()
        error = SlurmftError(f"{type(error).__name__}: {error}")
    text = redact(trace or f"error: {error}")
    print(text, file=sys.stderr, flush=True)
    run.add(Failure.of(f"node {host_name()}", error, traceback=trace))
    return int(error.code)
