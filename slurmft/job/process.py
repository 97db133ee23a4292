"""The life of one process of a job: it ends with its agent, has a log of its own, and records its
failure."""

import ctypes
import faulthandler
import functools
import os
import platform
import re
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from slurmft.core import filesystem, process
from slurmft.core.credentials import redact
from slurmft.core.errors import Exit, SlurmftError
from slurmft.core.files import open_to_append
from slurmft.core.run_files import Failure, current_attempt
from slurmft.node import flight_recorder, heartbeat, memory_kills, sealed, signals
from slurmft.node.hardware import host_name, visible_gpus
from slurmft.node.heartbeat import Heart
from slurmft.node.memory_kills import MemoryKills
from slurmft.node.signals import StopRequest
from slurmft.runs import log_times, rundir
from slurmft.runs.rundir import RunDir

_BROKEN_GPU = re.compile(
    r"\b(?:cuda|hip)\b.*(?:unknown error|uncorrectable|hardware stack error|busy or unavailable|"
    r"no \S+-capable device|system not yet initialized)|gpu is lost|device[ _]lost|off the bus",
    re.IGNORECASE,
)
"""Messages of drivers about a GPU that has failed. Errors that a program can make by itself, such
as a failed assertion on the device, are not among them."""


def receive_signals() -> StopRequest:
    """Takes up the stop signals, and ends with the process that started this one."""
    signals.block()
    # The ranks of a torchrun that was killed would train on, beside those of the next attempt.
    process.die_with_parent()
    # torchrun's end; some launchers ignore it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signals.let_children_be_terminated()
    stop = StopRequest()
    stop.listen()
    return stop


def redirect_output(run: RunDir, rank: int) -> None:
    """Sends stdout and stderr, those of libraries too, to the rank's log; Python's with times."""
    # Appended: earlier attempts and lives of the rank are in it.
    with open_to_append(run.rank_log(rank)) as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            # The descriptors themselves: C libraries write past sys.stdout.
            os.dup2(log.fileno(), stream.fileno())
    sys.stdout = log_times.stamped(1)
    sys.stderr = log_times.stamped(2)
    print(rundir.log_head(f"rank {rank}", platform.node()))


def start_heartbeat(rank: int) -> Heart:
    """Starts what the watchdog of this node reads: heartbeats, and stacks when it asks for them."""
    folder = node_folder()
    if folder is None:
        return Heart(None)
    heart = Heart(folder / f"beat-{rank}")
    stacks = open(folder / f"stacks-{rank}", "w")  # noqa: SIM115 - open as long as the rank
    # faulthandler writes from the signal handler, in C. Python's own handlers wait until a call
    # into a library returns, which is what hangs.
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    heartbeat.note_process(folder, rank, os.getpid())
    return heart


def node_folder() -> Path | None:
    """Returns the folder that this node's task shares with its ranks; None where a rank is started
    by hand."""
    path = os.environ.get(heartbeat.FOLDER)
    if not path:
        return None
    return Path(path)


def memory_ran_out() -> bool:
    """Returns whether the kernel has killed ranks of this node because memory ran out, since this
    was last asked; by the node's first rank."""
    folder = node_folder()
    if folder is None or os.environ.get("LOCAL_RANK", "0") != "0":
        return False
    return memory_kills.since_note(heartbeat.memory_kills_file(folder))


@functools.cache
def memory_kills_before() -> MemoryKills:
    """Returns the counters of when this was first called, at the start of this process."""
    return MemoryKills.now()


def note_stopped() -> None:
    """Tells this node's task that the ranks ended because of an agreed stop."""
    folder = node_folder()
    if folder is not None:
        (folder / "stopped").touch()


def record_failure(
    error: BaseException, run: RunDir, rank: int, step: int, meetings: int
) -> int:
    """Records a failure, and ends torchrun if a restart cannot help.

    It cannot help where the same failure at the same step is on record from an earlier life of the
    ranks, where the input is at fault, or where this host is: its ranks would have the same GPUs.

    Args:
        step: the last step that was done.
        meetings: how often the ranks have met in this attempt, as this process knows it.

    Returns:
        The exit code of the process.
    """
    explained = explain(error, run, rank)
    trace = _print(error, explained)
    host = host_name()
    where = f"rank {rank} on {host}"
    bad_host = None
    if host in explained.bad_hosts:
        bad_host = host
    # Where other hosts are at fault, or other ranks failed, their failure is the one to read.
    is_elsewhere = bool(explained.bad_hosts) or is_secondary(error)
    secondary = bad_host is None and is_elsewhere
    if secondary:
        flight_recorder.note_lost_peer()
    can_restart = secondary or explained.retry
    # Without a trace it is a SlurmftError: of the input, or of what the user has asked for.
    if not secondary and bad_host is None and trace is not None:
        can_restart = not failed_so_before(run, explained, where, step, meetings)
    memory_failures = None
    retry = explained.retry
    ran_out = explained.out_of_memory or memory_kills.is_said_by(explained.message)
    if not secondary and ran_out:
        memory_failures = _memory_failures()
    if memory_failures is not None:
        takes_less = memory_kills.TAKES_LESS in os.environ
        can_restart = can_restart or takes_less
        # Without torchrun, the only start is that of the whole job.
        is_by_job = takes_less or "TORCHELASTIC_RUN_ID" not in os.environ
        retry = retry or (can_restart and is_by_job)
    failure = Failure.of(
        where,
        explained,
        traceback=trace,
        secondary=secondary,
        step=step,
        meetings=meetings,
        bad_host=bad_host,
        memory_failures=memory_failures,
        retry=retry,
    )
    # Recorded first: torchrun's end is that of this process.
    run.add(failure)
    if not can_restart:
        ask_for_no_restart()
    return int(explained.code)


