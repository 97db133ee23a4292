"""`slurmft doctor node`: a node, and how a run would use it."""

import os

from slurmft.core.config import JobConfig
from slurmft.core.text import aligned
from slurmft.node import hardware, preparation, profiles
from slurmft.node.hardware import Hardware
from slurmft.node.profiles import Profile
from slurmft.plugins.examine import inspection


def describe(job: JobConfig) -> list[str]:
    """Writes lines about this node, and the variables that a run would set, with their reasons."""
    profile = preparation.use_of_node(inspection.config(job), os.environ)
    rows = [*_node(profile.hardware), *_use(profile)]
    variables = profiles.describe(profile, os.environ)
    return [*aligned(rows), "", *variables]


def _node(here: Hardware) -> list[tuple[str, str]]:
    flags = ", ".join(here.flags) or "no AVX"
    sockets = len(here.places("socket"))
    numa_nodes = len(here.places("numa"))
    # Two hyperthreads are of one core. Fewer cores compute than there are where Slurm grants less.
    all_cores = {cpu.core for cpu in here.cpus}
    count = f"{len(here.cores)} of {len(all_cores)}"
    cores = f"{count}, {here.threads_per_core} thread(s) each"
    mask = hardware.as_list(cpu.number for cpu in here.cpus)
    # Each may grant less than the others; the cores above are what all of them leave.
    granted_by = [f"affinity mask: {mask}"]
    if here.slurm_cpus:
        granted_by.append(f"Slurm: {here.slurm_cpus} CPUs")
    if here.quota_cpus:
        granted_by.append(f"cgroup: {here.quota_cpus:g} CPUs")
    gpus = []
    for gpu in here.gpus:
        gpus.append(f"{gpu.name}: {gpu.vendor} {gpu.model}, {gpu.precision}")
    return [
        ("host", here.host),
        ("CPU", f"{here.model}; {flags}"),
        ("sockets", f"{sockets}, NUMA nodes: {numa_nodes}"),
        ("cores", cores),
        ("granted by", ", ".join(granted_by)),
        ("memory", f"{here.memory_mib:,} MiB"),
        ("GPUs", "; ".join(gpus) or "none"),
        ("networks", ", ".join(here.interfaces) or "none"),
    ]


def _use(profile: Profile) -> list[tuple[str, str]]:
    processes = []
    cores_of_processes = zip(profile.cores, profile.comm_cores, strict=True)
    for compute_cores, comm_cores in cores_of_processes:
        text = hardware.as_list(compute_cores)
        # With oneCCL, a profile keeps cores for its workers.
        if comm_cores:
            text += f" and {hardware.as_list(comm_cores)} for communication"
        processes.append(text)
    use = f"{profile.nproc} process(es); {profile.pinning}"
    return [
        ("profile", f"{profile.name}: {use}"),
        ("compute on", "; ".join(processes)),
    ]
