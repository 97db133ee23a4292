"""The commands about any job: one module each, which parses, calls and prints.

The docstring of a module is the command's help, its first sentence the line in `slurmft --help`;
`parser()` has the command line, `main(argv)` carries it out and returns the exit code. Commands are
found by the entry points `slurmft.commands` (see `slurmft.core.plugins`).
"""

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from types import ModuleType
from typing import TYPE_CHECKING, TypedDict

from slurmft.core import plugins
from slurmft.core.errors import Exit

if TYPE_CHECKING:
    from argparse import Namespace

    from slurmft.cli.parser import Parser
    from slurmft.core.config import RunConfig
    from slurmft.core.options import Option

_SECTIONS = {
    "training": "slurmft.train.",
    "jobs": "slurmft.cli.",
    "plug-ins": "slurmft.plugins.",
    "of other packages": "",
}
"""Section of `slurmft --help` -> how the modules of its commands begin."""

_SUMMARY_WIDTH = 66
"""Characters of a line of `slurmft --help` beside the command, in 80 columns."""


class Submitted(TypedDict):
    """A run that was submitted."""

    run: str
    """The run directory."""
    name: str
    job: str
    cluster: str
    """The launcher: slurm, local, ..."""


def load_command(name: str, *arguments: str) -> ModuleType:
    """Imports the module of a command; UsageError for an unknown name, PluginError where the
    import fails.

    Args:
        arguments: what follows the name, for the line that an error proposes.
    """
    if plugins.find(plugins.COMMANDS, name) is None:
        from slurmft.cli import foreign_flags  # a command of ours need not wait for it

        error = foreign_flags.unknown_command([name, *arguments])
        if error is not None:
            raise error
    entry = plugins.get(plugins.COMMANDS, name, "command")
    module: ModuleType = entry.load()
    entry.check(module, "command", ["main"])
    return module


def command_parser(argv: Sequence[str]) -> "Parser | None":
    """Returns the parser of the command that a command line names, or of a part of it, as in
    `slurmft study run`; None where it has none.

    Raises:
        UsageError: there is no such command.
    """
    module = load_command(argv[0])
    parts = getattr(module, "PARTS", {})
    if len(argv) > 1 and argv[1] in parts:
        part: Parser = parts[argv[1]].parser()
        return part
    # A command of parts has none, and one of another package need not have one.
    if hasattr(module, "parser"):
        parser: Parser = module.parser()
        return parser
    return None


def usage() -> str:
    """Returns the text of `slurmft --help`."""
    # The last section takes every entry: each comes in the first section that has its module.
    left = dict(sorted(plugins.entries(plugins.COMMANDS).items()))
    lines = ["usage: slurmft COMMAND ..."]
    for title, prefix in _SECTIONS.items():
        section = [entry for entry in left.values() if entry.module.startswith(prefix)]
        if section:
            lines += ["", f"{title}:"]
        for entry in section:
            lines.append(_usage_line(entry))
            del left[entry.name]
    # Otherwise an installed package's command that does nothing would be a riddle.
    for entry in plugins.ignored(plugins.COMMANDS):
        lines += [
            "",
            f"ignored: {entry.name} of the package {entry.package}: slurmft has its own",
        ]
    lines += [
        "",
        "slurmft help COMMAND shows a command's flags; start with: slurmft submit --follow",
        "slurmft help PAGE shows a page of the documentation; slurmft help pages lists them",
        "--on CLUSTER runs any command on a cluster, by ssh",
    ]
    return "\n".join(lines)


def _usage_line(entry: plugins.Entry) -> str:
    text = entry.summary()[:_SUMMARY_WIDTH]
    if entry.package != plugins.OURS:
        text = f"{text} ({entry.package})".strip()
    return f"  {entry.name:<10} {text}".rstrip()


def next_commands(
    run_dir: PathLike[str],
    which: Sequence[str] = ("follow", "watch", "logs", "cancel"),
) -> str:
    """Returns the commands that a user types next, with this run's path in them; by default, those
    that work while its job waits or runs."""
    lines = []
    path = pasted(run_dir)
    for name in which:
        entry = plugins.find(plugins.COMMANDS, name)
        # slurmft works without the commands of its plug-ins, such as `report`.
        if entry is not None:
            lines.append((command(name, path), entry.summary()))
    return next_lines(lines)


def next_lines(commands: Sequence[tuple[str, str]]) -> str:
    """Returns commands and what they do, a line each; the commands alone where the terminal has no
    room for more."""
    from slurmft.core.text import screen_width  # not above: --help need not wait for it

    # A shell takes what follows # for a comment: a whole line can be pasted.
    width = max((len(line) for line, _ in commands), default=0)
    lines = [f"  {line:<{width}}  # {purpose}" for line, purpose in commands]
    if any(len(line) > screen_width() for line in lines):
        lines = [f"  {line}" for line, _ in commands]
    return "\n".join(["Next:", *lines])


def command(*words: str) -> str:
    """Returns a command line as this user types it."""
    return shlex.join([*typed(), *words])


def on_cluster(hint: str) -> str:
    """Returns a hint of a command; of one that came from a laptop, by --on, the commands in it can
    be typed there."""
    import re  # not above: --help need not wait for these

    from slurmft.runs.request import ON

    cluster = os.environ.get(ON)
    if not cluster:
        return hint
    names = "|".join(re.escape(name) for name in plugins.entries(plugins.COMMANDS))
    return re.sub(
        rf"\bslurmft (?=(?:{names})\b)",
        # No template, whose backslashes would mean something.
        lambda _: shlex.join(["slurmft", "--on", cluster]) + " ",
        hint,
    )


def typed() -> list[str]:
    """Returns how the user calls slurmft: `slurmft`, or by a path; or by a Python, with -m; or from
    elsewhere, with --on."""
    import shutil  # not above: --help need not wait for these

    from slurmft.runs.request import ON

    cluster = os.environ.get(ON)
    if cluster:
        return ["slurmft", "--on", cluster]
    script = sys.argv[0]
    if os.path.basename(script) == "slurmft":
        on_path = shutil.which("slurmft")
        real_script = os.path.realpath(script)
        # Another environment's slurmft may come first on the PATH: then only the path is right.
        if on_path is not None and os.path.realpath(on_path) == real_script:
            return ["slurmft"]
        return [script]
    # sys.argv has the module's file in the place of -m; only orig_argv has what was typed.
    original = sys.orig_argv
    if "-m" in original:
        # Kept as it was typed: the path of the Python, and its flags.
        end = original.index("-m") + 1
        return [*original[:end], "slurmft"]
    return ["slurmft"]


def pasted(path: PathLike[str]) -> str:
    """Returns a path as one types it in this folder: a short one, if it lies below."""
    text = os.fspath(path)
    try:
        below = os.path.relpath(text)
    except OSError:  # this folder is gone
        return text
    # "../x" is not below; a shell or a parser would take "-x" and "~x" for something else.
    if below.startswith((".", "-", "~")):
        return text
    return below


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
    from slurmft.cli.parser import print_json
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
    from slurmft.cli.follow import follow  # it would import this module in turn

    return follow(run)
