"""Prints tables, plots and a page of results. A table has a row for every cell (runs that differ
only in seed and folder); every study has a table. Published tables are printed as published, and
beside ours. Where there are two cells, a report also says whether they differ by more than noise.

--compare says in full what differs between two runs, or two folders of repeats (configuration,
versions, hosts, code), and whether one is faster or more accurate by more than noise. With three or
more repeats of each, repeats are compared; with fewer, the steps of the runs, which do not show how
much repeats would differ. Verdicts have a confidence of 95 %.

--output writes the tables in all formats, plots as SVG and PNG, and a page, report.html, that needs
no other file.

examples:
  slurmft report runs                                      # tables of all runs below runs/
  slurmft report studies/scaling --output report           # and plots, and report/report.html
  slurmft report studies/scaling --published mn4_emotion   # `slurmft examples` has the names
  slurmft report mn4_benchmark --format markdown
  slurmft report runs --format csv > runs.csv              # every measure and metric of every cell
  slurmft report runs --format latex > runs.tex            # for papers: booktabs, graphicx
  slurmft report runs/fp32 runs/bf16 --compare             # folders with repeats; or two runs
"""

import argparse
import sys
from pathlib import Path

from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.parser import Parser, above_zero, input_path, print_json
from slurmft.core.errors import Exit, UsageError, unknown
from slurmft.core.text import screen_width
from slurmft.plugins.studies.report import plots
from slurmft.plugins.studies.report.build import (
    collect_sections,
    tables_text,
    write_report,
)
from slurmft.plugins.studies.report.findings import ComparisonFacts
from slurmft.plugins.studies.report.formats import FORMATS, WIDTH

ELSEWHERE = Elsewhere.PLAIN


def main(argv: list[str]) -> int:
    arguments = parser().parse(argv)
    if arguments.compare:
        return _print_comparison(arguments)
    if arguments.json:
        raise UsageError(
            "--json prints a comparison", "add --compare; tables: --format csv"
        )
    return _print_report(arguments)


def _print_comparison(arguments: argparse.Namespace) -> int:
    if len(arguments.paths) != 2:
        raise UsageError(
            f"--compare needs two runs or folders of repeats, not {len(arguments.paths)}",
            "slurmft report RUN_A RUN_B --compare",
        )
    # numpy and scipy: 0.3 s
    from slurmft.plugins.studies.report.comparison import compare

    comparison = compare(*arguments.paths)
    if arguments.json:
        return print_json(comparison.as_json())
    print("\n".join(comparison.lines()))
    return Exit.OK


def _print_report(arguments: argparse.Namespace) -> int:
    form = arguments.format
    # Before the runs are read, which takes a while for a large folder.
    if form is not None and form not in FORMATS:
        raise unknown("--format", form, list(FORMATS))
    published = [Path(name) for name in arguments.published]
    sections, problems = collect_sections(
        arguments.paths,
        published,
        arguments.title,
        arguments.peak_tflop_per_s,
    )
    output = arguments.output
    if output is not None:
        # The page is written last: its name stands for all.
        written = write_report(
            output,
            sections,
            problems,
            arguments.title,
            arguments.paths,
        )
        *others, page = written
        print(f"written to {output}: {page} and {len(others)} other files")
        # Plots are an extra of the installation: tables and page are complete without.
        if not plots.is_available():
            print(f"without plots: {plots.HINT}", file=sys.stderr)
    # A user who has the tables in files sees them here only when asking for a format.
    if form is not None or output is None:
        width = min(WIDTH, screen_width())
        print(tables_text(sections, problems, form or "text", width), end="")
    return Exit.OK


def parser() -> Parser:
    report = Parser("slurmft report", __doc__)
    add = report.add_argument
    paths = (
        "runs (paths or names, as `last`), folders of runs at any depth, files of published "
        "tables (.json)"
    )
    add("paths", nargs="+", type=Path, metavar="RUN|DIR|FILE", help=paths)
    add(
        "--compare",
        action="store_true",
        help="of two runs or folders: is the difference noise?",
    )
    report.add_json("print the comparison as JSON", ComparisonFacts)
    add("--output", type=Path, metavar="FOLDER", help="write all files to this folder")
    printed = "what to print (default: text; with --output only the names of the files)"
    add("--format", default=None, metavar="|".join(FORMATS), help=printed)
    beside = (
        "published tables to compare with; repeatable (default: what the study names)"
    )
    add(
        "--published",
        type=input_path,
        action="append",
        default=[],
        metavar="FILE",
        help=beside,
    )
    peak = (
        "what a device computes at most, as `slurmft doctor` measures its matmuls: tables have "
        "the model FLOPs utilisation then"
    )
    add("--peak-tflop-per-s", type=above_zero, metavar="X", help=peak)
    add(
        "--title",
        default="",
        metavar="TEXT",
        help="of the page, its tables and studies",
    )
    return report
