"""The site file: what a site always needs, written once, in TOML; its keys are the flags."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from slurmft.config import JobConfig, TrainConfig, is_repeatable, options, value_type
from slurmft.errors import UsageError, unknown

WORDS: dict[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def site_file() -> Path:
    """The site's defaults: $SLURMFT_SITE, or ~/.config/slurmft/site.toml."""
    return Path(os.environ.get("SLURMFT_SITE") or "~/.config/slurmft/site.toml").expanduser()


def site_defaults() -> dict[str, Any]:
    """The values of the site file; empty without one.

    Raises:
        UsageError: $SLURMFT_SITE names no file, or the file is no TOML, has an unknown key, or a
            value of another type than its field's.
    """
    path = site_file()
    if not path.is_file():
        if os.environ.get("SLURMFT_SITE"):
            raise UsageError(f"$SLURMFT_SITE names no file: {path}", "unset it, or write that file")
        return {}
    import tomllib  # 4 ms: only a site with a file pays for it

    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"cannot read the site file {path}: {error}") from None
    return typed_values(path, values)


def known_options() -> dict[str, dataclasses.Field[Any]]:
    """Name -> field of all options of a run."""
    return options(TrainConfig) | options(JobConfig)


def typed_values(where: str | Path, values: dict[str, Any]) -> dict[str, Any]:
    """Values from a TOML file, under the names of flags, as their fields have them.

    Raises:
        UsageError: an unknown name, or a value of another type than its field's.
    """
    known = known_options()
    for name in values:
        if name not in known:
            raise in_file(where, unknown("key", name, list(known)))
    return {name: _typed(where, known[name], value) for name, value in values.items()}


def _typed(where: str | Path, option: dataclasses.Field[Any], value: Any) -> Any:
    kind = value_type(option)
    if is_repeatable(option):
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            return tuple(value)
        raise UsageError(f"{where}: {option.name} must be a list of strings, not {value!r}")
    if kind is float and type(value) is int:
        return float(value)
    if kind is str and option.name == "time" and type(value) is int:
        return str(value)  # time = 60: minutes, as Slurm reads it
    if type(value) is not kind:
        raise UsageError(f"{where}: {option.name} must be {WORDS[kind]}, not {value!r}")
    return value


def in_file(where: str | Path, error: UsageError) -> UsageError:
    """An error that says in which file it is."""
    return UsageError(f"{where}: {error.message}", error.hint)
