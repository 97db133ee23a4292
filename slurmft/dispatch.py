"""`slurmft submit`: from flags to a submitted job."""

from __future__ import annotations

import dataclasses
import getpass
import os
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import slurmft
from slurmft import (
    ccl,
    container,
    hardware,
    launchers,
    permissions,
    profiles,
    push,
    recipes,
    selection,
    slurm,
    stage,
    tracking,
)
from slurmft.cli import Parser, add_options, given
from slurmft.config import (
    JobConfig,
    RunConfig,
    TrainConfig,
    build,
    options,
)
from slurmft.credentials import redact
from slurmft.errors import Exit, SlurmftError, UsageError
from slurmft.filesystem import absolute
from slurmft.follow import Follower, next_commands
from slurmft.node import torchrun_command
from slurmft.rendezvous import Rendezvous
from slurmft.rundir import RunDir, to_json, write_text
from slurmft.site import site_defaults, site_file
from slurmft.sources import localize

WHERE = {
    "slurm": "to Slurm: {} node(s)",
    "local": "on this machine, without Slurm: {} simulated node(s)",
    "mpirun": "to mpirun: {} node(s)",
}

EXAMPLES = """\
examples:
  slurmft submit --nodes 2 --follow                     synthetic data, a minute on two cores
  slurmft submit --nodes 4 --task emotion --follow      emotion from the hub, on 4 nodes
  slurmft submit --nodes 4 --task emotion --data /gpfs/emotion --model /gpfs/distilbert \\
      --partition gpu --gpus-per-node 4 --time 30 --setup "module load cuda"
  slurmft submit --nodes 4 --recipe spr-squad --follow  a published setting
  slurmft submit --nodes 4 --container /gpfs/images/torch.sif --follow
  slurmft submit --cluster mpirun --hostfile hosts --nodes 4 --nproc-per-node 2 --follow
  slurmft submit --nodes 4 --dry-run                    show what would be submitted

Defaults of your site go to ~/.config/slurmft/site.toml (or the file that $SLURMFT_SITE names):
  partition = "gpu"
  gpus_per_node = 4
  setup = ["module load cuda"]
"""


RESUME_EXAMPLES = """\
examples:
  slurmft resume last --follow
  slurmft resume runs/emotion-20261120-093012-a1b2 --nodes 2 --time 60
"""


_PATHS = ("runs_dir", "hostfile", "container")
"""Options of a job that are paths: it may start in another folder."""


def parser() -> Parser:
    """The command line of `slurmft submit`."""
    made = Parser(
        prog="slurmft submit",
        description="Fine-tune a transformer on the nodes of a Slurm cluster, or on this machine.",
        epilog=EXAMPLES,
    )
    made.add_argument("--dry-run", action="store_true", help="show what would run; submit nothing")
    made.add_argument(
        "--create", action="store_true", help="write the run directory, print its path; no job"
    )
    made.add_argument("--follow", action="store_true", help="stream progress until the job ends")
    push.add_flag(made)
    add_options(made, TrainConfig, "what to train")
    add_options(made, JobConfig, "where to run it")
    return made


def configure(flags: dict[str, Any]) -> RunConfig:
    """The resolved configuration: flags over the site file over the recipe.

    Raises:
        UsageError: a value that cannot be right, from whichever source.
    """
    values = recipes.fill(merge(site_defaults(), flags))
    job = with_absolute_paths(build(JobConfig, values))
    return RunConfig(train=localize(build(TrainConfig, values)), job=job)


def checked(flags: dict[str, Any]) -> tuple[RunConfig, str]:
    """The resolved configuration of a job to be submitted from here, and where it will run.

    Raises:
        UsageError: a value that cannot be right, from whichever source.
        SlurmftError: the cluster that was asked for is not here.
    """
    config = configure(flags)
    cluster = launchers.choose(config.job.cluster)
    container.check(config.job, cluster)
    stage.check(config.job, cluster)
    tracking.check(config.job)
    return config, cluster


def with_absolute_paths(job: JobConfig) -> JobConfig:
    given = {name: getattr(job, name) for name in _PATHS}
    paths: dict[str, Any] = {k: str(absolute(v)) for k, v in given.items() if v is not None}
    return dataclasses.replace(job, **paths)


