"""One rank of a run: `python -m slurmft.train.rank RUN_DIR`, started by torchrun on every node.

Everything that a rank is before it trains: tied to its agent's life, its output in a log of its
own, its failure on record. Heavy imports come after that, so that their failures are recorded too.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import os
import platform
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from slurmft import locks
from slurmft.core import process
from slurmft.core.credentials import redact
from slurmft.core.errors import Exit, SlurmftError
from slurmft.node import heartbeat, signals
from slurmft.node.profiles import bind
from slurmft.runs import log_times, rundir
from slurmft.runs.rundir import RunDir

_LAST_SAVE_S = 30
"""How long a rank that failed may take to finish writing a checkpoint."""


def main(argv: list[str]) -> int:
    """Trains as one rank; returns its exit code: 0 also after an agreed stop, which is no failure
    that torchrun should cure."""
    began = time.time()
    signals.block()
    process.die_with_parent()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # torchrun's end; some launchers ignore it
    stop = signals.StopRequest()
    stop.listen()
    run = RunDir.open(argv[0])
    rank = int(os.environ["RANK"])
    if not sys.stdout.isatty():  # by hand, on a terminal, progress is wanted there
        redirect_output(run, rank)
    folder = node_folder()
    heart = heartbeat.Heart(folder and folder / f"beat-{rank}")
    if folder is not None:
        stacks = open(folder / f"stacks-{rank}", "w")  # noqa: SIM115 - open as long as the rank
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        (folder / f"pid-{rank}").write_text(str(os.getpid()))
    training: Any = None
    try:
        run.settle_permissions()
        bind(os.environ)
        locks.install(run.load_config().job.file_locks)
        gc.disable()  # of imports it finds nothing, and takes a fifth of their time
        from slurmft.train.trainer import Training

        gc.freeze()
        gc.enable()
        training = Training(run, stop, heart, imports_s=process.age_s())
        stopped = training.run()
        training.reporter.close()
        if stopped and folder is not None:
            (folder / "stopped").touch()
        return Exit.OK
    except Exception as error:
        step = training.position.step if training is not None else 0
        code = fail(error, run, rank, step, began)
        if training is not None:
            training.saver.wait(_LAST_SAVE_S)
            training.reporter.close()
        return code


def node_folder() -> Path | None:
    """Where the ranks of a node and its task meet; None where a rank is started by hand."""
    path = os.environ.get(heartbeat.FOLDER)
    return Path(path) if path else None


def fail(error: Exception, run: RunDir, rank: int, step: int, began: float) -> int:
    """Records a failure. Ends torchrun if a restart cannot help; returns the exit code.

    It cannot help where the same came up at the same step before this process `began`.
    """
    shown = explain(error, run, rank)
    trace = None if isinstance(error, SlurmftError) else traceback.format_exc()
    print(redact(trace or f"error: {shown}"), file=sys.stderr, flush=True)
    where, secondary = f"rank {rank} on {platform.node()}", is_secondary(error)
    earlier = [f for f in run.all_failures() if f["time"] < began]
    again = any(f["message"] == shown.message and f["step"] == step for f in earlier)
    with contextlib.suppress(OSError):  # a full disk takes no record of itself
        run.add_failure(where, shown, trace, secondary=secondary, step=step)
    if not secondary and (isinstance(error, SlurmftError) or again) and node_folder() is not None:
        os.kill(os.getppid(), signal.SIGHUP)
    return int(shown.code)


def explain(error: Exception, run: RunDir, rank: int) -> SlurmftError:
    """An error as its reader needs it: its own words, or where to look for more."""
    if isinstance(error, SlurmftError):
        return error
    message, hint = f"{type(error).__name__}: {error}", f"log: {run.rank_log(rank)}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = f"make room on the file system of {run.path}"
    return SlurmftError(message, hint)


def is_secondary(error: Exception) -> bool:
    """Whether an error only says that another rank is gone; nothing does before torch is there."""
    dist = sys.modules.get("slurmft.job.process_group")
    return dist is not None and dist.is_secondary(error)


def redirect_output(run: RunDir, rank: int) -> None:
    """Sends stdout and stderr, those of libraries too, to the rank's log; Python's with stamps."""
    log = os.open(run.rank_log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    os.close(log)
    sys.stdout, sys.stderr = log_times.stamped(1), log_times.stamped(2)
    print(rundir.log_head(f"rank {rank}", platform.node()))


if __name__ == "__main__":
    # The process group's threads may wait for ranks that are gone: leave without joining them.
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
