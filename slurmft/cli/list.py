"""Lists the runs in a folder. It shows their state, by their own records and by Slurm's, data,
model, progress, speed and metrics, or why they failed. A narrow terminal gets fewer columns, --json
gets all.

examples:
  slurmft list                              newest last
  slurmft list --state running --state requeued
  slurmft list --name bert --data tickets --sort accuracy
  slurmft list --cost
  slurmft list --runs-dir /gpfs/jane/runs --newest 10
  slurmft list --json | jq '.runs[] | select(.state == "failed") | .path'
"""

import argparse
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from slurmft.cli.parser import Parser, count, print_json
from slurmft.cluster import cost, status
from slurmft.cluster.job_state import Phase
from slurmft.core.errors import Exit, unknown
from slurmft.core.files import is_number
from slurmft.runs import resolve
from slurmft.runs.resolve import problem_line
from slurmft.show import costs, run_table

_SORTED_BY = (
    "submitted", "name", "state", "user", "task", "data", "model", "nodes", "steps_done",
    "samples_per_s", "left_s", "loss",
)  # fmt: skip


def in_order(runs: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """The runs by a value, or by a metric, the largest last; those without it come first."""
    metrics = dict.fromkeys(name for run in runs for name in run["metrics"] or {})
    if key not in (*_SORTED_BY, *metrics):
        raise unknown("--sort", key, [*_SORTED_BY, *metrics])
    values = [run[key] if key in _SORTED_BY else (run["metrics"] or {}).get(key) for run in runs]
    keys = ((v is not None, v if is_number(v) else 0, str(v)) for v in values)
    pairs = sorted(zip(keys, runs, strict=True), key=lambda pair: pair[0])
    return [run for _, run in pairs]


def _chosen(arguments: argparse.Namespace, top: Path) -> dict[str, Any]:
    """What --json prints: runs_dir; runs: of those that the flags choose what `status.summary`
    returns, oldest first; problems: a line for everything that could not be read."""
    runs, problems = resolve.read_all(top)
    for name in _HAVING:
        if text := getattr(arguments, name):
            pattern = f"*{text.lower()}*"
            runs = [
                r for r in runs if fnmatch(str(status.described(r)[name] or "").lower(), pattern)
            ]
    wanted = arguments.state or _STATES
    found = [each for each in status.run_statuses(runs) if each.state in wanted]
    found = found[-arguments.newest :] if arguments.newest else found
    rows = [status.summary(each) for each in found]
    if arguments.cost:
        spent = cost.costs_of([each.run for each in found])
        rows = [row | {"cost": each} for row, each in zip(rows, spent, strict=True)]
    return {"runs_dir": str(top), "runs": rows, "problems": problems}


_STATES = [str(phase) for phase in Phase]
_HAVING = ("name", "data", "model", "user")


def parser() -> Parser:
    command = Parser("slurmft list", __doc__).add_runs_dir()
    for name in _HAVING:
        text = f"only runs with this in their {name}; * stands for anything"
        command.add_argument(f"--{name}", metavar="TEXT", help=text)
    states = f"only runs in this state, repeatable: {', '.join(_STATES)}"
    command.add_argument("--state", action="append", default=[], metavar="STATE", help=states)
    command.add_argument("--newest", type=count, metavar="N", help="at most the N newest of them")
    sort = f"largest last: {', '.join(_SORTED_BY)}, or a metric (default: submitted)"
    command.add_argument("--sort", metavar="KEY", help=sort)
    command.add_argument("--reverse", action="store_true", help="the other way round")
    spent = "what they cost: hours of nodes, GPUs and CPUs over all attempts, memory, energy"
    command.add_argument("--cost", action="store_true", help=spent)
    return command.add_json("runs_dir, runs, problems, as JSON")


def main(argv: list[str]) -> int:
    arguments = parser().parse(argv)
    for state in arguments.state:
        if state not in _STATES:
            raise unknown("--state", state, _STATES)
    found = _chosen(arguments, resolve.folder(arguments.runs_dir))
    if arguments.sort:
        found["runs"] = in_order(found["runs"], arguments.sort)
    if arguments.reverse:
        found["runs"].reverse()
    if arguments.json:
        return print_json(found)
    if found["problems"]:
        print(f"warning: left out: {problem_line(found['problems'])}", file=sys.stderr)
    runs = found["runs"]
    if runs and arguments.cost:
        print("\n".join(costs.table([r["name"] for r in runs], [r["cost"] for r in runs])))
    else:
        print(run_table.table(runs) if runs else f"no such runs in {found['runs_dir']}")
    return Exit.OK