def _print(error: BaseException, explained: SlurmftError) -> str | None:
    """Prints a failure; returns its traceback, or None where the error is one of slurmft's own."""
    trace = None
    if not isinstance(error, SlurmftError):
        trace = "".join(traceback.format_exception(error))
    text = redact(trace or f"error: {explained}")
    print(text, file=sys.stderr, flush=True)
    return trace


def _memory_failures() -> int | None:
    """Returns how often memory had run out before this process of a program of the user's own; None
    in another program, which notes what it takes less of."""
    text = os.environ.get(memory_kills.FAILURES, "")
    # A program may start others, and give them what it likes.
    if not text.isdecimal():
        return None
    return int(text)


def ask_for_no_restart() -> None:
    """Ends torchrun, this process's parent; of a rank that was started by hand, nothing."""
    if node_folder() is not None:
        os.kill(os.getppid(), signal.SIGHUP)


def failed_so_before(
    run: RunDir, error: SlurmftError, where: str, step: int, meetings: int
) -> bool:
    """Returns whether the same failure is on record from an earlier life of the ranks.

    Looks at this host's failures alone: a thousand ranks may fail at once.
    """
    now = (current_attempt(), meetings)
    for failure in run.all_failures(f"rank-*-on-{host_name()}-*"):
        is_same = failure.message == error.message and failure.step == step
        is_earlier = (failure.attempt, failure.meetings or 0) < now
        # This process has recorded nothing yet: a failure of this rank is of one before it.
        if is_same and (is_earlier or failure.where == where):
            return True
    return False


def explain(error: BaseException, run: RunDir, rank: int) -> SlurmftError:
    """Returns an error as its reader needs it: with its own message, or where to look for more."""
    if isinstance(error, SlurmftError):
        return error
    foreign_write = sealed.cause_of(error)
    if foreign_write is not None:
        refused = SlurmftError(str(foreign_write), sealed.HINT, Exit.RENDEZVOUS)
        refused.retry = True
        return refused
    if isinstance(error, RuntimeError) and _BROKEN_GPU.search(str(error)):
        return _broken_gpu(error)
    hint = f"log: {run.rank_log(rank)}"
    if isinstance(error, OSError):
        place = filesystem.place_of(error, run.path)
        disk = filesystem.why_not(error, place)
        if disk is not None:
            _, hint = disk
            reason = filesystem.reason(error, place)
            return SlurmftError(f"{str(place)!r} cannot be written: {reason}", hint)
    explained = SlurmftError(f"{type(error).__name__}: {error}", hint)
    # As a worker of a DataLoader: the error of this process says only that it was killed.
    if memory_kills.lost_process(1, explained.message, memory_kills_before()):
        return memory_kills.with_cause(explained)
    return explained


def _broken_gpu(error: Exception) -> SlurmftError:
    """Returns the error for a GPU of this host that has failed."""
    gpus = visible_gpus(os.environ)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    name = str(local_rank)
    if gpus:  # a rank may see its own GPU alone, whatever its number is
        name = gpus[min(local_rank, len(gpus) - 1)].name
    host = host_name()
    message = f"GPU {name} of {host} failed: {error}"
    # Behind it, torch adds advice for debugging.
    first_line, _, _ = message.partition("\n")
    hint = "nvidia-smi and the kernel's log there may say more"
    broken = SlurmftError(first_line, hint)
    broken.bad_hosts = [host]
    return broken


def is_secondary(error: BaseException) -> bool:
    """Returns whether an error only says that another rank is gone.

    None does before torch is imported, so torch is not imported to find out.
    """
    process_group = sys.modules.get("slurmft.job.process_group")
    return process_group is not None and process_group.is_secondary(error)


def end(code: int) -> NoReturn:
    """Ends this process now: threads of the process group may wait for ranks that are gone."""
    if code == 0:
        _finalize_mpi()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _finalize_mpi() -> None:
    """Leaves MPI, if a library has joined it (oneCCL): mpirun kills the other ranks otherwise."""
    for name in ("libmpi.so.12", "libmpi.so.40"):  # Intel MPI and MPICH; Open MPI
        try:
            # NOLOAD: a handle of what is loaded already; nothing is loaded to leave it again.
            mpi = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        except OSError:
            continue  # it is not loaded
        has_joined = ctypes.c_int()
        has_left = ctypes.c_int()
        mpi.MPI_Initialized(ctypes.byref(has_joined))
        mpi.MPI_Finalized(ctypes.byref(has_left))
        if has_joined and not has_left:
            mpi.MPI_Finalize()
