"""`slurmft list`: the runs in a folder, how they stand, and how far they are."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slurmft import selection, standing
from slurmft.cli import Parser, aligned, shown
from slurmft.errors import Exit, UsageError, unknown
from slurmft.progress import duration
from slurmft.rundir import to_json
from slurmft.runs import Run
from slurmft.selection import Found
from slurmft.status import metrics_words, note, summary

EXAMPLES = """\
examples:
  slurmft list                              newest last
  slurmft list --state running --state requeued
  slurmft list --runs-dir /gpfs/jane/runs --newest 10
  slurmft list --json | jq '.runs[] | select(.state == "failed") | .path'
"""


def read(found: Found) -> tuple[list[Run], list[str]]:
    """The runs in a folder by when they were submitted, and a line for what cannot be read."""
    made, problems = [], list(found.problems)
    for path in sorted(found.paths, key=selection.submitted):
        try:
            made.append(Run.read(path, with_environment=False))
        except UsageError as error:
            problems.append(error.message)
    return made, problems


def take(top: Path, states: Sequence[str] = (), newest: int | None = None) -> dict[str, Any]:
    """The runs in a folder, as `slurmft list --json` prints them.

    Args:
        top: the folder.
        states: states to show; all of them, if none is given.
        newest: how many to show at most.

    Returns:
        runs_dir; runs: a list of what `status.summary` returns, oldest first; problems: a line for
        everything that could not be read.

    Raises:
        UsageError: there is no such folder.
    """
    made, problems = read(selection.look(top))
    every = [s for s in standing.stand(made) if not states or s.state in states]
    kept = every[-newest:] if newest else every
    return {
        "runs_dir": str(top),
        "runs": [summary(each) for each in kept],
        "problems": problems,
    }


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


def problem_line(problems: Sequence[str]) -> str:
    """What could not be read, in one line."""
    if len(problems) == 1:
        return f"warning: {problems[0]}; left out"
    return f"warning: {len(problems)} folders left out, such as: {problems[0]}"


def parser() -> Parser:
    """The command line of `slurmft list`."""
    made = Parser(
        prog="slurmft list",
        description="The runs in a folder: how they stand, by their own records and by Slurm's, "
        "how far they are, how fast, and their metrics.",
        epilog=EXAMPLES,
    )
    selection.add_folder(made)
    made.add_argument(
        "--state",
        action="append",
        default=[],
        metavar="STATE",
        help=f"only runs in this state, repeatable: {', '.join(standing.STATES)}",
    )
    made.add_argument("--newest", type=_count, metavar="N", help="at most the N newest of them")
    made.add_argument("--json", action="store_true", help="runs_dir, runs, problems, as JSON")
    return made


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of runs")
    return int(text)


def main(argv: list[str]) -> int:
    """`slurmft list`"""
    arguments = parser().parse(argv)
    for state in arguments.state:
        if state not in standing.STATES:
            raise unknown("--state", state, list(standing.STATES))
    found = take(selection.folder(arguments.runs_dir), arguments.state, arguments.newest)
    if arguments.json:
        print(to_json(found, indent=2))
        return Exit.OK
    if found["problems"]:
        print(problem_line(found["problems"]), file=sys.stderr)
    if found["runs"]:
        print(table(found["runs"]))
    else:
        print(f"no such runs in {found['runs_dir']}")
    return Exit.OK
