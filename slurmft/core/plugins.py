"""Finds plug-ins: objects that installed packages declare as entry points, in groups.

    [project.entry-points."slurmft.commands"]
    hello = "my_package.hello"

slurmft declares its own in `slurmft/entry_points.txt`, which pyproject.toml names. They are looked
up first and cannot be replaced. Other packages are read only for a name that slurmft does not have,
or for a list. `importlib.metadata` reads the same files; its import takes longer than most
commands.
"""

import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from slurmft.core.errors import SlurmftError, UsageError, one_line, unknown

COMMANDS = "slurmft.commands"
"""Modules: `main(argv)` runs the command and returns its exit code; the docstring is the help."""
GLOBAL_FLAGS = "slurmft.global_flags"
"""Functions that carry out a whole command line with that flag in it: `--on`."""
HOOKS = "slurmft.hooks"
"""Subclasses of `slurmft.core.hooks.Hooks`: what is called on the way of a job."""
INTEGRATIONS = "slurmft.integrations"
"""Modules that run a Python program with the callback of a training library, for --integrate:
`python -m MODULE NAME (SCRIPT|-m MODULE) ...`."""
JOB_OPTIONS = "slurmft.job_options"
"""Dataclasses with options that a plug-in adds to every job: flags of all commands that submit one,
and keys of the site file. Their docstrings are the headings in --help."""
LAUNCHERS = "slurmft.launchers"
"""Modules or objects with the functions of `slurmft.cluster.launcher.Launcher`."""

OPTIONS = "slurmft.options"
"""Dataclasses with the options of a program: keys of the site file."""
PROGRAMS = "slurmft.programs"
"""Subclasses of `slurmft.core.program.ProgramKind`, by the kind that a run records."""
TASKS = "slurmft.tasks"
"""Subclasses of `slurmft.train.tasks.Task`: what --task names."""

OURS = "slurmft"
"""The package of the entries that come with slurmft."""

Groups = dict[str, dict[str, str]]
"""Group -> name -> "module" or "module:attribute"."""


class PluginError(SlurmftError):
    """A plug-in that cannot be imported, or not be used."""


class Entry(NamedTuple):
    """An entry point: a name in a group, and where the object is."""

    group: str
    name: str
    target: str
    """ "module" or "module:attribute"."""
    package: str
    """The distribution that declares it, such as "slurmft"."""

    @property
    def module(self) -> str:
        return self.target.partition(":")[0].strip()

    def load(self) -> Any:
        """Imports the object; PluginError where that fails, whatever the package raises."""
        attribute = self.target.partition(":")[2].strip()
        try:
            loaded = importlib.import_module(self.module)
            if not attribute:
                return loaded
            # "module:Class.method": an attribute may have parts.
            return functools.reduce(getattr, attribute.split("."), loaded)
        # It says already what to do.
        except SlurmftError:
            raise
        # A package may raise anything at its import, and even exit.
        except (Exception, SystemExit) as error:
            cure = "mend or remove it"
            if self.package == OURS:
                cure = "install slurmft again"
            raise PluginError(
                f"{self.name!r} of the package {self.package} cannot be imported: "
                f"{one_line(error)}",
                f"{cure}; --debug shows where it fails",
            ) from error

    def check(self, loaded: Any, kind: str, members: list[str]) -> None:
        """Raises PluginError where the object lacks what all objects of its group have."""
        missing = [name for name in members if not hasattr(loaded, name)]
        if missing:
            raise PluginError(
                f"{self.name!r} of the package {self.package} is no {kind}: {self.target} has no "
                f"{', '.join(missing)}",
                "mend or remove it",
            )

    def summary(self) -> str:
        """Returns the first sentence of the module's docstring, without importing the module; ""
        where it has none."""
        try:
            # This imports the packages above the module, and not the module.
            spec = importlib.util.find_spec(self.module)
            with open(spec.origin, encoding="utf-8") as file:  # type: ignore[union-attr, arg-type]
                # Enough for a sentence: `slurmft --help` does this for every command.
                head = file.read(1000)
        # Its parent package fails, or it is no file: `load` says so.
        except Exception:
            return ""
        # A sentence ends with a full stop, a paragraph or the docstring.
        docstring = re.match(r'\s*[rR]?"""(.+?)(\.\s|\n\n|\.?""")', head, re.DOTALL)
        if docstring is None:
            return ""
        first_sentence = docstring[1]
        return " ".join(first_sentence.split())


