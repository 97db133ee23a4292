"""Lists the runs in a folder. It shows state, data, model, progress, speed and metrics, or why they
failed. Their own records and Slurm say in which state they are. A narrow terminal gets fewer
columns, --json gets all.

examples:
  slurmft list                              newest last
  slurmft list --state running --state requeued
  slurmft list --name bert --data tickets --sort accuracy
  slurmft list --cost
  slurmft list --ettr                       where the time of the runs went
  slurmft list --runs-dir /gpfs/jane/runs --newest 10
  slurmft list --json | jq '.runs[] | select(.state == "failed") | .path'
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.parser import Parser, count, print_json
from slurmft.cluster import facts, status
from slurmft.cluster.fact_types import Cost, RunSummary, TimeUse
from slurmft.cluster.job_state import Phase
from slurmft.core.errors import Exit, unknown
from slurmft.core.files import is_measurement
from slurmft.runs import resolve
from slurmft.runs.resolve import problem_lines
from slurmft.runs.scan import MeasuredRun
from slurmft.show import costs, run_table
from slurmft.show import time_use as show_time_use

ELSEWHERE = Elsewhere.SEVERAL

_SORTED_BY = (
    "submitted",
    "name",
    "state",
    "user",
    "task",
    "data",
    "model",
    "nodes",
    "steps_done",
    "samples_per_s",
    "left_s",
    "train_loss",
)
_NAMES = {"train_loss": "loss"}
"""Key of --sort -> name of the value in `facts.summary`, where they differ: the table shows
another loss, that of the validation, among the metrics."""


class ListedRun(RunSummary):
    """One run of `slurmft list`. null is what is not known."""

    cost: NotRequired[Cost]
    """With --cost."""
    time_use: NotRequired[TimeUse]
    """With --ettr."""


class Listing(TypedDict):
    """What `slurmft list` has read."""

    runs_dir: str
    runs: list[ListedRun]
    problems: list[str]
    """A line for everything that could not be read."""


def in_order(runs: Sequence[ListedRun], key: str) -> list[ListedRun]:
    """Sorts runs by a value or a metric, the largest last; those without it come first."""
    keys = list(_SORTED_BY)
    # Each task has metrics of its own.
    for run in runs:
        for name in run["metrics"] or {}:
            if name not in keys:
                keys.append(name)
    if key not in keys:
        raise unknown("--sort", key, keys)

    def sort_key(run: Mapping[str, Any]) -> tuple[bool, float, str]:
        if key in _SORTED_BY:
            value = run[_NAMES.get(key, key)]
        else:
            metrics = run["metrics"] or {}
            value = metrics.get(key)
        # Numbers are compared by their size, all other values by their text.
        size: float = 0
        if is_measurement(value):
            size = value
        return value is not None, size, str(value)

    return sorted(runs, key=sort_key)


def _chosen(arguments: argparse.Namespace, top: Path) -> Listing:
    """Reads the runs that the flags choose, oldest first."""
    runs, problems = resolve.read_all(top)
    # Filters by the runs' own files come first: of what they leave, Slurm is asked.
    for name in _FILTERS:
        text = getattr(arguments, name)
        if text:
            runs = [run for run in runs if _matches(run, name, text)]
    states = arguments.state or _STATES
    all_statuses = status.run_statuses(runs)
    statuses = [each for each in all_statuses if each.state in states]
    # Last: the newest of those that are running, not those of the newest that run.
    if arguments.newest:
        statuses = statuses[-arguments.newest :]
    # A run without a cost is one, too.
    rows = [cast(ListedRun, facts.summary(each)) for each in statuses]
    if arguments.cost:
        from slurmft.cluster import cost  # 5 ms

        run_costs = cost.costs_of([each.run for each in statuses])
        for row, run_cost in zip(rows, run_costs, strict=True):
            row["cost"] = run_cost
    if arguments.ettr:
        from slurmft.cluster import time_use

        for row, run_status in zip(rows, statuses, strict=True):
            row["time_use"] = time_use.of_status(run_status)
    return Listing(runs_dir=str(top), runs=rows, problems=problems)


def _tables(runs: Sequence[ListedRun], arguments: argparse.Namespace) -> list[str]:
    """Returns the tables that the flags ask for; without such a flag, that of the runs."""
    tables = []
    if arguments.cost:
        names = [run["name"] for run in runs]
        run_costs = [run["cost"] for run in runs]
        tables.append("\n".join(costs.table(names, run_costs)))
    if arguments.ettr:
        tables.append("\n".join(_time_table(runs)))
    return tables or [run_table.table(runs)]


def _time_table(runs: Sequence[ListedRun]) -> list[str]:
    """Returns where the time of each run went, and that of all."""
    from slurmft.cluster.time_use import in_all

    uses = [run["time_use"] for run in runs]
    names = [run["name"] for run in runs]
    return show_time_use.table("run", [*names, "in all"], [*uses, in_all(uses)])


def _matches(run: MeasuredRun, name: str, text: str) -> bool:
    """Returns whether a value of a run contains a text, in which * stands for anything."""
    values: Mapping[str, Any] = facts.described(run)
    # Lower case by hand: fnmatch leaves the case to the operating system.
    value_text = str(values[name] or "").lower()
    return fnmatch(value_text, f"*{text.lower()}*")


_STATES = [str(phase) for phase in Phase]
_FILTERS = ("name", "data", "model", "user")


def parser() -> Parser:
    command = Parser("slurmft list", __doc__).add_runs_dir()
    for name in _FILTERS:
        text = f"only runs with this in their {name}; * stands for anything"
        command.add_argument(f"--{name}", metavar="TEXT", help=text)
    states = f"only runs in this state, repeatable: {', '.join(_STATES)}"
    command.add_argument(
        "--state", action="append", default=[], metavar="STATE", help=states
    )
    command.add_argument(
        "--newest", type=count, metavar="N", help="at most the N newest of them"
    )
    sort = f"largest last: {', '.join(_SORTED_BY)}, or a metric (default: submitted)"
    command.add_argument("--sort", metavar="KEY", help=sort)
    command.add_argument("--reverse", action="store_true", help="the other way round")
    costs_help = "what they cost: hours of nodes, GPUs and CPUs over all attempts, memory, energy"
    command.add_argument("--cost", action="store_true", help=costs_help)
    ettr = (
        "where their time went: the share of steps that count, queue, starts, lost steps, saves, "
        "evaluations, waits for the slowest rank, hangs"
    )
    command.add_argument("--ettr", action="store_true", help=ettr)
    return command.add_json("runs_dir, runs, problems, as JSON", Listing)


def main(argv: list[str]) -> int:
    arguments = parser().parse(argv)
    # Not argparse's choices: its message suggests nothing.
    for state in arguments.state:
        if state not in _STATES:
            raise unknown("--state", state, _STATES)
    listing = _chosen(arguments, resolve.folder(arguments.runs_dir))
    if arguments.sort:
        listing["runs"] = in_order(listing["runs"], arguments.sort)
    if arguments.reverse:
        listing["runs"].reverse()
    if arguments.json:
        return print_json(listing)
    for line in problem_lines(listing["problems"]):
        # On stderr: stdout has the table alone, for whoever reads it through a pipe.
        print(f"warning: left out: {line}", file=sys.stderr)
    runs = listing["runs"]
    if not runs:
        print(f"no such runs in {listing['runs_dir']}")
    else:
        print("\n\n".join(_tables(runs, arguments)))
    return Exit.OK
