"""A question about launchers that packages below `slurmft.cluster.launcher` ask, too."""

from slurmft.core import plugins


def starts_ranks(cluster: str) -> bool:
    """Returns whether a launcher starts every rank itself, without the task of a node.

    `cluster` is what --cluster says. "auto" stands for Slurm or this machine, where tasks of nodes
    start the ranks.
    """
    if cluster == "auto":
        return False
    entry = plugins.get(plugins.LAUNCHERS, cluster, "--cluster")
    return bool(entry.load().STARTS_RANKS)
