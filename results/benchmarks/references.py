"""How much does slurmft differ from what others compute? Each check compares it with a reference
that it did not write, on small models and data that are made on the spot.

    pip install '.[test,references]'
    python results/benchmarks/references.py                      # every check; half an hour
    python results/benchmarks/references.py classes words        # these alone
    python results/benchmarks/references.py scores_of_evaluate --evaluate DIR

Scripts of evaluate's metrics come from the hub, or from DIR, a clone of huggingface/evaluate. A
check whose packages are not installed is left out, and so the table says. It ends with 1 where a
difference is larger than rounding. docs/tasks.md shows the table.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from comparisons.all_checks import CHECKS
from comparisons.table import Check, lines
from harness import load, parser, provenance, save

PACKAGES = (
    "accelerate", "evaluate", "lightning", "peft", "rouge-score", "sacrebleu", "scikit-learn",
    "scipy", "seqeval", "torch", "transformers", "trl",
)  # fmt: skip


def main(names: list[str]) -> int:
    be_quiet()
    too_large = []
    for name in names or CHECKS:
        check = CHECKS[name]
        missing = [package for package in check.needs if find_spec(package) is None]
        if missing:
            print(f"{name}: left out, as {', '.join(missing)} is not installed")
            note(name, None)
            continue
        began = time.monotonic()
        rows = rows_of(check)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        too_large += [row["check"] for row in rows if row["difference"] > check.limit]
        date = provenance()["date"]
        facts = {"section": check.section, "limit": check.limit, "date": date}
        note(name, facts | {"rows": rows})
    for line in lines(load("references")["checks"]):
        print(line)
    if too_large:
        print(f"larger than rounding: {', '.join(too_large)}")
    return int(bool(too_large))


def note(name: str, facts: dict[str, Any] | None) -> None:
    """Writes what a check has shown beside what others have; None: it is left out."""
    measured = load("references").get("checks", {}) | {name: facts}
    # In the order of the table, whichever were run now.
    checks = {each: measured[each] for each in CHECKS if measured.get(each)}
    left_out = [each for each in CHECKS if each not in checks]
    versions = provenance()["versions"] | package_versions()
    save("references", {"versions": versions, "left_out": left_out, "checks": checks})


def be_quiet() -> None:
    """Leaves the output to the rows."""
    import datasets
    from transformers.utils import logging

    datasets.disable_progress_bars()
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def rows_of(check: Check) -> list[dict[str, Any]]:
    """Runs a check in a folder of its own."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in check.compare(Path(folder)):
            print(f"  {row.check}: {row.difference:.1e}", flush=True)
            rows.append(vars(row))
    return rows


def package_versions() -> dict[str, str]:
    """Returns the versions of the references that are installed."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("names", nargs="*", choices=[*CHECKS, []], metavar="CHECK")
    arguments.add_argument("--evaluate", type=Path, metavar="DIR")
    asked = arguments.parse_args()
    if asked.evaluate:
        os.environ["EVALUATE_SCRIPTS"] = str(asked.evaluate.absolute())
    sys.exit(main(asked.names))
