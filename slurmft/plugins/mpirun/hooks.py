"""The hook of mpirun: its options are refused where nothing would read them."""

from slurmft.core.config import JobConfig
from slurmft.core.errors import UsageError
from slurmft.core.hooks import Hooks
from slurmft.plugins.mpirun.options import MpiOptions


class MpiRun(Hooks):
    """Checks the options of mpirun."""

    def check(self, job: JobConfig, cluster: str) -> None:
        hostfile = job.options_of(MpiOptions).hostfile
        # A rule of the declaration cannot say it: --cluster is no option of this plug-in.
        if hostfile is not None and cluster != "mpirun":
            raise UsageError(
                f"--hostfile {hostfile} needs --cluster mpirun: Slurm chooses the hosts by itself",
                "add --cluster mpirun, or leave --hostfile out",
            )
