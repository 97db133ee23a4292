"""Ends the job of a run."""

from slurmft.cli.parser import Parser, add_run
from slurmft.cluster import launcher as cluster_launcher
from slurmft.cluster.wait import cancel
from slurmft.core.errors import Exit
from slurmft.core.files import to_json


def parser() -> Parser:
    command = Parser("slurmft cancel", __doc__)
    add_run(command)
    command.add_argument("--json", action="store_true", help="print run, job, cancelled, state")
    return command


def main(argv: list[str]) -> int:
    arguments, run = parser().parse_run(argv)
    state, job_id = cancel(run), cluster_launcher.job_of(run)[1]
    if arguments.json:
        facts = {"run": str(run.path), "job": job_id, "cancelled": state is None}
        print(to_json(facts | {"state": state.name.lower() if state else "cancelled"}, indent=2))
    elif state is not None:
        print(f"the job {job_id} of {run.path.name} has already ended ({state.name.lower()})")
    else:
        print(f"the job {job_id} of {run.path.name} is being cancelled")
    return Exit.OK
