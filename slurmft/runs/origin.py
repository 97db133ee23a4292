"""Runs that came from elsewhere (`slurmft pull`).

Whoever could write such a run there has chosen what it makes slurmft execute: shell lines, a
program and its code, a Python. So it is marked before its files come, and whoever acts on it is
refused until its user has seen these and agreed.
"""

import dataclasses
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmft.core import plugins, trusted
from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.decode import load, read
from slurmft.core.errors import SlurmftError, UsageError
from slurmft.core.files import write_json
from slurmft.core.options import Option, options
from slurmft.core.program import OWN, RANK_MODULES, Program
from slurmft.core.text import clock

NAME = "origin.json"
"""The mark. `slurmft pull` fetches no file of this name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a run came from (origin.json)."""

    cluster: str = ""
    """By its name in clusters.toml."""
    path: str = ""
    """The run directory there."""
    owner: str = ""
    """The user there that it belongs to; "": not known."""
    is_own: bool = False
    """There it belonged to the account that fetched it, and nobody else could write it."""
    user: str = ""
    """Who fetched it."""
    time: float = 0.0
    """When, in Unix seconds."""
    accepted: list[str] = field(default_factory=list)
    """What may be executed, by the names that `executed` gives."""

    def __str__(self) -> str:
        owner = self.owner or "somebody"
        day = clock(self.time, "%Y-%m-%d")
        return f"{self.cluster}:{self.path} of {owner}, fetched on {day} by {self.user}"


class ForeignRunError(SlurmftError):
    """A run that came from elsewhere, and that its user has not agreed to execute."""


def origin_of(run: Path) -> Origin | None:
    """Returns where a run came from; None for one that was submitted here. All that lies within a
    run from elsewhere came with it, marks included."""
    top = _marked_above(run)
    if top is not None:
        came_with = read(top / NAME, Origin) or Origin()
        return dataclasses.replace(came_with, accepted=[])
    mark = run / NAME
    if not os.path.lexists(mark):
        return None
    # A mark that is damaged is one, too.
    return read(mark, Origin) or Origin()


def _marked_above(run: Path) -> Path | None:
    """Returns the uppermost folder above a run that is marked as one from elsewhere; None: there is
    none."""
    # Whatever else is in the folder: its owner there has chosen that.
    for folder in reversed(Path(os.path.realpath(run)).parents):
        mark = folder / NAME
        # In a folder above, others may make files of this name, and so may other programs.
        if trusted.is_own(mark) and _is_mark(mark):
            return folder
    return None


def _is_mark(path: Path) -> bool:
    try:
        return bool(load(path, Origin).cluster)
    except (OSError, ValueError):
        return True


def check(run: Path, opened: Path | None = None) -> None:
    """Raises ForeignRunError where a run came from elsewhere, and nobody has agreed to it.

    Args:
        opened: a path through a descriptor of it.
    """
    origin = origin_of(opened or run)
    if origin is not None and not origin.accepted:
        raise ForeignRunError(
            f"{str(run)!r} came from elsewhere ({origin}): nothing of it is executed unseen",
            f"it shows what it would execute, and asks: slurmft resume {shlex.quote(str(run))}",
        )


def check_alone(run: Path) -> None:
    """Raises ForeignRunError where a run lies within one from elsewhere: nobody can agree to it."""
    top = _marked_above(run)
    if top is not None:
        raise ForeignRunError(
            f"{str(run)!r} came with {str(top)!r} from elsewhere: it is not executed",
            "fetch that run by itself, by slurmft pull with its name",
        )


def withdraw(run: Path) -> None:
    """Takes back the agreement to a run from elsewhere: it was not executed."""
    origin = origin_of(run)
    if origin is not None:
        mark(run, dataclasses.replace(origin, accepted=[]))


def mark(run: Path, origin: Origin) -> None:
    """Marks a run that comes from elsewhere; of one that was accepted before, that is over."""
    write_json(run / NAME, origin)


def executed(config: RunConfig) -> dict[str, list[str]]:
    """Returns what a run executes that its configuration chooses, and where it sends data: name ->
    lines to show.

    Raises:
        ForeignRunError: its ranks would run a module that is of none of slurmft's programs.
    """
    program = config.program
    lines = {"program": _program_lines(program)}
    values = config.job.values()
    lines |= _lines_of(options(JobConfig), values)
    # Of every program, not of its kind alone: what is in the file is shown, whoever would heed it.
    for declared in plugins.load_all(plugins.OPTIONS):
        lines |= _lines_of(options(declared), program.settings)
    return lines


def _program_lines(program: Program) -> list[str]:
    # The ranks run `python -m MODULE`: another name executes whatever can be imported under it.
    if program.module != RANK_MODULES.get(program.kind):
        raise ForeignRunError(
            f"refused: a run from elsewhere that executes the module {program.module!r} as a "
            f"program of the kind {program.kind!r}, which slurmft does not",
            "submit a run of your own: slurmft run, or slurmft submit",
        )
    # Only a user's own program heeds the command, folder and code of its settings.
    if program.kind != OWN:
        lines = [f"python -m {program.module}"]
        if program.code:
            lines.append(f"with the code in {program.code!r}")
        return lines
    settings = program.settings
    words = settings.get("argv")
    command = repr(words)
    if isinstance(words, (list, tuple)):
        command = shlex.join(map(str, words))
    # A newline in a word would look like another line of the list.
    if not command.isprintable():
        command = repr(words)
    lines = [command]
    for what, name in (("in the folder", "folder"), ("with the code in", "code")):
        if settings.get(name):
            lines.append(f"{what} {settings[name]!r}")
    return lines


def _lines_of(
    declared: dict[str, Option], values: dict[str, Any]
) -> dict[str, list[str]]:
    lines = {}
    for name, each in declared.items():
        value = values.get(name)
        if not (each.executes or each.sends) or not each.is_set(value):
            continue
        parts = [value]
        if isinstance(value, (list, tuple)):
            parts = list(value)
        # By repr: words of a program may hold anything.
        texts = [f"{each.flag} {part!r}" for part in parts]
        if texts:
            lines[each.flag.removeprefix("--")] = texts
    return lines


def accept(
    run: Path, lines: dict[str, list[str]], names: Iterable[str], records: bool = True
) -> None:
    """Records that a run from elsewhere may execute what its user has named.

    Args:
        records: False: the names are only checked, as for a dry run.

    Raises:
        UsageError: it executes more than that, or less.
    """
    named = set(names)
    # Exactly these: a list that was typed after an earlier look must not cover what has come since.
    if named != lines.keys():
        raise UsageError(
            f"--yes names {_listed(named)}, but the run executes {_listed(lines)}",
            f"look at each, then: --yes {','.join(lines)}",
        )
    if not records:
        return
    origin = origin_of(run) or Origin()
    mark(run, dataclasses.replace(origin, accepted=sorted(named)))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
