"""A real Slurm of several nodes on one machine, for the tests and for trying things by hand."""

from tests.support.cluster.cluster import Cluster
from tests.support.cluster.system import ClusterError

__all__ = ["Cluster", "ClusterError"]
