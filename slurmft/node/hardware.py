"""The hardware of a node, and what of it this job may use, by the kernel and Slurm."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurmft.core import process
from slurmft.core.text import numbers

# CPU flags that decide the precision and the profile, best first.
_FLAGS = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx2")
# How long nvidia-smi may take.
_QUERY_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """One logical CPU."""

    number: int
    socket: int
    numa: int
    core: tuple[int, int]
    """The physical core: its socket, and its number within the socket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU that this process may use."""

    name: str
    """The name that the vendor's variable takes: an index, a UUID (see `select`)."""
    vendor: str = "NVIDIA"
    model: str = "unknown"
    capability: float | None = None
    """Compute capability: 7.0 is Volta, 8.0 Ampere, 9.0 Hopper. AMD's gfx942 (MI300) has 9.4."""
    memory_mib: int | None = None
    near_cpus: tuple[int, ...] = ()
    """Logical CPUs of the NUMA node that the GPU is attached to."""

    @property
    def precision(self) -> str:
        """The reduced precision that the GPU computes natively."""
        if self.capability is None:
            return "unknown"
        if self.capability >= 8:
            return "bf16"
        return "fp16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A network interface that is up."""

    name: str
    infiniband: bool
    speed_mbit_s: int
    """0 where the kernel does not know the speed, as for virtual interfaces."""

    def __str__(self) -> str:
        details = "Ethernet"
        if self.infiniband:
            details = "InfiniBand"
        if self.speed_mbit_s:
            details += f", {self.speed_mbit_s / 1000:g} Gbit/s"
        return f"{self.name} ({details})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """The part of a node that this process may use."""

    host: str
    model: str
    """Name of the CPU."""
    vendor: str
    flags: tuple[str, ...]
    """CPU flags that matter to training (`_FLAGS`)."""
    cpus: tuple[Cpu, ...]
    """Logical CPUs in the affinity mask."""
    machine_cpus: int
    """Logical CPUs of the whole node."""
    slurm_cpus: int | None
    """Number of CPUs that Slurm granted. None outside of a Slurm job."""
    quota_cpus: float | None
    """CPU quota of the cgroup, in CPUs. None without a quota."""
    memory_mib: int
    """Memory of the node, or the limit of the cgroup."""
    gpus: tuple[Gpu, ...]
    interfaces: tuple[str, ...]
    """Network interfaces that are up, fabrics first."""

    @property
    def threads_per_core(self) -> int:
        core_count = len({cpu.core for cpu in self.cpus})
        return max(1, len(self.cpus) // max(1, core_count))

    @property
    def cores(self) -> tuple[Cpu, ...]:
        """One logical CPU of each physical core that is granted, neighbours together."""
        by_core: dict[tuple[int, int], Cpu] = {}
        ordered = sorted(self.cpus, key=lambda cpu: (cpu.socket, cpu.numa, cpu.number))
        # Its first one stands for a core: the others are its hardware threads.
        for cpu in ordered:
            by_core.setdefault(cpu.core, cpu)
        limits = [len(by_core)]
        # What Slurm counts may be more than the mask has, or fewer.
        if self.slurm_cpus is not None:
            limits.append(max(1, self.slurm_cpus // self.threads_per_core))
        if self.quota_cpus is not None:
            limits.append(max(1, int(self.quota_cpus)))
        return tuple(by_core.values())[: min(limits)]

    @property
    def is_whole_node(self) -> bool:
        """True if the job has all CPUs of the node, so that no other job shares it."""
        all_cpus = self.machine_cpus
        granted = min(self.slurm_cpus or all_cpus, self.quota_cpus or all_cpus)
        return len(self.cpus) == all_cpus and granted >= all_cpus

    def places(self, kind: str) -> list[tuple[Cpu, ...]]:
        """Returns the granted cores of each `kind` of place: "socket" or "numa"."""
        cores_of: dict[int, list[Cpu]] = {}
        for core in self.cores:
            cores_of.setdefault(getattr(core, kind), []).append(core)
        return [tuple(cores) for _, cores in sorted(cores_of.items())]

    def facts(self) -> dict[str, Any]:
        """Returns all fields as JSON values, the CPUs as a list of the kernel: "0-63"."""
        fields = dataclasses.asdict(self)
        fields["cpus"] = as_list(cpu.number for cpu in self.cpus)
        return fields


def detect(environment: Mapping[str, str], root: Path = Path("/")) -> Hardware:
    """Detects the hardware of this node, as far as this job may use it.

    Args:
        environment: has the variables of Slurm, and those that choose among GPUs.
        root: the folder that has /dev, /proc and /sys.
    """
    cpu_info = _cpuinfo(root)
    present = _present_cpus(root)
    mask = set(present)
    if root == Path("/"):
        mask = os.sched_getaffinity(0)
    # Slurm sets the first one only where --cpus-per-task was given.
    slurm_cpus = environment.get("SLURM_CPUS_PER_TASK")
    if not slurm_cpus:
        slurm_cpus = environment.get("SLURM_CPUS_ON_NODE")
    granted_cpus = None
    if slurm_cpus:
        granted_cpus = int(slurm_cpus)
    gpus = visible_gpus(environment, root)
    # sysfs describes the GPUs of AMD and Intel; of NVIDIA's, nvidia-smi knows more.
    described = {}
    if _nvidia(root):
        described = _nvidia_smi(gpus)
    return Hardware(
        host=host_name(environment),
        model=cpu_model(root),
        vendor=cpu_info.get("vendor_id", "unknown"),
        flags=_flags(cpu_info),
        cpus=tuple(_cpu(root, number) for number in sorted(mask)),
        machine_cpus=len(present) or len(mask),
        slurm_cpus=granted_cpus,
        quota_cpus=_quota_cpus(root),
        memory_mib=memory_mib(root),
        gpus=tuple(described.get(gpu.name, gpu) for gpu in gpus),
        interfaces=tuple(network.name for network in networks(root)),
    )


def host_name(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the name that Slurm has for this host; without Slurm, the host's own."""
    return environment.get("SLURMD_NODENAME") or os.uname().nodename


