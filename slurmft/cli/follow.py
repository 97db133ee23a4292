"""Streams the progress of a run until its job ends. Then it shows the result, or the error, and
exits with the exit code of the job.

examples:
  slurmft follow last
  slurmft follow emotion-2026              first letters of its name, where only one begins so
  slurmft follow 8123                      the id of its job
  slurmft follow runs/emotion-20261120-093012-a1b2c3
"""

import contextlib
import sys
from collections.abc import Collection

from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.hints import next_commands
from slurmft.cli.parser import Parser
from slurmft.cluster import follow as cluster_follow
from slurmft.cluster.wait import JobWatch
from slurmft.core import hooks, interruption
from slurmft.core.errors import Exit, SlurmftError
from slurmft.runs.rundir import RunDir
from slurmft.show.progress import Progress
from slurmft.show.result_table import result_table

ELSEWHERE = Elsewhere.PLAIN


def follow(run: RunDir, only_new: bool = False) -> int:
    """Shows progress until the job of a run ends; returns the exit code of the job."""
    job = JobWatch(run)
    try:
        output = cluster_follow.follow(job, Progress(), only_new)
    except KeyboardInterrupt as interrupt:
        return detached(job, interrupt)
    return show_outcome(job, output)


def detached(job: JobWatch, interrupt: KeyboardInterrupt) -> int:
    """Says that a job goes on though nobody watches it any more; returns the exit code."""
    # A signal is meant for this process alone: the job has a session of its own, or other nodes.
    name = interruption.signal_of(interrupt).name
    why = ""
    if name != "SIGINT":
        why = f" ({name})"
    then = next_commands(job.run.path)
    # A terminal that has closed shows nothing any more.
    with contextlib.suppress(OSError):
        print(
            f"\nno longer following{why}; job {job.job_id} continues. {then}",
            flush=True,
        )
    # Of a death by the signal: a script sees that the job has not ended.
    return interruption.exit_code(interrupt)


def show_outcome(job: JobWatch, output: Collection[str] = ()) -> int:
    """Shows how an ended job ended: its result, or its error; returns its exit code.

    Args:
        output: lines of the program that are on the screen, and need not be shown again.
    """
    try:
        result = job.outcome()
    except SlurmftError as error:
        # Notes first: the error and what to do about it stay on the screen, below a traceback.
        for note in getattr(error, "__notes__", ()):
            if not _is_in(note, output):
                print(note, file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        return int(error.code)
    print(result_table(result))
    # A prediction, or a program of one's own, leaves no model.
    kept = "records"
    if job.run.model.is_dir():
        kept = "model and records"
    print(f"{kept}: {job.run.path}")
    for line in hooks.next_commands(job.run):
        print(f"  {line}")
    return Exit.OK


def _is_in(note: str, output: Collection[str]) -> bool:
    """Tells if each line of a note is in an output."""
    return {line.rstrip() for line in note.splitlines()} <= set(output)


def parser() -> Parser:
    return Parser("slurmft follow", __doc__).add_run()


def main(argv: list[str]) -> int:
    _, run = parser().parse_run(argv)
    # Notifications and trackers may be called from here, and write files of the run.
    run.settle_permissions()
    return follow(run)
