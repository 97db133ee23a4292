"""Submits a stopped, cancelled or failed run again. It resumes from its newest checkpoint, on any
number of nodes.

examples:
  slurmft resume last --follow
  slurmft resume emotion-20261120 --nodes 2 --time 60 --dry-run
  slurmft resume runs/emotion-20261120 --yes program,setup    one that was pulled, in a script
"""

from typing import TypedDict

from slurmft.cli import foreign
from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.follow import follow
from slurmft.cli.hints import next_commands
from slurmft.cli.parser import Parser, print_json, typed_options
from slurmft.cluster.submit import provenance, resume, show_resume
from slurmft.core.config import JobConfig
from slurmft.core.errors import Exit
from slurmft.core.options import options

ELSEWHERE = Elsewhere.SUBMITS

_DECLARED = options(JobConfig)
_JOB_OPTIONS = [name for name, each in _DECLARED.items() if not each.identifies]
"""Options of the job that may change: a run stays what and where it is."""


class Resumption(TypedDict):
    """A run that was submitted again."""

    run: str
    """The run directory."""
    job: str | None
    """null of a dry run."""
    checkpoint: str | None
    """null: it starts at the beginning."""


def parser() -> Parser:
    command = Parser("slurmft resume", __doc__).add_run()
    command.add_follow("print run, job and checkpoint as JSON", Resumption)
    foreign.add_yes(command)
    title = "where to run it (default: as before)"
    return command.add_options(JobConfig, title, _JOB_OPTIONS).show_usual()


def main(argv: list[str]) -> int:
    arguments, run = parser().parse_run(argv)
    flags = typed_options(arguments, _JOB_OPTIONS)
    # Read before the submission: a job that starts at once may write another.
    checkpoint = run.newest_checkpoint()
    start = checkpoint or "the beginning: there is no checkpoint"
    facts = Resumption(run=str(run.path), job=None, checkpoint=checkpoint)
    with foreign.agreed(run, arguments.yes, records=not arguments.dry_run):
        if not arguments.dry_run:
            facts["job"] = resume(run, flags, provenance("resume", argv))
    if arguments.json:
        return print_json(facts)
    if arguments.dry_run:
        # A comment of the shell, like the batch script's below it: all can go into a file.
        print(f"# would resume from {start}\n")
        print(show_resume(run, flags))
        return Exit.OK
    print(f"job {facts['job']} submitted; the run resumes from {start}", flush=True)
    print(f"run directory: {run.path}", flush=True)
    if arguments.follow:
        # The records of the attempts before are in the same file.
        return follow(run, only_new=True)
    print(next_commands(run.path))
    return Exit.OK
