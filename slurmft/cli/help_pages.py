"""The pages of the documentation in the terminal: `slurmft help own-data`."""

import re
import sys
import textwrap

from slurmft.cli.parser import wrapped_command
from slurmft.core import shipped, terminal
from slurmft.core.errors import UsageError, nearest
from slurmft.core.text import hanging, screen_width

_WIDEST = 100
"""Columns of a page: longer lines are hard to read."""


LIST = "pages"
"""The word in place of a page's name for which all of them are listed."""


def _show_list() -> None:
    for file in shipped.pages():
        # The second line of text is the page's question, between stars.
        _, question, *_ = filter(None, file.read_text(encoding="utf-8").splitlines())
        print(hanging(f"{file.stem:<18} ", question.strip("*"), indent=19))


def show(name: str) -> None:
    """Prints a page, formatted on a terminal, as Markdown elsewhere; or what all of them are about.

    Raises:
        UsageError: there is no such command or page.
    """
    if name == LIST:
        _show_list()
        return
    pages = {file.stem: file for file in shipped.pages()}
    # Of a page and a command that share a name, the page by its path.
    name = name.removeprefix("docs/").removesuffix(".md")
    if name not in pages:
        near = nearest(name, list(pages))
        hint = f"slurmft help lists the commands, slurmft help {LIST} the pages"
        if near is not None:
            hint = f"did you mean {near}?"
        raise UsageError(f"no command and no page {name!r}", hint)
    text = pages[name].read_text(encoding="utf-8")
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console  # pages alone wait for it
    from rich.markdown import Markdown

    width = min(_WIDEST, screen_width())
    # There is a column on both sides of a block.
    page = Markdown(_with_commands_in_lines(text, width - 2))
    screen = terminal.raw(sys.stdout)
    console = Console(file=screen, width=width)
    with console.capture() as captured:
        console.print(page)
    screen.write(_without_padding(captured.get()))


def _without_padding(text: str) -> str:
    """Returns a formatted text without the spaces at the ends of its lines: pasted, one of them
    behind a backslash would end the command."""
    return re.sub(
        r"(?: |\x1b\[[0-9;]*m)+$",
        lambda end: end[0].replace(" ", ""),
        text,
        flags=re.MULTILINE,
    )


def _with_commands_in_lines(text: str, width: int) -> str:
    """Returns a page whose commands fit the terminal, and can be pasted from there."""
    lines = []
    is_shell = False
    for line in text.splitlines():
        if line.startswith("```"):
            is_shell = line == "```sh"
        if is_shell and len(line) > width:
            lines += _command_in_lines(line, width)
        else:
            lines.append(line)
    return "\n".join(lines)


def _command_in_lines(line: str, width: int) -> list[str]:
    # No backslash continues a comment: it goes above its command.
    match = re.fullmatch(r"(.*?)\s*(?<!\S)# (.*)", line)
    if match is None:
        return [wrapped_command(line, width)]
    command, comment = match.groups()
    lines = textwrap.wrap(comment, width, initial_indent="# ", subsequent_indent="# ")
    if command:
        lines.append(wrapped_command(command, width))
    return lines
