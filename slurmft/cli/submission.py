"""The end of each command that submits a run: it submits, shows and follows."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from slurmft.cli.hints import next_commands
from slurmft.core.errors import Exit

if TYPE_CHECKING:
    from argparse import Namespace

    from slurmft.core.config import RunConfig
    from slurmft.core.options import Option


def submit_or_show(
    config: "RunConfig",
    arguments: "Namespace",
    name: str,
    argv: list[str],
    declared: Mapping[str, "Option"],
    submitted: Callable[[], object] = lambda: None,
) -> int:
    """Submits a run, says where it is, and follows it with --follow; with --dry-run shows what
    would be submitted. Returns the exit code.

    Args:
        declared: name -> declaration of the options of the command.
        submitted: called as soon as the run is submitted; not in a dry run.
    """
    # not above: --help need not wait for these
    from slurmft.cli.parser import Submitted, print_json
    from slurmft.cluster import dry_run, launcher, submit

    cluster = submit.check(config)
    typed_names = [name for name in declared if name in arguments]
    submit.warn_of_unread(config, cluster, typed_names, declared)
    if arguments.dry_run and arguments.json:
        print(config.to_json())
        return Exit.OK
    if arguments.dry_run:
        print(dry_run.text(config, cluster))
        return Exit.OK
    submission = submit.provenance(name, argv)
    run = submit.submit_with(config, cluster, submission)
    submitted()
    job = launcher.job_of(run)
    if arguments.json:
        facts = Submitted(
            run=str(run.path), name=run.path.name, job=job.id, cluster=job.cluster
        )
        return print_json(facts)
    destination = launcher.destination(job.cluster, config.job)
    print(f"job {job.id} submitted {destination}")
    # A request by --on that comes again leads to the run of the first time.
    if run.load_config().submission.time != submission.time:
        hint = "to submit another, type the command once more"
        print(f"before the connection was cut; {hint}")
    # At once: the job may take long, and whoever reads a pipe waits for this line.
    print(f"run directory: {run.path}", flush=True)
    if not arguments.follow:
        print(next_commands(run.path))
        return Exit.OK
    from slurmft.cli.follow import follow  # not for those who do not follow

    return follow(run)
