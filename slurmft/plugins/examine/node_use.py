"""What a node is, and how a run would use it: `slurmft doctor node`."""

import os

from slurmft.core.config import JobConfig
from slurmft.core.text import aligned
from slurmft.node import hardware, profiles, task
from slurmft.node.hardware import Hardware
from slurmft.node.profiles import Profile
from slurmft.plugins.examine import inspection


def describe(job: JobConfig) -> list[str]:
    """Writes lines about this node, and the variables that a run would set, with their reasons."""
    profile = task.use_of_node(inspection.config(job), os.environ)
    rows = [*_node(profile.hardware), *_use(profile)]
    return [*aligned(rows), "", *profiles.describe(profile, os.environ)]


def _node(here: Hardware) -> list[tuple[str, str]]:
    core_count = len({cpu.core for cpu in here.cpus})
    granted = [f"affinity mask: {hardware.as_list(cpu.number for cpu in here.cpus)}"]
    if here.slurm_cpus:
        granted.append(f"Slurm: {here.slurm_cpus} CPUs")
    if here.quota_cpus:
        granted.append(f"cgroup: {here.quota_cpus:g} CPUs")
    gpus = [f"{gpu.name}: {gpu.vendor} {gpu.model}, {gpu.precision}" for gpu in here.gpus]
    return [
        ("host", here.host),
        ("CPU", f"{here.model}; {', '.join(here.flags) or 'no AVX'}"),
        ("sockets", f"{len(here.places('socket'))}, NUMA nodes: {len(here.places('numa'))}"),
        ("cores", f"{len(here.cores)} of {core_count}, {here.threads_per_core} thread(s) each"),
        ("granted by", ", ".join(granted)),
        ("memory", f"{here.memory_mib:,} MiB"),
        ("GPUs", "; ".join(gpus) or "none"),
        ("networks", ", ".join(here.interfaces) or "none"),
    ]


def _use(profile: Profile) -> list[tuple[str, str]]:
    processes = []
    for compute_cores, comm_cores in zip(profile.cores, profile.comm_cores, strict=True):
        text = hardware.as_list(compute_cores)
        if comm_cores:
            text += f" and {hardware.as_list(comm_cores)} for communication"
        processes.append(text)
    return [
        ("profile", f"{profile.name}: {profile.nproc} process(es); {profile.pinning}"),
        ("compute on", "; ".join(processes)),
    ]
