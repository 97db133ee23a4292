"""Ends the job of a run."""

from typing import TypedDict

from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.parser import Parser, print_json
from slurmft.cluster import launcher as cluster_launcher
from slurmft.cluster.wait import cancel
from slurmft.core.errors import Exit

ELSEWHERE = Elsewhere.PLAIN


class Cancellation(TypedDict):
    """The end of a job."""

    run: str
    """The run directory."""
    job: str
    cancelled: bool
    """false: the job had ended already."""
    state: str
    """cancelled, or how it had ended."""


def parser() -> Parser:
    about = "print run, job, cancelled, state"
    return Parser("slurmft cancel", __doc__).add_run().add_json(about, Cancellation)


def main(argv: list[str]) -> int:
    arguments, run = parser().parse_run(argv)
    earlier_end = cancel(run)
    is_cancelled = earlier_end is None
    state = "cancelled"
    # cancelling it is no error: a script need not ask first
    if earlier_end is not None:
        state = earlier_end.name.lower()
    job_id = cluster_launcher.job_of(run).id
    if arguments.json:
        facts = Cancellation(
            run=str(run.path), job=job_id, cancelled=is_cancelled, state=state
        )
        return print_json(facts)
    if is_cancelled:
        # Not "is cancelled": the cluster gives the ranks some seconds to end.
        print(f"the job {job_id} of {run.path.name} is being cancelled")
    else:
        print(f"the job {job_id} of {run.path.name} has already ended ({state})")
    return Exit.OK
