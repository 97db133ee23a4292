"""What no command takes as the value of a flag or an argument."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmft.__main__ import main
from slurmft.cli import parser
from slurmft.cli.commands import command_parser, load_command
from slurmft.core import plugins
from slurmft.core.errors import UsageError, run_main
from tests.conftest import advises_itself
from tests.support import recorded_warnings


def _names() -> Iterator[list[str]]:
    """Yields every command, and every part of one."""
    for name in plugins.entries(plugins.COMMANDS):
        yield [name]
        for part in getattr(load_command(name), "PARTS", {}):
            yield [name, part]


NAMES = list(_names())
_DRY = ["--dry-run", "--cluster", "local"]
DRY = {"submit": _DRY, "run": _DRY, "predict": _DRY}
"""Command -> flags by which it submits nothing."""


def declared(words: list[str]) -> list[argparse.Action]:
    """Returns the flags and arguments of a command that take values."""
    found = command_parser(words)
    actions = found.arguments() if found else ()
    return [action for action in actions if action.nargs != 0]


@pytest.mark.parametrize("words", NAMES, ids=" ".join)
def test_no_type_reads_more_than_numbers(words: list[str]) -> None:
    """int and float take "1_000", " 1" and digits of any script."""
    lax = [action.dest for action in declared(words) if action.type in (int, float)]
    assert lax == []


@pytest.mark.parametrize("words", NAMES, ids=" ".join)
def test_an_empty_value_of_a_flag_is_refused(words: list[str]) -> None:
    for action in declared(words):
        found = command_parser(words)
        assert found is not None
        # Options are checked with their declarations: see tests/core/test_options.py.
        if action.option_strings and action.dest not in found.options:
            flag = action.option_strings[0]
            with pytest.raises(UsageError, match=f"^{flag} '' is empty"):
                found.parse([flag, ""])


@pytest.mark.parametrize("words", NAMES, ids=" ".join)
def test_a_second_value_is_a_word(words: list[str]) -> None:
    """The last one counts; where all count, or both are the same, there is nothing to say."""
    found = command_parser(words)
    if found is None:
        return
    for action in found.arguments():
        action.required = False
    for option in found.options.values():
        if option.value_type is bool:
            continue
        with recorded_warnings() as caught:
            found.parse_known_args([option.flag, "1", option.flag, "1"])
            assert caught == []
            found._typed.clear()
            found.parse_known_args([option.flag, "1", option.flag, "2"])
            found._typed.clear()
        expected = [f"{option.flag} is given twice: '2' counts, '1' does not"]
        if option.is_repeatable:
            expected = []
        assert [str(warning.message) for warning in caught] == expected


def command_lines(words: list[str], value: str) -> Iterator[list[str]]:
    """Yields command lines in which each flag and each argument of a command has a value."""
    actions = declared(words)
    needed = [
        action
        for action in actions
        if not action.option_strings and action.nargs not in ("?", "*")
    ]
    for action in actions:
        line = [*words, *DRY.get(words[0], [])]
        line += [f"{action.option_strings[0]}={value}"] if action.option_strings else []
        line += [value if each is action else "y" for each in needed]
        if not action.option_strings and action not in needed:
            line.append(value)
        yield line


@pytest.mark.parametrize(
    "words",
    # Doctor waits for nodes.
    [words for words in NAMES if words[0] != "doctor"],
    ids=" ".join,
)
def test_a_value_of_any_length_ends_in_two_lines(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where it becomes a path or a name, file systems do not take it."""
    (tmp_path / "y").touch()  # a program, for `slurmft run`
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    for line in command_lines(words, "x" * 5000):
        code = run_main(lambda line=line: main(line))  # type: ignore[misc]
        text = capsys.readouterr().err
        what = f"{' '.join(line)[:80]}: {text[:500]}"
        assert code == 0 or text.startswith("error: "), what
        assert len(text.splitlines()) <= 2, what
        assert len(text) < 1000, what
        assert "Errno" not in text, what


def test_a_hint_that_advises_the_same_again_is_found() -> None:
    """`slurmft` of the tests looks for one after every command that they run."""
    same = "error: no such model\nhint: fill the caches (slurmft fetch ...), or give a folder\n"
    other = "error: nothing to fetch\nhint: slurmft fetch MODEL, or see slurmft fetch --help\n"
    assert advises_itself(("fetch", "me/model"), same)
    assert advises_itself(("fetch", "MODEL"), other)
    assert not advises_itself(("submit", "--model", "me/model"), same)
    assert not advises_itself(("fetch",), other)


@pytest.mark.parametrize("text", ["1_000", " 1", "٣", "1e3", "nan", "inf", "", "0x1"])
def test_whole_numbers(text: str) -> None:
    for kind in (parser.integer, parser.count, parser.whole):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number"):
            kind(text)


@pytest.mark.parametrize("text", ["1_0.0", " 1", "٣", "nan", "-inf", "", ".", "1e"])
def test_numbers(text: str) -> None:
    for kind in (parser.number, parser.above_zero):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a number"):
            kind(text)
    assert parser.number("-1.5e-3") == -0.0015
    assert parser.number(".5") == 0.5
