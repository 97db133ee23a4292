"""Flags and commands of other tools, which people type by habit: what slurmft calls them."""

import os
import shlex
from collections.abc import Mapping, Sequence

from slurmft.core.errors import UsageError
from slurmft.core.options import Option, named_elsewhere

_CHOSEN = "--nodes and --nproc-per-node say how many; slurmft chooses ranks, addresses and ports"
_RESUME = "`slurmft resume RUN` continues a run from its newest checkpoint"
_ALWAYS = "a run always trains, evaluates and saves"

SENTENCES = {
    "resume_from_checkpoint": _RESUME,
    "resume": _RESUME,
    "overwrite_output_dir": "every run has a new folder; nothing is overwritten",
    "do_train": _ALWAYS,
    "do_eval": _ALWAYS,
    "do_predict": "`slurmft predict` applies the model of a run to rows",
    "push_to_hub": "`slurmft push RUN` uploads the model of a run",
    "trust_remote_code": "code from the hub is never run: slurmft help security",
    "main_process_ip": _CHOSEN,
    "main_process_port": _CHOSEN,
    "machine_rank": _CHOSEN,
    "node_rank": _CHOSEN,
    "master_addr": _CHOSEN,
    "master_port": _CHOSEN,
    "rdzv_backend": _CHOSEN,
    "rdzv_endpoint": _CHOSEN,
    "rdzv_id": _CHOSEN,
    "local_rank": _CHOSEN,
    "ntasks": _CHOSEN,
    "n": _CHOSEN,
    "array": "`slurmft study run` starts several runs",
    "output": "`slurmft logs RUN` shows what a job prints; its run keeps it",
    "o": "`slurmft logs RUN` shows what a job prints; its run keeps it",
    "error": "`slurmft logs RUN` shows what a job prints; its run keeps it",
    "e": "`slurmft logs RUN` shows what a job prints; its run keeps it",
    "wrap": "`slurmft run -- COMMAND` submits a program of your own",
}
"""Name of a flag elsewhere, without hyphens before it and with underscores in it, for which there
is no flag here -> what to do instead."""


def hint(flag: str, options: Mapping[str, Option]) -> str | None:
    """Returns what a flag of another tool is called here; None where it is unknown, or the command
    has nothing of the kind.

    Args:
        flag: as it was typed, such as "--num_train_epochs".
        options: those of the command: they declare their names elsewhere.
    """
    ours = named_elsewhere(flag, options)
    if ours is not None:
        return f"that is {ours.flag} here"
    # What they say is about training, of commands that start a job.
    if "nodes" in options:
        name = flag.lstrip("-").replace("-", "_")
        return SENTENCES.get(name) or SENTENCES.get(name.lower())
    return None


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
    "sync": "pull",
    "upload": "push",
    "check": "doctor",
    "sinfo": "doctor",
    "compare": "report",
    "plot": "report",
    "sweep": "study",
    "config": "help sites",
    "init": "help getting-started",
    "docs": "help pages",
    "version": "--version",
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
    if is_program(name):
        hint = program_hint(words)
    elif name in COMMANDS:
        hint = f"that is slurmft {COMMANDS[name]} here"
    if hint is None:
        return None
    return UsageError(f"unknown command {name!r}", hint)
