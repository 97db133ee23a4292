"""`python -m slurmft.submit`, which is `slurmft submit`.

Nothing imports this module: `from slurmft import submit` is a function, which an imported module of
that name would hide. The command is in slurmft/train/commands/submit.py.
"""

import sys

from slurmft.__main__ import console

if __name__ == "__main__":
    raise SystemExit(console(["submit", *sys.argv[1:]]))
