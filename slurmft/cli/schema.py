"""Prints the JSON Schema of a command's --json, errors included. Without a command, it lists those
that have --json. A program can validate answers by it, or generate types from it.

examples:
  slurmft schema
  slurmft schema status > status.schema.json
  slurmft schema study status
"""

from collections.abc import Iterator

from slurmft.cli.commands import load_command
from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.parser import Parser, print_json
from slurmft.core import plugins
from slurmft.core.errors import Exit, Failed, unknown
from slurmft.core.json_schema import schema_of

ELSEWHERE = Elsewhere.HERE


def parser() -> Parser:
    parser = Parser("slurmft schema", __doc__)
    text = "words of the command, such as: study status (default: list the commands)"
    parser.add_argument("command", nargs="*", metavar="COMMAND", help=text)
    return parser


def main(argv: list[str]) -> int:
    name = " ".join(parser().parse(argv).command)
    parsers = {each.prog.removeprefix("slurmft "): each for each in json_parsers()}
    if not name:
        print("\n".join(sorted(parsers)))
        return Exit.OK
    if name not in parsers:
        raise unknown("command with --json", name, sorted(parsers))
    title = f"slurmft {name} --json"
    if name == "logs":
        title = f"each line of {title}"
    return print_json(schema_of([*parsers[name].printed, Failed], title))


def json_parsers() -> Iterator[Parser]:
    """Yields the parsers of commands, and of parts of them, that have --json."""
    for name in plugins.entries(plugins.COMMANDS):
        module = load_command(name)
        parsers = [part.parser for part in getattr(module, "PARTS", {}).values()]
        # A command of parts has none, and one of another package need not have one.
        if hasattr(module, "parser"):
            parsers.append(module.parser)
        for make_parser in parsers:
            command = make_parser()
            if any("--json" in each.option_strings for each in command.arguments()):
                yield command
