"""How a run uses a node: processes, cores, and tuned environment variables.

Decided on the node itself, in its allocation, without importing torch. Every variable comes with
its reason; values that the user has set take precedence.
"""

import contextlib
import glob
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from slurmft.core.config import JobConfig
from slurmft.core.errors import SlurmftError, UsageError
from slurmft.core.text import numbers
from slurmft.node.hardware import Cpu, Hardware, as_list

CORES = "SLURMFT_CORES"
"""The cores of each process of a node, as "0-3;4-7"; for the ranks."""
GPUS = "SLURMFT_GPUS"
"""The GPUs that torch has to see on a node that has some, as "4 NVIDIA"; 0: none is to be used."""
BACKEND = "SLURMFT_BACKEND"
"""The backend of the collectives, where the task of the node has decided; else --backend's value.
For the ranks."""
USE_CPU = "ACCELERATE_USE_CPU"
"""Accelerate's variable: processes on CPUs form a process group only with it."""

_TCMALLOC = ("libtcmalloc.so", "libtcmalloc.so.4", "libtcmalloc_minimal.so.4")
_IOMP = ("libiomp5.so",)
# Settings of torch's allocator on GPUs; the second is their name up to torch 2.8.
_ALLOCATOR = "PYTORCH_ALLOC_CONF"
_OLD_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
# With oneCCL, one core of each eight of a process is reserved for communication, up to four.
_CORES_PER_COMM_CORE = 8
_MOST_COMM_CORES = 4


