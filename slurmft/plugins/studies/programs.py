"""The [program] table of a study file: a program of the user's own, with placeholders for what
varies."""

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

RUN_OPTIONS = {k: v for k, v in (options(JobConfig) | FLAGS).items() if k != "runs_dir"}
"""Name -> field of what `slurmft run` has flags for; the study has a folder for runs of its own."""

FIRST_SEED = 42
_OF_REPEAT = ("repeat", "seed")
_COMMAND = 'write command = ["train.py", "--lr", "{lr}"]'


def read(path: Path, table: dict[str, Any]) -> dict[str, Any]:
    """The table, with its command as a tuple of words."""
    where, words = f"{path}: [program]", table.get("command")
    try:
        words = shlex.split(words) if isinstance(words, str) else words
    except ValueError as error:
        raise UsageError(f"{where} command {words!r}: {error}", _COMMAND) from None
    if not isinstance(words, list) or not words or not all(map(_is_plain, words)):
        raise UsageError(f"{where} command must be words, or one text, not {words!r}", _COMMAND)
    rest = {k: v for k, v in table.items() if k != "command"}
    return {"command": tuple(map(str, words))} | typed_values(where, rest, FLAGS)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float))


def typed(where: str, values: dict[str, Any], varied: bool = False) -> dict[str, Any]:
    """Values as the options of `slurmft run` have them.

    Args:
        varied: whether other names are those of placeholders.
    """
    others = {k: v for k, v in values.items() if k not in RUN_OPTIONS}
    for key, value in others.items():
        if varied and not _is_plain(value):
            raise UsageError(f"{where} {key}: {value!r} is no text, number, true or false")
        if not varied and key in options(TrainConfig):
            raise UsageError(
                f"{where}: {key} = {value!r}, but [program] is no training of slurmft's",
                f"pass {key} on in command, or leave [program] out",
            )
    known = {k: v for k, v in values.items() if not varied or k not in others}
    return values | typed_values(where, known, RUN_OPTIONS)


def check_placeholders(
    path: Path, program: dict[str, Any], varied: Collection[str], fixed: Collection[str]
) -> None:
    """Raises UsageError unless every placeholder has values, and all that varies has a use."""
    where, used = f"{path}: [program]", {"latest"} if "resume_args" in program else set()
    for text in (*program["command"], *(v for k, v in program.items() if k != "command")):
        try:
            names = {name for _, name, *_ in Formatter().parse(text) if name is not None}
        except ValueError as error:
            hint = "write {{ and }} for braces that are meant"
            raise UsageError(f"{where} {text!r}: {error}", hint) from None
        for name in names - {*varied, *fixed, *_OF_REPEAT, *used}:
            raise UsageError(
                f"{where} {text!r} has {{{name}}}, but what varies is {', '.join(varied)}",
                f"add {name} = [...] to [grid]; or write {{{{ for a {{ that is meant",
            )
        used |= names
    for name in set(varied) - used - RUN_OPTIONS.keys():
        near = nearest(name, [*RUN_OPTIONS, *used])
        raise UsageError(
            f"{path}: {name} varies, but [program] has no {{{name}}}, and a job no such option",
            f"did you mean {near}?" if near else f"write {{{name}}} into command",
        )


def fill(program: dict[str, Any], values: dict[str, Any], repeat: int) -> dict[str, Any]:
    """The table of one run. Raises UsageError for a value that no format such as {lr:d} fits."""
    seed = FIRST_SEED + repeat - 1
    known = values | {"repeat": repeat, "seed": seed, "latest": LATEST}
    try:
        found = {key: value.format_map(known) for key, value in program.items() if key != "command"}
        return found | {"command": [word.format_map(known) for word in program["command"]]}
    except (ValueError, TypeError) as error:
        raise UsageError(f"[program]: a placeholder cannot be filled: {error}") from None


def check_apart(runs: Collection[dict[str, Any]], varied: Collection[str]) -> None:
    """Raises UsageError where runs would share what each must have for itself: another's results
    would be taken for its own. `runs`: the settings of their programs."""
    for key in OWN_FILES:
        found = Counter(settings[key] for settings in runs if settings[key])
        if twice := next((name for name, count in found.items() if count > 1), None):
            each = "-".join(f"{{{name}}}" for name in (*varied, "seed"))
            raise UsageError(
                f"[program]: several runs of the study would share {key} = {twice!r}",
                f'give each its own, such as {key} = "out/{each}"',
            )
