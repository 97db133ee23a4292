"""The options of staged environments."""

# No `from __future__ import annotations`: options are read from the types of their fields.

from dataclasses import dataclass

from slurmft.core.errors import UsageError
from slurmft.core.options import Needs, option


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOptions:
    """The Python environment on the nodes' own disks."""

    stage_env: bool = option(
        False,
        "copy the Python environment to the nodes' own disks first; under Slurm",
        affects="speed",
        at="node",
    )
    stage_dir: str | None = option(
        None,
        "folder on the nodes' own disks for --stage-env (default: $SLURM_TMPDIR, $TMPDIR, /tmp)",
        affects="speed",
        at="node",
        metavar="DIR",
        read_with=(Needs("stage_env"),),
        path="there",
    )

    def __post_init__(self) -> None:
        # There is no folder on the login node from which a relative path would be meant.
        if self.stage_dir is not None and not self.stage_dir.startswith("/"):
            raise UsageError(f"--stage-dir {self.stage_dir} must be an absolute path")
