"""How a run uses a node: processes, cores, and tuned environment variables.

Decided on the node itself, in its allocation, without importing torch. Every variable comes with
its reason; values that the user has set take precedence.
"""

import contextlib
import glob
import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from slurmft.core.config import JobConfig
from slurmft.core.errors import SlurmftError, UsageError
from slurmft.node.hardware import Cpu, Hardware, as_list, numbers

CORES = "SLURMFT_CORES"
"""The cores of each process of a node, as "0-3;4-7"; for the ranks."""
GPUS = "SLURMFT_GPUS"
"""The GPUs that torch has to see on a node that has some, as "4 NVIDIA"; 0: none is to be used."""

_TCMALLOC = ("libtcmalloc.so", "libtcmalloc.so.4", "libtcmalloc_minimal.so.4")
_IOMP = ("libiomp5.so",)
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Settings of torch's allocator on GPUs, and their name up to torch 2.8."""


class Setting(NamedTuple):
    """One environment variable of the training processes."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """How a node is used."""

    name: str
    """gpu, xeon or cpu."""
    hardware: Hardware
    nproc: int
    """Processes on the node."""
    cores: tuple[tuple[int, ...], ...]
    """Logical CPUs of each process, one for each physical core that computes."""
    comm_cores: tuple[tuple[int, ...], ...]
    """Logical CPUs of each process that are reserved for communication."""
    pinned: bool
    """Whether processes are bound to their cores."""
    pinning: str
    """Why, or why not."""
    uses_ccl: bool = False
    """Whether the collectives are oneCCL's."""

    def settings(self) -> list[Setting]:
        """The variables that the profile sets."""
        values = {
            "OMP_NUM_THREADS": max(1, min(len(cores) for cores in self.cores)),
            "TOKENIZERS_PARALLELISM": "true",
        }
        if self.pinned:
            pairs = zip(self.cores, self.comm_cores, strict=True)
            values[CORES] = ";".join(as_list(own + comm) for own, comm in pairs)
        gpus = self.hardware.gpus
        if gpus:
            values[GPUS] = f"{len(gpus)} {gpus[0].vendor}" if self.name == "gpu" else "0"
        if self.name == "gpu" and gpus[0].vendor == "NVIDIA":
            is_old = importlib.metadata.version("torch").startswith("2.8.")
            values[_ALLOCATOR[is_old]] = "expandable_segments:True"
        if self.name != "gpu":
            values |= self._memory() | {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": 512} | self._ccl()
        reasons = _REASONS | {CORES: self.pinning}
        return [Setting(name, str(value), reasons[name]) for name, value in values.items()]

    def _memory(self) -> dict[str, Any]:
        """tcmalloc, or glibc's own settings; and on Xeons Intel's OpenMP: libraries that must be
        loaded before Python, where this machine has them."""
        tcmalloc = find_library(_TCMALLOC)
        iomp = find_library(_IOMP) if self.name == "xeon" else None
        found: dict[str, Any] = {}
        if tcmalloc or iomp:
            found["LD_PRELOAD"] = ":".join(filter(None, (tcmalloc, iomp)))
        if iomp:
            found["KMP_BLOCKTIME"] = 1
        if iomp and self.pinned:  # else the processes of a node would bind to the same cores
            found |= {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_HW_SUBSET": "1T"}
        if not tcmalloc:
            found |= {"MALLOC_MMAP_MAX_": 0, "MALLOC_TRIM_THRESHOLD_": 2**40}
        return found

    def _ccl(self) -> dict[str, Any]:
        """oneCCL under torchrun, which sets nothing for it."""
        if not self.uses_ccl:
            return {}
        found = {"CCL_ATL_TRANSPORT": "ofi", "CCL_PROCESS_LAUNCHER": "none"}
        if not (workers := len(self.comm_cores[0])):
            return found | {"CCL_WORKER_OFFLOAD": 0}
        affinity = ",".join(str(cpu) for cores in self.comm_cores for cpu in cores)
        return found | {"CCL_WORKER_COUNT": workers, "CCL_WORKER_AFFINITY": affinity}


_REASONS = {
    "OMP_NUM_THREADS": "compute cores of each process",
    "TOKENIZERS_PARALLELISM": "one process tokenizes for all",
    GPUS: "GPUs that torch has to see on this node; 0: the ranks compute on CPUs",
    **dict.fromkeys(_ALLOCATOR, "packed batches have many sizes: memory of one serves the next"),
    "LD_PRELOAD": "tcmalloc: fewer page faults in training; on Xeons Intel's OpenMP",
    "KMP_BLOCKTIME": "idle threads sleep after 1 ms",
    "KMP_AFFINITY": "a thread stays on its core",
    "KMP_HW_SUBSET": "one thread a physical core",
    # glibc returns a large tensor's memory to the kernel, and later gets it again, page by page.
    "MALLOC_MMAP_MAX_": "large tensors reuse memory: no page faults in every step (no tcmalloc)",
    "MALLOC_TRIM_THRESHOLD_": "freed memory is kept for the next step",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "packed batches have many sizes, and oneDNN keeps the code "
    "for past ones in memory",
    "CCL_ATL_TRANSPORT": "MPI's needs mpirun",
    "CCL_PROCESS_LAUNCHER": "torchrun starts the ranks",
    "CCL_WORKER_OFFLOAD": "no core is free for a thread that waits for messages by polling",
    "CCL_WORKER_COUNT": "communication threads of each process",
    "CCL_WORKER_AFFINITY": "the cores reserved for them",
}


def choose(
    hardware: Hardware,
    job: JobConfig,
    *,
    uses_ccl: bool = False,
    part: tuple[int, int] | None = None,
) -> Profile:
    """How a run uses a node; UsageError where the node does not have what was asked for.

    Args:
        job: `--profile`, `--backend` and `--nproc-per-node` are read.
        uses_ccl: the collectives are oneCCL's, which needs cores of its own.
        part: index and number of the simulated nodes that share this machine.
    """
    name = name_of(hardware, job)
    places = hardware.places("numa" if name == "xeon" else "socket")
    nproc = job.nproc_per_node or (_usable_gpus(hardware) if name == "gpu" else len(places))
    if part is not None and job.nproc_per_node is None and name != "gpu":
        nproc = 1  # a part of a machine has at most one socket
    _check_processes(hardware, name, nproc, job, part)
    cores = list(hardware.cores)
    if part is not None:
        index, count = part
        cores = _slice(cores, index, count) or cores[:1]
    shares = _near_gpus(hardware, nproc) if name == "gpu" else None
    shares = shares or [_slice(cores, i, nproc) or cores[:1] for i in range(nproc)]
    pinned, pinning = _pinning(hardware, nproc, cores, part)
    # Of cores that are not certainly this job's, none can be set aside.
    gives = uses_ccl and (job.nodes > 1 or nproc > 1) and pinned
    comm = [_comm(share) if gives else 0 for share in shares]
    shared = [(tuple(cpu.number for cpu in s), n) for s, n in zip(shares, comm, strict=True)]
    return Profile(
        name=name,
        hardware=hardware,
        nproc=nproc,
        cores=tuple(own[: len(own) - n] for own, n in shared),
        comm_cores=tuple(own[len(own) - n :] for own, n in shared),
        pinned=pinned,
        pinning=pinning,
        uses_ccl=uses_ccl,
    )


def name_of(hardware: Hardware, job: JobConfig) -> str:
    """The requested profile, if this node supports it; auto: the one that fits the node."""
    asked = job.profile
    if asked == "gpu" and not hardware.gpus:
        raise UsageError(
            f"--profile gpu, but this job sees no GPU on {hardware.host}: looked at "
            "CUDA_VISIBLE_DEVICES and its like, /dev/nvidia*, /sys/class/kfd and /sys/class/drm",
            "request GPUs (--gpus-per-node), or use --profile auto",
        )
    if asked == "xeon" and "avx512f" not in hardware.flags:
        raise UsageError(
            f"--profile xeon, but the CPU of {hardware.host} ({hardware.model}) has no AVX-512",
            "use --profile cpu",
        )
    if asked != "auto":
        return asked
    if hardware.gpus and job.backend not in ("gloo", "ccl"):
        return "gpu"
    intel = hardware.vendor == "GenuineIntel" and "avx512f" in hardware.flags
    return "xeon" if intel else "cpu"


def _usable_gpus(hardware: Hardware) -> int:
    """How many GPUs processes can use together: of MIG instances CUDA shows a process the first
    one alone, and NCCL does not connect two of one GPU."""
    is_mig = any(gpu.name.startswith("MIG-") for gpu in hardware.gpus)
    return 1 if is_mig else len(hardware.gpus)


def _check_processes(
    hardware: Hardware, name: str, nproc: int, job: JobConfig, part: tuple[int, int] | None
) -> None:
    usable = _usable_gpus(hardware)
    # mpirun may show each rank a GPU of its own: the ranks find out.
    if name == "gpu" and nproc > usable and not (job.cluster == "mpirun" and usable == 1):
        of_mig = ", as MIG instances, of which torch and NCCL can use one a node"
        mig = of_mig if usable < len(hardware.gpus) else ""
        raise UsageError(
            f"--nproc-per-node {nproc}, but {hardware.host} has {len(hardware.gpus)} GPUs{mig}",
            "each process needs a GPU of its own; leave the flag out to use all of them",
        )
    if name != "gpu" and part is None and nproc > len(hardware.cores):
        raise UsageError(
            f"--nproc-per-node {nproc}, but {hardware.host} gives this job "
            f"{len(hardware.cores)} core(s)",
            "request more cores (--cpus-per-task, --exclusive), or start fewer processes",
        )


def _slice(cores: list[Cpu], index: int, count: int) -> list[Cpu]:
    """One of `count` equal consecutive parts; a remainder belongs to none."""
    size = len(cores) // count
    return cores[index * size : (index + 1) * size]


def _near_gpus(hardware: Hardware, nproc: int) -> list[list[Cpu]] | None:
    """For each GPU its share of the cores near it; None: which are near is not known."""
    gpus = hardware.gpus[:nproc]
    if len(gpus) < nproc or not all(gpu.near_cpus for gpu in gpus):
        return None
    shares = []
    for gpu in gpus:
        same = [other for other in gpus if other.near_cpus == gpu.near_cpus]
        near = [core for core in hardware.cores if core.number in gpu.near_cpus]
        shares.append(_slice(near, same.index(gpu), len(same)))
    return shares if all(shares) else None


def _comm(share: list[Cpu]) -> int:
    """How many cores of a process are reserved for communication."""
    return max(1, min(4, len(share) // 8)) if len(share) > 1 else 0


def _pinning(
    hardware: Hardware, nproc: int, cores: list[Cpu], part: tuple[int, int] | None
) -> tuple[bool, str]:
    """Whether to bind processes to cores, and why: only to cores that are certainly this job's."""
    if part is not None:
        return False, "not bound: simulated nodes share this machine"
    if len(cores) < nproc:
        return False, "not bound: more processes than cores"
    if len(hardware.cpus) == hardware.machine_cpus and not hardware.is_whole_node:
        return False, "not bound: other jobs may share the node, and no mask says which cores"
    return True, "each process on cores of its own"


def merge(settings: list[Setting], environment: Mapping[str, str]) -> dict[str, str]:
    """The settings as variables, without those that the user has set, even if to nothing."""
    return {s.name: s.value for s in settings if s.name not in environment}


def describe(profile: Profile, environment: Mapping[str, str]) -> list[str]:
    """A line for each variable: its value, and why."""
    lines = []
    for setting in profile.settings():
        is_yours = setting.name in environment
        why = f"yours (else {setting.value})" if is_yours else setting.reason
        value = environment.get(setting.name, setting.value)
        lines.append(f"{setting.name}={value}  # {why}")
    if not profile.pinned:
        lines.append(f"# {profile.pinning}")
    return lines


def find_library(names: tuple[str, ...]) -> str | None:
    """A shared library where Debian, other distributions, conda and PyPI put it."""
    import sysconfig  # 3 ms: only a node looks for libraries

    multiarch = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    folders = [
        f"{sys.prefix}/lib",
        f"{os.environ.get('CONDA_PREFIX') or sys.prefix}/lib",
        f"/usr/lib/{multiarch}",
        "/usr/lib64",
        "/usr/local/lib",
        "/usr/lib",
        *sorted(glob.glob("/opt/intel/oneapi/compiler/latest/lib")),
    ]
    paths = (f"{folder}/{name}" for folder in folders for name in names)
    # The loader splits LD_PRELOAD at spaces and colons.
    return next((p for p in paths if os.path.exists(p) and not set(p) & set(" :")), None)


@contextlib.contextmanager
def all_cores(environment: Mapping[str, str]) -> Iterator[None]:
    """Lets this thread, and those that it starts meanwhile, run on the cores of all the processes
    of its node: for work that the others wait for."""
    own = os.sched_getaffinity(0)
    wide = numbers(environment.get(CORES, "").replace(";", ","))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, own | set(wide))
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def bind_rank(environment: Mapping[str, str]) -> None:
    """Binds this rank, and the threads that it will start, to its cores (`CORES`)."""
    lists = environment.get(CORES)
    if lists is None:
        return
    cores = lists.split(";")[int(environment["LOCAL_RANK"])]
    try:
        os.sched_setaffinity(0, numbers(cores))
    except OSError as error:
        raise SlurmftError(
            f"cannot bind this rank to the cores {cores}: {error.strerror}",
            f"cores that it may use: {as_list(os.sched_getaffinity(0))}; unset "
            f"{CORES}, or set it to lists of these",
        ) from None
