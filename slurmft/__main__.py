"""`slurmft COMMAND ...`, also as `python -m slurmft COMMAND ...`."""

import itertools
import os
import sys

import slurmft
from slurmft.cli import load_command, usage
from slurmft.core import interruption, plugins, terminal
from slurmft.core.errors import Exit, UsageError, run_main


def main(argv: list[str]) -> int:
    _check_working_folder()
    if any(word == "--on" or word.startswith("--on=") for word in argv):
        forward = plugins.get(plugins.GLOBAL_FLAGS, "on", "flag").load()
        if (code := forward(argv)) is not None:
            return int(code)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return Exit.OK if argv else Exit.USAGE
    if argv[0] == "help":
        return main([*argv[1:], "--help"])
    if argv[0] == "--version":
        print(f"slurmft {slurmft.__version__}")
        return Exit.OK
    return int(load_command(argv[0]).main(argv[1:]))


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
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            mode = "w"
            if name == "stdin":
                mode = "r"
            stream = os.fdopen(descriptor, mode, closefd=False)
            setattr(sys, name, stream)


def console(argv: list[str] | None = None) -> int:
    """The console script `slurmft`."""
    words = sys.argv[1:] if argv is None else argv
    _open_closed_streams()
    terminal.protect()
    with interruption.as_exceptions():
        # Behind "--" stand the flags of a program.
        own_words = list(itertools.takewhile(lambda word: word != "--", words))
        return run_main(
            lambda: main(words),
            debug="--debug" in own_words,
            as_json="--json" in own_words,
        )


if __name__ == "__main__":
    raise SystemExit(console())