def find(group: str, name: str) -> Entry | None:
    """Returns the entry of that name: slurmft's, else that of another package; None without one.

    Raises:
        UsageError: two other packages have an entry of that name.
    """
    target = _ours().get(group, {}).get(name)
    if target:
        return Entry(group, name, target, OURS)
    others = [entry for entry in _others(group) if entry.name == name]
    # Entries with one target are one plug-in, whoever declares it.
    targets = {entry.target for entry in others}
    if len(targets) > 1:
        packages = " and ".join(sorted(entry.package for entry in others))
        raise UsageError(
            f"{name!r} is of two packages: {packages}", "pip uninstall one of them"
        )
    return next(iter(others), None)


def get(group: str, name: str, kind: str) -> Entry:
    """Returns the entry of that name; UsageError, with the nearest name, where there is none.
    `kind` is what it is, in the error."""
    entry = find(group, name)
    if entry is None:
        raise unknown(kind, name, list(entries(group)))
    return entry


def entries(group: str) -> dict[str, Entry]:
    """Returns all entries of a group by their names: slurmft's, then those of other packages."""
    by_name = {entry.name: entry for entry in _others(group)}
    # Ours come last: they take the place of others by the same name.
    for name, target in _ours().get(group, {}).items():
        by_name[name] = Entry(group, name, target, OURS)
    return by_name


@functools.cache
def load_all(group: str) -> tuple[Any, ...]:
    """Imports all plug-ins of a group. One that cannot be imported is left out, with a warning: a
    job at night does not fail for it."""
    loaded = []
    for entry in entries(group).values():
        try:
            loaded.append(entry.load())
        except PluginError as error:
            print(
                f"warning: {error.message}; it is left out", file=sys.stderr, flush=True
            )
    return tuple(loaded)


def is_ours(plugin: Any) -> bool:
    """Returns whether a class or function that was loaded is of slurmft itself."""
    module = getattr(plugin, "__module__", "")
    # With the dot: slurmft_x is a package of somebody else.
    return bool(module.startswith(f"{OURS}."))


def name_of(plugin: Any) -> str:
    """Returns module and name of what was loaded, for a message."""
    module = getattr(plugin, "__module__", "")
    name = getattr(plugin, "__name__", repr(plugin))
    return f"{module}.{name}".lstrip(".")


def ignored(group: str) -> list[Entry]:
    """Returns the entries of other packages that have the name of one of slurmft's."""
    ours = _ours().get(group, {})
    return [entry for entry in _others(group) if entry.name in ours]


@functools.cache
def _ours() -> Groups:
    """Reads slurmft's own entry points."""
    # Not from pip's metadata: a copy of the package alone, as in a container, has none.
    file = Path(__file__).parents[1] / "entry_points.txt"
    return _parse(file.read_text(encoding="utf-8"))


def _others(group: str) -> Iterator[Entry]:
    """Yields the entries of other packages."""
    for package, groups in _installed().items():
        for name, target in groups.get(group, {}).items():
            yield Entry(group, name, target, package)


@functools.cache
def _installed() -> dict[str, Groups]:
    """Reads the entry points of all packages on sys.path, as far as they are for slurmft."""
    packages: dict[str, Groups] = {}
    for folder in _installation_folders():
        for file in sorted(Path(folder).glob("*-info/entry_points.txt")):
            # The folder is NAME-VERSION.dist-info, with _ in place of the name's hyphens.
            name, _, _ = file.parent.name.partition("-")
            package = name.replace("_", "-")
            # Python imports the first on the path.
            if package == OURS or package in packages:
                continue
            try:
                text = file.read_text(encoding="utf-8")
            # What is wrong with any installed package must not end a command.
            except (OSError, UnicodeDecodeError):
                continue
            if f"[{OURS}." in text:
                packages[package] = _parse(text)
    return packages


def _installation_folders() -> Iterator[str]:
    """Yields the folders of sys.path, without the working directory: `python -m` puts it there, and
    what another account has written into it, as into /tmp, must not become commands or hooks."""
    for folder in sys.path:
        try:
            # By what they are, not by their names: "", "." and links lead to it as well.
            is_working_directory = os.path.samefile(folder or ".", ".")
        # Not all folders on sys.path exist: the zip of the standard library seldom does.
        except OSError:
            continue
        if not is_working_directory:
            yield folder


def _parse(text: str) -> Groups:
    """Reads an entry_points.txt, as far as it is for slurmft."""
    groups: Groups = {}
    group = ""
    for line in map(str.strip, text.splitlines()):
        is_comment = line.startswith(("#", ";"))
        if line.startswith("["):
            group = line.strip("[]")
        elif group.startswith(f"{OURS}.") and "=" in line and not is_comment:
            name, _, target = line.partition("=")
            # Extras, in brackets after the target, are long out of use.
            target = target.partition("[")[0].strip()
            groups.setdefault(group, {})[name.strip()] = target
    return groups
