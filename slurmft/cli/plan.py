"""`slurmft plan`: how many nodes a run should have, from runs that were measured."""

from __future__ import annotations

import argparse
import re

from slurmft.cli.parser import Parser
from slurmft.core.config import duration_s
from slurmft.core.errors import Exit
from slurmft.core.files import to_json
from slurmft.studies.scaling import model
from slurmft.studies.scaling.planner import (
    as_json,
    check_rows,
    choose,
    describe,
    devices_per_node,
    node_counts,
    predict,
    read,
    recommend,
    workload,
)

_DESCRIPTION = """\
Fits a model of a run's time to runs that were measured, and says what other numbers of nodes would
take. SOURCE: runs (paths or names), folders that hold such, or one published table (.json). Ranges
hold 90 % of what the measurements leave possible. Nothing is submitted.
"""

EXAMPLES = """\
examples:
  slurmft plan runs                                  # 1, 2, 4, ... nodes, from all runs in a folder
  slurmft plan runs --nodes 1-16 --deadline 30m      # the fewest nodes that meet it
  slurmft plan runs --budget 12 --epochs 10          # the fastest within 12 node-hours
  slurmft plan results/published/mn4_emotion.json --nodes 1,2,4,8
"""


def main(argv: list[str]) -> int:
    """`slurmft plan SOURCE...`."""
    arguments = _parser().parse(argv)
    if arguments.deadline is not None:
        arguments.deadline = duration_s(arguments.deadline, "--deadline")
    series = choose(read(arguments.sources), arguments.series)
    check_rows(series)
    counts = node_counts(arguments.nodes, series, arguments.devices_per_node)
    network = arguments.network_gbit_s or series.network_gbit_s
    fit = model.fit(series.rows, network, arguments.seed)
    options = predict(fit, counts, workload(fit, arguments), devices_per_node(series, arguments))
    chosen, why = recommend(options, arguments.deadline, arguments.budget)
    if arguments.json:
        print(to_json(as_json(series, options, chosen, why), indent=2))
    else:
        print("\n".join(describe(series, fit, options, chosen, why)))
    return Exit.OK


def _parser() -> Parser:
    parser = Parser(prog="slurmft plan", description=_DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="measured runs")
    parser.add_argument(
        "--series", metavar="NAME", help="which runs, where SOURCE has several kinds"
    )
    parser.add_argument(
        "--nodes", metavar="1-64|1,2,4", help="counts to compare (default: 1, 2, 4, ...)"
    )
    parser.add_argument(
        "--deadline", metavar="TIME", help="find the fewest nodes that meet it: 90s, 30m, 2h"
    )
    parser.add_argument(
        "--budget", type=_amount, metavar="NODE-HOURS", help="find the fastest within it"
    )
    group = parser.add_argument_group("What would run (default: as measured)")
    group.add_argument("--epochs", type=_count, metavar="N")
    group.add_argument("--batch-size", type=_count, metavar="N", help="a device and micro-step")
    group.add_argument(
        "--global-batch", type=_count, metavar="N", help="kept, whatever the number of nodes"
    )
    group.add_argument("--gradient-accumulation-steps", type=_count, metavar="N")
    group.add_argument("--train-samples", type=_count, metavar="N", help="of one epoch")
    group.add_argument("--devices-per-node", type=_count, metavar="N", help="processes a node")
    group.add_argument(
        "--gradient-bytes", type=int, choices=(2, 4), help="a parameter's; 2: compressed"
    )
    group.add_argument(
        "--network-gbit-s",
        type=_amount,
        metavar="X",
        help="line rate between nodes: runs on one node do not show it",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampler (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def _amount(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0, without a unit")
    return float(text)
