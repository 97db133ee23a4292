"""Submit a run again that was stopped, cancelled or failed: it resumes from its newest checkpoint,
on any number of nodes.

examples:
  slurmft resume last --follow
  slurmft resume runs/emotion-20261120-093012-a1b2c3 --nodes 2 --time 60
"""

from slurmft.cli import next_commands
from slurmft.cli.follow import Follower
from slurmft.cli.parser import Parser, add_follow, add_options, add_run, given
from slurmft.cluster.submit import provenance, resume
from slurmft.core.config import JobConfig, options
from slurmft.core.errors import Exit
from slurmft.core.files import to_json

_WHERE = options(JobConfig).keys() - {"runs_dir"}  # a run stays where it is


def parser() -> Parser:
    command = Parser("slurmft resume", __doc__)
    add_run(command)
    add_follow(command, dry_run=False)
    command.add_argument("--json", action="store_true", help="print run, job, checkpoint")
    add_options(command, JobConfig, "where to run it (default: as before)", _WHERE)
    return command


def main(argv: list[str]) -> int:
    arguments, run = parser().parse_run(argv)
    flags = given(arguments, _WHERE)
    job_id = resume(run, flags, provenance("resume", argv))
    newest = run.newest_checkpoint()
    if arguments.json and not arguments.follow:
        print(to_json({"run": str(run.path), "job": job_id, "checkpoint": newest}, indent=2))
        return Exit.OK
    place = newest or "the beginning: there is no checkpoint"
    print(f"job {job_id} submitted; the run resumes from {place}", flush=True)
    print(f"run directory: {run.path}", flush=True)
    if arguments.follow:
        return Follower(run, only_new=True).follow()
    print(next_commands(run.path))
    return Exit.OK
