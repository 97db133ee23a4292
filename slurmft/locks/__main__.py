"""`python -m slurmft.locks run -- script.py`: a script with file locks that hold between nodes."""

from __future__ import annotations

import os
import sys

from slurmft.core.errors import UsageError, run_main, unknown
from slurmft.core.filesystem import LOCK_PRIMITIVES
from slurmft.locks import environment, install

_USAGE = """\
usage: python -m slurmft.locks run [--primitive NAME] -- SCRIPT [ARGUMENT ...]
       python -m slurmft.locks run [--primitive NAME] -- -m MODULE [ARGUMENT ...]

Runs a Python script, and the Pythons that it starts, with file locks that hold between nodes.
NAME: auto (default), flock, lockf, ofd or soft. Which one holds where: slurmft doctor locks DIR

  python -m slurmft.locks run -- train.py --epochs 3
  torchrun --nproc-per-node 4 -m slurmft.locks run -- train.py
"""


def main(argv: list[str]) -> int:
    """`python -m slurmft.locks`."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0 if argv else 2
    options, command = _split(argv)
    if options[:1] != ["run"]:
        raise unknown("command", options[0] if options else "--", ["run"])
    primitive = "auto"
    if options[1:]:
        if options[1] != "--primitive":
            raise unknown("flag", options[1], ["--primitive"])
        if len(options) != 3:
            raise UsageError(
                "--primitive takes one value", f"one of auto, {', '.join(LOCK_PRIMITIVES)}"
            )
        primitive = options[2]
    if not command or command == ["-m"]:
        raise UsageError("no script to run", "python -m slurmft.locks run -- SCRIPT")
    install(primitive)
    os.environ.update(environment(primitive, dict(os.environ)))
    _run(command)
    return 0


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What comes before `--`, and after it."""
    if "--" not in argv:
        raise UsageError("no -- before the script", "python -m slurmft.locks run -- SCRIPT")
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _run(command: list[str]) -> None:
    """Runs a script or a module as `python` itself would."""
    import runpy

    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    if not os.path.exists(command[0]):
        raise UsageError(f"no such script: {command[0]!r}")
    sys.argv = command
    sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    # Not this copy of the module, which is __main__, but the one that children and tests see.

    raise SystemExit(run_main(lambda: main(sys.argv[1:])))
