"""The thresholds of all examinations: of `slurmft doctor` and of the preflight of a job.

Beyond a `warning` jobs run, but slower, or not for long. Beyond a `failure` they do not run, or not
worth the time: a preflight excludes such a node.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Threshold:
    """A pair of limits."""

    warning: float
    failure: float


DEVICE_SPEED = Threshold(warning=0.8, failure=0.5)
"""A device is slow below these shares of the median speed."""
CLOCK_SKEW_S = Threshold(warning=0.5, failure=30.0)
"""Failures of ranks are ordered by their times, to half a second. Credentials of munge and of the
hub's addresses expire within minutes."""

# Only warnings: jobs run.
NODE_LINK = 0.5
"""A node is slow if all its links are below this share of the median. Links of one switch differ
more than devices."""
SINGLE_LINK = 0.25
"""A link between two fast nodes is slow below this share."""
MEMORY = 0.9
"""A node has little memory below this share of the median."""
FREE_BYTES = 5 * 2**30
FREE_SHM_BYTES = 2**29
FREE_INODES = 10_000
"""A folder with less free space than that is nearly full."""

XID_AGE_S = 24 * 3600
"""Errors of GPUs count for so long."""
