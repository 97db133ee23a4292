"""Interpreter: how slurmft's own processes start Python, and what they import from.

`python -m` and `python -c` import from the present folder first. Others may write into that of a
submission: a `json.py` there would run as the user. So all commands of slurmft's own Python are
made here, without that folder; and a process that was started otherwise takes it off its path.

A program of the user's own imports as plain Python would have it, in its own process alone.
"""

# Nothing else: all other modules would still be looked for in the present folder.
import os
import sys

PYTHON = sys.executable
"""The Python of this process, and of all that slurmft starts."""
_VARIABLE = "PYTHONPATH"
# For Pythons that may be older than 3.11, which have no -P: -c has "" on its path.
_WITHOUT = "import sys; sys.path[:] = filter(None, sys.path)"
_RUN = f"{_WITHOUT}; import runpy; del sys.argv[0]"
_RUN_MODULE = (
    f"{_RUN}; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
_RUN_SCRIPT = f"{_RUN}; runpy.run_path(sys.argv[0], run_name='__main__')"


def module(
    name: str, *arguments: str, python: str | None = None, unbuffered: bool = False
) -> list[str]:
    """Returns the command that runs a module of slurmft, or of a library."""
    flags = ["-P"]
    if unbuffered:
        flags.append("-u")
    return [python or PYTHON, *flags, "-m", name, *arguments]


def code(text: str, *arguments: str) -> list[str]:
    """Returns the command that runs a text as a program."""
    return [PYTHON, "-P", "-c", text, *arguments]


def script(path: str, *arguments: str) -> list[str]:
    """Returns the command that runs a script of slurmft. The modules beside it are no top-level
    modules, of which one could hide a module of Python."""
    return [PYTHON, "-P", path, *arguments]


def foreign_code(python: str, text: str) -> list[str]:
    """Returns the command that runs a text by a Python of any version."""
    return [python, "-c", f"{_WITHOUT}\n{text}"]


def foreign_script(python: str, path: str, *arguments: str) -> list[str]:
    """Returns the command that runs a script of slurmft by a Python of any version, which imports
    nothing that lies beside the script."""
    return [python, "-c", _RUN_SCRIPT, path, *arguments]


def library_environment(variables: dict[str, str]) -> dict[str, str]:
    """Returns the variables for a process that is no module of slurmft, and so does not take the
    present folder off its path: those given, without the entries of PYTHONPATH that depend on
    it."""
    entries = variables.get(_VARIABLE, "").split(os.pathsep)
    environment = dict(variables)
    environment[_VARIABLE] = os.pathsep.join(filter(os.path.isabs, entries))
    # As Python has it, an empty value is none. Programs may see a difference.
    if not environment[_VARIABLE]:
        del environment[_VARIABLE]
    return environment


def environment_without_path(variables: dict[str, str]) -> dict[str, str]:
    """Returns the variables for a process that makes an environment: without PYTHONPATH, from which
    its Pythons, and what they build, would import."""
    environment = dict(variables)
    environment.pop(_VARIABLE, None)
    return environment


def with_path_of(variables: dict[str, str], command: list[str]) -> list[str]:
    """Returns a command so that it has PYTHONPATH as in these variables, where it is started by a
    process that has `library_environment`."""
    path = variables.get(_VARIABLE)
    if path == library_environment(variables).get(_VARIABLE):
        return command
    return ["env", f"{_VARIABLE}={path}", *command]


# --- programs of the user's own -------------------------------------------------------------------


def without_folder(argv: list[str]) -> list[str]:
    """Returns the command `python -m MODULE ...` so that it does not import from the folder that it
    runs in."""
    if knows_safe_path(argv[0]):
        return [argv[0], "-P", *argv[1:]]
    place = argv.index("-m")
    return [*argv[:place], "-c", _RUN_MODULE, *argv[place + 1 :]]


def with_folder(argv: list[str]) -> list[str]:
    """Returns the command of which `without_folder` was made; another command as it is."""
    if argv[1:2] == ["-P"]:
        return [argv[0], *argv[2:]]
    if _RUN_MODULE in argv:
        place = argv.index(_RUN_MODULE)
        return [*argv[: place - 1], "-m", *argv[place + 1 :]]
    return argv


def knows_safe_path(python: str) -> bool:
    """Returns whether a Python has the option -P: 3.11 or later."""
    if python == PYTHON:
        return True
    import subprocess

    # -I: it looks at no variables, and at no folder.
    command = [
        python,
        "-I",
        "-S",
        "-c",
        "import sys; sys.exit(sys.version_info < (3, 11))",
    ]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return True  # it is reported when the program starts


def import_as_plain(folder: str) -> None:
    """Lets this process import as one that plain Python has started for the user's program.

    Args:
        folder: that of its script, or the present one for -m.
    """
    sys.path[:] = _plain_path
    # As Python itself, with the option -P or its variable.
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


# --- this process ---------------------------------------------------------------------------------

_plain_path = list(sys.path)
"""The path of imports as Python has made it, without what -m has put first."""


def leave_out_present_folder() -> None:
    """Takes the present folder off the path of imports where this is a process of slurmft's own,
    before any module is looked for there.

    It is first where the user has typed `python -m slurmft`, and where PYTHONPATH has an empty
    entry: `export PYTHONPATH=/code:$PYTHONPATH` makes one.
    """
    if not _is_own():
        return
    try:
        present = os.getcwd()
    except OSError:  # it is gone, and nothing can be imported from there
        return
    if sys.argv[0] == "-m" and not sys.flags.safe_path and sys.path[:1] == [present]:
        del sys.path[0]
        _plain_path[:] = sys.path
    for folder in relative_folders():
        # Once: a file of the environment may name the folder, too.
        if folder in sys.path:
            sys.path.remove(folder)
    _keep_checkout(present)


def import_from(folder: str) -> None:
    """Lets this process import from the present folder, too.

    Args:
        folder: a path to it; through a descriptor, as another may have its name by now.
    """
    if folder not in sys.path:
        sys.path.insert(0, folder)
        _present.append(folder)


def forget_present_folder() -> None:
    """Ends `import_from`: the number of the descriptor will be another file's."""
    while _present:
        folder = _present.pop()
        if folder in sys.path:
            sys.path.remove(folder)
        sys.path_importer_cache.pop(folder, None)


_present: list[str] = []
"""Folders that were put on the path of imports."""


def relative_folders() -> set[str]:
    """Returns the folders of PYTHONPATH that depend on the present one."""
    value = os.environ.get(_VARIABLE)
    if not value or sys.flags.ignore_environment:
        return set()
    folders = set()
    for entry in value.split(os.pathsep):
        if not os.path.isabs(entry):
            # As Python's module `site` makes it.
            folders.add(os.path.abspath(entry))
    return folders.difference(value.split(os.pathsep))


def _is_own() -> bool:
    """Returns whether this process is a command of slurmft's, or was started by one.

    `python -m another.module`, which may import slurmft, is not.
    """
    # Absent in a program that embeds Python.
    words: list[str] = getattr(sys, "argv", [])
    match words[:1]:
        # Until Python has found the module.
        case ["-m"]:
            return _module().partition(".")[0] == "slurmft"
        case ["-c"]:
            return bool(sys.flags.safe_path)
        case [script]:
            return os.path.basename(script) == "slurmft"
    return False


def _module() -> str:
    """Returns the module of -m, also of -um and -mMODULE."""
    words = iter(sys.orig_argv[1:])
    for word in words:
        flags, m, name = word.partition("m")
        if m and flags.startswith("-") and not flags.startswith(("--", "-W", "-X")):
            return name or next(words, "")
    return ""


def _keep_checkout(present: str) -> None:
    """Lets this process and those that it starts find slurmft where it is not installed, but was
    found in the present folder."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.path.dirname(package) != present or present in sys.path:
        return
    sys.path.append(present)
    entries = [os.environ.get(_VARIABLE), present]
    os.environ[_VARIABLE] = os.pathsep.join(filter(None, entries))
