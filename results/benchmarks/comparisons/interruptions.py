"""What interrupts a run of this machine: as a preemption, a killed rank or a lost node does."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from harness import call

PATIENCE_S = 300


def node_tasks(run: Path) -> list[psutil.Process]:
    """Returns the processes that stand for the nodes of a run."""
    processes = []
    for process in psutil.process_iter():
        words = command_line(process)
        if "slurmft.node.task" in words and str(run) in words:
            processes.append(process)
    return processes


def command_line(process: psutil.Process) -> list[str]:
    words: list[str] = []
    # It may have ended in between.
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
    return words


def executes(process: psutil.Process, program: str) -> bool:
    return any(word.endswith(program) for word in command_line(process))


def ranks(run: Path, program: str) -> list[psutil.Process]:
    """Returns the processes of a run that execute a program, and have no child that does."""
    processes = []
    for task in node_tasks(run):
        for process in task.children(recursive=True):
            if executes(process, program):
                children = process.children()
                if not any(executes(child, program) for child in children):
                    processes.append(process)
    return processes


def stop(run: Path, program: str) -> None:
    """As a preemption or `scancel --signal=TERM`: every node is told to stop."""
    for task in node_tasks(run):
        task.send_signal(signal.SIGTERM)


def kill_rank(run: Path, program: str) -> None:
    """As the kernel does where memory is short."""
    ranks(run, program)[-1].kill()


def lose_node(run: Path, program: str) -> None:
    """As a node that goes down: nothing of it is left."""
    task = node_tasks(run)[-1]
    for process in (*task.children(recursive=True), task):
        process.kill()


INTERRUPTIONS: tuple[Callable[[Path, str], None], ...] = (stop, kill_rank, lose_node)
INTERRUPTED = "stopped, then a rank killed, then a node lost"


def interrupt(run: Path, program: str, progress: Callable[[], int], every: int) -> None:
    """Interrupts a run in each way, and waits for its end.

    Args:
        program: what the command lines of its ranks end with.
        progress: returns the last step.
        every: steps between interruptions, more than between checkpoints.
    """
    goal = every
    for interruption in INTERRUPTIONS:
        await_step(run, progress, goal)
        interruption(run, program)
        goal = max(progress(), goal) + every
    command = (sys.executable, "-m", "slurmft", "follow", str(run))
    call(*command, timeout_s=PATIENCE_S)


def await_step(run: Path, progress: Callable[[], int], step: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while progress() < step:
        if time.monotonic() > deadline:
            raise SystemExit(f"{run} does not come to step {step}")
        time.sleep(0.1)
