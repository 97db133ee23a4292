"""Processes on the login node that read and fill the caches of the hub."""

import os

from slurmft import locks
from slurmft.core.site import job_default


def environment_of_caches() -> dict[str, str]:
    """Returns the variables for a process that uses the caches of the hub.

    Its file locks are those of the jobs, as the site file has them: of another kind, a job and it
    would not see each other's.
    """
    variables = dict(os.environ)
    return variables | locks.environment(job_default("file_locks"), variables)
