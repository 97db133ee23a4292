"""Flags of other tools, which people type by habit: what slurmft calls them."""

from collections.abc import Mapping

from slurmft.core.options import Option

_CHOSEN = "nodes, ranks, addresses and ports are chosen by slurmft"
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
    name = flag.lstrip("-").replace("-", "_")
    # Case tells short flags apart: -c and -C of sbatch.
    names = {name}
    if len(name) > 1:
        names.add(name.lower())
    for option in options.values():
        if any(each in option.elsewhere for each in names):
            return f"that is {option.flag} here"
    # What they say is about training, of commands that start a job.
    if "nodes" in options:
        sentences = (SENTENCES.get(each) for each in names)
        return next(filter(None, sentences), None)
    return None
