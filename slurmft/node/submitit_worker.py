"""submitit's worker that loads no pickle that others could write.

`python -m slurmft.node.submitit_worker FOLDER` replaces `python -m submitit.core._submit FOLDER`.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

from slurmft.core import permissions
from slurmft.core.errors import Exit, run_main
from slurmft.node import signals


def load(path: str | Path) -> Any:
    """Unpickles a job.

    Raises:
        SlurmftError: somebody else could have written it.
    """
    return pickle.loads(permissions.read_own(Path(path)))


def main(argv: list[str]) -> int:
    """Runs the job in submitit's folder that the environment variables of submitit name."""
    # Before numpy, which submitit imports: its threads would take the stop signals, and submitit's
    # handlers drop them.
    signals.block()
    from submitit.core import submission, utils

    utils.DelayedSubmission.load = staticmethod(load)
    submission.process_job(argv[0])
    return Exit.OK


if __name__ == "__main__":
    raise SystemExit(run_main(lambda: main(sys.argv[1:])))
