"""Ranks that a signal has ended, where torchrun starts them again: nobody else could say why."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path

from slurmft.core import decode
from slurmft.core.errors import SlurmftError
from slurmft.core.run_files import Failure, current_attempt
from slurmft.node import heartbeat, memory_kills, rank_calls, signals, watchdog
from slurmft.node.hardware import host_name
from slurmft.node.memory_kills import MemoryKills
from slurmft.node.peers import says_lost_peer
from slurmft.runs import hung_collective
from slurmft.runs.log_times import split
from slurmft.runs.rundir import RUN_DIR, RunDir, read_log_head

_TAIL_BYTES = 2**14
"""Of the end of a rank's log."""
_WHAT = "what():"
"""Begins what a C++ program prints of an exception that nobody has caught."""


def record(exit_codes: Mapping[int, int]) -> None:
    """Records the ranks of this node that signals have ended.

    Args:
        exit_codes: those of the ranks that have failed, as `subprocess` has them.
    """
    place = os.environ.get(RUN_DIR)
    # Slurm kills what does not end in time.
    if not place or signals.STOPPING in os.environ:
        return
    run = RunDir(Path(place))
    for rank, code in exit_codes.items():
        if code < 0:
            run.add(failure_of(run, rank, -code))


def keep_calls() -> None:
    """Keeps the last collectives of the ranks of this node, which have ended and start again."""
    place = os.environ.get(RUN_DIR)
    folder = os.environ.get(heartbeat.FOLDER)
    if not place or not folder:
        return
    watchdog.keep_calls(Path(folder), RunDir(Path(place)))
    # A process that ends before it has a process group has told nothing.
    rank_calls.forget(Path(folder))


def tell_mismatch() -> None:
    """Warns of calls that did not fit together when ranks ended that start again, once all nodes
    have kept theirs."""
    place = os.environ.get(RUN_DIR)
    if place:
        hung_collective.tell_mismatch(RunDir(Path(place)), current_attempt())


def failure_of(run: RunDir, rank: int, number: int) -> Failure:
    """Returns the failure of a rank that a signal has ended."""
    hint = f"log: {run.rank_log(rank)}"
    error = memory_kills.killed("it", number, _kills_at_start(), hint)
    is_effect = False
    if number == signal.SIGABRT:
        what = uncaught(_output(run.rank_log(rank)))
        if what:
            error = SlurmftError(f"{error.message}: {what}", hint)
        # A rank that loses its peers may abort, with or without a word.
        is_effect = not what or says_lost_peer(what)
    return Failure.of(
        f"rank {rank} on {host_name()}",
        error,
        secondary=is_effect,
        retry=True,
        meetings=run.meetings(current_attempt()),
    )


def uncaught(lines: list[str]) -> str:
    """Returns the exception of C++ that has ended a program, by its output; "": none."""
    for line in reversed(lines):
        _, sign, what = line.partition(_WHAT)
        if sign:
            return what.strip()
    return ""


def _kills_at_start() -> MemoryKills:
    folder = os.environ.get(heartbeat.FOLDER)
    if folder:
        file = heartbeat.memory_kills_file(Path(folder))
        if noted := decode.read(file, MemoryKills):
            return noted
    return MemoryKills.now()


def _output(log: Path) -> list[str]:
    """Returns the last lines of a rank's log, since its process began."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines: list[str] = []
    for line in text.splitlines():
        if read_log_head(split(line)[1]):
            lines = []
        else:
            lines.append(line)
    return lines
