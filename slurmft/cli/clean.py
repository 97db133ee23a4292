"""`slurmft clean`: removes what runs leave behind and nobody needs any more."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from slurmft.cli.parser import Parser, add_runs_dir
from slurmft.cluster.cleanup import KINDS, Plan, plan, remove_all
from slurmft.core.config import duration_s
from slurmft.core.errors import Exit, UsageError
from slurmft.core.files import to_json
from slurmft.core.text import aligned, in_bytes
from slurmft.runs import resolve

EXAMPLES = """\
examples:
  slurmft clean --dry-run                  what could go, and how large it is
  slurmft clean --only checkpoints --yes
  slurmft clean --only runs --older-than 7d
  slurmft clean --only token-cache --older-than 7d
"""


# --- the command ----------------------------------------------------------------------------------


def parser() -> Parser:
    """The command line of `slurmft clean`."""
    made = Parser(
        prog="slurmft clean",
        description="Shows what may go, with sizes, and removes it when you say so: checkpoints "
        "and tokens of finished runs, leftovers of kills, runs that failed, were cancelled or "
        "vanished long ago, and tokens kept for other runs that none has used for as long. Never "
        "of a run whose job waits or runs, or of somebody else's, or of another cluster's that has "
        "not finished.",
        epilog=EXAMPLES,
    )
    add_runs_dir(made)
    made.add_argument(
        "--only",
        action="append",
        choices=KINDS,
        help="only this kind, repeatable; runs: whole directories of runs that did not finish; "
        "token-cache: in $HF_HOME, for all your runs",
    )
    made.add_argument(
        "--older-than",
        default="30d",
        metavar="TIME",
        help="for how long nothing may have happened in a run that goes as a whole, and no run "
        "used an entry of the token cache (default: 30d)",
    )
    made.add_argument("--dry-run", action="store_true", help="show it; remove nothing")
    made.add_argument("--yes", action="store_true", help="do not ask")
    made.add_argument(
        "--json", action="store_true", help="runs_dir, items, bytes, removed, left_out, as JSON"
    )
    return made


def table(found: Plan) -> str:
    """A line for everything that may go, and their sum."""
    rows = [["size", "kind", "why", "path"]]
    rows += [[in_bytes(i.bytes), i.kind, i.why, str(i.path)] for i in found.items]
    return "\n".join([*aligned(rows), f"{len(found.items)} in all, {in_bytes(found.bytes)}"])


def confirmed(found: Plan, yes: bool) -> bool:
    """Whether the user wants it.

    Raises:
        UsageError: nobody can be asked.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError("nothing was removed: nobody can be asked", "--yes, or --dry-run")
    return input(f"remove {in_bytes(found.bytes)}? [y/N] ").strip().lower() in ("y", "yes")


def as_json(top: Path, found: Plan, removed: bool) -> dict[str, Any]:
    """What `slurmft clean --json` prints: runs_dir, items (path, kind, why, bytes), bytes (their
    sum), removed (whether they are gone), left_out (a line each)."""
    items = [
        {"path": str(i.path), "kind": i.kind, "why": i.why, "bytes": i.bytes} for i in found.items
    ]
    return {
        "runs_dir": str(top),
        "items": items,
        "bytes": found.bytes,
        "removed": removed,
        "left_out": found.left_out,
    }


def main(argv: list[str]) -> int:
    """`slurmft clean`"""
    arguments = parser().parse(argv)
    older_s = duration_s(arguments.older_than, "--older-than")
    top, kinds = resolve.folder(arguments.runs_dir), arguments.only or KINDS
    found = plan(top, kinds, older_s)
    if not arguments.json:
        for line in found.left_out:
            print(f"left out: {line}", file=sys.stderr)
        unfinished = f"runs that did not finish go after {arguments.older_than}"
        print(table(found) if found.items else f"nothing may go from {top}; {unfinished}")
    removes = bool(found.items) and not arguments.dry_run and confirmed(found, arguments.yes)
    if removes:
        gone = remove_all(found, plan(top, kinds, older_s))
        found = Plan(gone, found.left_out)
    if arguments.json:
        print(to_json(as_json(top, found, removes), indent=2))
    elif found.items and not arguments.dry_run:
        print(f"removed {in_bytes(found.bytes)}" if removes else "nothing was removed")
    return Exit.OK
