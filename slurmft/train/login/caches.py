"""Processes on the login node that read and fill the caches of the hub."""

import os

from slurmft import locks
from slurmft.core.site import job_default


def environment_of_caches(file_locks: str | None = None) -> dict[str, str]:
    """Returns the variables for a process that uses the caches of the hub.

    Its file locks are those of the jobs: of another kind, a job and it would not see each other's.

    Args:
        file_locks: the job's, where there is one; None: as the site file has them.
    """
    variables = dict(os.environ)
    if file_locks is None:
        file_locks = job_default("file_locks")
    return variables | locks.environment(file_locks, variables)
