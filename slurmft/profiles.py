"""What a node gives this job: GPUs, or CPU sockets and cores -> processes and threads.

Detected on the node itself, in its allocation, without importing torch.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass

from slurmft.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeProfile:
    """What this process may use of its node."""

    gpus: tuple[str, ...]
    """Visible GPUs, as CUDA_VISIBLE_DEVICES names them."""
    sockets: int
    """CPU sockets on which this allocation has cores."""
    cores: int
    """Physical cores of this allocation."""
    native_bf16: bool
    """The CPU multiplies bf16 in hardware: AVX-512 BF16 or AMX."""

    @classmethod
    def detect(cls, environment: Mapping[str, str], share: int = 1) -> NodeProfile:
        """The profile of this node.

        Args:
            environment: CUDA_VISIBLE_DEVICES and Slurm's variables are read from it.
            share: how many simulated nodes divide this machine's cores among themselves.
        """
        cpus = os.sched_getaffinity(0)
        granted = environment.get("SLURM_CPUS_PER_TASK") or environment.get("SLURM_CPUS_ON_NODE")
        threads_per_core = max(1, len(cpus) // max(1, len(_places(cpus, "core_id"))))
        cores = len(_places(cpus, "core_id"))
        if granted:  # Slurm may count more than the affinity mask shows, or fewer
            cores = min(cores, max(1, int(granted) // threads_per_core))
        return cls(
            gpus=_visible_gpus(environment),
            sockets=len(_places(cpus, "physical_package_id")),
            cores=max(1, cores // share),
            native_bf16=bool({"avx512_bf16", "amx_bf16"} & _cpu_flags()),
        )

    def nproc_per_node(self, asked: int | None) -> int:
        """Processes for this node: as asked, else one a GPU, else one a socket.

        Raises:
            UsageError: more processes asked for than the node has GPUs.
        """
        if asked is None:
            return len(self.gpus) or self.sockets
        if self.gpus and asked > len(self.gpus):
            raise UsageError(
                f"--nproc-per-node {asked}, but this node has {len(self.gpus)} GPUs",
                "each process needs a GPU of its own; leave the flag out to use all of them",
            )
        return asked

    def threads(self, nproc: int) -> int:
        """Compute threads for each of a node's processes."""
        return max(1, self.cores // nproc)

    def check_precision(self, precision: str) -> None:
        """Raises UsageError where this node cannot train in the precision asked for."""
        if precision == "fp16" and not self.gpus:
            raise UsageError(
                f"--precision fp16 needs GPUs, and {os.uname().nodename} shows none to this job",
                "use --precision bf16 on CPUs, or ask for GPUs: --gpus-per-node",
            )

    def environment(self, nproc: int) -> dict[str, str]:
        """Variables for the training processes; what the user has set already wins."""
        threads = str(self.threads(nproc))
        return {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true"}


def _visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(
            g.strip() for g in visible.split(",") if g.strip() not in ("", "-1", "NoDevFiles")
        )
    # One device file a GPU, in containers too, where only the granted ones are mounted.
    found = [path for path in glob.glob("/dev/nvidia[0-9]*") if os.access(path, os.R_OK | os.W_OK)]
    return tuple(str(i) for i in range(len(found)))


def _places(cpus: set[int], what: str) -> set[tuple[str, str]]:
    """The distinct sockets, or (socket, core) pairs, that a set of CPUs lies on."""
    places = set()
    for cpu in cpus:
        folder = f"/sys/devices/system/cpu/cpu{cpu}/topology"
        try:
            socket = _read(f"{folder}/physical_package_id")
            places.add((socket, _read(f"{folder}/{what}")))
        except OSError:  # no sysfs, as in some containers: every CPU a core, on one socket
            places.add(("0", str(cpu) if what == "core_id" else "0"))
    return places


def _cpu_flags() -> set[str]:
    try:
        for line in _read("/proc/cpuinfo").splitlines():
            if line.startswith("flags"):
                return set(line.partition(":")[2].split())
    except OSError:
        pass
    return set()


def _read(path: str) -> str:
    with open(path) as file:
        return file.read().strip()
