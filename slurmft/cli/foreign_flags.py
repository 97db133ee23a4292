"""Flags of other tools, which people type by habit: what slurmft calls them."""

import os
from collections.abc import Collection, Mapping

from slurmft.cli.commands import command_parser
from slurmft.core import plugins
from slurmft.core.options import Option, named_elsewhere

_CHOSEN = "--nodes and --nproc-per-node say how many; slurmft chooses ranks, addresses and ports"
_RESUME = "`slurmft resume RUN` continues a run from its newest checkpoint"
_ALWAYS = "a run always trains, evaluates and saves"
_LOGS = "`slurmft logs RUN` shows what a job prints; its run keeps it"
_TOKENIZED = "texts are tokenized once, before the training; no workers read them"
_CLUSTERS = (
    "export SLURM_CLUSTERS=NAME: all of Slurm's commands then speak to that cluster"
)
_FOLLOW = "--follow waits for the end of the run, and shows its progress"

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
    "output": _LOGS,
    "o": _LOGS,
    "error": _LOGS,
    "e": _LOGS,
    "wait": _FOLLOW,
    "W": _FOLLOW,
    "chdir": "a job runs in the folder where you submit it: cd there first",
    "D": "a job runs in the folder where you submit it: cd there first",
    "clusters": _CLUSTERS,
    "M": _CLUSTERS,
    "parsable": "--json prints the id of the job, and the run",
    "signal": "always so: a run stops and saves before its time limit",
    "world_size": _CHOSEN,
    "standalone": _CHOSEN,
    "multi_gpu": "always so: a process a GPU, on all nodes",
    "use_cpu": "always so where no GPU is: --profile cpu",
    "cpu": "always so where no GPU is: --profile cpu",
    "no_cuda": "always so where no GPU is: --profile cpu",
    "dataloader_num_workers": _TOKENIZED,
    "num_workers": _TOKENIZED,
    "tokenizer": "the tokenizer is that of the model",
    "tokenizer_name": "the tokenizer is that of the model",
    "padding": "texts are packed, or padded to the longest of a batch; nothing is to be set",
    "pad_to_max_length": "texts are packed, or padded to the longest of a batch",
    "hub_model_id": "`slurmft push RUN NAME` uploads the model of a run",
    "torch_compile": "there is none: slurmft help performance says what makes a run fast",
    "config": "options of a site are in a site file: slurmft help sites",
    "wrap": "`slurmft run -- COMMAND` submits a program of your own",
}
"""Name of a flag elsewhere, without hyphens before it and with underscores in it, for which there
is no flag here -> what to do instead."""


OF_SBATCH = frozenset((
    "begin", "bb", "bbf", "core_spec", "cpu_freq", "cpus_per_gpu", "deadline",
    "delay_boot", "distribution", "exclude", "export", "extra_node_info", "gpu_bind",
    "gpu_freq", "gpus_per_socket", "gres_flags", "hint", "licenses", "mem_bind", "mem_per_gpu",
    "mincpus", "network", "nice", "nodefile", "nodelist", "ntasks_per_gpu", "ntasks_per_socket",
    "oversubscribe", "power", "prefer", "priority", "propagate", "switches", "thread_spec",
    "threads_per_core", "time_min", "tmp", "tres_per_task", "wckey"
))  # fmt: skip
"""Options of sbatch, with a value, for which there is no flag: --sbatch takes them."""
_SHORT_OF_SBATCH = {
    "b": "begin",
    "w": "nodelist",
    "x": "exclude",
    "L": "licenses",
    "m": "distribution",
    "s": "oversubscribe",
}

ARGUMENTS = {
    "f": ("follow",),
    "n": ("tail", "newest"),
    "lines": ("tail",),
    "limit": ("newest", "tail"),
    "last": ("newest", "tail"),
    "head": ("newest",),
    "max": ("newest",),
    "y": ("yes",),
    "force": ("yes",),
    "o": ("output",),
    "out": ("output",),
    "status": ("state",),
    "format": ("json",),
    "v": ("debug",),
    "verbose": ("debug",),
    "order": ("sort",),
    "days": ("older-than",),
    "batch": ("eval-batch-size",),
    "per_device_eval_batch_size": ("eval-batch-size",),
    "simulate": ("dry-run",),
    "test_only": ("dry-run",),
}
"""Names by habit of flags that declare none of their own -> ours; the first that a command has
counts."""


VALUES = {
    "auto_find_batch_size": "auto",
    "bf16": "bf16",
    "eval_steps": "steps:N",
    "fp16": "fp16",
    "fsdp": "full",
    "load_best_model_at_end": "best",
    "tensorboard": "tensorboard",
    "use_fsdp": "full",
    "wandb": "wandb",
}
"""Name elsewhere -> the value of our flag that does what it does there."""


def hint(
    flag: str, options: Mapping[str, Option], flags: Collection[str] = ()
) -> str | None:
    """Returns what a flag of another tool is called here; None where it is unknown, or the command
    has nothing of the kind.

    Args:
        flag: as it was typed, such as "--num_train_epochs".
        options: those of the command: they declare their names elsewhere.
        flags: all flags of the command, with their hyphens.
    """
    ours = named_elsewhere(flag, options)
    name = flag.lstrip("-").replace("-", "_")
    if ours is not None:
        value = VALUES.get(name.lower())
        words = f"{ours.flag} {value}" if value else ours.flag
        return f"that is {words} here"
    for argument in ARGUMENTS.get(name, ()):
        if f"--{argument}" in flags:
            return f"that is --{argument} here"
    if name == "json":
        return "this command prints no JSON; slurmft schema lists those that do"
    if "sbatch" in options:
        option = _SHORT_OF_SBATCH.get(name, name)
        if option in OF_SBATCH:
            return f"it is sbatch's: --sbatch {option.replace('_', '-')}=VALUE"
    # What they say is about training, of commands that start a job.
    if "nodes" in options:
        return SENTENCES.get(name) or SENTENCES.get(name.lower())
    return None


def hint_to_submission(flag: str, remark: str) -> str | None:
    """Returns which command has a flag that is one of a submission; None where none has it.

    Args:
        remark: what else to say, of the command where it was typed; "": nothing.
    """
    # Without the trainer there is no `submit`.
    for command in ("submit", "run"):
        if plugins.find(plugins.COMMANDS, command) is None:
            continue
        parser = command_parser([command])
        assert parser is not None  # both have one
        ours = named_elsewhere(flag, parser.options)
        for each in parser.options.values():
            if each.flag == flag.replace("_", "-"):
                ours = each
        if ours is not None:
            return f"that is {ours.flag} of slurmft {command}{remark}"
    return None


def taker(word: str, options: Mapping[str, Option]) -> str | None:
    """Returns the flag that takes what was typed without one; a command need not have it."""
    if os.path.isdir(word):
        # Of `list`, --data is a text that data are called by, and no option of a run.
        return "--data" if "data" in options else "--runs-dir"
    if plugins.find(plugins.TASKS, word) is not None:
        return "--task"
    return None
