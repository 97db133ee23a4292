"""What `--preflight` does on the way of a job."""

import os

from slurmft.core.config import RunConfig
from slurmft.core.hooks import Examination, Hooks
from slurmft.node.rendezvous import Rendezvous
from slurmft.runs.rundir import RunDir


class Examine(Hooks):
    """Examines the nodes of a job before its ranks start."""

    def examine_node(
        self, config: RunConfig, run: RunDir, rendezvous: Rendezvous
    ) -> Examination | None:
        from slurmft.plugins.examine import preflight

        if not preflight.is_due(config, os.environ):
            return None
        return preflight.Preflight(run, rendezvous).passes
