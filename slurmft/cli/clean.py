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
from typing import Any

from slurmft.cli.parser import Parser, confirmed, print_json
from slurmft.cluster.cleanup import KINDS, Plan, plan, remove_all
from slurmft.core.config import duration_s
from slurmft.core.errors import Exit
from slurmft.core.text import aligned, in_bytes
from slurmft.runs import resolve


def parser() -> Parser:
    command = Parser("slurmft clean", __doc__).add_runs_dir()
    add = command.add_argument
    only = "only this kind, repeatable; runs: whole directories of runs that did not finish; "
    only += "token-cache: in $HF_HOME, for all your runs"
    add("--only", action="append", choices=KINDS, help=only)
    older = "how long ago a run that is removed as a whole last changed, or an entry of the token "
    older += "cache was last used (default: 30d)"
    add("--older-than", default="30d", metavar="TIME", help=older)
    add("--dry-run", action="store_true", help="only show it")
    add("--yes", action="store_true", help="do not ask")
    return command.add_json("runs_dir, items, bytes, removed, left_out, as JSON")


def table(found: Plan) -> str:
    """A line for everything that can be removed, and the total."""
    rows = [["size", "kind", "why", "path"]]
    rows += [[in_bytes(i.bytes), i.kind, i.why, str(i.path)] for i in found.items]
    return "\n".join([*aligned(rows), f"{len(found.items)} in all, {in_bytes(found.bytes)}"])


def as_json(top: Path, found: Plan, removed: bool) -> dict[str, Any]:
    """What `slurmft clean --json` prints: runs_dir, items (path, kind, why, bytes), bytes (their
    sum), removed (whether they are gone), left_out (a line each)."""
    items = [
        {"path": str(i.path), "kind": i.kind, "why": i.why, "bytes": i.bytes} for i in found.items
    ]
    facts = {"runs_dir": str(top), "items": items, "bytes": found.bytes}
    return facts | {"removed": removed, "left_out": found.left_out}


def main(argv: list[str]) -> int:
    arguments = parser().parse(argv)
    older_s = duration_s(arguments.older_than, "--older-than")
    top, kinds = resolve.folder(arguments.runs_dir), arguments.only or KINDS
    found = plan(top, kinds, older_s)
    if not arguments.json:
        for line in found.left_out:
            print(f"left out: {line}", file=sys.stderr)
        unfinished = f"unfinished runs are kept for {arguments.older_than}"
        print(table(found) if found.items else f"nothing to remove in {top}; {unfinished}")
    removes = bool(found.items) and not arguments.dry_run
    removes = removes and (arguments.yes or confirmed(f"remove {in_bytes(found.bytes)}?"))
    if removes:
        gone = remove_all(found, plan(top, kinds, older_s))
        found = Plan(gone, found.left_out)
    if arguments.json:
        return print_json(as_json(top, found, removes))
    if found.items and not arguments.dry_run:
        print(f"removed {in_bytes(found.bytes)}" if removes else "nothing was removed")
    return Exit.OK
