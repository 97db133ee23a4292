"""One rank of a run: `python -m slurmft.rank RUN_DIR`, started by torchrun on every node.

Everything that a rank is before it trains: tied to its agent's life, its output in a log of its
own, its failure on record. Heavy imports come after that, so that their failures are recorded too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import sys
import traceback

from slurmft import process
from slurmft.errors import Exit, SlurmftError
from slurmft.rundir import RunDir


def main(argv: list[str]) -> int:
    """Trains as one rank; returns its exit code."""
    process.die_with_parent()
    run = RunDir.open(argv[0])
    rank = int(os.environ["RANK"])
    if not sys.stdout.isatty():  # by hand, on a terminal, progress is wanted there
        redirect_output(run, rank)
    try:
        from slurmft.train import Training

        Training(run).run()
        return Exit.OK
    except Exception as error:
        shown = explain(error, run, rank)
        trace = None if isinstance(error, SlurmftError) else traceback.format_exc()
        print(trace or f"error: {shown}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):  # a full disk takes no record of itself
            run.add_failure(f"rank {rank} on {platform.node()}", shown, trace, is_echo(error))
        return int(shown.code)


def explain(error: Exception, run: RunDir, rank: int) -> SlurmftError:
    """An error as its reader needs it: its own words, or where to look for more."""
    if isinstance(error, SlurmftError):
        return error
    message, hint = f"{type(error).__name__}: {error}", f"log: {run.rank_log(rank)}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = f"make room on the file system of {run.path}"
    return SlurmftError(message, hint)


def is_echo(error: Exception) -> bool:
    """Whether an error only says that another rank is gone; nothing does before torch is there."""
    dist = sys.modules.get("slurmft.dist")
    return dist is not None and dist.is_echo(error)


def redirect_output(run: RunDir, rank: int) -> None:
    """Sends stdout and stderr, those of libraries too, to the rank's log."""
    log = os.open(run.rank_log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    os.close(log)


if __name__ == "__main__":
    # The process group's threads may wait for ranks that are gone: leave without joining them.
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
