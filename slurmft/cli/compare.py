"""`slurmft compare`: what differs between two runs, and whether it is more than noise."""

from __future__ import annotations

from slurmft.cli.parser import Parser
from slurmft.core.errors import Exit, UsageError
from slurmft.core.files import to_json
from slurmft.studies.compare import as_json, cautions, compare, describe, differences, read

_DESCRIPTION = """\
Says what differs between two runs (configuration, versions, hosts, code), and whether one is faster
or more accurate by more than noise. Each is a run directory, or a folder with repeats of one run:
with three or more on either side, repeats are compared; with fewer, the steps of the runs, which
cannot know how much repeats would differ. A verdict is for 95 % confidence.
"""

EXAMPLES = """\
examples:
  slurmft compare runs/emotion-20261120-093012-a1b2 runs/emotion-20261120-101533-c3d4
  slurmft compare runs/fp32 runs/bf16                # folders with repeats
"""


def main(argv: list[str]) -> int:
    """`slurmft compare RUN_A RUN_B`."""
    parser = Parser(prog="slurmft compare", description=_DESCRIPTION, epilog=EXAMPLES)
    for name in "AB":
        parser.add_argument(
            name.lower(), metavar=f"RUN_{name}", help="run (path or name), or folder of repeats"
        )
    parser.add_argument("--seed", type=int, default=0, help="of the resampling (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    arguments = parser.parse(argv)
    a, b = read("A", arguments.a), read("B", arguments.b)
    if shared := {run.path.resolve() for run in a.runs} & {run.path.resolve() for run in b.runs}:
        raise UsageError(
            f"{str(min(shared))!r} is in A and in B", "give two runs, or folders that share none"
        )
    different = differences(a, b)
    findings = compare(a, b, arguments.seed)
    warnings = [*a.notes, *b.notes, *cautions(a, b)]
    if arguments.json:
        print(to_json(as_json(a, b, different, findings, warnings), indent=2))
    else:
        print("\n".join(describe(a, b, different, findings, warnings)))
    return Exit.OK
