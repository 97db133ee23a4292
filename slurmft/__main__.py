"""`slurmft COMMAND ...`, also as `python -m slurmft COMMAND ...`."""

from __future__ import annotations

import importlib
import sys

import slurmft
from slurmft.errors import Exit, run_main, unknown

COMMANDS = {
    "submit": ("slurmft.dispatch", "main", "submit a training job"),
    "follow": ("slurmft.follow", "follow_main", "stream a run's progress until its job ends"),
    "logs": ("slurmft.logs", "main", "the logs of all ranks as one, what failed first before it"),
    "watch": ("slurmft.watch", "main", "a live view of a run: speed, loss, ranks, time left"),
    "resume": ("slurmft.dispatch", "resume_main", "submit a stopped or failed run again"),
    "list": ("slurmft.listing", "main", "all runs: state, progress, speed, metrics"),
    "status": ("slurmft.status", "main", "one run in full, and what to type next"),
    "cancel": ("slurmft.follow", "cancel_main", "end the job of a run"),
    "clean": ("slurmft.cleaning", "main", "remove what is no longer needed"),
    "fetch": ("slurmft.fetch", "main", "fill the caches, for nodes without internet"),
    "push": ("slurmft.push", "main", "upload the model of a finished run to the hub"),
    "study": ("slurmft.study", "main", "measure many settings: study run, study status"),
    "report": ("slurmft.report", "main", "tables, plots and a page of what runs measured"),
    "plan": ("slurmft.planner", "main", "how many nodes: time and cost by number of nodes"),
    "compare": (
        "slurmft.compare",
        "main",
        "is one run faster or better than another, or is it noise",
    ),
    "doctor": (
        "slurmft.doctor",
        "main",
        "is the cluster well? and doctor node, doctor locks DIR",
    ),
    "render": ("slurmft.render", "main", "print what others start: mpirun's command, manifests"),
    "completion": ("slurmft.completion", "main", "print what makes TAB complete in bash or zsh"),
    "prepare": ("slurmft.prepare", "main", "inside a job: what the files in sbatch/ call"),
}
"""Command -> module, function, one line of help. Modules are imported when they are called."""


def usage() -> str:
    lines = [f"  {name:<10} {text}" for name, (_, _, text) in COMMANDS.items()]
    return "\n".join(
        (
            "usage: slurmft COMMAND ...",
            "",
            *lines,
            "",
            "slurmft COMMAND --help shows a command's flags; start with: slurmft submit --follow",
        )
    )


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return Exit.OK if argv else Exit.USAGE
    if argv[0] == "--version":
        print(f"slurmft {slurmft.__version__}")
        return Exit.OK
    if argv[0] not in COMMANDS:
        raise unknown("command", argv[0], list(COMMANDS))
    module, function, _ = COMMANDS[argv[0]]
    return int(getattr(importlib.import_module(module), function)(argv[1:]))


def console() -> int:
    """The console script `slurmft`."""
    return run_main(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv)


if __name__ == "__main__":
    raise SystemExit(console())