# --- CPUs -----------------------------------------------------------------------------------------


def _cpuinfo(root: Path) -> dict[str, str]:
    """Reads what /proc/cpuinfo says of the first processor."""
    fields: dict[str, str] = {}
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields


def cpu_model(root: Path = Path("/")) -> str:
    return _cpuinfo(root).get("model name", os.uname().machine)


def _flags(cpu_info: Mapping[str, str]) -> tuple[str, ...]:
    present = cpu_info.get("flags", "").split()
    return tuple(flag for flag in _FLAGS if flag in present)


def computes_bf16(flags: Iterable[str] | None = None) -> bool:
    """Tells if a CPU with these flags (default: this node's) multiplies bf16 in hardware."""
    if flags is None:
        flags = _flags(_cpuinfo(Path("/")))
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags)


def _present_cpus(root: Path) -> list[int]:
    return numbers(_read(root / "sys/devices/system/cpu/online") or "")


def _cpu(root: Path, number: int) -> Cpu:
    """Reads the place of a CPU. Without sysfs, as in some containers, all are cores of one
    socket."""
    folder = root / f"sys/devices/system/cpu/cpu{number}"
    socket = int(_read(folder / "topology/physical_package_id") or 0)
    core = int(_read(folder / "topology/core_id") or -1)
    if core < 0:  # the kernel itself says -1 for "unknown"
        core = number
    numa = socket
    for path in folder.glob("node[0-9]*"):
        numa = int(path.name.removeprefix("node"))
    return Cpu(number=number, socket=socket, numa=numa, core=(socket, core))


