"""The option of preflights."""

# No `from __future__ import annotations`: options are read from the types of their fields.

from dataclasses import dataclass

from slurmft.core.options import option


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightOptions:
    """Examination of the nodes before the program."""

    preflight: str = option(
        "auto",
        "examine all nodes before the program starts, and go on without bad ones; auto: from 8 "
        "nodes on; under Slurm",
        affects="nothing",
        at="node",
        choices=("auto", "on", "off"),
    )
