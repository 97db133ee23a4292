"""One of Slurm's commands, or a process of the fake Slurm: `main` with its name and arguments."""

from __future__ import annotations

import importlib
import sys
from typing import NoReturn

from tests.support.fake_slurm.jobs import RefusedError

COMMANDS = {
    "sbatch": "submission:sbatch",
    "srun": "step:srun",
    "squeue": "queries:squeue",
    "sacct": "queries:sacct",
    "sinfo": "queries:sinfo",
    "sacctmgr": "queries:sacctmgr",
    "scontrol": "control:scontrol",
    "scancel": "control:scancel",
    "runner": "runner:run",
    "timer": "runner:wake",
}
"""Name -> module of this folder and its function: each command imports only what it needs."""


def main() -> NoReturn:
    """Runs the command of this process's arguments, and ends the process."""
    name, *arguments = sys.argv[1:]
    module, _, function = COMMANDS[name].partition(":")
    run = getattr(
        importlib.import_module(f"tests.support.fake_slurm.{module}"), function
    )
    try:
        code = run(*arguments)
    except RefusedError as refusal:
        print(refusal.text, file=sys.stderr)
        code = refusal.code
    sys.exit(code)
