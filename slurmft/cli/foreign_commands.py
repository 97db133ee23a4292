"""Commands of other tools, and programs, in the place of a command."""

import os
import shlex
from collections.abc import Sequence

from slurmft.core.errors import UsageError

COMMANDS = {
    "train": "submit",
    "finetune": "submit",
    "fine-tune": "submit",
    "fit": "submit",
    "sbatch": "submit",
    "launch": "submit",
    "start": "submit",
    "srun": "run",
    "exec": "run",
    "torchrun": "run",
    "accelerate": "run",
    "python": "run",
    "bash": "run",
    "ls": "list",
    "ps": "list",
    "squeue": "list",
    "queue": "list",
    "sacct": "list",
    "runs": "list",
    "jobs": "list",
    "stop": "cancel",
    "kill": "cancel",
    "scancel": "cancel",
    "delete": "clean",
    "remove": "clean",
    "tail": "follow",
    "attach": "follow",
    "log": "logs",
    "cat": "logs",
    "show": "status",
    "info": "status",
    "top": "watch",
    "continue": "resume",
    "restart": "resume",
    "requeue": "resume",
    "infer": "predict",
    "inference": "predict",
    "generate": "predict",
    "evaluate": "predict",
    "eval": "predict",
    "test": "predict",
    "sync": "pull",
    "upload": "push",
    "check": "doctor",
    "sinfo": "doctor",
    "compare": "report",
    "plot": "report",
    "sweep": "study",
    "tune": "study",
    "hpo": "study",
    "grid": "study",
    "config": "help sites",
    "init": "help getting-started",
    "docs": "help pages",
    "version": "--version",
    "-V": "--version",
    "-v": "--version",
}
"""What people type as a command by habit -> our command. `slurmft download` is none: it may be
`fetch` or `pull`."""


def is_program(word: str) -> bool:
    """Returns whether a word that is no command or flag is a program: a script, or a file that can
    be executed here."""
    # os.path: it is False for what can be no path.
    is_executable = os.path.isfile(word) and os.access(word, os.X_OK)
    return word.endswith((".py", ".sh")) or is_executable


def program_hint(words: Sequence[str]) -> str:
    """Returns the hint for a program of the user's own in a place where none belongs."""
    line = shlex.join(["slurmft", "run", "--", *words])
    return f"slurmft run starts a program of your own: {line}"


def unknown_command(words: Sequence[str]) -> UsageError | None:
    """Returns the error for a command line whose first word is no command, but what another tool
    calls one, or a program; None where it is neither."""
    name = words[0]
    hint = None
    # Behind `train`, it may be the value of a flag: --metric ./f1.py.
    most = {"submit": 1, "run": len(words)}.get(COMMANDS.get(name, ""), 0)
    # As in `torchrun --nproc_per_node 4 train.py`: what is before it is for another tool.
    starts = [index for index, word in enumerate(words) if is_program(word)]
    if starts and starts[0] <= most:
        hint = program_hint(words[starts[0] :])
    elif name in COMMANDS:
        hint = f"that is slurmft {COMMANDS[name]} here"
    if hint is None:
        return None
    return UsageError(f"unknown command {name!r}", hint)
