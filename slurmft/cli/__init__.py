"""The commands: one module each, which parses, calls and prints."""

COMMANDS = {
    "submit": "submit a training job",
    "follow": "stream a run's progress until its job ends",
    "logs": "the logs of all ranks as one, what failed first before it",
    "watch": "a live view of a run: speed, loss, ranks, time left",
    "resume": "submit a stopped or failed run again",
    "list": "all runs: state, progress, speed, metrics",
    "status": "one run in full, and what to type next",
    "cancel": "end the job of a run",
    "clean": "remove what is no longer needed",
    "fetch": "fill the caches, for nodes without internet",
    "push": "upload the model of a finished run to the hub",
    "study": "measure many settings: study run, study status",
    "report": "tables, plots and a page of what runs measured",
    "plan": "how many nodes: time and cost by number of nodes",
    "compare": "is one run faster or better than another, or is it noise",
    "doctor": "is the cluster well? and doctor node, doctor locks DIR",
    "render": "print what others start: mpirun's command, manifests",
    "completion": "print what makes TAB complete in bash or zsh",
    "prepare": "inside a job: what the files in sbatch/ call",
}
"""Command -> one line of help. Each is `main` of its module here, imported when it is called."""


def usage() -> str:
    lines = [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        (
            "usage: slurmft COMMAND ...",
            "",
            *lines,
            "",
            "slurmft COMMAND --help shows a command's flags; start with: slurmft submit --follow",
        )
    )
