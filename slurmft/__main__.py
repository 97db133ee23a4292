"""`slurmft COMMAND ...`, also as `python -m slurmft COMMAND ...`."""

import sys

import slurmft
from slurmft.cli import load_command, usage
from slurmft.core import interruption, plugins, terminal
from slurmft.core.errors import Exit, run_main


def main(argv: list[str]) -> int:
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


def console(argv: list[str] | None = None) -> int:
    """The console script `slurmft`."""
    words = sys.argv[1:] if argv is None else argv
    terminal.protect()
    with interruption.as_exceptions():
        return run_main(lambda: main(words), debug="--debug" in words)


if __name__ == "__main__":
    raise SystemExit(console())
