"""The pages of the documentation in the terminal: `slurmft help own-data`."""

import sys

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
    Console(file=terminal.raw(sys.stdout), width=width).print(Markdown(text))
