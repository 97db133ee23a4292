"""The site file: what a site always needs, written once, in TOML; its keys are the flags."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmft.core import plugins
from slurmft.core.config import JobConfig
from slurmft.core.errors import UsageError, unknown
from slurmft.core.options import Option, options

OPTIONS_OF_ON = "SLURMFT_SITE_OPTIONS"
"""Variable with site options, in JSON, of a command that came from elsewhere by `--on`."""


def all_options() -> dict[str, Option]:
    """Returns the options of a job and of every program that is installed, by their names: what the
    site file may have."""
    found = dict(options(JobConfig))
    for entry in plugins.entries(plugins.OPTIONS).values():
        found |= options(entry.load())
    return found


def site_file() -> Path:
    """The site's defaults: $SLURMFT_SITE, or ~/.config/slurmft/site.toml."""
    return Path(os.environ.get("SLURMFT_SITE") or "~/.config/slurmft/site.toml").expanduser()


def site_defaults(known: Mapping[str, Option]) -> dict[str, Any]:
    """The values of the site file for the options that it may have; empty without one.

    Raises:
        UsageError: the file cannot be read, has an unknown key, or a value of another type than
            its field's.
    """
    return typed_values(site_file(), read_site_file(), known) | typed_values(
        "site options of --on", _options_of_on(), known
    )


def job_default(name: str) -> Any:
    """The value that the site file has for an option of the job, else its default."""
    known, values = options(JobConfig), read_site_file() | _options_of_on()
    given = {k: v for k, v in values.items() if k == name}
    return typed_values(site_file(), given, known).get(name, known[name].default)


def _options_of_on() -> dict[str, Any]:
    """Site options that came with a command from elsewhere; they take precedence."""
    found: dict[str, Any] = json.loads(os.environ.get(OPTIONS_OF_ON) or "{}")
    return found


def read_site_file() -> dict[str, Any]:
    """The site file as it is; empty without one. UsageError where $SLURMFT_SITE names no file, or
    the file is no TOML."""
    path = site_file()
    if not path.is_file():
        if os.environ.get("SLURMFT_SITE"):
            raise UsageError(f"$SLURMFT_SITE names no file: {path}", "unset it, or write that file")
        return {}
    import tomllib  # 4 ms: only a site with a file pays for it

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"cannot read the site file {path}: {error}") from None


def merge(site: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Flags over the site file; repeatable ones add to its list: a site always needs those."""
    both = {k: site[k] + v for k, v in flags.items() if isinstance(v, tuple) and k in site}
    return site | flags | both


def typed_values(
    where: str | Path, values: dict[str, Any], known: Mapping[str, Option]
) -> dict[str, Any]:
    """Values from a TOML file, under the names of flags, as their fields have them; UsageError for
    an unknown name, or a value of another type."""
    found = {}
    for name, value in values.items():
        is_minutes = name == "time" and type(value) is int  # time = 60, as Slurm reads it
        try:
            if name not in known:
                raise unknown("key", name, list(known))
            found[name] = known[name].checked(str(value) if is_minutes else value)
        except UsageError as error:
            raise in_file(where, error) from None
    return found


def in_file(where: str | Path, error: UsageError) -> UsageError:
    """An error that says in which file it is."""
    return UsageError(f"{where}: {error.message}", error.hint)
