"""`python -m slurmft.submit`, which is `slurmft submit`.

Nothing imports this module: `from slurmft import submit` is a function, which an imported module of
that name would hide. What both do is in dispatch.py.
"""

import sys

from slurmft.cli.submit import main
from slurmft.core.errors import run_main

if __name__ == "__main__":
    raise SystemExit(run_main(lambda: main(sys.argv[1:]), debug="--debug" in sys.argv))