def merge(site: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Flags over the site file; repeatable ones add to its list: a site always needs those."""
    both = {k: site[k] + v for k, v in flags.items() if isinstance(v, tuple) and k in site}
    return site | flags | both


def provenance(command: str, argv: list[str]) -> dict[str, Any]:
    """When, where, by whom, by which command and from which code a run is submitted."""
    return provenance_of(shlex.join(["slurmft", command, *argv]))


def provenance_of(command: str) -> dict[str, Any]:
    """The same, of a command or a call as it was written."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": os.uname().nodename,
        "user": user(),
        "folder": os.getcwd(),
        "command": redact(command),
        "site_file": str(site_file()) if site_file().is_file() else None,
        "slurmft": slurmft.__version__,
        "python": sys.version.split()[0],
        "git": git_state(Path.cwd()),
    }


def user() -> str:
    """The user's name, or number where it has none, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the folder's git checkout, and whether it has uncommitted changes; None: no git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def dry_run(config: RunConfig, cluster: str) -> str:
    """What would be submitted: configuration, job, and the command of the first node."""
    run = RunDir(Path(config.job.runs_dir) / f"{config.train.task}-<time>-<random>")
    return "\n".join(
        (
            f"# configuration, written to {run.config}",
            config.to_json(),
            launchers.get(cluster).plan(config, run),
            *([] if cluster == "mpirun" else node_command(config, run, cluster)),
            "",
            *node_variables(config),
            "",
            "dry run: nothing was submitted",
        )
    )


def node_command(config: RunConfig, run: RunDir, cluster: str) -> list[str]:
    """The torchrun command, with its title."""
    nproc = str(config.job.nproc_per_node or "$NPROC")
    command = shlex.join(
        torchrun_command(run.path, placeholder(config, cluster), nproc, config.job.max_restarts)
    )
    return [
        "# each node's task then runs (here: the first node's; NPROC: its GPUs or CPU sockets)",
        re.sub(r"'([\w.:]*\$[\w.:$]+)'", r'"\1"', command),  # our variables, and no path
    ]


def node_variables(config: RunConfig) -> list[str]:
    """The variables of the training processes and their reasons, on a node like this machine."""
    title = (
        "# variables of the processes, on a node like this machine (slurmft doctor node: others)"
    )
    try:
        here = hardware.detect(os.environ)
        uses_ccl = ccl.choose(config.train.backend, bool(here.gpus)) is not None
        profile = profiles.choose(here, config.job, uses_ccl=uses_ccl)
    except SlurmftError as error:
        return [f"# {config.job.profile}: to be decided on the nodes; not here: {error.message}"]
    return [f"{title}: {profile.name}", *profiles.describe(profile, os.environ)]


def placeholder(config: RunConfig, cluster: str) -> Rendezvous:
    """The rendezvous as it is known before the job has nodes."""
    head, job_id = ("$HEAD", "$SLURM_JOB_ID.0") if cluster == "slurm" else ("127.0.0.1", "$JOB_ID")
    return Rendezvous(
        hosts=(head,) * config.job.nodes, node_rank=0, port="$PORT", roll_call_port=0, id=job_id
    )


def submit(config: RunConfig, cluster: str, mark: str = "") -> RunDir:
    """Submits a job; returns its run directory, whose name ends with `mark`.

    Raises:
        SlurmftError: the job was refused, or would wait for ever. There is no run directory then.
    """
    where = launchers.here(cluster)
    run, launcher = RunDir.create(config, mark), launchers.get(cluster)
    try:
        job_id = launcher.submit(config, run)
    except SlurmftError:
        run.discard()
        raise
    launchers.note_job(run, cluster, job_id, where)
    if reason := launcher.never_starts(job_id):
        launcher.cancel(job_id, run)
        run.discard()
        raise SlurmftError(
            f"Slurm would never start the job: {reason}", slurm.offers(), Exit.SUBMIT
        )
    return run


def order(config: RunConfig, cluster: str, told: dict[str, Any]) -> RunDir:
    """Submits a job on somebody's behalf; see `submit` and `provenance`."""
    return submit(dataclasses.replace(config, submission=told), cluster)


def main(argv: list[str]) -> int:
    """The command: parse, configure, submit, and follow if asked to."""
    arguments = parser().parse(argv)
    push.check(arguments.push_to_hub, arguments.follow)
    flags = given(arguments, [*options(TrainConfig), *options(JobConfig)])
    config, cluster = checked(flags)
    if arguments.dry_run:
        print(dry_run(config, cluster))
        return Exit.OK
    told_by = provenance("submit", argv)
    if arguments.create:
        print(RunDir.create(dataclasses.replace(config, submission=told_by)).path)
        return Exit.OK
    run = order(config, cluster, told_by)
    print(f"job {launchers.job_of(run)[1]} submitted {WHERE[cluster].format(config.job.nodes)}")
    print(f"run directory: {run.path}", flush=True)
    if arguments.follow:
        return push.after(Follower(run).follow(), run, arguments.push_to_hub)
    print(next_commands(run))
    return Exit.OK


