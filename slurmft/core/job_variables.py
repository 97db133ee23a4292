"""The environment variables that the processes of one job hand to each other.

A user's program may submit another job, and a shell may have inherited them: to that other job they
would tell hosts, ports and an attempt that are not its own.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping

PUBLIC = (
    "SLURMFT_CLUSTERS",
    "SLURMFT_FILE_LOCKS",
    "SLURMFT_LISTEN",
    "SLURMFT_ON",
    "SLURMFT_REQUEST",
    "SLURMFT_RUN",
    "SLURMFT_SITE",
    "SLURMFT_SITE_OPTIONS",
    "SLURMFT_TITLE",
)
"""Variables that users, sites and connections set, or that users' commands read."""
OF_JOBS = (
    "SLURMFT_ATTEMPT",
    "SLURMFT_BACKEND",
    "SLURMFT_CORES",
    "SLURMFT_GPUS",
    "SLURMFT_HOSTS",
    "SLURMFT_LOCAL_NODE",
    "SLURMFT_MEMORY_FAILURES",
    "SLURMFT_NODE_COUNT",
    "SLURMFT_NODE_FOLDER",
    "SLURMFT_RENDEZVOUS_PORTS",
    "SLURMFT_RESERVED_PORT",
    "SLURMFT_START_PORT",
    "SLURMFT_RUN_DIR",
    "SLURMFT_RUN_INODE",
    "SLURMFT_SETUP",
    "SLURMFT_STACKS",
    "SLURMFT_STAGE",
    "SLURMFT_STAGED",
    "SLURMFT_STOPPING",
    "SLURMFT_STORE_SECRET",
    "SLURMFT_TAKES_LESS",
    "SLURMFT_WATCHER",
)
"""Variables of one job alone."""
OF_RANKS = (
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "WORLD_SIZE",
)
"""Variables by which torchrun tells a process its place among the ranks."""
_PREFIXES_OF_RANKS = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_")


def without_ranks(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables for a process that a rank starts, and that is none itself: libraries
    would let it join the others, and wait for it."""
    left = {}
    for name, value in variables.items():
        is_of_ranks = name in OF_RANKS or name.startswith(_PREFIXES_OF_RANKS)
        if not is_of_ranks and name not in OF_JOBS:
            left[name] = value
    return left


@contextlib.contextmanager
def outside_of_jobs() -> Iterator[None]:
    """Lets this process start jobs, in the block, as one that is in no job itself."""
    values = {name: os.environ.pop(name) for name in OF_JOBS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(values)
