"""One rank of a training run: `python -m slurmft.train.rank RUN_DIR`, started by torchrun."""

from __future__ import annotations

import gc
import sys

from slurmft.core import process
from slurmft.job import attach
from slurmft.job.process import end


def main(run_dir: str) -> None:
    """Trains as one rank, to the end or to an agreed stop."""
    with attach(run_dir) as job:
        # Heavy imports: what fails in them is recorded, too. Collections of garbage would find
        # none, and take a third of the time.
        gc.disable()
        from slurmft.train.trainer import Training

        gc.freeze()
        gc.enable()
        Training(job, imports_s=process.age_s()).run()
    end(0)


if __name__ == "__main__":
    main(sys.argv[1])
