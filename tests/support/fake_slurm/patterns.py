"""The names of output files: %j, %A, %a, %x, %N, and %t and %s of srun."""

from __future__ import annotations

import os
import re

from tests.support.fake_slurm.jobs import Job


def filled(pattern: str, job: Job, **more: str) -> str:
    """Returns the file that a pattern means for a job; `more` are further letters."""
    values = {
        "j": str(job.id),
        "A": str(job.array or job.id),
        "a": str(job.task if job.array else 4294967294),
        "x": job.name,
        "N": job.hosts[0] if job.hosts else "",
        "n": "0",
        "t": "0",
        "s": "batch",
        "%": "%",
    } | more
    name = re.sub(r"%(.)", lambda match: values.get(match[1], match[0]), pattern)
    return os.path.join(job.work_dir, name)
