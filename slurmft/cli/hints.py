"""Command lines in what is shown, as this user types them."""

import os
import shlex
import sys
from collections.abc import Sequence
from os import PathLike

from slurmft.core import plugins


def next_commands(
    run_dir: PathLike[str],
    which: Sequence[str] = ("follow", "watch", "logs", "cancel"),
) -> str:
    """Returns the commands that a user types next, with this run's path in them; by default, those
    that work while its job waits or runs."""
    lines = []
    path = pasted(run_dir)
    for name in which:
        entry = plugins.find(plugins.COMMANDS, name)
        # slurmft works without the commands of its plug-ins, such as `report`.
        if entry is not None:
            lines.append((command(name, path), entry.summary()))
    return next_lines(lines)


def next_lines(commands: Sequence[tuple[str, str]]) -> str:
    """Returns commands and what they do, a line each; the commands alone where the terminal has no
    room for more."""
    from slurmft.core.text import screen_width  # not above: --help need not wait for it

    # A shell takes what follows # for a comment: a whole line can be pasted.
    width = max((len(line) for line, _ in commands), default=0)
    lines = [f"  {line:<{width}}  # {purpose}" for line, purpose in commands]
    if any(len(line) > screen_width() for line in lines):
        lines = [f"  {line}" for line, _ in commands]
    return "\n".join(["Next:", *lines])


def command(*words: str) -> str:
    """Returns a command line as this user types it."""
    return shlex.join([*typed(), *words])


def on_cluster(hint: str) -> str:
    """Returns a hint of a command; of one that came from a laptop, by --on, the commands in it can
    be typed there."""
    import re  # not above: --help need not wait for these

    from slurmft.runs.request import ON

    cluster = os.environ.get(ON)
    if not cluster:
        return hint
    names = "|".join(re.escape(name) for name in plugins.entries(plugins.COMMANDS))
    return re.sub(
        rf"\bslurmft (?=(?:{names})\b)",
        # No template, whose backslashes would mean something.
        lambda _: shlex.join(["slurmft", "--on", cluster]) + " ",
        hint,
    )


def typed() -> list[str]:
    """Returns how the user calls slurmft: `slurmft`, or by a path; or by a Python, with -m; or from
    elsewhere, with --on."""
    import shutil  # not above: --help need not wait for these

    from slurmft.runs.request import ON

    cluster = os.environ.get(ON)
    if cluster:
        return ["slurmft", "--on", cluster]
    script = sys.argv[0]
    if os.path.basename(script) == "slurmft":
        on_path = shutil.which("slurmft")
        real_script = os.path.realpath(script)
        # Another environment's slurmft may come first on the PATH: then only the path is right.
        if on_path is not None and os.path.realpath(on_path) == real_script:
            return ["slurmft"]
        return [script]
    # sys.argv has the module's file in the place of -m; only orig_argv has what was typed.
    original = sys.orig_argv
    if "-m" in original:
        # Kept as it was typed: the path of the Python, and its flags.
        end = original.index("-m") + 1
        return [*original[:end], "slurmft"]
    return ["slurmft"]


def pasted(path: PathLike[str]) -> str:
    """Returns a path as one types it in this folder: a short one, if it lies below."""
    text = os.fspath(path)
    try:
        below = os.path.relpath(text)
    except OSError:  # this folder is gone
        return text
    # "../x" is not below; a shell or a parser would take "-x" and "~x" for something else.
    if below.startswith((".", "-", "~")):
        return text
    return below
