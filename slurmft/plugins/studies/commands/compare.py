"""Says whether one run is faster or better than another. It also shows what differs between them:
configuration, versions, hosts, code. Each is a run directory, or a folder with repeats of one run.
With three or more repeats on either side, repeats are compared; with fewer, the steps of the runs,
which do not show how much repeats would differ. Verdicts have a confidence of 95 %.

examples:
  slurmft compare runs/emotion-20261120-093012-a1b2c3 runs/emotion-20261120-101533-c3d4e5
  slurmft compare runs/fp32 runs/bf16                # folders with repeats
"""

from slurmft.cli.parser import Parser, print_json
from slurmft.core.errors import Exit
from slurmft.plugins.studies.compare import compare, describe_comparison


def parser() -> Parser:
    made = Parser("slurmft compare", __doc__)
    for name in "AB":
        made.add_argument(
            name.lower(), metavar=f"RUN_{name}", help="run (path or name), or folder of repeats"
        )
    return made.add_json("print the comparison as JSON")


def main(argv: list[str]) -> int:
    arguments = parser().parse(argv)
    found = compare(arguments.a, arguments.b)
    if arguments.json:
        return print_json(found)
    print("\n".join(describe_comparison(found)))
    return Exit.OK
