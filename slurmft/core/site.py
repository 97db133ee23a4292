"""The site file: defaults of a site in TOML; its keys are the names of the flags."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmft.core import plugins
from slurmft.core.config import JobConfig
from slurmft.core.errors import UsageError, unknown
from slurmft.core.files import read_text
from slurmft.core.options import Option, extensions, options, own_options

OPTIONS_OF_ON = "SLURMFT_SITE_OPTIONS"
"""Variable with site options, in JSON, of a command that came from elsewhere by `--on`."""


def all_options() -> dict[str, Option]:
    """Returns name -> option of a job and of every program that is installed.

    These are the keys that the site file may have.
    """
    declared = options(JobConfig)
    for program in plugins.load_all(plugins.OPTIONS):
        declared |= options(program)
    return declared


def site_file() -> Path:
    """Returns the path of the site file: $SLURMFT_SITE, or ~/.config/slurmft/site.toml."""
    path = os.environ.get("SLURMFT_SITE") or "~/.config/slurmft/site.toml"
    return Path(path).expanduser()


def site_defaults(known: Mapping[str, Option]) -> dict[str, Any]:
    """Returns the values of the site file, and of a command's --on; empty without either. What the
    file has for other programs is left out.

    Raises:
        UsageError: the file cannot be read, has an unknown key, or a value of another type than
            its field's.
    """
    of_file = read_site_file()
    of_on = _options_of_on()
    usable = extensions(JobConfig)
    installed = plugins.entries(plugins.JOB_OPTIONS)
    # One of them could not be used, as a warning has said. A key that nobody knows may be its own:
    # a job does not fail for it.
    if len(usable) < len(installed):
        of_file = {name: value for name, value in of_file.items() if name in known}
        of_on = {name: value for name, value in of_on.items() if name in known}
    # To load the options of all programs takes time: only who has others pays for it.
    if (of_file | of_on).keys() - known.keys():
        others = all_options().keys() - known.keys()
        of_file = {name: value for name, value in of_file.items() if name not in others}
        of_on = {name: value for name, value in of_on.items() if name not in others}
    defaults = typed_values(site_file(), of_file, known)
    return defaults | typed_values("site options of --on", of_on, known)


def job_default(name: str) -> Any:
    """Returns the value that the site file has for an option of the job, else its default. The
    option is one of the kernel's: no plug-in is imported for it."""
    kernel_options = own_options(JobConfig)
    values = read_site_file() | _options_of_on()
    if name not in values:
        return kernel_options[name].default
    # This value alone: a mistake in another line is for the command that uses that.
    typed = typed_values(site_file(), {name: values[name]}, kernel_options)
    return typed[name]


def _options_of_on() -> dict[str, Any]:
    """Returns the site options that came with a command by --on; they take precedence."""
    text = os.environ.get(OPTIONS_OF_ON) or "{}"
    # No JSON, and JSON that is no object, get the same message below.
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise UsageError(
            f"${OPTIONS_OF_ON} is no JSON object: {text[:80]!r}", "unset it"
        )
    return values


def read_site_file() -> dict[str, Any]:
    """Reads the site file, without a check of its keys; empty without one.

    Raises:
        UsageError: $SLURMFT_SITE names no file, or the file is no TOML.
    """
    path = site_file()
    if not path.is_file():
        # A file that was named must be there; at the usual place it need not.
        if os.environ.get("SLURMFT_SITE"):
            raise UsageError(
                f"$SLURMFT_SITE names no file: {path}", "unset it, or write that file"
            )
        return {}
    import tomllib  # 4 ms: only a site with a file pays for it

    try:
        return tomllib.loads(read_text(path))
    # tomllib reads text alone: bytes that are no UTF-8 fail before it sees them.
    # tomllib calls itself for every bracket: thousands of them are too many.
    except (ValueError, RecursionError, OSError) as error:
        raise UsageError(f"cannot read the site file {path}: {error}") from None


def merge(site: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of flags over those of the site file.

    A repeatable flag adds to the list of the site file: the site always needs what is in it.
    """
    merged = site | flags
    for name, value in flags.items():
        if isinstance(value, tuple) and name in site:
            merged[name] = site[name] + value
    return merged


def typed_values(
    where: str | Path, values: dict[str, Any], known: Mapping[str, Option]
) -> dict[str, Any]:
    """Converts values of a TOML file to the types of their options.

    Args:
        where: what holds the values, for messages.
        values: name of the option -> value.
        known: name -> option that may be there.

    Raises:
        UsageError: an unknown name, or a value of another type.
    """
    typed = {}
    for name, value in values.items():
        # TOML has numbers: time = 60 are minutes, as on Slurm's command line.
        if name == "time" and type(value) is int:
            value = str(value)
        try:
            if name not in known:
                raise unknown("key", name, list(known))
            typed[name] = known[name].checked(value)
        except UsageError as error:
            raise in_file(where, error) from None
    return typed


def in_file(where: str | Path, error: UsageError) -> UsageError:
    """Returns an error that names its file."""
    return UsageError(f"{where}: {error.message}", error.hint)
