"""`python -m slurmft.locks run -- script.py`: a script with file locks that hold between nodes."""

from __future__ import annotations

import os
import sys

from slurmft.core.errors import Exit, UsageError, run_main, unknown
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


_EXAMPLE = "python -m slurmft.locks run -- SCRIPT"


def main(argv: list[str]) -> int:
    """`python -m slurmft.locks`."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return Exit.OK if argv else Exit.USAGE
    if "--" not in argv:
        raise UsageError("no -- before the script", _EXAMPLE)
    at = argv.index("--")
    (subject, *options), command = argv[:at] or ["--"], argv[at + 1 :]
    if subject != "run":
        raise unknown("command", subject, ["run"])
    if options and options[0] != "--primitive":
        raise unknown("flag", options[0], ["--primitive"])
    if len(options) not in (0, 2):
        raise UsageError("--primitive takes one value", f"auto, {', '.join(LOCK_PRIMITIVES)}")
    if not command or command == ["-m"]:
        raise UsageError("no script to run", _EXAMPLE)
    primitive = options[1] if options else "auto"
    install(primitive)
    os.environ.update(environment(primitive, dict(os.environ)))
    _run(command)
    return Exit.OK


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
    raise SystemExit(run_main(lambda: main(sys.argv[1:])))
