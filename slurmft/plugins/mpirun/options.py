"""The options of mpirun."""

# No `from __future__ import annotations`: options are read from the types of their fields.

from dataclasses import dataclass

from slurmft.core.options import Needs, option


@dataclass(frozen=True, kw_only=True, slots=True)
class MpiOptions:
    """Jobs by mpirun, on hosts of one's own."""

    hostfile: str | None = option(
        None,
        "file of hosts for --cluster mpirun, one a line; the first --nodes of them are used",
        affects="speed",
        at="submission",
        metavar="FILE",
        path="input",
        executes=True,  # on these hosts
        elsewhere=(
            "hostsfile",
            "machinefile",
        ),
    )
    dialect: str = option(
        "auto",
        "kind of mpirun: intel (also MPICH) or openmpi; auto: the one on the PATH",
        affects="speed",
        at="submission",
        choices=("auto", "intel", "openmpi"),
        read_with=(Needs("cluster", ("mpirun",)),),
    )
