"""One rank of a run: `python -m slurmft.rank RUN_DIR`, started by torchrun on every node.

Everything that a rank is before it trains: tied to its agent's life, its output in a log of its
own, its failure on record. Heavy imports come after that, so that their failures are recorded too.
"""

from __future__ import annotations

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
    except SlurmftError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        record_failure(run, rank, error, trace=None)
        return int(error.code)
    except Exception as error:
        trace = traceback.format_exc()
        print(trace, file=sys.stderr, flush=True)
        record_failure(run, rank, error, trace)
        return Exit.FAILED


def redirect_output(run: RunDir, rank: int) -> None:
    """Sends stdout and stderr, those of libraries too, to the rank's log."""
    log = os.open(run.rank_log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    os.close(log)


def record_failure(run: RunDir, rank: int, error: Exception, trace: str | None) -> None:
    """Keeps a failure in the run directory, where the node and the follower find it."""
    from slurmft.dist import is_echo

    shown = error
    if not isinstance(shown, SlurmftError):
        shown = SlurmftError(f"{type(error).__name__}: {error}", f"log: {run.rank_log(rank)}")
    run.add_failure(f"rank {rank} on {platform.node()}", shown, trace, is_echo(error))


if __name__ == "__main__":
    # The process group's threads may wait for ranks that are gone: leave without joining them.
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
