"""What the fake Slurm has: four nodes, two partitions, and its times.

The nodes are addresses of this machine, so that programs on several of them meet without a name
service. The rest is what tests/support/cluster declares to the real Slurm.
"""

from __future__ import annotations

from dataclasses import dataclass

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")
CPUS_PER_NODE = 4
MEMORY_MB = 4000
CLUSTER_NAME = "slurmft"
MAX_ARRAY_SIZE = 1001
VERSION = "slurm-wlm 22.05.8"

KILL_WAIT_S = 10.0
"""Between SIGTERM and SIGKILL to a job that is ended."""
REQUEUE_DELAY_S = 1.0
"""How long a requeued job waits before it may start again."""
MIN_JOB_AGE_S = 300.0
"""How long the controller knows a job after its end."""


@dataclass(frozen=True)
class Partition:
    """A partition of all nodes."""

    name: str
    tier: int
    """Jobs of a higher tier start first, and preempt those of a lower one."""
    max_time_min: int = 60
    default_time_min: int = 10


PARTITIONS = {p.name: p for p in (Partition("batch", 1), Partition("urgent", 10))}
DEFAULT_PARTITION = "batch"
