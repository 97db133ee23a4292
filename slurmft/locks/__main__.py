"""`python -m slurmft.locks run -- script.py`: a script with file locks that hold between nodes."""

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
    if command[0] != "-m" and not os.path.exists(command[0]):
        raise UsageError(f"no such script: {command[0]!r}")
    primitive = options[1] if options else "auto"
    install(primitive)  # raises its errors here
    unbuffered = ["-u"] if getattr(sys.stdout, "write_through", False) else []
    variables = os.environ | environment(primitive, dict(os.environ))
    os.execve(sys.executable, [sys.executable, *unbuffered, *command], variables)


if __name__ == "__main__":
    raise SystemExit(run_main(lambda: main(sys.argv[1:])))
