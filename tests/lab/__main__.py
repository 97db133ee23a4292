"""`python -m tests.lab [NAME ...]`: sets file systems up, checks them, prints the tables.

What was found is kept in results/measured/file_systems/NAME.json; the tables of docs/file-locks.md
are made of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path

from slurmft.core.files import write_json
from slurmft.plugins.examine.agents import AgentError
from tests.lab import tables
from tests.lab.bench import bench
from tests.lab.checks import CHECKS
from tests.lab.hosts import LabError
from tests.lab.labs import LABS, make


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(LABS))
    parser.add_argument(
        "--only", action="append", metavar="CHECK", help=", ".join(CHECKS)
    )
    parser.add_argument(
        "--output", type=Path, default=tables.FOLDER, help="%(default)s"
    )
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.names:
        examine(name, arguments.only or list(CHECKS), arguments.output / f"{name}.json")
    text = tables.page(tables.PAGE.read_text(), arguments.output)
    if arguments.output == tables.FOLDER:
        tables.PAGE.write_text(text)
    print(text.partition("<!-- labs -->")[2].partition("<!-- end")[0])


def examine(name: str, checks: list[str], path: Path) -> None:
    """Makes some checks on a file system; of the others, what was found before stays."""
    found = tables.load(path)
    with make(name) as lab:
        found |= {
            "file_system_name": lab.title,
            "version": lab.version,
            "options": lab.options,
        }
        found["date"] = time.strftime("%Y-%m-%d")
        for check in checks:
            began = time.monotonic()
            try:
                with bench(lab) as made:
                    found[check] = CHECKS[check](made)
            except (AgentError, LabError, NotYet) as error:
                print(f"{name} {check}: {error}", file=sys.stderr, flush=True)
                continue
            said = f"{name} {check} ({time.monotonic() - began:.0f} s)"
            print(said, json.dumps(found[check], indent=1), file=sys.stderr, flush=True)
            write_json(path, found)


if __name__ == "__main__":
    main()