class Setting(NamedTuple):
    """An environment variable of the training processes."""

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
    """Number of processes on the node."""
    cores: tuple[tuple[int, ...], ...]
    """Logical CPUs of each process, one for each physical core that computes."""
    comm_cores: tuple[tuple[int, ...], ...]
    """Logical CPUs of each process that are reserved for communication."""
    pinned: bool
    """True if processes are bound to their cores."""
    pinning: str
    """The reason why they are bound or not."""
    uses_ccl: bool = False
    """True if the collectives are oneCCL's."""

    def settings(self) -> list[Setting]:
        """Lists the variables that the profile sets."""
        values: dict[str, Any] = {
            # One value for all processes: the smallest share, so that none has too many threads.
            "OMP_NUM_THREADS": max(1, min(len(cores) for cores in self.cores)),
            "TOKENIZERS_PARALLELISM": "true",
            # glibc asks again after 5 s, and torch's stores ask for a name at every connection, on
            # the server one after the other. Five times: as long in all as before, half of it where
            # nobody answers.
            "RES_OPTIONS": "timeout:1 attempts:5",
        }
        if self.pinned:
            values[CORES] = self._cores_of_processes()
        if self.hardware.gpus:
            values |= self._gpu_variables()
        if self.name != "gpu":
            # The CPUs compute: their memory and libraries matter.
            values[USE_CPU] = "true"
            values |= self._memory_variables()
            values["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = 512
            values |= self._ccl_variables()
        reasons = _REASONS | {CORES: self.pinning}
        settings = []
        for name, value in values.items():
            settings.append(Setting(name, str(value), reasons[name]))
        return settings

    def _cores_of_processes(self) -> str:
        # Without those for communication: oneCCL's threads poll, and bind themselves.
        return ";".join(as_list(compute_cores) for compute_cores in self.cores)

    def _gpu_variables(self) -> dict[str, Any]:
        if self.name != "gpu":
            return {GPUS: 0}
        gpus = self.hardware.gpus
        vendor = gpus[0].vendor
        variables = {GPUS: f"{len(gpus)} {vendor}"}
        if vendor == "NVIDIA":
            # 8 ms of each dry run: only nodes with GPUs need it
            import importlib.metadata

            name = _ALLOCATOR
            if importlib.metadata.version("torch").startswith("2.8."):
                name = _OLD_ALLOCATOR
            variables[name] = "expandable_segments:True"
        return variables

    def _memory_variables(self) -> dict[str, Any]:
        """Returns the variables for tcmalloc, or glibc's own settings; on Xeons also for Intel's
        OpenMP. These libraries must be loaded before Python, where this machine has them."""
        tcmalloc = find_library(_TCMALLOC)
        iomp = None
        if self.name == "xeon":
            iomp = find_library(_IOMP)
        variables: dict[str, Any] = {}
        if tcmalloc or iomp:
            variables["LD_PRELOAD"] = ":".join(filter(None, (tcmalloc, iomp)))
        if iomp:
            variables["KMP_BLOCKTIME"] = 1
        # else the processes of a node would bind to the same cores
        if iomp and self.pinned:
            variables["KMP_AFFINITY"] = "granularity=fine,compact,1,0"
            variables["KMP_HW_SUBSET"] = "1T"
        if not tcmalloc:
            variables["MALLOC_MMAP_MAX_"] = 0
            variables["MALLOC_TRIM_THRESHOLD_"] = 2**40
        return variables

    def _ccl_variables(self) -> dict[str, Any]:
        """Returns the variables for oneCCL under torchrun, which sets none for it."""
        if not self.uses_ccl:
            return {}
        variables: dict[str, Any] = {
            "CCL_ATL_TRANSPORT": "ofi",
            "CCL_PROCESS_LAUNCHER": "none",
        }
        worker_count = len(self.comm_cores[0])
        if worker_count == 0:
            variables["CCL_WORKER_OFFLOAD"] = 0
        else:
            cpus = [str(cpu) for cores in self.comm_cores for cpu in cores]
            variables["CCL_WORKER_COUNT"] = worker_count
            variables["CCL_WORKER_AFFINITY"] = ",".join(cpus)
        return variables


_REASONS = {
    "OMP_NUM_THREADS": "compute cores of each process",
    "TOKENIZERS_PARALLELISM": "one process tokenizes for all",
    "RES_OPTIONS": "DNS is asked again after 1 s: torch asks for the name of each peer",
    GPUS: "GPUs that torch has to see on this node; 0: the ranks compute on CPUs",
    _ALLOCATOR: "packed batches have many sizes: memory of one serves the next",
    _OLD_ALLOCATOR: "packed batches have many sizes: memory of one serves the next",
    USE_CPU: "Accelerate, and Trainer by it: without it each process trains a copy of its own",
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
    for_rank: bool = False,
    is_bound: bool = False,
) -> Profile:
    """Decides how a run uses a node.

    Args:
        job: `--profile`, `--backend` and `--nproc-per-node` are read.
        uses_ccl: the collectives are oneCCL's, which needs cores of its own.
        part: index and number of the simulated nodes that share this machine.
        for_rank: one rank of the node asks, not the task that starts them all.
        is_bound: MPI has bound this rank to the cores that it sees, as the user wants it.

    Raises:
        UsageError: the node does not have what was asked for.
    """
    name = name_of(hardware, job)
    nproc = job.nproc_per_node
    if nproc is None:
        nproc = _default_nproc(hardware, name, is_part=part is not None)
    # The cores of one rank are not those of all.
    if name == "gpu" or not is_bound:
        _check_processes(hardware, name, nproc, part, for_rank)
    cores = _cores_of_node(hardware, part)
    if is_bound:
        # What it sees is its own share. It needs none of the other ranks.
        shares = [cores] * nproc
    else:
        shares = _shares(hardware, name, nproc, cores)
    pinned, pinning = _pinning(hardware, nproc, cores, part)
    if is_bound:
        pinned = True
        pinning = "each process on the cores that MPI has bound it to"
    # Cores can be set aside only if they are certainly this job's.
    communicates = job.nodes > 1 or nproc > 1
    reserves_cores = uses_ccl and pinned and communicates
    compute_cores, comm_cores = _split(shares, reserves_cores)
    return Profile(
        name=name,
        hardware=hardware,
        nproc=nproc,
        cores=compute_cores,
        comm_cores=comm_cores,
        pinned=pinned,
        pinning=pinning,
        uses_ccl=uses_ccl,
    )


def _default_nproc(hardware: Hardware, profile: str, is_part: bool) -> int:
    """Returns the number of processes without --nproc-per-node: one for each GPU, or for each
    socket or NUMA node."""
    if profile == "gpu":
        return _usable_gpus(hardware)
    if is_part:  # a part of a machine has at most one socket
        return 1
    # Memory of another NUMA node is slower. On Xeons in SNC mode a socket has several.
    place = "socket"
    if profile == "xeon":
        place = "numa"
    return len(hardware.places(place))


def name_of(hardware: Hardware, job: JobConfig) -> str:
    """Returns the requested profile; for "auto", the one that fits the node.

    Raises:
        UsageError: this node does not support the requested profile.
    """
    if job.profile == "gpu" and not hardware.gpus:
        raise UsageError(
            f"--profile gpu, but this job sees no GPU on {hardware.host}: looked at "
            "CUDA_VISIBLE_DEVICES and its like, /dev/nvidia*, /sys/class/kfd and /sys/class/drm",
            "request GPUs (--gpus-per-node), or use --profile auto",
        )
    if job.profile == "xeon" and "avx512f" not in hardware.flags:
        raise UsageError(
            f"--profile xeon, but the CPU of {hardware.host} ({hardware.model}) has no AVX-512",
            "use --profile cpu",
        )
    if job.profile != "auto":
        return job.profile
    if hardware.gpus and job.backend not in ("gloo", "ccl"):
        return "gpu"
    # AMD's have AVX-512, too, but the profile's OpenMP is Intel's.
    is_xeon = hardware.vendor == "GenuineIntel" and "avx512f" in hardware.flags
    if is_xeon:
        return "xeon"
    return "cpu"


def _usable_gpus(hardware: Hardware) -> int:
    """Counts the GPUs that processes can use together.

    CUDA shows a process only the first of several MIG instances, and NCCL does not connect two
    instances of one GPU.
    """
    is_mig = any(gpu.name.startswith("MIG-") for gpu in hardware.gpus)
    if is_mig:
        return 1
    return len(hardware.gpus)


def _check_processes(
    hardware: Hardware,
    name: str,
    nproc: int,
    part: tuple[int, int] | None,
    for_rank: bool,
) -> None:
    usable = _usable_gpus(hardware)
    # The MPI that starts the ranks may show each a GPU of its own. Then the ranks check it.
    rank_may_have_gpu = for_rank and usable == 1
    if name == "gpu" and nproc > usable and not rank_may_have_gpu:
        gpus = f"{len(hardware.gpus)} GPUs"
        if usable < len(hardware.gpus):
            gpus += ", as MIG instances, of which torch and NCCL can use one a node"
        raise UsageError(
            f"--nproc-per-node {nproc}, but {hardware.host} has {gpus}",
            "each process needs a GPU of its own; leave the flag out to use all of them",
        )
    if name != "gpu" and part is None and nproc > len(hardware.cores):
        raise UsageError(
            f"--nproc-per-node {nproc}, but {hardware.host} gives this job "
            f"{len(hardware.cores)} core(s)",
            "request more cores (--cpus-per-task, --exclusive), or start fewer processes",
        )


def _cores_of_node(hardware: Hardware, part: tuple[int, int] | None) -> list[Cpu]:
    """Returns the cores of a node, or those of one of the simulated nodes of a machine."""
    cores = list(hardware.cores)
    if part is None:
        return cores
    index, count = part
    # There may be more simulated nodes than cores: these share the first one.
    return _slice(cores, index, count) or cores[:1]


def _shares(
    hardware: Hardware, name: str, nproc: int, cores: list[Cpu]
) -> list[list[Cpu]]:
    """Divides the cores of a node among its processes: near their GPUs, or into equal parts."""
    shares = None
    if name == "gpu":
        shares = _near_gpus(hardware, nproc)
    if shares is None:
        # There may be more processes than cores, on a simulated node: these share the first one.
        shares = [_slice(cores, index, nproc) or cores[:1] for index in range(nproc)]
    return shares


def _split(
    shares: list[list[Cpu]], reserves_cores: bool
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Returns the logical CPUs of each process that compute, and those for communication."""
    compute_cores = []
    comm_cores = []
    for share in shares:
        cpus = tuple(cpu.number for cpu in share)
        split = len(share)
        if reserves_cores:
            split -= _comm_core_count(share)
        compute_cores.append(cpus[:split])
        comm_cores.append(cpus[split:])
    return tuple(compute_cores), tuple(comm_cores)


def _slice(cores: list[Cpu], index: int, count: int) -> list[Cpu]:
    """Returns one of `count` equal consecutive parts. A remainder belongs to none."""
    # Equal parts: in every step, the ranks wait for the one with the fewest cores.
    size = len(cores) // count
    return cores[index * size : (index + 1) * size]


def _near_gpus(hardware: Hardware, nproc: int) -> list[list[Cpu]] | None:
    """Returns for each GPU its share of the cores near it. None: which are near is unknown."""
    gpus = hardware.gpus[:nproc]
    if len(gpus) < nproc or not all(gpu.near_cpus for gpu in gpus):
        return None
    shares = []
    for gpu in gpus:
        # GPUs near the same cores divide them.
        same = [other for other in gpus if other.near_cpus == gpu.near_cpus]
        near = [core for core in hardware.cores if core.number in gpu.near_cpus]
        shares.append(_slice(near, same.index(gpu), len(same)))
    # A GPU may be near cores that are not granted to this job.
    if not all(shares):
        return None
    return shares


def _comm_core_count(share: list[Cpu]) -> int:
    """Returns how many cores of a process are reserved for communication."""
    # The only core has to compute.
    if len(share) == 1:
        return 0
    return max(1, min(_MOST_COMM_CORES, len(share) // _CORES_PER_COMM_CORE))


def _pinning(
    hardware: Hardware, nproc: int, cores: list[Cpu], part: tuple[int, int] | None
) -> tuple[bool, str]:
    """Decides if processes are bound to cores; returns the reason, too. They are bound only to
    cores that are certainly this job's."""
    if part is not None:
        return False, "not bound: simulated nodes share this machine"
    if len(cores) < nproc:
        return False, "not bound: more processes than cores"
    # Without task/affinity or cgroups, Slurm grants CPUs but binds no process to them.
    has_all_cpus = len(hardware.cpus) == hardware.machine_cpus
    if has_all_cpus and not hardware.is_whole_node:
        reason = "other jobs may share the node, and no mask says which cores"
        return False, f"not bound: {reason}"
    return True, "each process on cores of its own"


def merge(settings: list[Setting], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings as variables, without those that the user has set, even if to
    nothing."""
    return {s.name: s.value for s in settings if s.name not in environment}


def describe(profile: Profile, environment: Mapping[str, str]) -> list[str]:
    """Writes a line for each variable: its value and the reason."""
    lines = []
    for name, value, reason in profile.settings():
        if name in environment:
            reason = f"yours (else {value})"
            value = environment[name]
        lines.append(f"{name}={value}  # {reason}")
    if not profile.pinned:
        lines.append(f"# {profile.pinning}")
    return lines


def find_library(names: tuple[str, ...]) -> str | None:
    """Finds a shared library where Debian, other distributions, conda and PyPI put it."""
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
    # The environment's own first: it fits its Python.
    for folder in folders:
        for name in names:
            path = f"{folder}/{name}"
            # The loader splits LD_PRELOAD at spaces and colons.
            if os.path.exists(path) and not set(path) & set(" :"):
                return path
    return None


@contextlib.contextmanager
def all_cores(environment: Mapping[str, str]) -> Iterator[None]:
    """Lets this thread, and those that it starts meanwhile, run on the cores of all the processes
    of its node: for work that the others wait for."""
    affinity = os.sched_getaffinity(0)
    all_cpus = numbers(environment.get(CORES, "").replace(";", ","))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, affinity.union(all_cpus))
    try:
        yield
    finally:
        os.sched_setaffinity(0, affinity)


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