def resume_parser() -> Parser:
    """The command line of `slurmft resume`."""
    made = Parser(
        prog="slurmft resume",
        description="Submit a run again that was stopped, cancelled or failed: it goes on from its "
        "newest checkpoint, on as many nodes as you like.",
        epilog=RESUME_EXAMPLES,
    )
    selection.add_argument(made)
    made.add_argument("--follow", action="store_true", help="stream progress until the job ends")
    push.add_flag(made)
    made.add_argument("--json", action="store_true", help="print run, job, checkpoint")
    where = set(options(JobConfig)) - {"runs_dir"}  # a run stays where it is
    add_options(made, JobConfig, "where to run it (default: as before)", where)
    return made


def resume(run: RunDir, flags: dict[str, Any], told: dict[str, Any]) -> str:
    """Submits the job of a run again; returns its id.

    Args:
        run: the run.
        flags: what is to be different of where it runs.
        told: who asks for it, and how: see `provenance`.

    Raises:
        UsageError: the run has finished, or its job has not ended.
        SlurmftError: the job was refused. The run is as it was then.
    """
    old = run.load_config()
    _check_ended(run, moves="cluster" in flags)
    if not os.access(run.path, os.W_OK):
        raise UsageError(
            f"the run {str(run.path)!r} is not yours to write", "its owner can resume it"
        )
    job = with_absolute_paths(dataclasses.replace(old.job, **flags))
    permissions.settle(job.share_with_group)
    again = [*old.submission.get("resumed", []), told]
    cluster = launchers.choose(job.cluster)
    container.check(job, cluster)
    stage.check(job, cluster)
    tracking.check(job)
    config = dataclasses.replace(old, job=job, submission=old.submission | {"resumed": again})
    launcher, where = launchers.get(cluster), launchers.here(cluster)
    write_text(run.config, config.to_json())
    run.set_state("submitted", "resumed")  # before the job can say that it runs
    try:
        job_id = launcher.submit(config, run)
    except SlurmftError as error:
        write_text(run.config, old.to_json())
        run.set_state("failed", error.message, error.code)
        raise
    launchers.note_job(run, cluster, job_id, where)
    return job_id


def _check_ended(run: RunDir, moves: bool) -> None:
    """Makes sure that the job of a run has ended.

    Args:
        run: the run.
        moves: whether the user says where it is to go on: so it may come here from elsewhere.

    Raises:
        UsageError: it has not, or that cannot be known; or the run has finished.
    """
    cluster, job_id = launchers.job_of(run)
    if run.get_state()["state"] == "finished":
        raise UsageError(f"the run {str(run.path)!r} has finished", f"its model: {run.model}")
    if words := launchers.elsewhere(run):
        if moves:
            return
        raise UsageError(
            f"the job {job_id} of {run.path.name} is {words}",
            f"resume it there; or here, if that job has surely ended: --cluster {cluster}",
        )
    state = launchers.get(cluster).job_state(job_id, run)
    if state is not None and not state.ended:
        raise UsageError(
            f"the job {job_id} of this run is {state.name.lower()}",
            f"slurmft cancel {shlex.quote(str(run.path))}",
        )


def resume_main(argv: list[str]) -> int:
    """`slurmft resume RUN`"""
    arguments = resume_parser().parse(argv)
    push.check(arguments.push_to_hub, arguments.follow)
    run = selection.find(arguments.run, arguments.runs_dir)
    flags = given(arguments, set(options(JobConfig)) - {"runs_dir"})
    job_id = resume(run, flags, provenance("resume", argv))
    newest = next(reversed(run.checkpoint_names()), None)
    if arguments.json and not arguments.follow:
        print(to_json({"run": str(run.path), "job": job_id, "checkpoint": newest}, indent=2))
        return Exit.OK
    place = newest or "its beginning: there is no checkpoint"
    print(f"job {job_id} submitted; the run goes on from {place}", flush=True)
    print(f"run directory: {run.path}", flush=True)
    if arguments.follow:
        return push.after(Follower(run, only_new=True).follow(), run, arguments.push_to_hub)
    print(next_commands(run))
    return Exit.OK
