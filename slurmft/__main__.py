"""`slurmft COMMAND ...`, also as `python -m slurmft COMMAND ...`."""

import contextlib
import itertools
import os
import sys
from pathlib import Path

import slurmft
from slurmft.cli.commands import load_command, usage
from slurmft.cli.hints import on_cluster
from slurmft.core import descent, interpreter, interruption, plugins, terminal
from slurmft.core.errors import Exit, SlurmftError, UsageError, run_main


def main(argv: list[str]) -> int:
    _check_proc()
    _check_working_folder()
    # Where others can rename, another folder may have its name before the command ends.
    with descent.staying():
        try:
            return _run(argv)
        finally:
            interpreter.forget_present_folder()


def _run(argv: list[str]) -> int:
    # Before the command is looked up: the cluster may have one that is not installed here.
    if any(word == "--on" or word.startswith("--on=") for word in argv):
        forward = plugins.get(plugins.GLOBAL_FLAGS, "on", "flag").load()
        if (code := forward(argv)) is not None:
            return int(code)
    if not argv or argv[0] in ("-h", "--help", "--help-all"):
        print(usage())
        return Exit.OK if argv else Exit.USAGE
    if argv[0] == "help":
        return _help(argv[1:])
    if argv[0] == "--version":
        print(f"slurmft {_version()}")
        return Exit.OK
    return int(load_command(*argv).main(argv[1:]))


def _help(words: list[str]) -> int:
    """Shows the help of a command, or a page of the documentation."""
    commands = plugins.entries(plugins.COMMANDS)
    if not words or words[0].startswith("-") or words[0] in commands:
        return main([*words, "--help"])
    from slurmft.cli import help_pages  # other commands need not wait for it

    help_pages.show(words[0])
    return Exit.OK


def _version() -> str:
    """Returns the version; of a checkout that was never installed, the commit."""
    if slurmft.__version__ != slurmft.UNKNOWN_VERSION:
        return str(slurmft.__version__)
    from slurmft.core import git  # an installed slurmft need not wait for it

    head = None
    # A repository that git refuses to read says nothing.
    with contextlib.suppress(SlurmftError):
        head = git.head(Path(slurmft.__file__).parent)
    if head is None:
        return f"{slurmft.__version__} (never installed)"
    changes = ""
    if head.dirty:
        changes = ", with changes"
    return f"{slurmft.__version__} (never installed; commit {head.commit[:9]}{changes})"


def _check_proc() -> None:
    if not os.path.isdir("/proc/self/fd"):
        raise UsageError(
            "/proc is not mounted here: slurmft opens files through it, as it has examined them",
            "mount it: mount -t proc proc /proc; or use another machine",
        )


def _check_working_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError(
            "the working folder has been removed", "change to another one: cd"
        ) from None


def _open_closed_streams() -> None:
    """Opens the standard streams that the caller has closed (`>&-`): files that are opened later
    would take their numbers, and get what is printed."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            # open takes the lowest number that is free, which is mostly this one.
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            mode = "w"
            if name == "stdin":
                mode = "r"
            stream = os.fdopen(descriptor, mode, closefd=False)
            setattr(sys, name, stream)


def _main_as_typed(words: list[str]) -> int:
    """Runs a command; what its errors advise can be typed where the command was."""
    try:
        return main(words)
    except SlurmftError as error:
        if error.hint is not None:
            error.hint = on_cluster(error.hint)
        raise


def console(argv: list[str] | None = None) -> int:
    """The console script `slurmft`."""
    words = sys.argv[1:] if argv is None else argv
    _open_closed_streams()
    # Before anything is printed: records and logs may hold commands to the terminal.
    terminal.protect()
    # Behind "--" stand the flags of a program.
    own_words = list(itertools.takewhile(lambda word: word != "--", words))
    try:
        with interruption.as_exceptions():
            return run_main(
                lambda: _main_as_typed(words),
                debug="--debug" in own_words,
                as_json="--json" in own_words,
            )
    # Between the command and its caller: Python would end this process by the signal.
    except KeyboardInterrupt as interrupt:
        return interruption.exit_code(interrupt)


if __name__ == "__main__":
    raise SystemExit(console())
