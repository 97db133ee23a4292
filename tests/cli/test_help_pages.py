"""The documentation in the terminal, for those who have the wheel alone."""

import ast
import re
import shlex
from pathlib import Path

import pytest

import slurmft
from slurmft.__main__ import console
from slurmft.cli import help_pages
from slurmft.core import plugins, shipped

PAGES = {file.stem for file in shipped.pages()}


def test_pages_are_those_of_the_documentation() -> None:
    docs = Path(slurmft.__file__).parents[1] / "docs"
    assert {file.stem for file in docs.glob("*.md")} == PAGES
    assert help_pages.LIST not in PAGES


def test_page_that_has_the_name_of_a_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert PAGES & {*plugins.entries(plugins.COMMANDS)} == {"doctor"}
    assert console(["help", "docs/doctor.md"]) == 0
    assert capsys.readouterr().out.startswith("# Doctor\n")


def test_page_and_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert console(["help", "own-data"]) == 0
    assert capsys.readouterr().out.startswith("# Your own data\n")
    assert console(["help", "pages"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == PAGES
    assert all(line.endswith("?") for line in lines)
    assert console(["help", "own-dat"]) == 2
    assert "did you mean own-data?" in capsys.readouterr().err


def texts_of(path: Path) -> list[str]:
    """Texts of a module that may be shown; docstrings of functions and attributes are for those who
    have the repository."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
    }
    texts = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in docstrings:
            continue
        if isinstance(node.value, str):
            texts.append(node.value)
    return texts


@pytest.mark.parametrize("columns", [60, 80])
def test_commands_of_pages_can_be_pasted(columns: int) -> None:
    """A line that a terminal breaks by itself would be two commands."""
    for page in shipped.pages():
        text = page.read_text(encoding="utf-8")
        shown = help_pages._with_commands_in_lines(text, columns - 2)
        blocks = [
            re.findall(r"^```sh\n(.*?)^```", each, re.S | re.M)
            for each in (text, shown)
        ]
        for before, after in zip(*blocks, strict=True):
            words = [
                shlex.split(block.replace("\\\n", " "), comments=True)
                for block in (before, after)
            ]
            assert words[0] == words[1], page.name
            # A word alone, as a path or a text in quotes, stays whole.
            for line in after.splitlines():
                assert len(line) <= columns - 2 or len(shlex.split(line)) <= 3, line


def test_no_space_stands_behind_the_backslash_of_a_command() -> None:
    padded = "\x1b[97mls  -l \\\x1b[0m\x1b[48;5;1m   \x1b[0m  \n  a \n"
    assert help_pages._without_padding(padded) == (
        "\x1b[97mls  -l \\\x1b[0m\x1b[48;5;1m\x1b[0m\n  a\n"
    )


def test_source_names_pages_that_a_user_of_the_wheel_can_open() -> None:
    """`docs/NAME.md` is a file of the repository."""
    for path in Path(slurmft.__file__).parent.rglob("*.py"):
        for name in re.findall(r"slurmft help (?!lists)([a-z-]+)", path.read_text()):
            assert name in PAGES or name == help_pages.LIST, (path, name)
        for text in texts_of(path):
            assert not re.search(r"docs/[a-z-]+\.md", text), (path, text)


_PLACEHOLDER = re.compile(r"slurmft (status|resume|follow|logs|cancel) RUN\b")
"""A run that is not named. Whoever prints a message mostly knows it."""
_WITHOUT_DASHES = re.compile(r"slurmft run (?!--)\S+\.py\b")


def test_commands_in_messages_work_as_they_stand() -> None:
    for path in Path(slurmft.__file__).parent.rglob("*.py"):
        # What other tools call it is told before there is a run.
        if path.name == "foreign_flags.py":
            continue
        for text in texts_of(path):
            # Help is of several lines.
            if "\n" not in text:
                assert not _PLACEHOLDER.search(text), (path, text)
            assert not _WITHOUT_DASHES.search(text), (path, text)
