"""Reports: what a node finds of itself, and of its connections to other nodes.

All examinations read them: `slurmft doctor`, its parts, and the preflight of a job. They travel as
JSON (`dataclasses.asdict`), and `slurmft.core.decode` reads them.
"""

from dataclasses import dataclass, field

from slurmft.core.filesystem import FileSystem, Room
from slurmft.node.hardware import Gpu, Network


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderReport:
    """A folder, as one node sees it."""

    path: str
    file_system: FileSystem | None = None
    room: Room | None = None
    problem: str | None = None
    """The reason why file system and room are unknown, as where the folder does not answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """Hardware and software of a node, as far as a job has them."""

    cpu_model: str
    cpu_flags: tuple[str, ...]
    """CPU flags that matter to training."""
    cpus: str
    """Logical CPUs in the affinity mask, as a list of the kernel: "0-63"."""
    cpu_count: int
    """Number of logical CPUs in the affinity mask."""
    slurm_cpus: int | None
    """Number of CPUs that Slurm granted; None: not a Slurm job."""
    quota_cpus: float | None
    """CPU quota of the cgroup; None: no quota."""
    cores: int
    """Number of physical cores to compute on."""
    memory_mib: int
    available_mib: int
    gpus: tuple[Gpu, ...]
    networks: tuple[Network, ...]
    """Interfaces that are up, the fastest first."""
    software: dict[str, str | None]
    """Versions of Python and of packages."""
    reaches_hub: bool
    profile: str
    """The profile with which a run would use the node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkReport:
    """A node's connections to another node."""

    problem: str | None = None
    """The reason why the other node's name has no address; None: it has one."""
    ports: dict[str, str | None] = field(default_factory=dict)
    """Purpose of a port -> the reason why it cannot be reached, or None."""
    ahead_s: float | None = None
    """How far the clock there is ahead of the one here."""
    round_trip_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Products:
    """Matrix products, as `matmul` measured them in a process of its own."""

    tflop_s: tuple[float, ...] = ()
    """Speed of each GPU, or of one core."""
    problems: tuple[str, ...] = ()
    """Errors of GPUs, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """A node as it sees itself."""

    host: str
    """Slurm's name for the node."""
    time_s: float
    """The node's clock when it reported, as `time.time()`."""
    gpus_granted: int | None
    """Number of GPUs that Slurm granted; None: not known."""
    gpus_visible: int
    gpu_errors: tuple[str, ...]
    """Hardware errors of GPUs, in words."""
    folders: dict[str, FolderReport]
    """Purpose of a folder -> the folder."""
    tflop_s: float | None = None
    """Speed of the slowest GPU, or of one core, in matrix products; None: not measured."""
    links: dict[str, LinkReport] = field(default_factory=dict)
    """Node -> the connections to it."""
    system: System | None = None
    """None where nobody asked for it: a preflight does not."""
