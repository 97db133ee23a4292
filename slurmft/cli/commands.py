"""The commands, by their names."""

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from slurmft.core import plugins
from slurmft.core.text import hanging

if TYPE_CHECKING:
    from slurmft.cli.parser import Parser

_SECTIONS = {
    "training": "slurmft.train.",
    "jobs": "slurmft.cli.",
    "plug-ins": "slurmft.plugins.",
    "of other packages": "",
}
"""Section of `slurmft --help` -> how the modules of its commands begin."""

_SUMMARY_WIDTH = 66
"""Characters of a line of `slurmft --help` beside the command, in 80 columns."""
_MORE = (
    "slurmft help COMMAND shows its flags; start with: slurmft submit --follow",
    "slurmft help PAGE shows a page of the documentation; slurmft help pages: all",
    "--on CLUSTER runs any command on a cluster, by ssh",
)
"""Last lines of `slurmft --help`."""


def load_command(name: str, *arguments: str) -> ModuleType:
    """Imports the module of a command; UsageError for an unknown name, PluginError where the
    import fails.

    Args:
        arguments: what follows the name, for the line that an error proposes.
    """
    if plugins.find(plugins.COMMANDS, name) is None:
        from slurmft.cli import (
            foreign_commands,  # a command of ours need not wait for it
        )

        error = foreign_commands.unknown_command([name, *arguments])
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
    lines.append("")
    lines += [hanging("", line, 2) for line in _MORE]
    return "\n".join(lines)


def _usage_line(entry: plugins.Entry) -> str:
    text = entry.summary()[:_SUMMARY_WIDTH]
    if entry.package != plugins.OURS:
        text = f"{text} ({entry.package})".strip()
    head = f"  {entry.name:<10} "
    return hanging(head, text, len(head)).rstrip()
