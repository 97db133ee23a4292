"""The site file: what a site always needs, written once, in TOML; its keys are the flags."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from slurmft.config import JobConfig, TrainConfig, is_repeatable, options, value_type
from slurmft.errors import UsageError, unknown


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
    known = options(TrainConfig) | options(JobConfig)
    for name, value in values.items():
        if name not in known:
            raise _in_file(path, unknown("key", name, list(known)))
        values[name] = _site_value(path, known[name], value)
    return values


def _site_value(path: Path, option: dataclasses.Field[Any], value: Any) -> Any:
    kind = value_type(option)
    if is_repeatable(option):
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            return tuple(value)
        raise UsageError(f"{path}: {option.name} must be a list of strings, not {value!r}")
    if kind is float and type(value) is int:
        return float(value)
    if kind is str and option.name == "time" and type(value) is int:
        return str(value)  # time = 60: minutes, as Slurm reads it
    if type(value) is not kind:
        raise UsageError(f"{path}: {option.name} must be a {kind.__name__}, not {value!r}")
    return value


def _in_file(path: Path, error: UsageError) -> UsageError:
    return UsageError(f"{path}: {error.message}", error.hint)
