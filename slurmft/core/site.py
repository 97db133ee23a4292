"""Site files: defaults of a site in TOML, whose keys are the names of the flags."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmft.core import plugins
from slurmft.core.config import JobConfig, overridden
from slurmft.core.errors import UsageError
from slurmft.core.files import parse_json, parse_toml, read_text
from slurmft.core.options import (
    Option,
    extensions,
    options,
    own_options,
    unknown_option,
)

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


_WHERE_ON = "site options of --on"
OF_CENTRE = Path("/etc/slurmft/site.toml")
"""The site file of the whole machine."""
NAMED_BY = "SLURMFT_SITE"
"""Variable with the path of a site file, as a module of the centre sets it."""
OF_USER = "~/.config/slurmft/site.toml"


def site_files() -> list[Path]:
    """Returns the site files that there are; each has precedence over those before it.

    Raises:
        UsageError: $SLURMFT_SITE names no file.
    """
    files = [OF_CENTRE]
    named = os.environ.get(NAMED_BY)
    if named:
        file = Path(named).expanduser()
        # A file that was named must be there; at the usual places it need not.
        if not file.is_file():
            raise UsageError(
                f"${NAMED_BY} names no file: {file}", "unset it, or write that file"
            )
        files.append(file)
    of_user = Path(OF_USER).expanduser()
    # The variable may name it, too.
    if of_user not in files:
        files.append(of_user)
    return [file for file in files if file.is_file()]


def site_defaults(known: Mapping[str, Option]) -> dict[str, Any]:
    """Returns the values of the site files, and of a command's --on; empty without any. What the
    files have for other programs is left out.

    Raises:
        UsageError: a file cannot be read, has an unknown key, or a value of another type than its
            field's.
    """
    layers = _layers()
    left_out = _of_other_programs(layers, known)
    defaults: dict[str, Any] = {}
    for where, values in layers:
        used = {name: value for name, value in values.items() if name not in left_out}
        typed = _site_values(where, used, known)
        # Those of --on are complete: whoever wrote them knew the cluster.
        if where == _WHERE_ON:
            defaults = overridden(defaults, typed)
        else:
            defaults = merge(defaults, typed)
    return defaults


def _layers() -> list[tuple[str | Path, dict[str, Any]]]:
    """Returns the values of each site file and of --on, with their origin; later ones have
    precedence."""
    layers: list[tuple[str | Path, dict[str, Any]]] = []
    for file in site_files():
        layers.append((file, read_site_file(file)))
    layers.append((_WHERE_ON, _options_of_on()))
    return layers


def _of_other_programs(
    layers: Sequence[tuple[str | Path, dict[str, Any]]], known: Mapping[str, Option]
) -> set[str]:
    """Returns the keys that are not for the options at hand, and no mistake."""
    others = {name for _, values in layers for name in values} - known.keys()
    # To load the options of all programs takes time: only who has others pays for it.
    if not others:
        return set()
    usable = extensions(JobConfig)
    installed = plugins.entries(plugins.JOB_OPTIONS)
    # One of them could not be used, as a warning has said. A key that nobody knows may be its own:
    # a job does not fail for it.
    if len(usable) < len(installed):
        return others
    return others & all_options().keys()


def origins(names: Iterable[str]) -> dict[Path, list[str]]:
    """Returns which of some options each site file sets; a file that sets none of them has an empty
    list."""
    chosen_names = set(names)
    keys = {}
    for file in site_files():
        keys[file] = [name for name in read_site_file(file) if name in chosen_names]
    return keys


def job_default(name: str) -> Any:
    """Returns the value that the site files have for an option of the job, else its default. The
    option is one of the kernel's: no plug-in is imported for it."""
    kernel_options = own_options(JobConfig)
    # This value alone: a mistake in another line is for the command that uses that.
    for where, values in reversed(_layers()):
        if name in values:
            return _site_values(where, {name: values[name]}, kernel_options)[name]
    return kernel_options[name].default


def _site_values(
    where: str | Path, values: dict[str, Any], known: Mapping[str, Option]
) -> dict[str, Any]:
    """Converts values of a site file to the types of their options; paths have variables of the
    environment replaced: a centre has one file for all its users, and a folder for each."""
    typed = typed_values(where, values, known)
    for name, value in typed.items():
        # Places on the nodes are theirs to know.
        if isinstance(value, str) and known[name].path in ("input", "output"):
            try:
                typed[name] = _with_variables(name, value)
            except UsageError as error:
                raise in_file(where, error) from None
    return typed


def _with_variables(name: str, path: str) -> str:
    """Returns a path with the values of `$NAME` and `${NAME}`.

    Raises:
        UsageError: a variable is not set, or empty: another folder would be meant.
    """

    def value_of(match: re.Match[str]) -> str:
        variable = match[1] or match[2]
        value = os.environ.get(variable)
        if not value:
            raise UsageError(
                f"{name} = {path!r}, and ${variable} is not set",
                f"export {variable}, or write the path in full",
            )
        return value

    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", value_of, path)


def _options_of_on() -> dict[str, Any]:
    """Returns the site options that came with a command by --on; they take precedence."""
    text = os.environ.get(OPTIONS_OF_ON) or "{}"
    # No JSON, and JSON that is no object, get the same message below.
    try:
        values = parse_json(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise UsageError(
            f"${OPTIONS_OF_ON} is no JSON object: {text[:80]!r}", "unset it"
        )
    return values


def read_site_file(path: Path) -> dict[str, Any]:
    """Reads a site file, without a check of its keys.

    Raises:
        UsageError: it cannot be read, or is no TOML.
    """
    try:
        return parse_toml(read_text(path))
    except (ValueError, OSError) as error:
        raise UsageError(
            f"cannot read the site file {path}: {error}",
            "write it as TOML, a line for each option: nodes = 2",
        ) from None


def merge(site: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of flags, or of a site file, over those of the site files before them.

    A list adds to those before it: the site always needs what is in them.
    """
    merged = overridden(site, flags)
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
                raise unknown_option("key", name, known)
            typed[name] = known[name].checked(value)
        except UsageError as error:
            raise in_file(where, error) from None
    return typed


def in_file(where: str | Path, error: UsageError) -> UsageError:
    """Returns an error that names its file, and has a hint."""
    hint = error.hint or "correct it, or take it out"
    return UsageError(f"{where}: {error.message}", hint)
