"""`slurmft COMMAND ...`, also as `python -m slurmft COMMAND ...`."""

from __future__ import annotations

import importlib
import sys

import slurmft
from slurmft.cli import COMMANDS, usage
from slurmft.core.errors import Exit, run_main, unknown


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return Exit.OK if argv else Exit.USAGE
    if argv[0] == "--version":
        print(f"slurmft {slurmft.__version__}")
        return Exit.OK
    if argv[0] not in COMMANDS:
        raise unknown("command", argv[0], list(COMMANDS))
    return int(importlib.import_module(f"slurmft.cli.{argv[0]}").main(argv[1:]))


def console() -> int:
    """The console script `slurmft`."""
    return run_main(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv)


if __name__ == "__main__":
    raise SystemExit(console())
