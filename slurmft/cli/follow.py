"""Streams the progress of a run until its job ends. Then it shows the result, or the error, and
exits with the exit code of the job.

examples:
  slurmft follow last
  slurmft follow emotion-2026              first letters of its name, where only one begins so
  slurmft follow 8123                      the id of its job
  slurmft follow runs/emotion-20261120-093012-a1b2c3
"""

import sys

from slurmft.cli import next_commands
from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.parser import Parser
from slurmft.cluster import follow as cluster_follow
from slurmft.cluster.wait import JobWatch
from slurmft.core import hooks
from slurmft.core.errors import Exit, SlurmftError
from slurmft.runs.rundir import RunDir
from slurmft.show.progress import Progress
from slurmft.show.result_table import result_table

ELSEWHERE = Elsewhere.PLAIN


def follow(run: RunDir, only_new: bool = False) -> int:
    """Shows progress until the job of a run ends; returns the exit code of the job."""
    job = JobWatch(run)
    try:
        cluster_follow.follow(job, Progress(), only_new)
    except KeyboardInterrupt:
        # Ctrl-C is meant for this process alone: the job has a group of its own, or other nodes.
        then = next_commands(run.path)
        print(f"\nno longer following; job {job.job_id} continues. {then}")
        # As a shell counts a death by SIGINT: a script sees that the job has not ended.
        return 130
    return show_outcome(job)


def show_outcome(job: JobWatch) -> int:
    """Shows how an ended job ended: its result, or its error; returns its exit code."""
    try:
        result = job.outcome()
    except SlurmftError as error:
        # Notes first: the error and what to do about it stay on the screen, below a traceback.
        for text in (*getattr(error, "__notes__", ()), f"error: {error}"):
            print(text, file=sys.stderr)
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


def parser() -> Parser:
    return Parser("slurmft follow", __doc__).add_run()


def main(argv: list[str]) -> int:
    _, run = parser().parse_run(argv)
    # Notifications and trackers may be called from here, and write files of the run.
    run.settle_permissions()
    return follow(run)
