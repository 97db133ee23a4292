"""The runs in a folder: their state, by their own records and by Slurm's, their progress, speed and
metrics.

examples:
  slurmft list                              newest last
  slurmft list --state running --state requeued
  slurmft list --runs-dir /gpfs/jane/runs --newest 10
  slurmft list --json | jq '.runs[] | select(.state == "failed") | .path'
"""

import sys
from collections.abc import Sequence
from typing import Any

from slurmft.cli.parser import Parser, add_runs_dir, count
from slurmft.cluster import status
from slurmft.cluster.status import list_runs, note
from slurmft.core.errors import Exit, unknown
from slurmft.core.files import to_json
from slurmft.core.text import aligned, duration, shown
from slurmft.runs import resolve
from slurmft.runs.progress import metrics_words
from slurmft.runs.resolve import problem_line


def table(runs: Sequence[dict[str, Any]]) -> str:
    """A line for every run."""
    several = len({run["user"] for run in runs}) > 1
    heads = ["run", *(["user"] if several else []), "job", "state", "steps", "samples/s", "left"]
    rows = [[*heads, "metrics", ""]]
    for run in runs:
        user = [str(run["user"] or "-")] if several else []
        rows.append([run["name"], *user, str(run["job"] or "-"), run["state"], *_cells(run)])
    return "\n".join(aligned(rows))


def _cells(run: dict[str, Any]) -> list[str]:
    total, speed, left = run["steps_total"], run["samples_per_s"], run["left_s"]
    return [
        f"{run['steps_done']}/{total}" if total else "-",
        "-" if speed is None else f"{speed:,.0f}",
        duration(left) if left else "-",
        metrics_words(run["metrics"]) or "-",
        shown(note(run)),
    ]


def parser() -> Parser:
    command = Parser("slurmft list", __doc__)
    add_runs_dir(command)
    states = f"only runs in this state, repeatable: {', '.join(status.STATES)}"
    command.add_argument("--state", action="append", default=[], metavar="STATE", help=states)
    command.add_argument("--newest", type=count, metavar="N", help="at most the N newest of them")
    command.add_argument("--json", action="store_true", help="runs_dir, runs, problems, as JSON")
    return command


def main(argv: list[str]) -> int:
    arguments = parser().parse(argv)
    for state in arguments.state:
        if state not in status.STATES:
            raise unknown("--state", state, list(status.STATES))
    found = list_runs(resolve.folder(arguments.runs_dir), arguments.state, arguments.newest)
    if arguments.json:
        print(to_json(found, indent=2))
        return Exit.OK
    if found["problems"]:
        print(f"warning: left out: {problem_line(found['problems'])}", file=sys.stderr)
    if found["runs"]:
        print(table(found["runs"]))
    else:
        print(f"no such runs in {found['runs_dir']}")
    return Exit.OK
