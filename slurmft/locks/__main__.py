"""`python -m slurmft.locks run -- script.py`: a script with file locks that hold between nodes."""

import os
import sys

from slurmft.core import interpreter
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
    if not argv:
        print(_USAGE, end="")
        return Exit.USAGE
    if argv[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return Exit.OK
    if "--" not in argv:
        raise UsageError("no -- before the script", _EXAMPLE)
    end = argv.index("--")
    if argv[0] != "run":
        raise unknown("command", argv[0], ["run"])
    primitive = _primitive(argv[1:end])
    command = argv[end + 1 :]
    _check_command(command)
    install(primitive)  # here its errors are shown as ours
    python = [interpreter.PYTHON]
    # This Python was started with -u: the script is to have it, too.
    if getattr(sys.stdout, "write_through", False):
        python.append("-u")
    variables = os.environ | environment(primitive, dict(os.environ))
    os.execve(interpreter.PYTHON, [*python, *command], variables)


def _primitive(options: list[str]) -> str:
    if not options:
        return "auto"
    if options[0] != "--primitive":
        raise unknown("flag", options[0], ["--primitive"])
    if len(options) != 2:
        names = ", ".join(["auto", *LOCK_PRIMITIVES])
        raise UsageError("--primitive takes one value", names)
    return options[1]


def _check_command(command: list[str]) -> None:
    if not command or command == ["-m"]:
        raise UsageError("no script to run", _EXAMPLE)
    if command[0] != "-m" and not os.path.exists(command[0]):
        raise UsageError(f"no such script: {command[0]!r}")


if __name__ == "__main__":
    raise SystemExit(run_main(lambda: main(sys.argv[1:])))
