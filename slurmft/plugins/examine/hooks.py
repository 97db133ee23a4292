"""The hook of `--preflight`: an examination of the nodes before a job's programs start."""

import os
from collections.abc import Mapping

from slurmft.core.config import JobConfig, RunConfig
from slurmft.core.errors import UsageError
from slurmft.core.hooks import Examination, Hooks
from slurmft.core.launchers import starts_ranks
from slurmft.node.rendezvous import LOCAL_NODE, Rendezvous
from slurmft.plugins.examine.options import PreflightOptions
from slurmft.runs.rundir import RunDir

NODES = 8
"""With `--preflight auto`, jobs of at least so many nodes have one: it is worth its seconds."""


class Examine(Hooks):
    """Examines the nodes of a job before its ranks start."""

    def check(self, job: JobConfig, cluster: str) -> None:
        # Whoever starts the ranks of all nodes at once can leave no node out.
        if job.options_of(PreflightOptions).preflight == "on" and starts_ranks(cluster):
            raise UsageError(
                f"--preflight on cannot be used with --cluster {cluster}",
                "use auto, or leave --preflight out",
            )

    def examine_node(
        self,
        config: RunConfig,
        run: RunDir,
        rendezvous: Rendezvous,
    ) -> Examination | None:
        if not is_due(config, os.environ):
            return None
        # only where there is one
        from slurmft.plugins.examine.preflight import Preflight

        return Preflight(run, rendezvous).passes


def is_due(config: RunConfig, environment: Mapping[str, str]) -> bool:
    """Tells if a job has a preflight. By default, simulated nodes have none: they share a
    machine."""
    preflight = config.job.options_of(PreflightOptions).preflight
    if preflight == "auto":
        return config.job.nodes >= NODES and LOCAL_NODE not in environment
    return preflight == "on"
