"""`slurmft doctor node`: what a node is, and how a run would use it."""

from __future__ import annotations

import os

from slurmft.core.config import JobConfig
from slurmft.core.text import aligned
from slurmft.node import ccl, hardware, profiles
from slurmft.node.profiles import Profile


def describe_this_node(job: JobConfig) -> list[str]:
    """This node, what of it this job has, and what a run would make of that.

    Raises:
        UsageError: the node cannot serve what was asked for.
    """
    here = hardware.detect(os.environ)
    binding = ccl.choose(job.backend, bool(here.gpus))
    profile = profiles.choose(here, job, uses_ccl=binding is not None)
    return [*_facts(profile), "", *profiles.describe(profile, os.environ)]


def _facts(profile: Profile) -> list[str]:
    here = profile.hardware
    cores = {core.core for core in here.cpus}
    granted = {
        "affinity mask": hardware.as_list(cpu.number for cpu in here.cpus),
        "Slurm": here.slurm_cpus and f"{here.slurm_cpus} CPUs",
        "cgroup": here.quota_cpus and f"{here.quota_cpus:g} CPUs",
    }
    gpus = [f"{g.name}: {g.model}, {g.precision}" for g in here.gpus]
    processes = [
        hardware.as_list(own) + (f" and {hardware.as_list(comm)} for communication" if comm else "")
        for own, comm in zip(profile.cores, profile.comm_cores, strict=True)
    ]
    return aligned(
        [
            ("host", here.host),
            ("CPU", f"{here.model}; {', '.join(here.flags) or 'no AVX'}"),
            ("sockets", f"{len(here.places('socket'))}, NUMA nodes: {len(here.places('numa'))}"),
            ("cores", f"{len(here.cores)} of {len(cores)}, {here.threads_per_core} thread(s) each"),
            ("granted by", ", ".join(f"{k}: {v}" for k, v in granted.items() if v)),
            ("memory", f"{here.memory_mib:,} MiB"),
            ("GPUs", "; ".join(gpus) or "none"),
            ("networks", ", ".join(here.interfaces) or "none"),
            ("profile", f"{profile.name}: {profile.nproc} process(es); {profile.pinning}"),
            ("compute on", "; ".join(processes)),
        ]
    )
