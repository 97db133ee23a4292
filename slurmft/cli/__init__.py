"""The commands: one module each, which parses, calls and prints. Its docstring is its help; its
`parser()` has the command line, `main` carries it out and returns the exit code."""

import importlib
import os
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from os import PathLike
from types import ModuleType
from typing import TYPE_CHECKING

from slurmft.core.errors import Exit

if TYPE_CHECKING:
    from slurmft.core.config import RunConfig

COMMANDS = {
    "submit": "submit a training job",
    "run": "run a program of your own as a job",
    "data": "a look at your data before anything runs",
    "follow": "stream a run's progress until its job ends",
    "logs": "the logs of all ranks as one, after the first failure",
    "watch": "a live view of a run: speed, loss, ranks, time left",
    "resume": "submit a stopped or failed run again",
    "list": "all runs: state, progress, speed, metrics",
    "status": "one run in full, and what to type next",
    "cancel": "end the job of a run",
    "clean": "remove what is no longer needed",
    "fetch": "fill the caches, for nodes without internet",
    "predict": "predict the rows of a file with a finished run's model",
    "pull": "fetch a run from a cluster that you use by --on",
    "push": "upload the model of a finished run to the hub",
    "study": "run a grid of settings: study run, status, cancel",
    "report": "tables, plots and a page of results",
    "plan": "time and cost by number of nodes",
    "compare": "whether one run is faster or better than another, or it is noise",
    "doctor": "check the cluster; doctor node, doctor locks DIR: parts of it",
    "render": "print Kubernetes manifests",
    "examples": "list or copy the studies, tables and batch scripts that come along",
    "completion": "print the TAB completion script for bash or zsh",
    "prepare": "within a job: called by the files in sbatch/",
}
"""Command -> one line of help."""

_MODULES = {
    **dict.fromkeys(("submit", "data", "fetch", "predict", "push", "prepare"), "train"),
    **dict.fromkeys(("study", "report", "plan", "compare"), "plugins.studies"),
    "doctor": "plugins.examine",
    "pull": "plugins.remote",
    "render": "plugins.kubernetes",
}
"""Command -> the package whose `commands` have it, where it is not of this one."""


def module_of(name: str) -> ModuleType:
    """The module of a command: `main` runs it, and `parser` has its command line."""
    package = f"{_MODULES[name]}.commands" if name in _MODULES else "cli"
    return importlib.import_module(f"slurmft.{package}.{name}")


def usage() -> str:
    lines = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
    return (
        f"usage: slurmft COMMAND ...\n\n{lines}\n\n"
        "slurmft help COMMAND shows a command's flags; start with: slurmft submit --follow\n"
        "--on CLUSTER runs any command on a cluster, by ssh"
    )


def next_commands(
    run_dir: PathLike[str], which: Sequence[str] = ("follow", "watch", "logs", "cancel", "resume")
) -> str:
    """The commands that a user types next, with this run's path in them."""
    return next_lines([(command(name, pasted(run_dir)), COMMANDS[name]) for name in which])


def next_lines(commands: Sequence[tuple[str, str]]) -> str:
    """Commands and what they do; without these words where the terminal has no room for them."""
    from slurmft.core.text import screen_width  # not above: --help need not wait for it

    width = max(len(line) for line, _ in commands)
    lines = [f"  {line:<{width}}  # {words}" for line, words in commands]
    if max(map(len, lines)) > screen_width():
        lines = [f"  {line}" for line, _ in commands]
    return "\n".join(["Next:", *lines])


def command(*words: str) -> str:
    """A command line as this user types it."""
    return shlex.join([*typed(), *words])


def typed() -> list[str]:
    """How the user calls slurmft: `slurmft`, or by a path; or by a Python, with -m; or from
    elsewhere, with --on."""
    from slurmft.runs.request import ON  # not above: --help need not wait for it

    if on := os.environ.get(ON):
        return ["slurmft", "--on", on]
    program, words = sys.argv[0], sys.orig_argv
    if os.path.basename(program) == "slurmft":
        found = shutil.which("slurmft")
        is_on_path = found is not None and os.path.realpath(found) == os.path.realpath(program)
        return ["slurmft" if is_on_path else program]
    return [*words[: words.index("-m") + 1], "slurmft"] if "-m" in words else ["slurmft"]


def pasted(path: PathLike[str]) -> str:
    """A path as one types it in this folder: a short one, if it lies below."""
    text = os.fspath(path)
    try:
        below = os.path.relpath(text)
    except OSError:  # this folder is gone
        return text
    return text if below.startswith((".", "-", "~")) else below


_WHERE = {
    "slurm": "to Slurm: {} node(s)",
    "local": "on this machine, without Slurm: {} simulated node(s)",
    "mpirun": "to mpirun: {} node(s)",
}


def submit_or_show(config: "RunConfig", arguments: Namespace, name: str, argv: list[str]) -> int:
    """Submits a run, says where it is, and follows it with --follow; with --dry-run shows what
    would be submitted. Returns the exit code."""
    from slurmft.cli.parser import print_json  # not above: --help need not wait for these
    from slurmft.cluster import launcher, submit

    cluster = submit.check(config.job)
    if arguments.dry_run:
        print(config.to_json() if arguments.json else submit.dry_run(config, cluster))
        return Exit.OK
    submission = submit.provenance(name, argv)
    run = submit.submit_with(config, cluster, submission)
    cluster, job_id = launcher.job_of(run)
    if arguments.json:
        facts = {"run": str(run.path), "name": run.path.name, "job": job_id, "cluster": cluster}
        return print_json(facts)
    print(f"job {job_id} submitted {_WHERE[cluster].format(config.job.nodes)}")
    if run.load_config().submission.get("time") != submission["time"]:
        print("before the connection was cut; to submit another, type the command once more")
    print(f"run directory: {run.path}", flush=True)
    if not arguments.follow:
        print(next_commands(run.path))
        return Exit.OK
    from slurmft.cli.follow import follow

    return follow(run)
