"""Removes what is no longer needed. It shows everything with its size and asks first: checkpoints
and tokens of finished runs, leftovers of killed jobs, runs that failed, were cancelled or vanished
long ago, entries of the token cache that no run has used for as long, and code that no run has. It
never touches a run whose job is pending or running, runs of other users, or unfinished runs of
another cluster.

examples:
  slurmft clean --dry-run                  what can be removed, and its size
  slurmft clean --only checkpoints --yes
  slurmft clean --only runs --older-than 7d
  slurmft clean --only token-cache --older-than 7d
"""

import sys
from pathlib import Path
from typing import TypedDict

from slurmft.cli.elsewhere import Elsewhere
from slurmft.cli.parser import Parser, confirmed, print_json
from slurmft.cluster.cleanup import KINDS, Plan, remove_all
from slurmft.cluster.cleanup import plan as make_plan
from slurmft.core.config import duration_s
from slurmft.core.errors import Exit
from slurmft.core.text import aligned, in_bytes, screen_width
from slurmft.runs import resolve

ELSEWHERE = Elsewhere.PLAIN


class RemovableItem(TypedDict):
    """Something that can be removed."""

    path: str
    kind: str
    why: str
    bytes: int


class Removal(TypedDict):
    """What can be removed, or was."""

    runs_dir: str
    items: list[RemovableItem]
    bytes: int
    """Of all items."""
    removed: bool
    """The items are gone."""
    left_out: list[str]
    """A line for everything that cannot be judged."""


def parser() -> Parser:
    command = Parser("slurmft clean", __doc__).add_runs_dir()
    add = command.add_argument
    only = (
        f"only this kind, of {', '.join(KINDS)}; repeatable; runs: whole directories of runs that "
        "did not finish; token-cache: in $HF_HOME, for all your runs"
    )
    add("--only", action="append", choices=KINDS, metavar="KIND", help=only)
    older_than = (
        "how long ago a run that is removed as a whole last changed, or an entry of the token "
        "cache was last used (default: 30d)"
    )
    add("--older-than", default="30d", metavar="TIME", help=older_than)
    add("--dry-run", action="store_true", help="only show it")
    add("--yes", action="store_true", help="do not ask")
    return command.add_json(
        "runs_dir, items, bytes, removed, left_out, as JSON", Removal
    )


def table(plan: Plan) -> str:
    """Returns a line for everything that can be removed, and the total. Where the screen is too
    narrow, paths have lines of their own."""
    rows = [["size", "kind", "why"]]
    paths = ["path"]
    for item in plan.items:
        rows.append([in_bytes(item.bytes), item.kind, item.why])
        paths.append(str(item.path))
    total = f"{len(plan.items)} in all, {in_bytes(plan.bytes)}"
    with_paths = [[*row, path] for row, path in zip(rows, paths, strict=True)]
    lines = aligned(with_paths)
    if max(map(len, lines)) >= screen_width():
        lines = []
        for line, path in zip(aligned(rows), paths, strict=True):
            lines += [line, f"  {path}"]
    return "\n".join([*lines, total])


def as_json(top: Path, plan: Plan, is_removed: bool) -> Removal:
    """Returns what `slurmft clean --json` prints."""
    items = []
    for item in plan.items:
        facts = RemovableItem(
            path=str(item.path), kind=item.kind, why=item.why, bytes=item.bytes
        )
        items.append(facts)
    return Removal(
        runs_dir=str(top),
        items=items,
        bytes=plan.bytes,
        removed=is_removed,
        left_out=plan.left_out,
    )


def main(argv: list[str]) -> int:
    arguments = parser().parse(argv)
    older_s = duration_s(arguments.older_than, "--older-than")
    top = resolve.folder(arguments.runs_dir)
    # Not as argparse's default, to which `append` would add the kinds that are typed.
    kinds = arguments.only or KINDS
    plan = make_plan(top, kinds, older_s)
    # --json prints one object, at the end, and nothing else on stdout.
    if not arguments.json:
        _show(plan, top, arguments.older_than)
    is_removed = False
    if plan.items and not arguments.dry_run:
        is_removed = arguments.yes or confirmed(f"remove {in_bytes(plan.bytes)}?")
    if is_removed:
        # While the user was thinking, a job may have started: only what is in both plans goes.
        removed = remove_all(plan, make_plan(top, kinds, older_s))
        # What is reported below is what has gone, not what was to go.
        plan = Plan(removed, plan.left_out)
    if arguments.json:
        return print_json(as_json(top, plan, is_removed))
    if plan.items and not arguments.dry_run:
        outcome = "nothing was removed"
        if is_removed:
            outcome = f"removed {in_bytes(plan.bytes)}"
        print(outcome)
    return Exit.OK


def _show(plan: Plan, top: Path, older_than: str) -> None:
    for line in plan.left_out:
        # On stderr, as warnings: stdout has the table alone.
        print(f"left out: {line}", file=sys.stderr)
    if plan.items:
        print(table(plan))
    else:
        print(f"nothing to remove in {top}; unfinished runs are kept for {older_than}")
