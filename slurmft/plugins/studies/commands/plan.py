"""Predicts time and cost by number of nodes. It fits a model of a run's time to measured runs.
Ranges hold 90 %; what no run shows is named. Nothing is submitted.

examples:
  slurmft plan runs                                  # 1, 2, 4, ... nodes, from all runs in a folder
  slurmft plan runs --nodes 1-16 --deadline 30m      # the fewest nodes that meet it
  slurmft plan runs --epochs 10 --json               # other runs than those, for programs
"""

import argparse
import dataclasses
import sys

from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.parser import Parser, count, print_json
from slurmft.core.config import duration_s
from slurmft.core.errors import Exit
from slurmft.plugins.studies.scaling import model, planner
from slurmft.plugins.studies.scaling.model import Workload
from slurmft.plugins.studies.scaling.series import series_of
from slurmft.runs import resolve, scan

ELSEWHERE = Elsewhere.PLAIN


def main(argv: list[str]) -> int:
    arguments = parser().parse(argv)
    deadline_s = None
    # Before the runs are read, which takes a while in a large folder: a mistyped time is told at
    # once.
    if arguments.deadline is not None:
        deadline_s = duration_s(arguments.deadline, "--deadline")
    folders = [resolve.folder_of(source) for source in arguments.sources]
    runs, problems = scan.find(folders)
    # To stderr, so that --json stays JSON.
    for problem in problems:
        print(f"warning: left out: {problem}", file=sys.stderr)
    all_series = series_of(runs)
    series = planner.choose_series(all_series, arguments.series)
    devices_per_node = arguments.devices_per_node or series.devices_per_node
    counts = planner.node_counts(arguments.nodes, series, devices_per_node)
    fit = model.fit(series.rows)
    work = _work(arguments, fit.rows[0].work)
    options = planner.predict(fit, counts, work, devices_per_node)
    chosen, reason = planner.recommend(options, deadline_s)
    plan = planner.Plan(series, fit, work, options, chosen, reason)
    if arguments.json:
        return print_json(planner.as_json(plan))
    lines = planner.describe(plan)
    print("\n".join(lines))
    return Exit.OK


def _work(arguments: argparse.Namespace, measured: Workload) -> Workload:
    """Returns the work of the planned run: as measured, but for what flags change."""
    changes = {}
    # Flags of what would run are stored under the names of the workload's fields (see `dest`).
    # A field without a flag, such as the tokens of a sample, stays as it was measured.
    for field in dataclasses.fields(Workload):
        value = getattr(arguments, field.name, None)
        if value is not None:
            changes[field.name] = value
    # Their number no longer follows from the global batch.
    if arguments.micro_steps is not None:
        changes["accumulates"] = False
    return dataclasses.replace(measured, **changes)


def parser() -> Parser:
    plan = Parser("slurmft plan", __doc__)
    add = plan.add_argument
    add(
        "sources",
        nargs="+",
        metavar="RUN|DIR",
        help="runs (paths or names), folders of runs",
    )
    add("--series", metavar="NAME", help="which runs, if there are several kinds")
    add(
        "--nodes",
        metavar="1-64|1,2,4",
        help="counts to compare (default: 1, 2, 4, ...)",
    )
    add(
        "--deadline",
        metavar="TIME",
        help="find the fewest nodes that meet it: 90s, 30m, 2h",
    )
    plan.add_json("print the plan as JSON", planner.PlanFacts)
    add = plan.add_argument_group("What would run (default: as measured)").add_argument
    add("--epochs", type=count, metavar="N")
    add("--batch-size", type=count, metavar="N", help="of a device and micro-step")
    add(
        "--global-batch",
        type=count,
        metavar="N",
        dest="kept_global_batch",
        help="the same for every number of nodes",
    )
    add("--gradient-accumulation-steps", type=count, metavar="N", dest="micro_steps")
    add("--train-samples", type=count, metavar="N", help="of one epoch")
    add("--devices-per-node", type=count, metavar="N", help="processes of a node")
    return plan
