"""The [program] table of a study file: a program of the user's own, with placeholders for what
varies."""

import re
import shlex
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from string import Formatter
from typing import Any

from slurmft.core.config import JobConfig
from slurmft.core.errors import UsageError, nearest
from slurmft.core.options import options
from slurmft.core.site import typed_values
from slurmft.programs.description import FLAGS, LATEST, OWN_FILES
from slurmft.train.config import TrainConfig

_FLAGS_OF_RUN = options(JobConfig) | FLAGS
RUN_OPTIONS = {name: each for name, each in _FLAGS_OF_RUN.items() if name != "runs_dir"}
"""Name -> option of `slurmft run`, but for the folder of runs: a study has one of its own."""

FIRST_SEED = 42
"""The seed of the first repeat; those after it count up."""
_REPEAT_PLACEHOLDERS = ("repeat", "seed")
"""Placeholders that have a value in every study: they differ between the repeats of a cell."""
_MOST_DIGITS = 1000
"""As wide as a placeholder may be: a slip of the finger would fill the memory."""
_COMMAND_HINT = 'write command = ["train.py", "--lr", "{lr}"]'


def read(path: Path, table: dict[str, Any]) -> dict[str, Any]:
    """Checks the table; returns it with its command as a tuple of words."""
    where = f"{path}: [program]"
    command = table.get("command")
    # One text is split as a shell does, but nothing in it is expanded.
    if isinstance(command, str):
        try:
            command = shlex.split(command)
        except ValueError as error:
            problem = f"{where} command {command!r}: {error}"
            raise UsageError(problem, _COMMAND_HINT) from None
    if not isinstance(command, list) or not command or not all(map(_is_plain, command)):
        what = f"{where} command must be words, or one text, not {command!r}"
        raise UsageError(what, _COMMAND_HINT)
    # Its words are text: ["train.py", "--lr", 0.1] is TOML, too.
    command_words = tuple(str(word) for word in command)
    checked: dict[str, Any] = {"command": command_words}
    settings = {}
    for name, value in table.items():
        if name != "command":
            settings[name] = value
    checked |= typed_values(where, settings, FLAGS)
    return checked


def _is_plain(value: Any) -> bool:
    """Returns whether a value has one obvious text, as a placeholder and a word must."""
    return isinstance(value, (str, int, float))


def typed(where: str, values: dict[str, Any], varied: bool = False) -> dict[str, Any]:
    """Converts values to the types of the options of `slurmft run`.

    Args:
        varied: whether other names are those of placeholders, whose values stay as they are.
    """
    settings: dict[str, Any] = {}
    for key, value in values.items():
        if key in RUN_OPTIONS:
            settings[key] = value
        elif varied:
            if not _is_plain(value):
                problem = f"{value!r} is no text, number, true or false"
                raise UsageError(f"{where} {key}: {problem}")
        elif key in options(TrainConfig):
            raise UsageError(
                f"{where}: {key} = {value!r}, but [program] is no training of slurmft's",
                f"pass {key} on in command, or leave [program] out",
            )
        else:
            # `typed_values` refuses it, and names the option that was meant.
            settings[key] = value
    return values | typed_values(where, settings, RUN_OPTIONS)


def check_placeholders(
    path: Path,
    program: dict[str, Any],
    varied: Collection[str],
    fixed: Collection[str],
) -> None:
    """Raises UsageError unless every placeholder has values, and all that varies has a use."""
    where = f"{path}: [program]"
    used: set[str] = set()
    if "resume_args" in program:
        # The newest checkpoint, which is filled in where a run goes on.
        used.add("latest")
    settings = []
    for key, value in program.items():
        if key != "command":
            settings.append(value)
    with_values = {*varied, *fixed, *_REPEAT_PLACEHOLDERS, *used}
    for text in (*program["command"], *settings):
        names = _placeholders(where, text)
        for name in names - with_values:
            all_varied = ", ".join(varied)
            raise UsageError(
                f"{where} {text!r} has {{{name}}}, but what varies is {all_varied}",
                f"add {name} = [...] to [grid]; or write {{{{ for a {{ that is meant",
            )
        used |= names
    # What varies without a use would be several measurements of one thing.
    for name in set(varied) - used - RUN_OPTIONS.keys():
        hint = f"write {{{name}}} into command"
        near = nearest(name, [*RUN_OPTIONS, *used])
        if near:
            hint = f"did you mean {near}?"
        raise UsageError(
            f"{path}: {name} varies, but [program] has no {{{name}}}, and a job no such option",
            hint,
        )


def _placeholders(where: str, text: str) -> set[str]:
    """Returns the names in braces of a text."""
    try:
        fields = list(Formatter().parse(text))
    except ValueError as error:
        hint = "write {{ and }} for braces that are meant"
        raise UsageError(f"{where} {text!r}: {error}", hint) from None
    for _, name, width, _ in fields:
        if any(
            int(digits) > _MOST_DIGITS for digits in re.findall(r"\d+", width or "")
        ):
            raise UsageError(
                f"{where} {text!r}: {{{name}:{width}}} is wider than {_MOST_DIGITS}",
                "give fewer digits",
            )
    names = [name for _, name, _, _ in fields]
    # The name is None after the last pair of braces.
    return {name for name in names if name is not None}


def fill(
    program: dict[str, Any],
    values: dict[str, Any],
    repeat: int,
) -> dict[str, Any]:
    """Fills the placeholders of the table, for one run.

    Args:
        values: name of a placeholder -> its value in the cell, or in [fixed].
        repeat: number of the repeat, from 1.

    Raises:
        UsageError: a value does not fit its format, such as {lr:d}.
    """
    seed = FIRST_SEED + repeat - 1
    # {latest} stays a placeholder: the attempt that goes on fills it.
    placeholders = values | {"repeat": repeat, "seed": seed, "latest": LATEST}
    filled: dict[str, Any] = {}
    try:
        for key, value in program.items():
            if key == "command":
                filled[key] = [word.format_map(placeholders) for word in value]
            else:
                filled[key] = value.format_map(placeholders)
        return filled
    except (ValueError, TypeError) as error:
        problem = f"a placeholder cannot be filled: {error}"
        raise UsageError(f"[program]: {problem}") from None


def check_apart(runs: Collection[dict[str, Any]], varied: Collection[str]) -> None:
    """Checks that runs do not share a file that each must have for itself.

    The results of another run would be taken for its own.

    Args:
        runs: the settings of their programs.

    Raises:
        UsageError: several runs have the same file.
    """
    for key in OWN_FILES:
        # A run without such a file has "" there.
        files = [settings[key] for settings in runs if settings[key]]
        counts = Counter(files)
        for name, count in counts.items():
            if count > 1:
                # The seed tells repeats of a cell apart.
                placeholders = [f"{{{field}}}" for field in (*varied, "seed")]
                example = "-".join(placeholders)
                raise UsageError(
                    f"[program]: several runs of the study would share {key} = {name!r}",
                    f'give each its own, such as {key} = "out/{example}"',
                )
