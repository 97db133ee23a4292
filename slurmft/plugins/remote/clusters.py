"""The clusters that a laptop knows, by name: host, folder, how slurmft starts there; in TOML."""

import os
import re
import shlex
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from slurmft.core.decode import matches
from slurmft.core.errors import UsageError, unknown
from slurmft.core.files import parse_toml, read_text
from slurmft.core.site import in_file

_PYTHON = 'python = "~/slurmft-venv/bin/python"'
# Keys that are no text -> their type, and words for it.
_KINDS: dict[str, tuple[Any, str]] = {
    "setup": (list[str], "a list of strings"),
    "site": (dict[str, Any], "a table"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A cluster that commands run on by ssh."""

    name: str
    host: str = ""
    """As OpenSSH knows it, with user, keys and jump hosts from ~/.ssh/config; default: its name."""
    folder: str = "slurmft"
    """Where projects and runs are there; from the home folder, if it is relative."""
    python: str = ""
    """The Python there that has slurmft."""
    uv: str = ""
    """Or the uv project there whose environment has it."""
    setup: list[str] = field(default_factory=list)
    """Shell lines that run before each command there."""
    site: dict[str, Any] = field(default_factory=dict)
    """Site options; they take precedence over the site file there."""
    ssh: str = "ssh"
    """The command."""

    @property
    def start(self) -> str:
        """The words of a shell that start slurmft there."""
        # -P: the folder in which a command runs is none that Python imports from. There, others may
        # be able to write it.
        if self.uv:
            return f"uv run --project {word(self.uv)} python -P -m slurmft"
        return f"{word(self.python)} -P -m slurmft"


def word(path: str) -> str:
    """Returns a path as a word of a shell, which expands the home folder alone."""
    # Quoted, "~" would be a folder of that name.
    if path.startswith("~/"):
        return '"$HOME"/' + shlex.quote(path[2:])
    return shlex.quote(path)


def clusters_file() -> Path:
    """Returns the file of clusters: $SLURMFT_CLUSTERS, or ~/.config/slurmft/clusters.toml."""
    path = os.environ.get("SLURMFT_CLUSTERS") or "~/.config/slurmft/clusters.toml"
    return Path(path).expanduser()


def named(names: str) -> list[Cluster]:
    """Returns the clusters of a list with commas; "all" stands for those of the file.

    Raises:
        UsageError: the file cannot be read, lacks one of them, or has a value that cannot be right.
    """
    tables = _read(clusters_file(), names)
    if names == "all":
        chosen = list(tables)
    else:
        chosen = [name for name in names.split(",") if name]
    # All, before any is connected to: a mistake in the last name costs nothing.
    for name in chosen:
        if name not in tables:
            raise in_file(clusters_file(), unknown("cluster", name, list(tables)))
    if not chosen:
        all_names = ", ".join(tables)
        raise UsageError(f"--on {names!r} names no cluster", f"known: {all_names}")
    without_repeats = dict.fromkeys(chosen)
    return [_cluster(name, tables[name]) for name in without_repeats]


def _read(path: Path, names: str) -> dict[str, Any]:
    """Returns the tables of the file; where there is none, the error has the line that makes one
    with the cluster that was named."""
    try:
        return parse_toml(read_text(path))
    except FileNotFoundError:
        folder = shlex.quote(str(path.parent))
        file = shlex.quote(str(path))
        name, _, _ = names.partition(",")
        if name == "all" or not re.fullmatch(r"[\w-]+", name, re.ASCII):
            name = "juwels"
        # The line breaks are printf's.
        table = rf'[{name}]\nhost = "{name}"\n{_PYTHON}\n'
        raise UsageError(
            f"--on needs a file that names clusters: {path}",
            f"mkdir -p {folder}; printf '{table}' > {file}",
        ) from None
    except (ValueError, OSError) as error:
        raise UsageError(f"cannot read the clusters' file {path}: {error}") from None


def _cluster(name: str, values: Any) -> Cluster:
    """Makes a cluster of its table in the file; UsageError where a value cannot be right."""
    where = f"{clusters_file()}: [{name}]"
    keys = [each.name for each in fields(Cluster)]
    keys.remove("name")  # it is that of the table
    if not isinstance(values, dict):
        problem = f"{where} must be a table, not {values!r}"
        raise UsageError(problem, f"such as {{ {_PYTHON} }}")
    for key, value in values.items():
        if key not in keys:
            raise in_file(where, unknown("key", key, keys))
        shape, kind = _KINDS.get(key, (str, "a text"))
        if not matches(value, shape):
            wrong_type = UsageError(f"{key} must be {kind}, not {value!r}")
            raise in_file(where, wrong_type)
    defaults: dict[str, Any] = {"name": name, "host": name}
    cluster = Cluster(**defaults | values)
    if bool(cluster.python) == bool(cluster.uv):
        raise UsageError(
            f"{where} needs one of python and uv: what starts slurmft there",
            f"such as {_PYTHON}",
        )
    # ssh would take such a host as an option, and could be made to run a command by it.
    if cluster.host.startswith("-") or not cluster.folder:
        values_of_both = f"host {cluster.host!r}, folder {cluster.folder!r}"
        raise UsageError(f"{where}: {values_of_both} cannot be right")
    return cluster