def as_list(cpus: Iterable[int]) -> str:
    """Writes numbers as the kernel does: 0, 1, 2, 3, 8 are "0-3,8"."""
    ranges: list[list[int]] = []
    for cpu in sorted(cpus):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    parts = []
    for first, last in ranges:
        if first == last:
            parts.append(str(first))
        else:
            parts.append(f"{first}-{last}")
    return ",".join(parts)


# --- cgroup limits ------------------------------------------------------------------------------


def cgroups(root: Path, controller: str) -> list[Path]:
    """Lists the folders of this process's cgroup of a controller, innermost first; version 2 or 1.

    Some containers show their own cgroup alone, but name the path that it has on the host. Then
    the root is the cgroup.
    """
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        # "0::/path" in version 2, "4:cpu,cpuacct:/path" in version 1
        _, controllers, path = line.split(":", 2)
        is_unified = not controllers  # version 2 names none
        if not is_unified and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup"
        if not is_unified:
            base /= controller
        innermost = base / path.lstrip("/")
        if not innermost.is_dir():
            return [base]
        outer = [folder for folder in innermost.parents if folder.is_relative_to(base)]
        return [innermost, *outer]
    return []


def _quota_cpus(root: Path) -> float | None:
    quotas = []
    # The limit of every folder above applies, too.
    for folder in cgroups(root, "cpu"):
        version_2 = _read(folder / "cpu.max")
        if version_2:
            quota, period = version_2.split()  # "max 100000" without a quota
        else:
            quota = _read(folder / "cpu.cfs_quota_us") or "max"
            period = _read(folder / "cpu.cfs_period_us") or ""
        if quota not in ("max", "-1") and period:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_mib(root: Path) -> int:
    """Returns the memory of the node that this process may have."""
    limits = []
    total = re.search(r"MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo") or "")
    if total:
        limits.append(int(total[1]) // 1024)
    for folder in cgroups(root, "memory"):
        # Version 2, or version 1, which says "none" by a number near 2 to the 63rd.
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        if limit and limit != "max":
            limits.append(int(limit) // 2**20)
    return min(limits, default=0)


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Returns the memory of the node that processes of this one's control group may still take."""
    free = []
    available = re.search(
        r"MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo") or ""
    )
    if available:
        free.append(int(available[1]) * 1024)
    for folder in cgroups(root, "memory"):
        # Version 2, or version 1.
        version_2_limit = _read(folder / "memory.max")
        limit = version_2_limit or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(
            folder / "memory.usage_in_bytes"
        )
        if not limit or limit == "max" or not used:
            continue
        # Pages of files are given back when memory is needed: not those of tmpfs and shared memory,
        # which "file" and "total_cache" count, too. Version 1 has sums only with "total_".
        pages = r"^total_(?:in)?active_file (\d+)$"
        if version_2_limit:
            pages = r"^(?:in)?active_file (\d+)$"
        cached = re.findall(pages, _read(folder / "memory.stat") or "", re.MULTILINE)
        free.append(int(limit) - int(used) + sum(map(int, cached)))
    return max(0, min(free, default=0))


# --- GPUs and networks ----------------------------------------------------------------------------


# Variables that choose among a vendor's GPUs, in the order in which they apply: each chooses
# among those that the one before has left. Of several in one place, the first that is set counts.
_SELECT = {
    "NVIDIA": (("CUDA_VISIBLE_DEVICES",),),
    "AMD": (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
    "Intel": (("ZE_AFFINITY_MASK",),),
}


# A line such as " MIG 1g.10gb Device 0: (UUID: MIG-...)": name, GiB, UUID.
_MIG = re.compile(r"\s+(MIG \S*?(\d+)gb\S*) .*\(UUID: (MIG-\S+)\)")
# AMD's data centre GPUs, from MI25 on: MI100 is gfx908, MI300X gfx942.
_INSTINCT = "gfx(9(0[068a]|[45].)|125.)"


def visible_gpus(
    environment: Mapping[str, str], root: Path = Path("/")
) -> tuple[Gpu, ...]:
    """Lists the GPUs that this process may use. NVIDIA's have their names alone."""
    gpus = _nvidia(root) or _amd(root) or _intel(root)
    vendor = "NVIDIA"
    if gpus:
        vendor = gpus[0].vendor
    for variables in _SELECT[vendor]:
        by_index = {}
        for index, gpu in enumerate(gpus):
            by_index[str(index)] = gpu
        names = list(by_index)
        for variable in variables:
            if variable in environment:
                names = environment[variable].split(",")
                break
        unknown = Gpu(name="", vendor=vendor)  # named by UUID: nvidia-smi describes it
        gpus = []
        for name in _valid_names(names):
            gpu = by_index.get(name, unknown)
            gpus.append(replace(gpu, name=name))
    return tuple(gpus)


def _valid_names(names: Iterable[str]) -> list[str]:
    """Returns the names of GPUs before the first invalid one, at which the drivers stop."""
    valid = []
    for name in names:
        name = name.strip()
        if name in ("", "-1", "NoDevFiles"):
            break
        valid.append(name)
    return valid


def select(gpus: Iterable[Gpu]) -> dict[str, str]:
    """Returns the variable by which a process sees these GPUs alone."""
    gpus = list(gpus)
    vendor = "NVIDIA"
    if gpus:
        vendor = gpus[0].vendor
    # The last choice: names count among the GPUs that the ones before have left.
    last_variables = _SELECT[vendor][-1]
    return {last_variables[0]: ",".join(gpu.name for gpu in gpus)}


def _may_use(file: Path) -> bool:
    """Tells if a device is granted: containers have the device files of granted GPUs alone."""
    return os.access(file, os.R_OK | os.W_OK)


def _nvidia(root: Path) -> list[Gpu]:
    files = (root / "dev").glob("nvidia[0-9]*")
    usable = [file for file in files if _may_use(file)]
    # CUDA counts the usable ones from 0, whatever the numbers of the files.
    return [Gpu(name=str(index)) for index in range(len(usable))]


def _amd(root: Path) -> list[Gpu]:
    """Lists AMD's data centre GPUs. The topology's nodes are also CPUs, and graphics of
    desktops."""
    gpus = []
    folders = (root / "sys/class/kfd/kfd/topology/nodes").glob("[0-9]*")
    for folder in sorted(folders, key=lambda path: int(path.name)):
        # The kernel does not let the properties be read of a GPU that the cgroup denies.
        text = _read(folder / "properties") or ""
        properties = dict(re.findall(r"(\w+) (\d+)", text))
        render_node = f"renderD{properties.get('drm_render_minor')}"
        target = int(properties.get("gfx_target_version", 0))  # 90402 is gfx942
        version = target // 10000
        revision = target // 100 % 100
        step = target % 100
        model = f"gfx{version}{revision:x}{step:x}"
        if re.fullmatch(_INSTINCT, model) and _may_use(root / "dev/dri" / render_node):
            device = root / "sys/class/drm" / render_node / "device"
            gpu = _read_gpu("AMD", model, device)
            gpus.append(replace(gpu, capability=version + revision / 10))
    return gpus


def _intel(root: Path) -> list[Gpu]:
    """Lists Intel's data centre GPUs: display controllers that drive no screen (PCI class 0x0380).

    A processor's own graphics may be of that class, too, but is always on the bus 0000:00.
    """
    gpus = []
    for device in sorted((root / "sys/class/drm").glob("renderD*/device")):
        pci_vendor = _read(device / "vendor")
        pci_class = _read(device / "class")
        kind = f"{pci_vendor} {pci_class}"
        is_on_processor = device.resolve().name.startswith("0000:00:")
        is_granted = _may_use(root / "dev/dri" / device.parent.name)
        if not kind.startswith("0x8086 0x0380") or is_on_processor or not is_granted:
            continue
        # Each tile is a device of its own, by default: folders of the driver xe, and of i915.
        tiles = [*device.glob("tile[0-9]*"), *device.glob("drm/card[0-9]*/gt/gt[0-9]*")]
        gpu = _read_gpu("Intel", "Data Center GPU", device)
        gpus += [gpu] * max(1, len(tiles))
    return gpus


def _read_gpu(vendor: str, model: str, device: Path) -> Gpu:
    """Reads memory and place of a GPU from its folder in sysfs."""
    memory_bytes = _read(device / "mem_info_vram_total")  # of the driver amdgpu alone
    memory_mib = None
    if memory_bytes:
        memory_mib = int(memory_bytes) // 2**20
    return Gpu(
        name="",
        vendor=vendor,
        model=model,
        memory_mib=memory_mib,
        near_cpus=tuple(numbers(_read(device / "local_cpulist") or "")),
    )


def _nvidia_smi(gpus: Iterable[Gpu]) -> dict[str, Gpu]:
    """Asks nvidia-smi about the node's GPUs; returns them by index and by UUID.

    If some of `gpus` are MIG instances, returns the MIG instances. Empty where nvidia-smi fails.
    """
    query = "--query-gpu=index,uuid,name,compute_cap,memory.total,pci.bus_id"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    whole = parse_nvidia_smi(process.output(command, _QUERY_S) or "")
    if not any(gpu.name.startswith("MIG-") for gpu in gpus):
        return whole
    return parse_mig(process.output(["nvidia-smi", "-L"], _QUERY_S) or "", whole)


def parse_nvidia_smi(text: str, root: Path = Path("/")) -> dict[str, Gpu]:
    """Parses lines "index, uuid, name, capability, MiB, bus"; returns the GPUs by index and by
    UUID."""
    gpus: dict[str, Gpu] = {}
    for line in text.splitlines():
        # ValueError: a line of another kind, or a value that this GPU lacks.
        with contextlib.suppress(ValueError):
            values = [value.strip() for value in line.split(",")]
            index, uuid, model, capability, memory, bus = values
            # nvidia-smi writes the domain in eight digits, sysfs in four.
            domain, _, rest = bus.lower().partition(":")
            device = root / f"sys/bus/pci/devices/{domain[-4:]}:{rest}"
            gpu = replace(
                _read_gpu("NVIDIA", model, device),
                capability=float(capability),
                memory_mib=int(memory),
            )
            gpus[index] = replace(gpu, name=index)
            gpus[uuid] = replace(gpu, name=uuid)
    return gpus


def parse_mig(text: str, whole: Mapping[str, Gpu]) -> dict[str, Gpu]:
    """Parses `nvidia-smi -L`, which lists below each GPU its MIG instances; returns these by
    UUID."""
    instances: dict[str, Gpu] = {}
    parent = Gpu(name="")
    for line in text.splitlines():
        gpu = re.match(r"GPU (\d+): ", line)
        mig = _MIG.match(line)
        if gpu:
            parent = whole.get(gpu[1], parent)
        elif mig:
            name, gib, uuid = mig.groups()
            instances[uuid] = replace(
                parent,
                name=uuid,
                model=f"{parent.model} {name}",
                memory_mib=int(gib) * 1024,
            )
    return instances


def networks(root: Path = Path("/")) -> tuple[Network, ...]:
    """Lists the interfaces that are up, InfiniBand first, then by speed. Loopback is left out."""
    interfaces = []
    for path in (root / "sys/class/net").glob("*"):
        if path.name == "lo" or _read(path / "operstate") not in ("up", "unknown"):
            continue
        # unreadable, or -1, for virtual interfaces
        speed = int(_read(path / "speed") or 0)
        network = Network(
            name=path.name,
            infiniband=_read(path / "type") == "32",  # ARPHRD_INFINIBAND
            speed_mbit_s=max(0, speed),
        )
        interfaces.append(network)
    interfaces.sort(key=_order_of_network)
    return tuple(interfaces)


def _order_of_network(network: Network) -> tuple[bool, int, str]:
    return (not network.infiniband, -network.speed_mbit_s, network.name)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
