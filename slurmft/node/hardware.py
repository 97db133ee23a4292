"""The hardware of a node, and what of it this job may use, by the kernel and Slurm."""

import contextlib
import dataclasses
import glob
import itertools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slurmft.core import process

_FLAGS = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx2")
"""CPU flags that decide the precision and the profile, the best first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """One logical CPU."""

    number: int
    socket: int
    numa: int
    core: tuple[int, int]
    """Its physical core: socket, and the core's number there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU that this process may use."""

    name: str
    """As the variable of its vendor names it (`select`)."""
    vendor: str = "NVIDIA"
    model: str = "unknown"
    capability: float | None = None
    """Compute capability: 7.0 is Volta, 8.0 Ampere, 9.0 Hopper; of AMD's, 9.4 is gfx942 (MI300)."""
    memory_mib: int | None = None
    near_cpus: tuple[int, ...] = ()
    """Logical CPUs on its side of the node."""

    @property
    def precision(self) -> str:
        """The reduced precision that it computes natively."""
        if self.capability is None:
            return "unknown"
        return "bf16" if self.capability >= 8 else "fp16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A network interface that is up."""

    name: str
    infiniband: bool
    speed_mbit_s: int
    """0: the kernel does not know it, as for virtual ones."""

    def __str__(self) -> str:
        kind = "InfiniBand" if self.infiniband else "Ethernet"
        speed = f", {self.speed_mbit_s / 1000:g} Gbit/s" if self.speed_mbit_s else ""
        return f"{self.name} ({kind}{speed})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """The part of a node that this process may use."""

    host: str
    model: str
    """The CPU's name."""
    vendor: str
    flags: tuple[str, ...]
    """Those of the CPU's flags that are in _FLAGS."""
    cpus: tuple[Cpu, ...]
    """Logical CPUs in the affinity mask."""
    machine_cpus: int
    """Logical CPUs of the whole node."""
    slurm_cpus: int | None
    """How many CPUs Slurm granted; None: not a Slurm job."""
    quota_cpus: float | None
    """The cgroup's CPU quota, in CPUs; None: no quota."""
    memory_mib: int
    """The node's memory, or the cgroup's limit."""
    gpus: tuple[Gpu, ...]
    interfaces: tuple[str, ...]
    """Network interfaces that are up, fabrics first."""

    @property
    def threads_per_core(self) -> int:
        return max(1, len(self.cpus) // max(1, len({cpu.core for cpu in self.cpus})))

    @property
    def cores(self) -> tuple[Cpu, ...]:
        """One logical CPU of each physical core that is granted, near ones together."""
        first: dict[tuple[int, int], Cpu] = {}
        for cpu in sorted(self.cpus, key=lambda c: (c.socket, c.numa, c.number)):
            first.setdefault(cpu.core, cpu)
        limits = [len(first)]
        if self.slurm_cpus is not None:  # may be more than the mask has, or fewer
            limits.append(max(1, self.slurm_cpus // self.threads_per_core))
        if self.quota_cpus is not None:
            limits.append(max(1, int(self.quota_cpus)))
        return tuple(first.values())[: min(limits)]

    @property
    def is_whole_node(self) -> bool:
        """Whether the job has all CPUs of the node, so that no other job shares it."""
        granted = min(self.slurm_cpus or self.machine_cpus, self.quota_cpus or self.machine_cpus)
        return len(self.cpus) == self.machine_cpus and granted >= self.machine_cpus

    def places(self, what: str) -> list[tuple[Cpu, ...]]:
        """The granted cores of each socket, or of each numa node."""
        found: dict[int, list[Cpu]] = {}
        for core in self.cores:
            found.setdefault(getattr(core, what), []).append(core)
        return [tuple(cores) for _, cores in sorted(found.items())]

    def facts(self) -> dict[str, Any]:
        """All fields as JSON values; of the CPUs, their numbers: "0-63"."""
        return dataclasses.asdict(self) | {"cpus": as_list(cpu.number for cpu in self.cpus)}


def detect(environment: Mapping[str, str], root: Path = Path("/")) -> Hardware:
    """Detects the hardware of this node. The environment has Slurm's variables, and those that
    choose among GPUs; below `root` are /dev, /proc and /sys."""
    info = _cpuinfo(root)
    gpus = visible_gpus(environment, root)
    known = _nvidia_smi(gpus) if _nvidia(root) else {}
    mask = os.sched_getaffinity(0) if root == Path("/") else set(_present(root))
    granted = environment.get("SLURM_CPUS_PER_TASK") or environment.get("SLURM_CPUS_ON_NODE")
    return Hardware(
        host=host_name(environment),
        model=cpu_model(root),
        vendor=info.get("vendor_id", "unknown"),
        flags=_flags(info),
        cpus=tuple(_cpu(root, number) for number in sorted(mask)),
        machine_cpus=len(_present(root)) or len(mask),
        slurm_cpus=int(granted) if granted else None,
        quota_cpus=_quota_cpus(root),
        memory_mib=_memory_mib(root),
        gpus=tuple(known.get(gpu.name, gpu) for gpu in gpus),
        interfaces=tuple(network.name for network in networks(root)),
    )


def host_name(environment: Mapping[str, str] = os.environ) -> str:
    """This host, as Slurm names it; without Slurm, as it names itself."""
    return environment.get("SLURMD_NODENAME") or os.uname().nodename


# --- CPUs -----------------------------------------------------------------------------------------


def _cpuinfo(root: Path) -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo."""
    found: dict[str, str] = {}
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip(), value.strip())
    return found


def cpu_model(root: Path = Path("/")) -> str:
    return _cpuinfo(root).get("model name", os.uname().machine)


def _flags(info: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(flag for flag in _FLAGS if flag in info.get("flags", "").split())


def computes_bf16(flags: Iterable[str] | None = None) -> bool:
    """Whether a CPU with these flags, or this node's, multiplies bf16 in hardware."""
    found = _flags(_cpuinfo(Path("/"))) if flags is None else flags
    return bool({"avx512_bf16", "amx_bf16"} & set(found))


def _present(root: Path) -> list[int]:
    return numbers(_read(root / "sys/devices/system/cpu/online") or "")


def _cpu(root: Path, number: int) -> Cpu:
    """The place of a CPU; without sysfs, as in some containers, all are cores of one socket."""
    folder = root / f"sys/devices/system/cpu/cpu{number}"
    socket = int(_read(folder / "topology/physical_package_id") or 0)
    core = int(_read(folder / "topology/core_id") or -1)  # -1 is the kernel's own "unknown", too
    numa = [path.name.removeprefix("node") for path in folder.glob("node[0-9]*")]
    return Cpu(
        number=number,
        socket=socket,
        numa=int(numa[0]) if numa else socket,
        core=(socket, number if core < 0 else core),
    )


def numbers(text: str) -> list[int]:
    """The numbers of a list as the kernel writes it: "0-3,8" -> 0, 1, 2, 3, 8."""
    found: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    return found


def as_list(cpus: Iterable[int]) -> str:
    """The other way round: 0, 1, 2, 3, 8 -> "0-3,8"."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


# --- cgroup limits ------------------------------------------------------------------------------


def _cgroups(root: Path, controller: str) -> list[Path]:
    """Folders of this process's cgroup of a controller, innermost first; version 2 or 1.

    Where a container shows its own cgroup alone, under the path that it has on the host, that is
    the root.
    """
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") or not controllers:
            base = root / "sys/fs/cgroup" / (controller if controllers else "")
            inner = base / path.lstrip("/")
            above = [p for p in inner.parents if p == base or base in p.parents]
            return [inner, *above] if inner.is_dir() else [base]
    return []


def _quota_cpus(root: Path) -> float | None:
    found = []
    for folder in _cgroups(root, "cpu"):
        quota, period = (_read(folder / "cpu.max") or "").split() or (None, None)
        if quota is None:
            quota = _read(folder / "cpu.cfs_quota_us")
            period = _read(folder / "cpu.cfs_period_us")
        if quota and period and quota not in ("max", "-1"):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def _memory_mib(root: Path) -> int:
    total = re.search(r"MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo") or "")
    limits = [int(total[1]) // 1024] if total else []
    for folder in _cgroups(root, "memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        if limit and limit != "max":
            limits.append(int(limit) // 2**20)
    return min(limits, default=0)


# --- GPUs and networks ----------------------------------------------------------------------------


_SELECT = {
    "NVIDIA": (("CUDA_VISIBLE_DEVICES",),),
    "AMD": (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
    "Intel": (("ZE_AFFINITY_MASK",),),
}
"""Variables that choose among a vendor's GPUs: in turn, each among those that the one before has
left; of several in one place the first that is set."""


_INSTINCT = "gfx(9(0[068a]|[45].)|125.)"
"""From MI25 on: MI100 is gfx908, MI300X gfx942."""


def visible_gpus(environment: Mapping[str, str], root: Path = Path("/")) -> tuple[Gpu, ...]:
    """The GPUs that this process may use; of NVIDIA's the names alone."""
    gpus = _nvidia(root) or _amd(root) or _intel(root)
    vendor = gpus[0].vendor if gpus else "NVIDIA"
    for variables in _SELECT[vendor]:
        known = {str(index): gpu for index, gpu in enumerate(gpus)}
        chosen = next((environment[v] for v in variables if v in environment), ",".join(known))
        names = (name.strip() for name in chosen.split(","))
        # The drivers stop at the first invalid name.
        good = itertools.takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), names)
        gpus = [replace(known.get(n, Gpu(name=n, vendor=vendor)), name=n) for n in good]
    return tuple(gpus)


def select(gpus: Iterable[Gpu]) -> dict[str, str]:
    """The variable by which a process sees these alone."""
    found = list(gpus)
    variable = _SELECT[found[0].vendor if found else "NVIDIA"][-1][0]
    return {variable: ",".join(gpu.name for gpu in found)}


def _may_use(file: Path) -> bool:
    """In containers only the device files of granted GPUs are there."""
    return os.access(file, os.R_OK | os.W_OK)


def _nvidia(root: Path) -> list[Gpu]:
    files = glob.glob(str(root / "dev/nvidia[0-9]*"))
    return [Gpu(name=str(i)) for i in range(sum(_may_use(Path(f)) for f in files))]


def _amd(root: Path) -> list[Gpu]:
    """Data centre GPUs among the nodes of the topology: CPUs, and graphics of desktops, too."""
    found = []
    folders = (root / "sys/class/kfd/kfd/topology/nodes").glob("[0-9]*")
    for folder in sorted(folders, key=lambda path: int(path.name)):
        # Of a GPU that the cgroup denies, the kernel does not let the properties be read.
        facts = dict(re.findall(r"(\w+) (\d+)", _read(folder / "properties") or ""))
        minor, number = facts.get("drm_render_minor"), int(facts.get("gfx_target_version", 0))
        version, revision, step = number // 10000, number // 100 % 100, number % 100
        model = f"gfx{version}{revision:x}{step:x}"  # of 90402: gfx942
        if re.fullmatch(_INSTINCT, model) and _may_use(root / f"dev/dri/renderD{minor}"):
            gpu = _of_sysfs("AMD", model, root / f"sys/class/drm/renderD{minor}/device")
            found.append(replace(gpu, capability=version + revision / 10))
    return found


def _intel(root: Path) -> list[Gpu]:
    """Data centre GPUs: display controllers that drive no screen (PCI class 0x0380). A processor's
    own graphics may be of that class, too, but is always on the bus 0000:00."""
    found = []
    for device in sorted((root / "sys/class/drm").glob("renderD*/device")):
        kind = f"{_read(device / 'vendor')} {_read(device / 'class')}"
        is_own = device.resolve().name.startswith("0000:00:")
        may_use = _may_use(root / "dev/dri" / device.parent.name)
        if kind.startswith("0x8086 0x0380") and may_use and not is_own:
            # Each tile is a device of its own, by default: xe's folders, and i915's.
            tiles = [*device.glob("tile[0-9]*"), *device.glob("drm/card[0-9]*/gt/gt[0-9]*")]
            found += [_of_sysfs("Intel", "Data Center GPU", device)] * max(1, len(tiles))
    return found


def _of_sysfs(vendor: str, model: str, device: Path) -> Gpu:
    memory = _read(device / "mem_info_vram_total")
    memory_mib = int(memory) // 2**20 if memory else None
    near = tuple(numbers(_read(device / "local_cpulist") or ""))
    return Gpu(name="", vendor=vendor, model=model, memory_mib=memory_mib, near_cpus=near)


def _nvidia_smi(gpus: Iterable[Gpu]) -> dict[str, Gpu]:
    """What nvidia-smi says of the GPUs on the node, by index and by uuid; of MIG instances, if some
    are wanted. Empty where it fails."""
    query = "--query-gpu=index,uuid,name,compute_cap,memory.total,pci.bus_id"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    whole = parse_nvidia_smi(process.output(command, 20) or "")
    if not any(gpu.name.startswith("MIG-") for gpu in gpus):
        return whole
    return parse_mig(process.output(["nvidia-smi", "-L"], 20) or "", whole)


def parse_nvidia_smi(text: str, root: Path = Path("/")) -> dict[str, Gpu]:
    """From lines "index, uuid, name, capability, MiB, bus"."""
    found: dict[str, Gpu] = {}
    for line in text.splitlines():
        with contextlib.suppress(ValueError):  # of lines of other kinds, and values it lacks
            index, uuid, model, capability, memory, bus = map(str.strip, line.split(","))
            domain, _, rest = bus.lower().partition(":")
            device = root / f"sys/bus/pci/devices/{domain[-4:]}:{rest}"
            gpu = _of_sysfs("NVIDIA", model, device)
            gpu = replace(gpu, capability=float(capability), memory_mib=int(memory))
            found |= {name: replace(gpu, name=name) for name in (index, uuid)}
    return found


def parse_mig(text: str, whole: Mapping[str, Gpu]) -> dict[str, Gpu]:
    """MIG instances by uuid, from lines of `nvidia-smi -L`: below each GPU those that it has."""
    found: dict[str, Gpu] = {}
    parent = Gpu(name="")
    for line in text.splitlines():
        if gpu := re.match(r"GPU (\d+): ", line):
            parent = whole.get(gpu[1], parent)
        elif mig := re.match(r"\s+(MIG (\S*?(\d+)gb\S*)) .*\(UUID: (MIG-\S+)\)", line):
            memory_mib, model = int(mig[3]) * 1024, f"{parent.model} {mig[1]}"
            found[mig[4]] = replace(parent, name=mig[4], model=model, memory_mib=memory_mib)
    return found


def networks(root: Path = Path("/")) -> tuple[Network, ...]:
    """Interfaces that are up, InfiniBand's first, then by speed; loopback is left out."""
    found = []
    for path in (root / "sys/class/net").glob("*"):
        state = _read(path / "operstate")
        if path.name == "lo" or state not in ("up", "unknown"):
            continue
        fabric = _read(path / "type") == "32"
        speed = int(_read(path / "speed") or 0)  # unreadable, or -1, for virtual ones
        found.append(Network(name=path.name, infiniband=fabric, speed_mbit_s=max(0, speed)))
    return tuple(sorted(found, key=lambda n: (not n.infiniband, -n.speed_mbit_s, n.name)))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
